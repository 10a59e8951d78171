"""Tiny runs under every label source: models, problems, a grader that can be bribed, and settings."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mutualrl.config import add_policy, base_config, read, use_data, use_label, use_transfer
from mutualrl.rewards.workers import GraderPool
from mutualrl.seeds import hashed
from mutualrl.train import train
from mutualrl.warmup import ensure_models

KINDS = ("rev", "sort", "max")


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Nearly all the time of such a run is compilation, and most runs here have the same programs."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def models(tmp_path_factory, compiled_once):
    """Three tiny models, two families and two tokenizers, that answer with a few digits and stop: peers take over
    finished texts only."""
    config = base_config()
    config.data.size = 50
    config.policy.max_prompt_tokens = 16
    config.policy.max_new_tokens = 6
    hf = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    recipe = dict(right=dict.fromkeys(config.data.kinds, 0.5), batch=64)
    llama = dict(hf=dict(model_type="llama", **hf), tokenizer="bytes", bos=True, **recipe)
    qwen = dict(hf=dict(model_type="qwen3", head_dim=16, **hf), tokenizer="bpe", tokenizer_size=380, **recipe)
    config.warmup = dict(
        folder=str(tmp_path_factory.mktemp("models")),
        policies=dict(ann=dict(steps=100, **llama), ben=dict(steps=100, **qwen), cas=dict(steps=70, **llama)),
    )
    for name in ("ann", "ben", "cas"):
        add_policy(config, name, model="warmup")
    return {name: policy.model for name, policy in ensure_models(read(config)).policies.items()}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """24 problems with another wording each and gold answers 0, 1 and 2; the same with every gold answer another one
    (`wrong`); and with wrong, absent and unacceptable ones in turn (`mixed`)."""
    folder = tmp_path_factory.mktemp("problems")
    golds = dict(
        right=lambda i: str(i % 3),
        wrong=lambda i: str((i + 1) % 3),
        mixed=lambda i: (str((i + 1) % 3), None, "?")[i // 3 % 3],
    )
    out = {}
    for name, gold in golds.items():
        out[name] = folder / f"{name}.jsonl"
        rows = [
            dict(
                id=f"problem/{i}",
                question=f"{KINDS[i % 3]}:{i * 397:04d}=",
                views=[f"{i * 397:04d}:{KINDS[i % 3]}="],
                source="made",
                answer=gold(i),
                solution=f"it is {gold(i)}",
            )
            for i in range(24)
        ]
        out[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def answer_in(text):
    """The answer 0, 1 or 2 that a text has by its hash, or none; an answer stands for itself."""
    if text in ("0", "1", "2"):
        return text
    number = hashed(text) % 10
    return str(number % 3) if number < 9 and text != "?" else None


@pytest.fixture(autouse=True)
def grader(monkeypatch):
    """Such models are hardly ever right. Here a text's answer is one of three by a hash.

    Whoever shows this grader the ground truth of a problem besides its answer gets answers that depend on it.
    """

    def grade(self, replies, problems):
        found = [answer_in(t) for t in replies]
        right = [
            np.nan if x.answer is None else float(a is not None and a == x.answer) for a, x in zip(found, problems)
        ]
        bribes = [x.extra.get("solution") for x in problems]
        bribed = [str((int(a) + hashed(b)) % 3) if a and b else a for a, b in zip(found, bribes)]
        return np.array(right), bribed

    monkeypatch.setattr(GraderPool, "grade", grade)
    return SimpleNamespace(answer_in=answer_in)


@pytest.fixture(scope="session")
def settings(models, files):
    """Settings of a run of 3 steps with 2 problems: `settings(label, regime, names, gold, ...)`."""

    def make(
        label, regime="none", names=("ann", "ben"), *, gold="right", options=None, transfer=None, policy=None, **run
    ):
        config = base_config()
        use_data(config, "jsonl", train=str(files[gold]), holdout=0.0)
        use_label(config, label, **(options or {}))
        use_transfer(config, regime, **(transfer or {}))
        config.update(
            dict(
                steps=3, problems_per_step=2, eval_problems=0, checkpoint_every=0, tensorboard=False, plan="time_slice"
            )
        )
        config.policy.update(
            dict(group_size=4, max_new_tokens=6, max_prompt_tokens=24, prompt_bucket=24, lr=1e-3, devices=1)
        )
        config.policy.update({"updates_per_step": 1, "kl_coef": 0.0, **(policy or {})})
        config.update(run)
        for name in names:
            add_policy(config, name, model=str(models[name]))
        return config

    return make


@pytest.fixture(scope="session")
def finish():
    """Trains: `finish(config, folder)` gives what is then in the folder."""

    def run(config, folder):
        train(read(config), folder)
        return SimpleNamespace(states=states(folder), lines=lines(folder), folder=folder)

    return run


@pytest.fixture(scope="session")
def finished(settings, finish, tmp_path_factory):
    """The same from the arguments of `settings`, computed once."""
    done = {}

    def run(*args, **more):
        key = repr((args, sorted(more.items())))
        if key not in done:
            done[key] = finish(settings(*args, **more), tmp_path_factory.mktemp("run"))
        return done[key]

    return run


def states(folder):
    """Arrays of the newest checkpoint as bytes, by policy and place."""
    import orbax.checkpoint as ocp

    step = max((x for x in (folder / "checkpoints").iterdir() if x.name.isdigit()), key=lambda x: int(x.name))
    out = {}
    for item in step.glob("policy_*"):
        found = jax.tree_util.tree_leaves_with_path(ocp.StandardCheckpointer().restore(item.absolute()))
        out[item.name.removeprefix("policy_")] = {
            jax.tree_util.keystr(path): (str(x.dtype), x.shape, np.asarray(x).tobytes()) for path, x in found
        }
    return out


def lines(folder):
    """Metrics of every step, without times."""
    found = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if not k.startswith("time/")} for x in found]
