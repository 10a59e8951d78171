"""Policies that learn from each other: every regime through the whole loop, resume, frozen and logged peers."""

import dataclasses
import importlib
import json
import logging

import jax
import numpy as np
import pyarrow.dataset
import pytest

from mutualrl import train as train_module
from mutualrl.config import ConfigError, add_policy, base_config, read, use_transfer
from mutualrl.rewards.workers import GraderPool
from mutualrl.seeds import hashed
from mutualrl.train import train
from mutualrl.types import Problem
from mutualrl.warmup import ensure_models

STEPS = 3
REGIMES = {
    "prp snapshot": ("prp", dict(variant="prp_snapshot"), dict(updates_per_step=2)),
    "prp thl": ("prp", dict(variant="prp_thl", split="prior", negatives="filter_kl"), {}),
    "prp seq": ("prp", dict(variant="prp_seq"), dict(kl_coef=0.1, kl_rows="all")),
    "prp topr": ("prp", dict(variant="prp_thl", negatives="topr"), {}),
    "xgrpo": ("xgrpo", {}, {}),
    "sgt": ("sgt", dict(selection="likelihood"), dict(updates_per_step=2)),
    "graft": ("graft", dict(floor=0.0, balance=False), dict(updates_per_step=2, group_size=4, lr=1e-3)),
    "hacpo": ("hacpo", {}, dict(group_size=4, lr=1e-3)),
    "luffy": ("luffy", {}, dict(group_size=4, lr=1e-3)),
    "ampo": ("ampo", {}, {}),
    "distill": ("distill", dict(task_coef=0.5), {}),
    "sft": ("sft", {}, {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two tiny models that have learnt to answer with a few digits and to stop, and nothing more."""
    config = base_config()
    config.data.size = 50
    config.policy.max_prompt_tokens = 16
    config.policy.max_new_tokens = 6
    hf = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    right = dict.fromkeys(config.data.kinds, 0.5)
    recipe = dict(right=right, steps=100, batch=64)
    config.warmup = dict(
        folder=str(tmp_path_factory.mktemp("models")),
        policies=dict(
            llama=dict(hf=dict(model_type="llama", **hf), tokenizer="bytes", bos=True, **recipe),
            qwen=dict(hf=dict(model_type="qwen3", head_dim=16, **hf), tokenizer="bpe", tokenizer_size=380, **recipe),
        ),
    )
    for name in ("llama", "qwen"):
        add_policy(config, name, model="warmup")
    return {name: policy.model for name, policy in ensure_models(read(config)).policies.items()}


@pytest.fixture(autouse=True)
def some_are_right(monkeypatch):
    """Such models are hardly ever right. Here text and problem decide by a hash: a third of the rollouts is, and about
    every fifth group of four has none."""

    def grade(self, replies, problems):
        return np.array([float(hashed(f"{x.id}:{t}") % 3 == 0) for t, x in zip(replies, problems)]), list(replies)

    monkeypatch.setattr(GraderPool, "grade", grade)


def settings(models, regime="none", options=None, policy=None, **changes):
    config = base_config()
    config.data.size = 20
    config.steps = STEPS
    config.problems_per_step = 4
    config.eval_problems = 0
    config.gold_check = "off"  # the grader here is a hash
    config.checkpoint_every = 2
    config.tensorboard = False
    config.plan = "time_slice"
    config.policy.group_size = 4
    config.policy.max_new_tokens = 6
    config.policy.max_prompt_tokens = config.policy.prompt_bucket = 16
    config.policy.lr = 1e-3
    config.policy.devices = 1
    use_transfer(config, regime, **(options or {}))
    config.policy.update(policy or {})
    for name, folder in models.items():
        add_policy(config, name, model=str(folder))
    config.update(changes)
    return config


def states(workdir):
    """Arrays of the newest checkpoint, by policy."""
    import orbax.checkpoint as ocp

    step = max((p for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    return {x.name: ocp.StandardCheckpointer().restore(x.absolute()) for x in sorted(step.glob("policy_*"))}


def lines(workdir):
    """Metrics of every step, without times."""
    read_ = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if not k.startswith("time/")} for x in read_]


def same(a, b):
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.fixture(scope="module")
def without(models, tmp_path_factory):
    """Final states of GRPO without transfer under a policy's settings; computed once for each."""
    done = {}

    def run(policy):
        key = repr(sorted(policy.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp("none")
            train(read(settings(models, policy=policy)), folder)
            done[key] = states(folder)
        return done[key]

    return run


@pytest.mark.parametrize("name", REGIMES)
def test_every_regime_learns_from_its_peer_and_is_itself_without(models, without, tmp_path, name):
    """qwen hears llama and llama hears nobody: llama ends where it ends without transfer, bit for bit."""
    regime, options, policy = REGIMES[name]
    edges = dict(exchange=dict(topology="explicit", edges=("llama->qwen",)))
    train(read(settings(models, regime, options, policy, **edges)), tmp_path / "one")
    published = importlib.import_module(f"mutualrl.transfer.{regime}")
    mutual = states(tmp_path / "one")
    none = without({**getattr(published, "PUBLISHED", {}), **policy})
    if regime != "sft":  # which has nothing to learn from without a peer
        assert same(mutual["policy_llama"], none["policy_llama"])
    assert not same(mutual["policy_qwen"]["params"], none["policy_qwen"]["params"])
    for line in lines(tmp_path / "one"):
        assert all(np.isfinite(v) for v in line.values())
        assert line["qwen/skipped_updates"] == 0
    total = {k: sum(x.get(k, 0) for x in lines(tmp_path / "one")) for k in ("qwen/peer_rows", "qwen/peer_tokens")}
    if regime not in ("xgrpo", "distill"):  # which train on own rows only
        assert total["qwen/peer_rows"] > 0 and total["qwen/peer_tokens"] > total["qwen/peer_rows"]
    exchange = json.loads((tmp_path / "one/summary.json").read_text())["exchange"]
    assert exchange["edges"] == {"llama": [], "qwen": ["llama"]} and exchange["bytes_sent"]["llama"] > 0


class Killed(Exception):
    pass


def test_a_mutual_run_resumes_bit_for_bit(models, tmp_path, monkeypatch):
    """Parameters, metrics, exchange log and summary are those of the run that was not stopped."""
    config = lambda: read(settings(models, "hacpo", None, dict(group_size=4, lr=1e-3), exchange=dict(log=True)))  # noqa: E731
    whole = train(config(), tmp_path / "whole" / "run")
    step = train_module.train_step

    def dies(number, *args):
        if number == 2:
            (tmp_path / "killed" / "run" / "exchange.log" / "rollout" / "part-00000002-00000009.parquet").touch()
            raise Killed
        return step(number, *args)

    monkeypatch.setattr(train_module, "train_step", dies)
    with pytest.raises(Killed):
        train(config(), tmp_path / "killed" / "run")
    monkeypatch.setattr(train_module, "train_step", step)
    again = train(config(), tmp_path / "killed" / "run")
    assert same(states(tmp_path / "whole/run"), states(tmp_path / "killed/run"))
    assert lines(tmp_path / "whole/run") == lines(tmp_path / "killed/run")
    assert again["exchange"] == whole["exchange"] and again["policies"] == whole["policies"]
    for topic in ("rollout", "capability", "used"):
        tables = [
            pyarrow.dataset.dataset(tmp_path / which / "run/exchange.log" / topic).to_table().to_pylist()
            for which in ("whole", "killed")
        ]
        assert repr(tables[0]) == repr(tables[1]) and len(tables[0]) > 0  # repr: NaN is not equal to itself


def test_frozen_and_logged_peers(models, tmp_path, caplog):
    """A frozen policy stays as it is and is heard; a log replays what was published, and stands in for its policy."""
    live = settings(models, "sgt", exchange=dict(log=True))
    live.policies.llama.frozen = True
    train(read(live), tmp_path / "live")
    untouched = states(tmp_path / "live")["policy_llama"]
    assert int(untouched["step"]) == 0
    assert sum(x["qwen/peer_rows"] for x in lines(tmp_path / "live")) > 0

    alone = {"qwen": models["qwen"]}
    log = {"before": dict(folder=str(tmp_path / "live/exchange.log"), policy="llama")}
    replay = settings(alone, "sgt", exchange=dict(logs=log))
    train(read(replay), tmp_path / "replay")
    assert same(states(tmp_path / "replay")["policy_qwen"], states(tmp_path / "live")["policy_qwen"])

    used = settings(alone, "sft", exchange=dict(logs={"before": {**log["before"], "used_by": "qwen"}}))
    summary = train(read(used), tmp_path / "used")
    assert [x["qwen/transfer/certificates"] for x in lines(tmp_path / "used")] == [
        x["qwen/transfer/certificates"] for x in lines(tmp_path / "live")
    ]
    assert summary["exchange"]["kinds"] == {"qwen": "live", "before": "log"}

    log["before"]["folder"] = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="exchange.logs.before.folder=.*no such folder"):
        train(read(settings(alone, "sgt", exchange=dict(logs=log))), tmp_path / "missing")


def test_order_and_plan_do_not_matter(models, tmp_path):
    """Reversed order: other indices and another order of sources. Static plan: each policy on a device of its own."""
    run = read(settings(models, "sgt"))
    reversed_ = dataclasses.replace(run, policies=dict(reversed(run.policies.items())))
    assert list(reversed_.policies) == ["qwen", "llama"]
    for name, each in dict(first=run, turned=reversed_, static=dataclasses.replace(run, plan="static")).items():
        train(each, tmp_path / name)
    assert same(states(tmp_path / "first"), states(tmp_path / "turned"))
    assert same(states(tmp_path / "first"), states(tmp_path / "static"))


def test_a_lossy_tokenizer_is_refused(models, tmp_path, caplog):
    import shutil

    folder = shutil.copytree(models["qwen"], tmp_path / "lossy")
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(spec))
    broken = {**models, "qwen": folder}
    with pytest.raises(ConfigError, match="policies.qwen.model=.* alters case.*allow_lossy=True"):
        train(read(settings(broken, "sgt")), tmp_path / "refused")
    with caplog.at_level(logging.WARNING):
        train(read(settings(broken, "sgt", exchange=dict(allow_lossy=True), steps=1)), tmp_path / "allowed")


def test_a_problem_name_too_long_for_the_wire_is_refused():
    short = Problem(id="é" * 80, question="")
    train_module.check_names([short])
    with pytest.raises(ConfigError, match="data: the problem id 'éé.* has 161 bytes: at most 160"):
        train_module.check_names([short, Problem(id="é" * 80 + "a", question="")])
