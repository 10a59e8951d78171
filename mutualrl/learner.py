"""The learner: log-probs of rows, the gradient of an update over its micro-batches, the optimiser. Pure functions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from mutualrl import losses
from mutualrl.config import PolicyConfig
from mutualrl.models.decoder import Decoder
from mutualrl.types import Batch


def schedule(config: PolicyConfig, total_updates: int) -> optax.Schedule:
    """Learning rate by optimiser update: linear warm-up from 0, a stable part, then constant or decay.

    Args:
      config: `lr`, `schedule`, `warmup_fraction`, `stable_fraction`, `lr_end`.
      total_updates: optimiser updates of the whole run, from which every length is taken.
    """
    warmup = round(config.warmup_fraction * total_updates)
    stable = round(config.stable_fraction * total_updates)
    decay = max(1, total_updates - warmup - stable)
    if config.schedule == "constant":
        after = optax.constant_schedule(config.lr)
    elif config.schedule == "linear":
        after = optax.linear_schedule(config.lr, config.lr * config.lr_end, decay)
    else:
        after = optax.cosine_decay_schedule(config.lr, decay, config.lr_end)
    parts = [optax.linear_schedule(0.0, config.lr, warmup), optax.constant_schedule(config.lr), after]
    return optax.join_schedules(parts, [warmup, warmup + stable])


def make_optimizer(config: PolicyConfig, total_updates: int) -> optax.GradientTransformation:
    """Global-norm clipping and AdamW (weight decay on matrices only) under `schedule`."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.adamw(
            schedule(config, total_updates),
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            mask=_decayed,
        ),
    )


def _decayed(params: dict) -> dict:
    """Which parameters decay: kernels and embeddings, not norms and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].key.endswith(("norm", "bias")), params)


def logprobs(
    params: dict,
    tokens,
    positions,
    completion: int,
    *,
    decoder: Decoder,
    temperature: float,
    real_vocab: int,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies f32[B, T] of the last `completion` tokens of rows i32[B, L], as the sampler has them."""
    hidden, _ = decoder.apply({"params": params}, tokens, positions)
    start = tokens.shape[1] - completion
    return losses.token_logprobs(
        lambda h: decoder.apply({"params": params}, h, method="head"),
        hidden[:, start - 1 : -1],  # the state before a token predicts it
        tokens[:, start:],
        temperature=temperature,
        real_vocab=real_vocab,
        chunk_tokens=chunk,
    )


def gradients(params: dict, batch: Batch, *, forward: Callable, settings: losses.LossSettings):
    """Gradient, loss and metric sums of one update, added up over its micro-batches.

    Args:
      params: float32 parameters.
      batch: leaves [M, b, ...], one entry a micro-batch.
      forward: `logprobs` with everything static bound.
      settings: of the loss.

    Returns:
      gradient tree, loss f32[], dict of f32[] sums (maxima where the key ends in `/max`), and f32[M, b] the log-prob of
      each row's surrogate tokens under `params`.
    """

    def micro(params, rows: Batch):
        logp, entropy = forward(params, rows.tokens, rows.positions, rows.mask.shape[-1])
        loss, sums = losses.loss(logp, entropy, rows, settings)
        return loss, (sums, jnp.where(rows.surr_mask, logp, 0.0).sum(-1))

    def step(carry, rows):
        (loss, (sums, row_logp)), grads = jax.value_and_grad(micro, has_aux=True)(params, rows)
        new = grads, loss, sums
        add = lambda path, a, b: jnp.maximum(a, b) if _is_max(path) else a + b  # noqa: E731
        return jax.tree_util.tree_map_with_path(add, carry, new), row_logp

    first = jax.tree.map(lambda x: x[0], batch)
    shapes = jax.eval_shape(lambda: jax.value_and_grad(micro, has_aux=True)(params, first))
    (loss, (sums, _)), grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (grads, loss, sums), row_logp = jax.lax.scan(step, (grads, loss, sums), batch)
    return grads, loss, sums, row_logp


def _is_max(path) -> bool:
    return isinstance(path[-1], jax.tree_util.DictKey) and str(path[-1].key).endswith("/max")


def apply_update(state: dict, batch: Batch, *, forward, settings, optimizer) -> tuple[dict, dict]:
    """One optimiser update. A gradient or step that is not finite leaves the state as it is, counted in `skipped`.

    Args:
      state: `params`, `opt_state`, `step` (updates made, i32) and `skipped` (i32); whatever else it has stays.
      batch: leaves [M, b, ...].

    Returns:
      the new state, and metric sums with `loss`, `grad_norm` (before clipping), `skipped` and `row_logp` (f32[M, b],
      see `gradients`) added.
    """
    grads, loss, sums, row_logp = gradients(state["params"], batch, forward=forward, settings=settings)
    norm = optax.global_norm(grads)
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    finite = jnp.isfinite(norm) & jnp.isfinite(optax.global_norm(updates))
    moved = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
    kept = {k: state[k] for k in moved}
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), moved, kept)
    new = {**state, **new, "step": state["step"] + finite, "skipped": state["skipped"] + ~finite}
    skipped = (~finite).astype(jnp.float32)
    return new, {**sums, "loss": loss, "grad_norm": norm, "skipped": skipped, "row_logp": row_logp}
