"""The loop: runs, is killed, resumes bit for bit; writes what it promises."""

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mutualrl import train as train_module
from mutualrl.config import ConfigError, add_policy, base_config, read, use_data, use_label
from mutualrl.testing import tiny_model
from mutualrl.train import train

STEPS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": tiny_model(folder / "llama", "llama", bos=True, padded_vocab=5),
        "qwen": tiny_model(folder / "qwen", "qwen3", tokenizer="bpe", seed=1),
    }


def settings(models, **changes):
    config = base_config()
    config.data.size = 20
    config.steps = STEPS
    config.problems_per_step = 4
    config.eval_problems = 10
    config.checkpoint_every = 2
    config.tensorboard = False
    config.plan = "time_slice"
    config.policy.group_size = 4
    config.policy.max_new_tokens = 5
    config.policy.max_prompt_tokens = config.policy.prompt_bucket = 16
    config.policy.lr = 1e-3
    config.policy.devices = 1
    for name, folder in models.items():
        add_policy(config, name, model=str(folder))
    config.update(changes)
    return config


def final_states(workdir):
    """Arrays of the newest checkpoint, read without the product's own restore."""
    import orbax.checkpoint as ocp

    step = max((p for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    out = {}
    for item in sorted(step.glob("policy_*")):
        out[item.name] = ocp.StandardCheckpointer().restore(item.absolute())
    return step.name, out


def assert_same_states(a, b):
    assert a[0] == b[0] and a[1].keys() == b[1].keys()
    for x, y in zip(jax.tree.leaves(a[1]), jax.tree.leaves(b[1])):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, train(read(settings(models)), workdir)


def test_summary_and_metrics(whole):
    workdir, summary = whole
    assert json.loads((workdir / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["schema"] == 1 and summary["exchange"] == {} and summary["seconds"] > 0
    assert {"python", "jax", "flax"} <= summary["versions"].keys()
    for policy in summary["policies"].values():
        assert policy["steps"] == STEPS and policy["skipped_updates"] == 0
        assert policy["tokens"]["generated"] == policy["tokens"]["trained"] > 0 and policy["tokens"]["scored"] == 0
        for when in ("before", "after"):
            result = policy[when]
            assert result["n"] == 10 and result["interval"][0] <= result["accuracy"] <= result["interval"][1]
    lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [x for x in lines if "llama/loss" in x]
    assert [x["step"] for x in steps] == list(range(1, STEPS + 1))
    for name in ("llama", "qwen"):
        for key in ("reward/mean", "entropy", "grad_norm", "mismatch/mean_abs", "mismatch/max_abs", "mismatch/kl",
                    "length/mean", "truncated_frac", "clip/low", "clip/high", "clip/dual", "lr"):  # fmt: skip
            assert all(np.isfinite(x[f"{name}/{key}"]) for x in steps), key
        assert all(x[f"{name}/mismatch/max_abs"] < 1e-4 for x in steps)
        assert sum(x[f"{name}/tokens/generated"] for x in steps) == summary["policies"][name]["tokens"]["generated"]


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_stopped_run_resumes_bit_for_bit(models, whole, tmp_path, monkeypatch, at):
    """Stopped in the middle of step `at`; the same call goes on from the last complete checkpoint."""
    step = train_module.train_step

    def dies(number, *args):
        if number == at:
            raise Killed
        return step(number, *args)

    monkeypatch.setattr(train_module, "train_step", dies)
    with pytest.raises(Killed):
        train(read(settings(models)), tmp_path)
    monkeypatch.setattr(train_module, "train_step", step)
    summary = train(read(settings(models)), tmp_path)
    assert_same_states(final_states(tmp_path), final_states(whole[0]))
    for name, policy in whole[1]["policies"].items():
        assert summary["policies"][name] == policy

    def steady(folder):
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in x.items() if not k.startswith("time/")} for x in lines if "llama/loss" in x]

    assert steady(tmp_path) == steady(whole[0])


def test_a_half_written_step_is_set_aside(models, whole, tmp_path, caplog):
    """Newest step lacks one policy: the step before it is taken, for all policies, and nothing is deleted."""
    shutil.copytree(whole[0], tmp_path / "run")
    newest = tmp_path / "run/checkpoints" / str(STEPS)
    (newest / "policy_qwen" / "_METADATA").unlink()
    with caplog.at_level(logging.WARNING):
        train(read(settings(models)), tmp_path / "run")
    assert "it lacks policy_qwen" in caplog.text
    assert (newest.with_name(f"{STEPS}.incomplete") / "policy_llama").is_dir()
    assert_same_states(final_states(tmp_path / "run"), final_states(whole[0]))


def test_a_damaged_step_is_passed_over(models, whole, tmp_path, caplog):
    shutil.copytree(whole[0], tmp_path / "run")
    for file in (tmp_path / "run/checkpoints" / str(STEPS) / "policy_llama").rglob("*"):
        if file.is_file() and file.name != "_METADATA":
            file.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        train(read(settings(models)), tmp_path / "run")
    assert f"{STEPS} set aside as {STEPS}.incomplete" in caplog.text
    assert_same_states(final_states(tmp_path / "run"), final_states(whole[0]))


def test_a_finished_run_is_not_run_again(models, whole):
    before = (whole[0] / "metrics.jsonl").read_text()
    summary = train(read(settings(models)), whole[0])
    assert summary["policies"] == whole[1]["policies"] and (whole[0] / "metrics.jsonl").read_text() == before


def test_other_data_is_refused(models, whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    config = settings(models)
    config.data.size = 21
    with pytest.raises(ConfigError, match="data: the problems are not those of the checkpoints"):
        train(read(config), tmp_path / "run")


def test_a_policy_more_is_refused(models, whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    config = settings(models)
    add_policy(config, "third", model=str(models["llama"]))
    with pytest.raises(
        ConfigError, match="policies=llama, qwen, third: the checkpoints in .* are of llama, qwen; use another workdir"
    ):
        train(read(config), tmp_path / "run")


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(seed=1), "seed=1: the checkpoints in .* are of seed 0; use another workdir"),
        (dict(steps=2), "steps=2: the checkpoints in .* have 4 steps already"),
    ],
)
def test_another_run_is_refused(models, whole, change, says):
    with pytest.raises(ConfigError, match=says):
        train(read(settings(models, **change)), whole[0])


def test_a_first_evaluation_of_a_trained_policy_is_not_called_before(models, tmp_path):
    train(read(settings(models, steps=2, eval_problems=0)), tmp_path)
    summary = train(read(settings(models)), tmp_path)
    for policy in summary["policies"].values():
        assert "before" not in policy and policy["after"]["n"] == 10


def test_a_damaged_config_note_does_not_stop_a_run(models, whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    (tmp_path / "run/config.json").write_text("")
    assert train(read(settings(models)), tmp_path / "run")["policies"] == whole[1]["policies"]


def test_other_objectives_resume_bit_for_bit(models, tmp_path, monkeypatch):
    """Several updates a step, a KL anchor, and more problems than an epoch holds."""
    step = train_module.train_step

    def config():
        config = settings(models, eval_problems=0, checkpoint_every=1, problems_per_step=8)
        config.data.size = 2
        config.data.kinds = ("rev", "sort", "swap", "dup", "inc")
        config.policy.updates_per_step = 2
        config.policy.kl_coef = 0.1
        return read(config)

    train(config(), tmp_path / "whole")

    def dies(number, *args):
        if number == 2:
            raise Killed
        return step(number, *args)

    monkeypatch.setattr(train_module, "train_step", dies)
    with pytest.raises(Killed):
        train(config(), tmp_path / "run")
    monkeypatch.setattr(train_module, "train_step", step)
    train(config(), tmp_path / "run")
    assert_same_states(final_states(tmp_path / "run"), final_states(tmp_path / "whole"))


@pytest.mark.parametrize(
    "label, check, dropped, trained_on, judged",
    [("verifier", "drop", 2, 7, 3), ("verifier", "keep", 0, 8, 4), ("self_vote", "drop", 1, 8, 3)],
)
def test_gold_answers_that_the_grader_does_not_accept(
    models, tmp_path, monkeypatch, caplog, label, check, dropped, trained_on, judged
):
    """One of eight problems to train on and one of four held-out ones has an empty gold answer. Without ground truth
    in the rewards nobody looks at the first."""
    for split, n in (("train", 8), ("test", 4)):
        rows = [dict(id=f"{split}/{i}", question=f"{split}:{i}=", answer=str(i) if i else "") for i in range(n)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings({"llama": models["llama"]}, steps=2, eval_problems=4, gold_check=check)
    use_data(config, "jsonl", train=str(tmp_path / "train.jsonl"), test=str(tmp_path / "test.jsonl"))
    use_label(config, label, **(dict(n_vote=0) if label == "self_vote" else {}))
    config.policy.update(dict(group_size=4, lr=1e-3, kl_coef=0.0))
    step, seen = train_module.train_step, []

    def watched(number, cohort, problems, *args):
        seen.extend(x.id for x in problems)
        return step(number, cohort, problems, *args)

    monkeypatch.setattr(train_module, "train_step", watched)
    with caplog.at_level(logging.WARNING):
        train(read(config), tmp_path / "run")
    assert len(seen) == 8 and len(set(seen)) == trained_on and ("train/0" in seen) == (trained_on == 8)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["dropped_golds"] == dropped and summary["dropped_problems"] == 0
    assert summary["policies"]["llama"]["after"]["n"] == judged
    held_out = json.loads((tmp_path / "run/held_out.json").read_text())["problems"]
    assert len(held_out) == judged and ("test/0" in held_out) == (judged == 4)
    says = [x for x in caplog.messages if "does not accept the gold answers" in x]
    assert len(says) == 1 and ("train/0" in says[0]) == (label == "verifier") and "test/0" in says[0]


@pytest.mark.parametrize("devices", [(4, 4), (6, 2)])
def test_two_policies_on_slices_give_the_single_device_numbers(models, tmp_path, devices):
    """Disjoint slices of eight devices, one of them with layers split in two, against turns on one device."""

    def run(workdir, plan, sizes, tensor):
        config = settings(models, steps=2, eval_problems=0, plan=plan)
        config.policies.llama.devices, config.policies.qwen.devices = sizes
        config.policies.llama.tensor = tensor
        train(read(config), workdir)
        lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
        return final_states(workdir)[1], [{k: v for k, v in x.items() if not k.startswith("time/")} for x in lines]

    (one, one_metrics), (many, many_metrics) = (
        run(tmp_path / "one", "time_slice", (1, 1), 1),
        run(tmp_path / "many", "static", devices, 2),
    )
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(many)):
        np.testing.assert_allclose(np.asarray(y), np.asarray(x), atol=2e-4, rtol=2e-4)
    for x, y in zip(one_metrics, many_metrics):
        assert x.keys() == y.keys()
        for key in x:
            np.testing.assert_allclose(y[key], x[key], atol=1e-3, rtol=1e-3, err_msg=key)


def test_policy_order_does_not_matter(models, whole, tmp_path):
    run = read(settings(models))
    turned = dataclasses.replace(run, policies=dict(reversed(run.policies.items())))
    assert list(turned.policies) != list(run.policies)
    train(turned, tmp_path)
    assert_same_states(final_states(tmp_path), final_states(whole[0]))


def test_killed_by_the_system_in_mid_run(models, whole, tmp_path):
    """SIGKILL at whatever moment it hits, then the same command: the same parameters as the run that was not killed."""
    config_file = tmp_path / "config.py"
    config_file.write_text(
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom test_train import settings\n"
        f"def get_config():\n    return settings({ {k: str(v) for k, v in models.items()} })\n"
    )
    workdir = tmp_path / "run"
    command = [sys.executable, "-m", "mutualrl.train", f"--config={config_file}", f"--workdir={workdir}"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(workdir.glob("checkpoints/2*")) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)  # seen as soon as the folder of step 2 (or its temporary name) is there
    first.send_signal(signal.SIGKILL)
    first.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert_same_states(final_states(workdir), final_states(whole[0]))
