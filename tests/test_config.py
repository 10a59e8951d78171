"""Settings: defaults in one place, overrides, and one-line refusals before anything is loaded."""

import subprocess
import sys
import textwrap

import ml_collections
import pytest

from mutualrl.command_line import read_command_line
from mutualrl.config import ConfigError, add_policy, base_config, read, transfer_options, use_transfer


def two_policies(**settings):
    config = base_config()
    add_policy(config, "a", model="x", **settings)
    add_policy(config, "b", model="y", lr=5e-4)
    return config


def test_one_place_sets_all_that_do_not_say_otherwise():
    config = two_policies()
    config.policy.lr = 1e-2
    config.policy.group_size = 4
    run = read(config)
    assert (run.policies["a"].lr, run.policies["b"].lr) == (1e-2, 5e-4)
    assert [p.group_size for p in run.policies.values()] == [4, 4]
    config.policies.a.group_size = 16
    run = read(config)
    assert [p.group_size for p in run.policies.values()] == [16, 4]


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(group_size=1), "policies.a.group_size=1: estimator grpo"),
        (dict(estimator="gae"), "policies.a.estimator='gae': allowed are grpo, dr_grpo, rloo"),
        (dict(kl_estimator="k1"), "policies.a.kl_estimator='k1': allowed are k2, k3, k3_k2"),
        (dict(aggregation="mean"), "policies.a.aggregation='mean': allowed are token_mean"),
        (dict(overlong_factor=1.0), "policies.a.overlong_buffer=0"),
        (dict(temperature=0.0), "policies.a.temperature=0.0: must be above 0"),
        (dict(lr=float("nan")), "policies.a.lr=nan: must be a finite number"),
        (dict(clip_low=1.5), "policies.a.clip_low=1.5: must be at least 0 and at most 1"),
        (dict(dual_clip=0.5), "policies.a.dual_clip=0.5"),
        (dict(warmup_fraction=0.7, stable_fraction=0.7), "policies.a.stable_fraction=0.7"),
        (dict(micro_batch=4, micro_batch_tokens=64), "policies.a.micro_batch_tokens=64: set it or micro_batch"),
        (dict(template="no place"), "policies.a.template='no place': must contain {question}"),
        (dict(dtype="float16"), "policies.a.dtype='float16': allowed are float32, bfloat16"),
    ],
)
def test_bad_settings_of_a_policy(change, says):
    with pytest.raises(ConfigError) as error:
        read(two_policies(**change))
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "path, value, says",
    [
        ("steps", 0, "steps=0: must be at least 1"),
        ("label.name", "oracle", "label.name='oracle': allowed are entropy, peer_vote"),
        ("transfer.name", "magic", "transfer.name='magic': allowed are ampo, distill, graft, hacpo, luffy, none, prp"),
        ("transfer.sgt.nll_coef", -0.1, None),  # options of a regime that is not used do not matter
        ("exchange.topology", "tree", "exchange.topology='tree': allowed are all_to_all, ring, pairs, star, explicit"),
        ("exchange.topology", "explicit", "exchange.edges=(): the explicit topology needs some"),
        ("exchange.overlong", "cut", "exchange.overlong='cut': allowed are drop, truncate"),
        ("exchange.deadline_s", 0.0, "exchange.deadline_s=0.0: must be above 0"),
        ("exchange.max_staleness", -1, "exchange.max_staleness=-1: must be at least 0"),
        ("exchange.logs", {"a": {"folder": "x", "policy": "a"}}, "exchange.logs.a: must be a name of its own"),
        ("exchange.logs", {"z": {"folder": "x"}}, "exchange.logs.z={'folder': 'x'}: must be a dict with folder and"),
        ("exchange.lag", 1, "exchange.lag: no such setting; allowed are"),
        ("policy.frozen", True, "policies: all are frozen"),
        ("grader", "vibes", "grader='vibes': allowed are"),
        (
            "grader_options.math",
            ml_collections.ConfigDict({"last_number": "no"}),
            "grader_options.math.last_number='no': must be of type bool",
        ),
        ("grader_options.maths", {}, "grader_options.maths: no such setting; allowed are code, math"),
        ("plan", "parallel", "plan='parallel': allowed are auto, static, time_slice"),
        ("data", ml_collections.ConfigDict({"name": "nowhere"}), "data.name='nowhere': allowed are"),
        (
            "data",
            ml_collections.ConfigDict({"name": "procedural", "sise": 3}),
            "data.sise: no such setting; allowed are",
        ),
        ("data", ml_collections.ConfigDict({"name": "procedural", "size": "3"}), "data.size='3': must be of type int"),
        ("eval_top_p", 0.0, "eval_top_p=0.0"),
    ],
)
def test_bad_settings_of_a_run(path, value, says):
    config = two_policies()
    *where, key = path.split(".")
    target = config
    for part in where:
        target = target[part]
    with config.unlocked():
        target[key] = value
    if says is None:
        read(config)
        return
    with pytest.raises(ConfigError) as error:
        read(config)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_a_run_has_the_options_of_its_grader():
    config = two_policies()
    assert read(config).grader_options == {}
    config.grader, config.grader_options.math.last_number = "math", False
    assert read(config).grader_options == {"last_number": False}
    config.grader, config.grader_options.code.allow_unsafe_exec = "code", True
    assert read(config).grader_options["allow_unsafe_exec"] is True
    config.grader_timeout_s = 4.0
    with pytest.raises(ConfigError, match=r"grader_options\.code\.timeout_s=4: must be below grader_timeout_s=4"):
        read(config)


def test_a_grader_that_cannot_work_here_is_refused(monkeypatch):
    from mutualrl.rewards import sandbox

    monkeypatch.setattr(sandbox, "unavailable", lambda: "bwrap is not installed")
    config = two_policies()
    config.grader = "code"
    with pytest.raises(ConfigError, match="grader='code': .*bwrap is not installed.*allow_unsafe_exec"):
        read(config)


def test_the_regime_and_its_options():
    config = two_policies()
    assert read(config).transfer == {"name": "none"}
    use_transfer(config, "sgt", nll_coef=0.2)
    run = read(config)
    assert run.transfer["name"] == "sgt" and run.transfer["nll_coef"] == 0.2 and transfer_options(run).nll_coef == 0.2
    config.transfer.sgt.nll_coef = -1.0
    with pytest.raises(ConfigError, match="transfer.sgt.nll_coef=-1.0: must be at least 0"):
        read(config)
    with pytest.raises(ConfigError, match="transfer.sgt.lambda_: no such setting; allowed are length_norm"):
        use_transfer(config, "sgt", lambda_=1)
    with pytest.raises(ConfigError, match="transfer.sgt.nll_coef='x': must be of type float"):
        use_transfer(config, "sgt", nll_coef="x")


def test_a_regime_published_with_an_objective_sets_it():
    config = two_policies()
    use_transfer(config, "hacpo")
    assert config.policy.ratio_level == "sequence" and config.policies.b.clip_high == 4e-4
    read(config)
    config.transfer.name = "luffy"
    with pytest.raises(ConfigError, match="policies.a.estimator='grpo'"):
        read(config)


def test_policies_have_string_names_and_known_settings():
    with pytest.raises(ConfigError, match="name 0 must be a string"):
        add_policy(base_config(), 0)
    with pytest.raises(ConfigError, match="policies.a.lrr: no such setting; allowed are adam_b1"):
        add_policy(base_config(), "a", lrr=1)
    with pytest.raises(ConfigError, match="policies.a.lr='x': must be of type float"):
        add_policy(base_config(), "a", lr="x")
    with pytest.raises(ConfigError, match="at least one"):
        read(base_config())
    config = base_config()
    config.policies = ml_collections.ConfigDict({"a": {"model": "x", "lrr": 1}})
    with pytest.raises(ConfigError, match="policies.a.lrr: no such setting"):
        read(config)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent(
            """
            from mutualrl.config import add_policy, base_config

            def get_config():
                config = base_config()
                add_policy(config, "a", model="x")
                add_policy(config, "b", model="y", lr=5e-4)
                return config
            """
        )
    )
    return path


def test_command_line_overrides(config_file, tmp_path):
    before = list(sys.argv)
    run, workdir = read_command_line(
        [
            "prog",
            f"--config={config_file}",
            "--config.policies.a.lr=1e-3",
            "--config.policy.group_size=4",
            "--config.steps=7",
        ]
    )
    assert (run.policies["a"].lr, run.policies["b"].lr, run.policies["b"].group_size, run.steps) == (1e-3, 5e-4, 4, 7)
    assert workdir == "runs/mine" and sys.argv == before
    flags = tmp_path / "flags"
    flags.write_text("--config.policies.b.clip_high=0.28\n--workdir=there\n")
    run, workdir = read_command_line(["prog", "--config", str(config_file), f"--flagfile={flags}"])
    assert run.policies["b"].clip_high == 0.28 and workdir == "there"


@pytest.mark.parametrize(
    "flag, says",
    [
        ("--config.policies.a.lrr=1", "config.policies.a.lrr: no such setting; allowed are adam_b1"),
        ("--config.policies.c.lr=1", "config.policies.c: no such setting; allowed are a, b"),
        ("--config.polices.a.lr=1", "config.polices: no such setting; allowed are"),
        ("--config.policies.a.lr=fast", "config.policies.a.lr=fast: must be a number"),
        ("--config.steps=1.5", "config.steps=1.5: must be a whole number"),
        ("--config.tensorboard=maybe", "config.tensorboard=maybe: must be true or false"),
        ("--config.policies.a.group_size=1", "policies.a.group_size=1"),
        ("--wrkdir=x", "Unknown command line flag 'wrkdir'"),
        ("stray", "'stray': not a flag"),
    ],
)
def test_command_line_refusals(config_file, flag, says):
    with pytest.raises(ConfigError) as error:
        read_command_line(["prog", f"--config={config_file}", flag])
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_command_line_without_a_file():
    with pytest.raises(ConfigError, match="--config=FILE is missing"):
        read_command_line(["prog"])
    with pytest.raises(ConfigError, match="--config=nowhere.py: no such file"):
        read_command_line(["prog", "--config=nowhere.py"])


def test_a_refusal_is_one_line_on_the_screen(config_file):
    command = [sys.executable, "-m", "mutualrl.train", f"--config={config_file}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr.startswith("config: policies.a.model='x': 'x' is no local folder") and done.stderr.count("\n") == 1
    )
