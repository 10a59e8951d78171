"""Rotary position embedding: frequencies of every supported scaling, cos and sin from integer positions, rotation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Keys each rope type reads. A key outside its type's list is refused, since it could change the maths.
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """One rotary embedding; hashable.

    Attributes:
      type: default, linear, llama3, yarn or longrope; `none` leaves queries and keys as they are (a no-rope layer).
      dim: leading elements of a head that are rotated; the rest pass through.
      theta: base of the wavelengths.
      factor: context extension factor (linear, llama3, yarn, longrope).
      low_freq_factor, high_freq_factor: llama3 band limits.
      original_length: context length before extension (llama3, yarn, longrope).
      explicit_attention_factor: factor on cos and sin as the config gives it; None means the type's own formula.
      beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn.
      short_factor, long_factor: longrope divisors, dim/2 numbers each.
      long: longrope only: use `long_factor`. Fixed for a model, see `ModelConfig.for_length`.
    """

    type: str
    dim: int
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 0
    explicit_attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    long: bool = False

    @staticmethod
    def from_hf(params: Mapping[str, Any], dim: int, theta: float, original_length: int | None, max_length: int | None):
        """Reads one flat HF `rope_parameters` / `rope_scaling` dict.

        Args:
          params: the HF dict, possibly empty; the type is under `rope_type` or the older `type`.
          dim: rotated elements of a head.
          theta: base used where the dict has no `rope_theta`.
          original_length: context length before extension, as the dict or the config around it says.
          max_length: context length after extension, for a longrope without `factor`.

        Raises:
          ValueError: unknown type, missing or unsupported key, wrong number of longrope factors.
        """
        type_ = params.get("rope_type", params.get("type")) or "default"
        if type_ not in _KEYS:
            raise ValueError(f"rope_type {type_!r} is not supported; allowed: {', '.join(_KEYS)}")
        given = {key: value for key, value in params.items() if value is not None}
        unknown = sorted(given.keys() - _COMMON_KEYS - _KEYS[type_])
        if unknown:
            name, allowed = unknown[0], ", ".join(sorted(_COMMON_KEYS | _KEYS[type_]))
            raise ValueError(
                f"rope parameter {name!r} = {given[name]!r} is not read by rope_type {type_!r}; allowed: {allowed}"
            )
        missing = [key for key in _REQUIRED[type_] if key not in given]
        if missing:
            raise ValueError(f"rope parameter {missing[0]!r} is missing for rope_type {type_!r}")
        if dim % 2 or dim <= 0:
            raise ValueError(f"rotated part of a head has {dim} elements; allowed: even positive numbers")
        if type_ not in ("llama3", "yarn", "longrope"):
            original_length = 0
        elif not original_length:
            raise ValueError(f"original_max_position_embeddings is missing for rope_type {type_!r}")
        factor = given.get("factor")
        if type_ == "longrope":
            for key in ("short_factor", "long_factor"):
                if len(given[key]) != dim // 2:
                    raise ValueError(f"rope parameter {key!r} has {len(given[key])} numbers; {dim // 2} are needed")
            if factor is None:
                if not max_length:
                    raise ValueError("longrope needs `factor` or max_position_embeddings")
                factor = max_length / original_length
        same_name = (
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        )
        return Rope(
            type=type_,
            dim=dim,
            theta=float(given.get("rope_theta", theta)),
            factor=float(1.0 if factor is None else factor),
            original_length=int(original_length),
            explicit_attention_factor=given.get("attention_factor"),
            short_factor=tuple(given.get("short_factor", ())),
            long_factor=tuple(given.get("long_factor", ())),
            **{key: given[key] for key in same_name if key in given},
        )

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin. An explicit one replaces the type's formula."""
        if self.type not in ("yarn", "longrope"):
            return 1.0
        if self.explicit_attention_factor is not None:
            return float(self.explicit_attention_factor)
        if self.factor <= 1.0:
            return 1.0
        if self.type == "longrope":
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))
        if self.mscale and self.mscale_all_dim:
            return self._yarn_scale(self.mscale) / self._yarn_scale(self.mscale_all_dim)
        return self._yarn_scale(1.0)

    def _yarn_scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def frequencies(self) -> np.ndarray:
        """f32[dim/2] radians per position, the fastest first."""
        if self.type == "none":
            return np.zeros(self.dim // 2, np.float32)
        unscaled = self.theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.type == "default":
            scaled = unscaled
        elif self.type == "linear":
            scaled = unscaled / self.factor
        elif self.type == "llama3":
            # Whole turns inside the original context; between the two limits the scaling is blended in.
            turns = self.original_length * unscaled / (2 * math.pi)
            keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
            scaled = unscaled * (keep + (1.0 - keep) / self.factor)
        elif self.type == "yarn":
            keep = 1.0 - self._yarn_ramp()
            scaled = unscaled * (keep + (1.0 - keep) / self.factor)
        else:
            scaled = unscaled / np.asarray(self.long_factor if self.long else self.short_factor, np.float64)
        return scaled.astype(np.float32)

    def _yarn_ramp(self) -> np.ndarray:
        """f64[dim/2] from 0 (extrapolate) to 1 (interpolate)."""

        def pair_with(turns: float) -> float:
            return self.dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001  # the ramp would be 0/0
        return np.clip((np.arange(self.dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)


def cos_sin(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every rotated pair, times the attention factor.

    Args:
      rope: the embedding.
      positions: i32[B, L].

    Returns:
      cos, sin: f32[B, L, dim/2].
    """
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rope.frequencies())
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the leading 2·R elements of each head in float32; element r pairs with r + R (HF "rotate half").

    Args:
      x: [B, L, heads, C].
      cos, sin: f32[B, L, R], 2·R <= C.

    Returns:
      Same shape and dtype as `x`.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., 2 * half :]], -1) if 2 * half < x.shape[-1] else turned
