"""The decoder: embed, scan over stacked layers, norm, logits. One module for every family in the table.

Parameters (float32, a plain nested dict; kernels are [in, out], layer parameters stacked on a leading Y):

    embed [V, D]      norm [D]      head [D, V] (absent if tied)
    layers/q [Y, D, H*C]   layers/k, v [Y, D, J*C]   layers/o [Y, H*C, D]
    layers/gate, up [Y, D, F]   layers/down [Y, F, D]
    layers/attention_norm, mlp_norm [Y, D]             before attention and MLP
    layers/post_attention_norm, post_mlp_norm [Y, D]   on their outputs
    layers/q_norm, k_norm [Y, C], or [Y, H*C], [Y, J*C]
    layers/q_bias [Y, H*C]   layers/k_bias, v_bias [Y, J*C]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mutualrl.models.attention import attend
from mutualrl.models.config import ModelConfig
from mutualrl.models.rope import cos_sin, rotate

_ACTIVATIONS = {
    "silu": nn.silu,
    "gelu_pytorch_tanh": lambda x: nn.gelu(x, approximate=True),
    "gelu_new": lambda x: nn.gelu(x, approximate=True),
    "gelu": lambda x: nn.gelu(x, approximate=False),
}


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: bool) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32, returned in the dtype of `x`.

    Args:
      x: [..., D].
      weight: [D].
      eps: added to the mean square.
      offset: scale by (1 + weight), as Gemma stores it, instead of by weight.
    """
    wide = x.astype(jnp.float32)
    scale = weight.astype(jnp.float32) + 1.0 if offset else weight.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps) * scale).astype(x.dtype)


def dense(x: jax.Array, kernel: jax.Array, out: Any = None) -> jax.Array:
    """x [..., I] times kernel [I, O], in the dtype `out` (that of x by default).

    Rows are flattened first: as one matrix product its gradient is up to 2.5 times faster on a CPU than with several
    leading dimensions.
    """
    flat = jnp.matmul(x.reshape(-1, x.shape[-1]), kernel, preferred_element_type=out)
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


class Layer(nn.Module):
    """One block: attention and gated MLP, each with the norms its family has."""

    config: ModelConfig
    dtype: Any

    def _kernel(self, name: str, rows: int, columns: int) -> jax.Array:
        init = nn.initializers.normal(self.config.init_std)
        return self.param(name, init, (rows, columns), jnp.float32).astype(self.dtype)

    def _norm(self, x: jax.Array, name: str) -> jax.Array:
        offset = self.config.family.norm_offset
        init = nn.initializers.zeros if offset else nn.initializers.ones
        weight = self.param(name, init, (x.shape[-1],), jnp.float32)
        return rms_norm(x, weight, self.config.norm_eps, offset)

    def _project(self, x: jax.Array, name: str, heads: int) -> jax.Array:
        """[B, L, D] -> [B, L, heads, C], with the bias and the norm the family has."""
        config, width = self.config, heads * self.config.head_dim
        out = dense(x, self._kernel(name, x.shape[-1], width))
        if config.family.qkv_bias:
            bias = self.param(f"{name}_bias", nn.initializers.zeros, (width,), jnp.float32)
            out = out + bias.astype(self.dtype)
        norm = config.family.qk_norm if name != "v" else ""
        if norm == "full":
            out = self._norm(out, f"{name}_norm")
        out = out.reshape(*out.shape[:2], heads, config.head_dim)
        return self._norm(out, f"{name}_norm") if norm == "head" else out

    @nn.compact
    def __call__(self, x, per_layer, shared):
        """Carries x [B, L, D]; returns (x, (k, v)) with the new keys (after rope) and values [B, L, J, C].

        per_layer: (window i32[], rope index i32[], (k, v) cached [B, Lc, J, C] or None).
        shared: (positions i32[B, L], cos, sin f32[R, B, L, dim/2], cached positions i32[B, Lc] or None).
        """
        config, family = self.config, self.config.family
        window, rope, cached = per_layer
        positions, cos, sin, cached_positions = shared

        h = self._norm(x, "attention_norm") if family.pre_norm else x
        q = rotate(self._project(h, "q", config.num_heads), cos[rope], sin[rope])
        k = rotate(self._project(h, "k", config.num_kv_heads), cos[rope], sin[rope])
        v = self._project(h, "v", config.num_kv_heads)
        parts = [(k, v, positions)]
        if cached is not None:
            parts.insert(0, (cached[0].astype(self.dtype), cached[1].astype(self.dtype), cached_positions))
        h = attend(q, parts, positions, window, config.attention_scale, config.attention_softcap)
        h = dense(h, self._kernel("o", h.shape[-1], config.hidden_size))
        x = x + (self._norm(h, "post_attention_norm") if family.post_norm else h)

        h = self._norm(x, "mlp_norm") if family.pre_norm else x
        gate = dense(h, self._kernel("gate", config.hidden_size, config.intermediate_size))
        up = dense(h, self._kernel("up", config.hidden_size, config.intermediate_size))
        h = _ACTIVATIONS[config.activation](gate) * up
        h = dense(h, self._kernel("down", config.intermediate_size, config.hidden_size))
        return x + (self._norm(h, "post_mlp_norm") if family.post_norm else h), (k, v)


class Decoder(nn.Module):
    """A causal language model.

    Attributes:
      config: the model.
      dtype: compute dtype of activations and of the kernels as used; norms, softmax and rope are float32 always.
      remat: recompute each layer in the backward pass instead of keeping its activations.
      unroll: layers per step of the scan; `config.num_layers` unrolls all. The parameters are stacked either way.
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    remat: bool = False
    unroll: int = 1

    def setup(self):
        config = self.config
        init = nn.initializers.normal(config.init_std)
        self.embed = self.param("embed", init, (config.vocab_size, config.hidden_size), jnp.float32)
        norm_init = nn.initializers.zeros if config.family.norm_offset else nn.initializers.ones
        self.norm = self.param("norm", norm_init, (config.hidden_size,), jnp.float32)
        if not config.tie_embeddings:
            self.head_kernel = self.param("head", init, (config.hidden_size, config.vocab_size), jnp.float32)
        self.layers = nn.scan(
            # Inside a scan the recomputation cannot be merged away, so the costly barrier is not needed.
            nn.remat(Layer, prevent_cse=False) if self.remat else Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
            out_axes=0,
            length=config.num_layers,
            unroll=self.unroll,
        )(config, self.dtype)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: Mapping[str, jax.Array] | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Runs the layers.

        A key is visible to a query iff key_pos >= 0, key_pos <= query_pos and (window == 0 or
        query_pos - key_pos < window), for cached and new keys alike.

        Args:
          tokens: i32[B, L].
          positions: i32[B, L], 0 for the first real token of a row, -1 on pads.
          cache: earlier keys and values, only read: k and v [Y, B, Lc, J, C], positions i32[B, Lc] with -1 on empty
            slots and pads. The caller writes the returned ones wherever it likes.

        Returns:
          hidden dtype[B, L, D] after the final norm, finite on pads too; (k, v) dtype[Y, B, L, J, C] of the given
          tokens, k after rope.

        Raises:
          ValueError: more tokens than a longrope model is set up for; see `ModelConfig.for_length`.
        """
        config = self.config
        length = tokens.shape[1] + (0 if cache is None else cache["k"].shape[2])
        for rope in config.ropes:
            if rope.type == "longrope" and not rope.long and length > rope.original_length:
                raise ValueError(f"{length} tokens exceed the original {rope.original_length}; use config.for_length")

        x = self.embed[tokens].astype(self.dtype)
        if config.family.embed_scale:
            x = x * jnp.asarray(np.sqrt(config.hidden_size), self.dtype)
        tables = [cos_sin(rope, positions) for rope in config.ropes]
        cos, sin = (jnp.stack(table) for table in zip(*tables))
        cached = None if cache is None else (cache["k"], cache["v"])
        per_layer = (jnp.asarray(config.windows, jnp.int32), jnp.asarray(config.layer_ropes, jnp.int32), cached)
        shared = (positions, cos, sin, None if cache is None else cache["positions"])
        x, kv = self.layers(x, per_layer, shared)
        return rms_norm(x, self.norm, config.norm_eps, config.family.norm_offset), kv

    def head(self, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., V] of hidden states [..., D]; use as `Decoder.apply(variables, hidden, method="head")`."""
        kernel = self.embed.T if self.config.tie_embeddings else self.head_kernel
        hidden, kernel = hidden.astype(self.dtype), kernel.astype(self.dtype)
        logits = dense(hidden, kernel, jnp.float32)
        cap = self.config.final_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits


def init_params(config: ModelConfig, rng: jax.Array) -> dict:
    """Random float32 parameters: normal kernels of `config.init_std`, neutral norms, zero biases.

    Args:
      config: the model.
      rng: a JAX random key.
    """
    return jax.jit(lambda key: _init(config, key))(rng)


def param_shapes(config: ModelConfig) -> dict:
    """The parameter tree as `jax.ShapeDtypeStruct`, without computing or holding anything."""
    return jax.eval_shape(lambda key: _init(config, key), jax.random.key(0))


def _init(config: ModelConfig, key: jax.Array) -> dict:
    one = jnp.zeros((1, 1), jnp.int32)
    return Decoder(config).init(key, one, one)["params"]
