"""Arms of a comparison are checked before anything runs; processes keep their order; what is finished stays so."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest

from mutualrl import arms as arms_module
from mutualrl import compare
from mutualrl.arms import comparison, is_finished, plan
from mutualrl.config import ConfigError, add_policy, base_config
from mutualrl.processes import Job, cores, last_step, run_jobs


def base():
    config = base_config()
    config.policy.model = "some/model"
    add_policy(config, "llama")
    add_policy(config, "qwen", model="warmup", lr=1e-3)
    return config


def planned(arms, tmp_path="work", **more):
    config = comparison(base(), arms, **{"seeds": (0, 1), "baseline": "grpo", **more})
    return {r.name: r for r in plan(config, tmp_path).runs}


LOGS = {"qwen_log": {"folder": "{sgt}/exchange.log", "policy": "qwen"}}
ARMS = {
    "from_log": {
        "transfer.name": "sgt", "exchange.logs": LOGS,
        "exchange.topology": "explicit", "exchange.edges": ["qwen_log->llama"],
    },
    "grpo": {},
    "twice": {"policy.group_size": 16, "policies.llama.lr": 3e-4},
    "sgt": {"transfer.name": "sgt", "transfer.sgt.nll_coef": 0.2, "exchange.log": True},
    "frozen": {
        "policies.start": {"like": "qwen", "frozen": True},
        "exchange.topology": "explicit", "exchange.edges": ("start->llama",),
    },
}  # fmt: skip


def test_arms_change_what_they_name_and_nothing_else():
    runs = planned(ARMS)
    assert len(runs) == 10 and {r.run.seed for r in runs.values()} == {0, 1}
    plain = runs["grpo/0"].run
    assert runs["grpo/1"].run == dataclasses.replace(plain, seed=1)
    twice = runs["twice/0"].run
    assert [p.group_size for p in twice.policies.values()] == [16, 16]  # policies follow `policy`
    assert (twice.policies["llama"].lr, twice.policies["qwen"].lr) == (3e-4, 1e-3)
    assert [p.group_size for p in plain.policies.values()] == [8, 8]  # the base is as it was
    assert runs["sgt/0"].run.transfer["nll_coef"] == 0.2 and runs["sgt/0"].run.exchange.log
    assert runs["sgt/0"].rollouts_per_step == 2 * 8 * plain.problems_per_step


def test_added_policies_have_the_settings_of_another():
    found = planned(ARMS)["frozen/1"]
    assert list(found.run.policies) == ["llama", "qwen", "start"] and found.copies == {"start": "qwen"}
    assert found.run.policies["start"] == dataclasses.replace(found.run.policies["qwen"], frozen=True)


def test_folders_of_other_arms_come_first():
    runs = planned(ARMS, "there")
    assert list(runs)[:5] == ["grpo/0", "twice/0", "sgt/0", "from_log/0", "frozen/0"]
    found = runs["from_log/1"]
    assert found.needs == ("sgt",)
    assert found.run.exchange.logs["qwen_log"].folder == "there/sgt/1/exchange.log"
    assert found.run.exchange.edges == ("qwen_log->llama",)


@pytest.mark.parametrize(
    "arms, more, message",
    [
        ({"a": {"policy.grup_size": 3}}, {}, r"arms\.a\.policy\.grup_size: no such setting; allowed are"),
        ({"a": {"nonsense.x": 3}}, {}, r"arms\.a\.nonsense\.x: no such setting"),
        ({"a": {"policy.group_size": "many"}}, {}, r"arms\.a\.policy\.group_size='many'"),
        ({"a": {"policy.group_size": 1}}, {}, r"arms\.a: policies\.llama\.group_size=1: .*at least 2"),
        ({"a": {"transfer.name": "telepathy"}}, {}, r"arms\.a: transfer\.name='telepathy': allowed are"),
        ({"a": {"data.size": 3}}, {}, r"arms\.a\.data\.size: must be the same in all arms"),
        ({"a": {"eval_samples": 3}}, {}, r"arms\.a\.eval_samples: must be the same"),
        ({"a": {"policies.new": {"frozen": True}}}, {}, r"arms\.a\.policies\.new=.*like, one of llama, qwen"),
        ({"a": {"policies.new": {"like": "qwen", "x": 1}}}, {}, r"arms\.a\.policies\.new\.x: no such setting"),
        (
            {"a": {"exchange.logs": {"x": {"folder": "{b}/l", "policy": "qwen"}}}},
            {},
            r"exchange\.logs: \{b\} must name",
        ),
        ({"a": {"policy.system": "{b}"}, "b": {"policy.system": "{a}"}}, {}, "a, b need each other"),
        (
            {
                "a": {"transfer.name": "sgt"},
                "b": {"exchange.logs": {"x": {"folder": "{a}/exchange.log", "policy": "qwen"}}},
            },
            {},
            r"arms\.b\.exchange\.logs\.x\.folder=.*: arm a keeps no log; set its exchange\.log=True",
        ),
        (
            {
                "a": {"exchange.log": True},
                "b": {"exchange.logs": {"x": {"folder": "{a}/exchange.log", "policy": "gwen"}}},
            },
            {},
            r"arms\.b\.exchange\.logs\.x\.policy='gwen': must be a policy of arm a: llama, qwen",
        ),
        ({"compiled": {}}, {}, "'compiled'"),
        ({}, {"baseline": "ppo"}, "baseline='ppo': must be one of grpo"),
        ({}, {"seeds": ()}, "seeds"),
        ({}, {"seeds": (1, 1)}, "seeds"),
        ({}, {"jobs": 0}, "jobs=0"),
        ({}, {"contrasts": ("grpo/x",)}, "contrasts='grpo/x'"),
    ],
)
def test_refusals_name_the_arm_and_the_field(arms, more, message):
    with pytest.raises(ConfigError, match=message) as caught:
        planned({"grpo": {}, **arms}, **more)
    assert "\n" not in str(caught.value)


def test_without_held_out_problems_there_is_nothing_to_compare():
    without = base()
    without.eval_problems = 0
    with pytest.raises(ConfigError, match="base.eval_problems=0"):
        plan(comparison(without, {"grpo": {}}, seeds=(0,), baseline="grpo"), "work")


CONFIG = """
from mutualrl.arms import comparison
from mutualrl.config import add_policy, base_config
ARMS = {"grpo": {"policies.old": {"like": "llama", "frozen": True}}, "twice": {"policy.group_size": 16}}


def get_config():
    base = base_config()
    base.policy.model = "m"
    add_policy(base, "llama")
    return comparison(base, ARMS, seeds=(0, 1), baseline="grpo")
"""


def test_command_line(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(CONFIG)
    argv = [
        "compare",
        f"--config={file}",
        "--config.seeds=4,5,6",
        "--config.base.steps=7",
        "--config.base.policy.lr=0.5",
    ]
    found, part = compare.read_command_line(argv)
    assert found.seeds == (4, 5, 6) and found.arms == ("grpo", "twice") and part == ""
    assert all(r.run.steps == 7 and r.run.policies["llama"].lr == 0.5 for r in found.runs)
    assert str(found.workdir) == "runs/some" and str(found.runs[0].folder) == "runs/some/grpo/4"
    assert compare.read_command_line([*argv[:2], "--config.seeds=4"])[0].seeds == (4,)
    for flag, message in (
        ("--config.base.stepz=7", "config.base.stepz: no such setting"),
        ("--config.jobs=two", "config.jobs=two: must be a whole number"),
        ("more", "not a flag"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare.read_command_line([*argv, flag])


def test_a_part_trains_its_run_with_the_models_of_others(tmp_path, monkeypatch):
    config = comparison(base(), ARMS, seeds=(0, 1), baseline="grpo")
    compared = plan(config, tmp_path)
    seen = []
    monkeypatch.setitem(sys.modules, "mutualrl.train", types.SimpleNamespace(train=lambda *a: seen.append(a)))
    compare.run_part(compared, f"frozen/1:{compared.digest}")
    ((run, folder),) = seen
    assert folder == tmp_path / "frozen/1" and run.seed == 1
    assert run.policies["start"].model == run.policies["qwen"].model == "warmup"
    with pytest.raises(ConfigError, match="has changed"):
        compare.run_part(dataclasses.replace(compared, runs=compared.runs[1:]), f"frozen/1:{compared.digest}")


def test_finished_means_with_the_same_settings(tmp_path):
    run = planned(ARMS, tmp_path)["from_log/1"]
    assert not is_finished(run)
    run.folder.mkdir(parents=True)
    settings = json.loads(json.dumps(dataclasses.asdict(run.run)))
    settings["policies"]["qwen"]["model"] = "cache/qwen-123"  # of a warm-up: made, so not in the plan
    settings["tensorboard"] = not settings["tensorboard"]
    settings["exchange"]["logs"]["qwen_log"]["folder"] = "before/it/moved/sgt/1/exchange.log"

    def begun(**changes):
        (run.folder / "config.json").write_text(json.dumps({**settings, **changes}))

    begun()
    assert not is_finished(run)
    (run.folder / "summary.json").write_text("{}")
    assert is_finished(run)
    begun(steps=settings["steps"] + 1)
    with pytest.raises(ConfigError, match=r"arms\.from_log: .*other settings: steps was 101, now 100; use another"):
        is_finished(run)
    other = json.loads(json.dumps(settings["policies"]))
    other["llama"]["model"] = "another"  # not of a warm-up
    begun(policies=other)
    with pytest.raises(ConfigError, match=r"policies\.llama\.model was 'another'"):
        is_finished(run)


def job(folder, name, code, **more):
    return Job(name, (sys.executable, "-c", code), folder / name, **more)


def write(seconds=0.0, **metrics):
    """A process that notes when it was begun and ended in the current folder's log of times."""
    return (
        "import json, os, sys, time; from pathlib import Path; t = time.time()\n"
        f"time.sleep({seconds}); print(json.dumps([t, time.time(), sorted(os.sched_getaffinity(0))]))"
    )


def times(folder, name):
    return json.loads((folder / name / "log.txt").read_text())


def test_jobs_follow_those_they_need_side_by_side_on_their_own_cores(tmp_path):
    jobs = [
        job(tmp_path, "late", write(), needs=("first",)),
        job(tmp_path, "first", write(0.6)),
        job(tmp_path, "beside", write(0.6)),
        job(tmp_path, "old_need", write(), needs=("old",)),
    ]
    assert run_jobs(jobs, title="t", slots=2, done={"old"}) == {}
    first, beside, late, old = (times(tmp_path, n) for n in ("first", "beside", "late", "old_need"))
    assert late[0] >= first[1] and beside[0] < first[1] and first[0] < beside[1]  # the two overlap
    assert old[0] >= min(first[1], beside[1])  # never three at a time
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(first[2]) & set(beside[2])


def test_a_failed_job_stops_only_those_that_need_it(tmp_path, capfd):
    jobs = [
        job(tmp_path, "bad", "print('so it goes'); raise SystemExit(3)"),
        job(tmp_path, "needs_bad", write(), needs=("bad",)),
        job(tmp_path, "needs_that", write(), needs=("needs_bad",)),
        job(tmp_path, "no_result", write(), result="summary.json"),
        job(tmp_path, "good", write()),
    ]
    failed = run_jobs(jobs, title="t", slots=1)
    assert list(failed) == ["bad", "needs_bad", "needs_that", "no_result"]
    assert failed["bad"] == "exit status 3:\nso it goes"
    assert failed["needs_bad"] == "not run: it needs bad" and failed["needs_that"] == "not run: it needs needs_bad"
    assert times(tmp_path, "good") and "bad failed with exit status 3" in capfd.readouterr().err


def test_an_interrupted_comparison_ends_its_processes(tmp_path):
    code = (
        "import signal, sys; from pathlib import Path; from mutualrl.processes import Job, run_jobs\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        f"run_jobs([Job('x', (sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'),"
        f" Path({str(tmp_path)!r}))], title='t', slots=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    log = tmp_path / "log.txt"
    until = time.monotonic() + 60
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.1)
    child = int(log.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_cores_are_split_evenly(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5, 6}, raising=False)
    assert cores(1) == [[]] and cores(2) == [[0, 1], [2, 5, 6]] and cores(6) == [[]] * 6


def test_last_step_passes_over_a_line_cut_in_mid_write(tmp_path):
    assert last_step(tmp_path / "metrics.jsonl") == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "x": 1}\n{"step": 4, "x": 1}\n{"step": 5, "x"')
    assert last_step(tmp_path / "metrics.jsonl") == 4


def fake_part(folder):
    """What a process of `compare` leaves for these tests: a run that is begun, done if it is not to fail."""
    return (
        "import json, sys; from pathlib import Path\n"
        f"f = Path({str(folder)!r}) / sys.argv[-1].split('=')[1].split(':')[0]\n"
        "if f.name == '1' and f.parent.name == 'twice' and not (f / 'again').exists():\n"
        "    (f / 'again').touch(); raise SystemExit('out of luck')\n"
        "(f / 'summary.json').write_text('{}'); (f / 'config.json').write_text((f / 'plan.json').read_text())"
    )


def test_everything_runs_once_and_failed_runs_again(tmp_path, monkeypatch):
    (tmp_path / "some.py").write_text(CONFIG)
    argv = ["compare", f"--config={tmp_path}/some.py", f"--workdir={tmp_path}/work"]
    compared, _ = compare.read_command_line(argv)
    for r in compared.runs:
        r.folder.mkdir(parents=True)
        (r.folder / "plan.json").write_text(json.dumps(dataclasses.asdict(r.run)))
    started, real = [], run_jobs

    def instead(jobs, **kwargs):
        started.append([j.name for j in jobs])
        assert all(
            j.command[-1] == f"--part={j.name}:{compared.digest}" and j.command[3:5] == tuple(argv[1:]) for j in jobs
        )
        code = fake_part(compared.workdir)
        return real(
            [dataclasses.replace(j, command=(sys.executable, "-c", code, j.command[-1])) for j in jobs], **kwargs
        )

    monkeypatch.setattr(compare, "run_jobs", instead)
    failed = compare.run_everything(compared, argv)
    assert started == [["grpo/0", "twice/0", "grpo/1", "twice/1"]]
    assert list(failed) == ["twice/1"] and "out of luck" in failed["twice/1"]
    assert compare.run_everything(compared, argv) == {} and started[1:] == [["twice/1"]]
    assert compare.run_everything(compared, argv) == {} and started[2:] == [[]]
    assert arms_module.MODELS not in os.listdir(tmp_path / "work")
