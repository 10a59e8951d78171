"""Tiny policies made on the spot: a tokenizer, random weights, and supervised learning on noisy demonstrations.

A demonstration shows the right answer with probability p and a consistent wrong one otherwise, the coin tossed anew
each time, so the noise cannot be memorised and pass@1 on new problems ends near p. With p high for some kinds and low
for others, differently for each policy, every policy is good at something the others are not. The result is an
ordinary HF folder, made once and found again by its settings.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mutualrl import types
from mutualrl.cohort import load_problems
from mutualrl.config import ConfigError, RunConfig, check_options
from mutualrl.learner import logprobs
from mutualrl.models.config import ModelConfig
from mutualrl.models.decoder import Decoder, init_params
from mutualrl.models.weights import export_hf
from mutualrl.report import Progress
from mutualrl.seeds import hashed
from mutualrl.tokenizers import train as train_tokenizer
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.types import Problem

MODEL = "warmup"  # `policies.<name>.model` of a policy whose model is made here
CHUNK = 50  # optimiser steps inside one compiled scan


def recipe(
    *,
    hf: Mapping[str, Any] = {},
    tokenizer: str = "bytes",
    tokenizer_size: int = 0,
    bos: bool = False,
    right: Mapping[str, float] = {},
    steps: int = 1500,
    batch: int = 128,
    lr: float = 3e-3,
) -> dict[str, Any]:
    """Settings of one policy's warm-up (`config.warmup.policies.<name>`).

    Args:
      hf: HF config of the model, without ids and vocabulary size.
      tokenizer: `bytes` or `bpe`. tokenizer_size: ids of the BPE. bos: put a BOS before prompts.
      right: probability of the right answer by kind of problem.
      steps: optimiser steps. batch: rows each. lr: peak of a cosine schedule.
    """
    return dict(locals())


def ensure_models(run: RunConfig) -> RunConfig:
    """Makes the models that `run.warmup` describes, unless they are there, and points the policies at them.

    Raises:
      ConfigError: the warm-up settings do not fit.
    """
    settings = dict(run.warmup)
    if set(settings) != {"folder", "policies"}:
        raise ConfigError(f"warmup={sorted(settings)}: must have folder and policies")
    policies = dict(run.policies)
    for name, options in settings["policies"].items():
        if name not in policies or policies[name].model != MODEL:
            raise ConfigError(f"warmup.policies.{name}: there must be a policies.{name} with model='{MODEL}'")
        where = f"warmup.policies.{name}"
        check_options(where, recipe, options)
        if policies[name].template or policies[name].system:
            raise ConfigError(f"policies.{name}.template: a warm-up asks the bare question; leave it and system empty")
        plan = {**recipe(**options), "seed": run.seed, "data": dict(run.data)}
        if run.views:
            plan["views"] = run.views
        if not plan["data"].get("views"):
            plan["data"].pop("views", None)  # models without views keep the names they had before there were any
        digest = hashlib.blake2b(json.dumps(plan, sort_keys=True).encode(), digest_size=6).hexdigest()
        folder = Path(settings["folder"]) / f"{name}-{digest}"
        if not folder.is_dir():
            _check(where, plan, problems := load_problems(run, "train"))
            make_model(folder, name, plan, problems)
        policies[name] = dataclasses.replace(policies[name], model=str(folder))
    return dataclasses.replace(run, policies=policies)


def _check(where: str, plan: Mapping[str, Any], problems: list[Problem]) -> None:
    """Refuses what would otherwise fail after minutes."""
    if plan["tokenizer"] not in train_tokenizer.KINDS:
        raise ConfigError(f"{where}.tokenizer={plan['tokenizer']!r}: allowed are {', '.join(train_tokenizer.KINDS)}")
    if not hasattr(importlib.import_module(f"mutualrl.data.{plan['data']['name']}"), "demonstrations"):
        raise ConfigError(f"data.name={plan['data']['name']!r}: a warm-up needs a source with demonstrations")
    for field, low in (("steps", 1), ("batch", 1), ("tokenizer_size", 0)):
        if plan[field] < low:
            raise ConfigError(f"{where}.{field}={plan[field]}: must be at least {low}")
    if plan["tokenizer"] == "bpe" and plan["tokenizer_size"] < 259:
        raise ConfigError(f"{where}.tokenizer_size={plan['tokenizer_size']}: must be at least 259")
    if not plan["lr"] > 0:
        raise ConfigError(f"{where}.lr={plan['lr']}: must be above 0")
    for kind, p in plan["right"].items():
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
            raise ConfigError(f"{where}.right.{kind}={p!r}: must be a number from 0 to 1")
    kinds = {x.kind for x in problems}
    if missing := kinds - set(plan["right"]):
        raise ConfigError(f"{where}.right: has no probability for {', '.join(sorted(missing))}")
    try:
        ModelConfig.from_hf({**plan["hf"], "vocab_size": 512})
    except ValueError as error:
        raise ConfigError(f"{where}.hf: {error}") from error


def make_model(folder: Path, name: str, plan: Mapping[str, Any], problems: list[Problem]) -> None:
    """Trains one policy's tokenizer and model, and writes them to `folder` when both are done."""
    source = importlib.import_module(f"mutualrl.data.{plan['data']['name']}")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    texts = [f"{text}{x.answer}" for x in problems for text in (x.question, *x.views)]
    train_tokenizer.train(part, plan["tokenizer"], texts, size=plan["tokenizer_size"], bos=plan["bos"])
    tokenizer = Tokenizer.load(part)
    stop = tokenizer.stop_ids[0]
    ids = {"vocab_size": tokenizer.size, "eos_token_id": stop, "pad_token_id": tokenizer.pad_id}
    model = ModelConfig.from_hf({**plan["hf"], **ids, "bos_token_id": tokenizer.bos_id})

    questions, right, wrong, chance = source.demonstrations(problems, plan["right"])
    completion = max(len(tokenizer.encode(a)) for a in right + wrong) + 1  # with the stop id
    rows = [encode_rows(tokenizer, questions, answers, completion) for answers in (right, wrong)]
    params = fit(model, rows, chance, completion, plan, title=f"Warming up {name}")
    export_hf(params, model, part, tokenizer_folder=part)
    part.rename(folder)


def encode_rows(
    tokenizer: Tokenizer, questions: list[str], answers: list[str], completion: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and positions i32[n, L]: prompts left-padded, answers with a stop id right-padded to `completion`."""
    prompts = [tokenizer.prompt(q) for q in questions]
    replies = [tokenizer.encode(a) + [tokenizer.stop_ids[0]] for a in answers]
    s = max(map(len, prompts))
    tokens = np.full((len(prompts), s + completion), tokenizer.pad_id, np.int32)
    positions = np.full_like(tokens, types.PAD_POSITION)
    for i, (x, y) in enumerate(zip(prompts, replies)):
        tokens[i, s - len(x) : s + len(y)] = x + y
        positions[i, s - len(x) : s + len(y)] = np.arange(len(x) + len(y))
    return tokens, positions


def fit(
    model: ModelConfig,
    rows: list[tuple[np.ndarray, np.ndarray]],
    chance: np.ndarray,
    completion: int,
    plan: Mapping[str, Any],
    title: str,
) -> dict:
    """Supervised learning of the completions: mean negative log-likelihood over completion tokens, Adam, cosine.

    Args:
      rows: (ids, positions) with the right answers, and with the wrong ones, i32[n, L] each.
      chance: f32[n] probability of the right one.
      completion: T, the last columns of a row.
      plan: a `recipe`, with the seed.
      title: of the progress display.

    Returns:
      float32 parameters.
    """
    decoder = Decoder(model, unroll=model.num_layers)  # few layers: faster, and quick to compile
    tokens, positions = (jnp.stack([r[i] for r in rows]) for i in range(2))  # [2, n, L]
    chance = jnp.asarray(chance)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(plan["lr"], plan["steps"]), b2=0.99)
    )

    def step(carry, key):
        params, opt_state = carry
        which, coin = jax.random.split(key)
        i = jax.random.randint(which, (plan["batch"],), 0, tokens.shape[1])
        side = (jax.random.uniform(coin, i.shape) >= chance[i]).astype(jnp.int32)
        x, pos = tokens[side, i], positions[side, i]
        mask = pos[:, -completion:] >= 0

        def nll(params):
            logp, _ = logprobs(
                params, x, pos, completion, decoder=decoder, temperature=1.0, real_vocab=model.vocab_size, chunk=1 << 20
            )
            return -jnp.where(mask, logp, 0.0).sum() / mask.sum()

        loss, grads = jax.value_and_grad(nll)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    key = jax.random.fold_in(jax.random.key(plan["seed"]), hashed(title))
    params = init_params(model, key)
    carry = params, optimizer.init(params)
    keys = jax.random.split(key, plan["steps"])
    run = jax.jit(functools.partial(jax.lax.scan, step))
    first = keys[: min(CHUNK, len(keys))]
    compiled = {len(first): run.lower(carry, first).compile()}  # before the clock of the progress bar starts
    with Progress(title, plan["steps"]) as bar:
        for start in range(0, plan["steps"], CHUNK):
            chunk = keys[start : start + CHUNK]
            if len(chunk) not in compiled:
                compiled[len(chunk)] = run.lower(carry, chunk).compile()
            carry, losses = compiled[len(chunk)](carry, chunk)
            bar.update(start + len(chunk), f"loss {float(losses.mean()):.3f}")
    return jax.device_get(carry[0])


def main() -> None:
    """`python -m mutualrl.warmup --config=configs/demo.py`: makes the models only."""
    from mutualrl.command_line import read_command_line

    try:
        run, _ = read_command_line(sys.argv)
        for name, policy in ensure_models(run).policies.items():
            print(f"{name}: {policy.model}")
    except ConfigError as error:
        sys.exit(f"config: {error}")


if __name__ == "__main__":
    main()
