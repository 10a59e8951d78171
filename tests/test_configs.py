"""The configs that come with the project describe runs that can be read."""

import pathlib
import runpy

import pytest

from mutualrl import arms
from mutualrl.config import ConfigError, base_config, label_options, read, use_label

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
RUNS = {
    "demo": [()],
    "smollm2_gemma3": [()],
    "corl_demo": [(), ("same",), ("views",), ("three",)],
    "corl_3b": [(), ("same_qwen",), ("same_llama",), ("views",)],
    "corl_7b": [(), ("same_qwen",), ("same_llama",), ("views",)],
    "corl_qwen3": [(), ("different",), ("views",)],
}
COMPARISONS = {"compare_demo": [()], "corl_experts": [(), ("separatrix",), ("wrong",)]}


def made(name, arguments):
    return runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"](*arguments)


def test_every_config_is_looked_at():
    assert {p.stem for p in CONFIGS.glob("*.py")} == {*RUNS, *COMPARISONS}


@pytest.mark.parametrize("name, arguments", [(n, a) for n, all_of in RUNS.items() for a in all_of])
def test_runs(name, arguments):
    run = read(made(name, arguments))
    if name.startswith("corl"):
        assert run.label["name"] == "peer_vote" and len(run.policies) >= 2
        assert {p.view for p in run.policies.values()} == ({0, 1} if arguments == ("views",) else {0})


@pytest.mark.parametrize("name, arguments", [(n, a) for n, all_of in COMPARISONS.items() for a in all_of])
def test_comparisons(name, arguments, tmp_path):
    found = arms.plan(made(name, arguments), tmp_path)
    assert len(found.runs) == len(found.arms) * len(found.seeds)


@pytest.mark.parametrize("name", ["corl_demo", "corl_3b", "corl_experts"])
def test_a_wrong_argument_is_named(name):
    with pytest.raises(ValueError, match="'nobody': must be one of"):
        made(name, ("nobody",))


def test_a_label_source_published_with_an_objective_sets_it():
    config = base_config()
    use_label(config, "self_vote", min_share=0.5)
    assert config.policy.group_size == 32 and config.policy.kl_coef == 0.001 and config.label.self_vote.n_vote == 64
    with pytest.raises(ConfigError, match="label.name='oracle': allowed are entropy, peer_vote"):
        use_label(config, "oracle")
    with pytest.raises(ConfigError, match="label.self_vote.votes: no such setting; allowed are min_share"):
        use_label(config, "self_vote", votes=3)
    made_run = read(made("corl_demo", ()))
    assert label_options(made_run).vote_identity == "string"
