"""The decoder's own promises: norms and scales, the mask rule, pads, cache, remat, unroll, dtype."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl.models.attention import visible
from mutualrl.models.config import ModelConfig
from mutualrl.models.decoder import Decoder, init_params, param_shapes, rms_norm

TINY = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@functools.cache
def model(**fields):
    """A tiny model whose kernels are large enough for differences to show."""
    config = ModelConfig.from_hf({**TINY, "initializer_range": 0.2, **fields})
    return config, init_params(config, jax.random.key(0))


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("dtype", "remat", "unroll"))
def logits(config, params, tokens, positions, cache=None, **options):
    decoder = Decoder(config, **options)
    hidden, kv = decoder.apply({"params": params}, tokens, positions, cache)
    return decoder.apply({"params": params}, hidden, method="head"), kv


def row(length, seed=0):
    tokens = np.random.default_rng(seed).integers(1, TINY["vocab_size"], (1, length)).astype(np.int32)
    return tokens, np.arange(length, dtype=np.int32)[None]


def test_offset_norm():
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    normed = rms_norm(x, jnp.zeros(4), 1e-6, offset=True)
    np.testing.assert_allclose(normed, [0.365148, 0.730297, 1.095445, 1.460593], atol=1e-6)
    np.testing.assert_allclose(rms_norm(x, jnp.ones(4), 1e-6, offset=False), normed)


@pytest.mark.parametrize(("width", "scale"), [(2048, 45.25), (2560, 50.5), (3072, 55.5), (3840, 62.0)])
def test_embedding_scale_is_rounded_in_the_compute_dtype(width, scale):
    config = ModelConfig.from_hf({**TINY, "model_type": "gemma2", "hidden_size": width, "num_hidden_layers": 1})
    # With zero kernels and a norm of weight 0 the last norm sees the scaled embedding alone; a huge epsilon makes the
    # norm a plain division, so the scale can be read off.
    config = dataclasses.replace(config, norm_eps=1e12)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), param_shapes(config)) | {"embed": jnp.ones((50, width))}
    for dtype, expected in ((jnp.bfloat16, scale), (jnp.float32, np.sqrt(width))):
        hidden, _ = Decoder(config, dtype).apply(
            {"params": params}, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
        )
        wanted = np.asarray(jnp.asarray(np.float32(expected) * 1e-6, dtype), np.float32)
        np.testing.assert_allclose(np.asarray(hidden[0, 0, 0], np.float32), wanted, rtol=1e-6)


def test_window_mask():
    positions = np.arange(12)[None]
    seen = np.asarray(visible(positions, positions, 4))[0]
    for query in range(12):
        assert list(np.flatnonzero(seen[query])) == list(range(max(0, query - 3), query + 1))
    np.testing.assert_array_equal(visible(positions, positions, 0)[0], np.tril(np.ones((12, 12), bool)))
    assert not visible(positions, np.full((1, 3), -1), 0).any()
    assert not visible(np.full((1, 3), -1), positions, 0).any()


def test_a_local_layer_sees_its_window_only():
    config, params = model(model_type="mistral", sliding_window=4, num_hidden_layers=1)
    tokens, positions = row(12)
    other = tokens.copy()
    other[0, 0] = tokens[0, 0] % 49 + 1
    changed = np.abs(logits(config, params, tokens, positions)[0] - logits(config, params, other, positions)[0]).max(
        -1
    )[0]
    assert (changed[:4] > 1e-4).all()
    assert (changed[4:] == 0).all()


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("pads", [1, 3, 8])
def test_pads_change_nothing(left, pads):
    config, params = model()
    tokens, positions = row(6)
    width = ((0, 0), (pads, 0) if left else (0, pads))
    padded, padded_positions = np.pad(tokens, width, constant_values=7), np.pad(positions, width, constant_values=-1)
    real = padded_positions >= 0

    def loss(params, tokens, positions):
        out = logits(config, params, tokens, positions)[0]
        picked = jnp.take_along_axis(jax.nn.log_softmax(out), tokens[..., None], -1)[..., 0]
        return jnp.where(positions >= 0, picked, 0).sum()

    plain, with_pads = logits(config, params, tokens, positions)[0], logits(config, params, padded, padded_positions)[0]
    assert np.isfinite(with_pads).all()
    np.testing.assert_allclose(np.asarray(with_pads)[real], plain[0], rtol=0, atol=1e-5)
    if pads == 3:
        gradient, padded_gradient = (
            jax.jit(jax.grad(loss))(params, *args) for args in ((tokens, positions), (padded, padded_positions))
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-4), gradient, padded_gradient)


def test_cache_slots_may_lie_anywhere_and_hold_anything_where_empty():
    config, params = model(model_type="mistral", sliding_window=5)
    tokens, positions = row(9)
    full, (k, v) = logits(config, params, tokens, positions)
    order = np.asarray([3, 0, 8, 1, 5, 9, 2, 4])  # slot of each of the first eight tokens
    cache = {
        "k": jnp.full((*k.shape[:2], 11, *k.shape[3:]), 1e3).at[:, :, order].set(k[:, :, :8]),
        "v": jnp.full((*v.shape[:2], 11, *v.shape[3:]), 1e3).at[:, :, order].set(v[:, :, :8]),
        "positions": jnp.full((1, 11), -1).at[:, order].set(positions[:, :8]),
    }
    last, (new_k, _) = logits(config, params, tokens[:, 8:], positions[:, 8:], cache)
    np.testing.assert_allclose(last[:, 0], full[:, 8], rtol=0, atol=1e-5)
    np.testing.assert_allclose(new_k[:, :, 0], k[:, :, 8], rtol=0, atol=1e-5)


def test_prefill_in_two_pieces():
    config, params = model(model_type="gemma3_text", sliding_window=4, sliding_window_pattern=3)
    tokens, positions = row(12)
    full, (k, v) = logits(config, params, tokens, positions)
    cache = {"k": k[:, :, :7], "v": v[:, :, :7], "positions": positions[:, :7]}
    rest, _ = logits(config, params, tokens[:, 7:], positions[:, 7:], cache)
    np.testing.assert_allclose(rest, full[:, 7:], rtol=0, atol=1e-5)


def test_remat_and_unroll_give_the_same():
    config, params = model(model_type="qwen2")
    tokens, positions = row(8)

    def loss(params, **options):
        return logits(config, params, tokens, positions, **options)[0].std()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    for options in ({"unroll": 3}, {"remat": True}):
        again, again_gradient = jax.jit(jax.value_and_grad(functools.partial(loss, **options)))(params)
        np.testing.assert_allclose(again, value, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, again_gradient)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2"])
def test_bfloat16_is_close(family):
    config, params = model(model_type=family)
    tokens, positions = row(8)
    exact, _ = logits(config, params, tokens, positions)
    rough, (k, _) = logits(config, params, tokens, positions, dtype=jnp.bfloat16)
    assert k.dtype == jnp.bfloat16
    assert rough.dtype == jnp.float32
    assert np.abs(exact - rough).max() < 0.1 * np.abs(exact).max()


def test_parameters():
    config, params = model(tie_word_embeddings=True)
    shapes = param_shapes(config)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )
    assert {type(params), type(params["layers"])} == {dict}
    assert set(params) == {"embed", "layers", "norm"}
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype("float32")}
    assert "head" in param_shapes(model()[0])


def test_longrope_beyond_its_side_is_refused():
    scaling = {"type": "longrope", "short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4}
    config = ModelConfig.from_hf(
        {**TINY, "model_type": "phi3", "rope_scaling": scaling, "original_max_position_embeddings": 8}
    )
    params = init_params(config, jax.random.key(0))
    with pytest.raises(ValueError, match="for_length"):
        logits(config, params, *row(9))
    logits(config, params, *row(8))
    logits(config.for_length(9), params, *row(9))
