"""Grouped-query attention over cached and new keys, under the one visibility rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Finite, so that a row with nothing visible (a pad query) averages instead of giving NaN.
_HIDDEN = -1e30


def visible(query_positions: jax.Array, key_positions: jax.Array, window: jax.Array | int) -> jax.Array:
    """The mask rule: a key is seen if it is no pad, not later than the query, and inside the window.

    Args:
      query_positions: i32[B, L], -1 on pads.
      key_positions: i32[B, M], -1 on pads and on empty cache slots.
      window: number of latest keys seen, the query's own included; 0 means all. May be traced.

    Returns:
      bool[B, L, M].
    """
    query, key = query_positions[:, :, None], key_positions[:, None, :]
    return (key >= 0) & (key <= query) & ((window == 0) | (query - key < window))


def attend(
    query: jax.Array,
    parts: list[tuple[jax.Array, jax.Array, jax.Array]],
    query_positions: jax.Array,
    window: jax.Array | int,
    scale: float,
    softcap: float = 0.0,
) -> jax.Array:
    """Softmax attention in float32 over the keys of all parts together.

    The parts (cache, new tokens) are never joined, so a cache is read where it lies; keys and values are not repeated
    for the query heads that share them.

    Args:
      query: [B, L, H, C]; query head h reads key/value head h // (H / J).
      parts: (keys [B, M, J, C], values [B, M, J, C], key positions i32[B, M]) each.
      query_positions: i32[B, L].
      window: see `visible`.
      scale: factor on the scores.
      softcap: scores become softcap·tanh(score / softcap) before masking; 0 means none.

    Returns:
      [B, L, H·C] in the dtype of `query`; finite on pads.
    """
    B, L, H, C = query.shape
    J = parts[0][0].shape[2]
    grouped = query.reshape(B, L, J, H // J, C)
    scores = []
    for keys, _, key_positions in parts:
        score = jnp.einsum("bljgc,bmjc->bjglm", grouped, keys, preferred_element_type=jnp.float32) * scale
        if softcap:
            score = softcap * jnp.tanh(score / softcap)
        scores.append(jnp.where(visible(query_positions, key_positions, window)[:, None, None], score, _HIDDEN))
    weights = jax.nn.softmax(jnp.concatenate(scores, -1), axis=-1).astype(query.dtype)
    out, start = 0.0, 0
    for keys, values, _ in parts:
        part = weights[..., start : start + keys.shape[1]]
        out += jnp.einsum("bjglm,bmjc->bljgc", part, values, preferred_element_type=jnp.float32)
        start += keys.shape[1]
    return out.astype(query.dtype).reshape(B, L, H * C)
