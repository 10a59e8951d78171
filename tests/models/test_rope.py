"""Rope frequencies against published numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl.models.rope import Rope, cos_sin, rotate


def llama3(**spelling):
    params = {"factor": 32, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    return Rope.from_hf({**spelling, **params}, 64, 5e5, 8192, 131072).frequencies()


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_llama3_bands(key):
    plain = Rope("default", 64, 5e5).frequencies()
    scaled = llama3(**{key: "llama3"})
    np.testing.assert_allclose(scaled[:15], plain[:15], rtol=1e-6)
    np.testing.assert_allclose(scaled[18:], plain[18:] / 32, rtol=1e-6)
    np.testing.assert_allclose(
        scaled[15:18], [0.001290547928209264, 0.00042955679655936815, 9.70828780262767e-05], rtol=1e-5
    )
    np.testing.assert_allclose(plain[16], 1.41421e-3, rtol=1e-5)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"factor": 64, "attention_factor": 1.0}, 1.0),
        ({"factor": 64}, 1.4158883083359672),
        ({"factor": 128}, 1.4852030263919618),
        ({"factor": 1.0}, 1.0),
        ({"factor": 64, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(params, expected):
    rope = Rope.from_hf({"rope_type": "yarn", **params}, 64, 1e4, 4096, 262144)
    assert rope.attention_factor == pytest.approx(expected, abs=1e-6)
    # Applied once to cosine and sine: at position 0 the cosine is the factor itself.
    cos, _ = cos_sin(rope, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos, expected, rtol=1e-6)


def test_longrope_factors_and_attention_factor():
    params = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]}
    rope = Rope.from_hf(params, 4, 1e4, 4096, 131072)
    np.testing.assert_allclose(rope.frequencies(), [1.0, 0.005], rtol=1e-6)
    assert rope.attention_factor == pytest.approx(np.sqrt(1 + np.log(32) / np.log(4096)))
    explicit = Rope.from_hf({**params, "attention_factor": 1.25}, 4, 1e4, 4096, 131072)
    assert explicit.attention_factor == 1.25


def test_rotation_keeps_what_it_should():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 8)), jnp.float32)
    positions = jnp.asarray([[0, 1, 2]])
    partial = rotate(x, *cos_sin(Rope("default", 4), positions))
    np.testing.assert_array_equal(partial[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(partial[:, 0], x[:, 0])
    assert np.abs(partial[:, 1, :, :4] - x[:, 1, :, :4]).max() > 0.1
    np.testing.assert_array_equal(rotate(x, *cos_sin(Rope("none", 8), positions)), x)
