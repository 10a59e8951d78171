"""What the live and the recorded parity tests share."""

import functools
import importlib.util
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl.models.decoder import Decoder

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def make():
    """The script that records the fixtures, as a module."""
    path = Path(__file__).parent.parent / "fixtures/models/make.py"
    spec = importlib.util.spec_from_file_location("make_model_fixtures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.partial(jax.jit, static_argnums=0)
def _forward(config, params, tokens, positions, cache=None):
    decoder = Decoder(config)
    hidden, kv = decoder.apply({"params": params}, tokens, positions, cache)
    return decoder.apply({"params": params}, hidden, method="head"), kv


@pytest.fixture(scope="session")
def forward():
    """(config, params, tokens, positions, cache=None) -> (logits, kv), float32."""
    return _forward


@pytest.fixture(scope="session")
def decode():
    """(config, params, tokens, positions, steps) -> logits of the given tokens, greedy continuation i32[B, steps].

    One token at a time from the very first, with a cache the caller writes.
    """

    def run(config, params, tokens, positions, steps):
        B, S = tokens.shape
        shape = (config.num_layers, B, S + steps, config.num_kv_heads, config.head_dim)
        cache = {"k": jnp.zeros(shape), "v": jnp.zeros(shape), "positions": jnp.full((B, S + steps), -1)}
        given, new, logits = [], [], None
        for column in range(S + steps):
            if column < S:
                token, position = tokens[:, column], positions[:, column]
            else:
                token, position = np.asarray(logits.argmax(-1), np.int32), position + 1
                new.append(token)
            logits, (k, v) = _forward(config, params, token[:, None], position[:, None], cache)
            logits = logits[:, 0]
            if column < S:
                given.append(logits)
            cache = {
                "k": cache["k"].at[:, :, column].set(k[:, :, 0]),
                "v": cache["v"].at[:, :, column].set(v[:, :, 0]),
                "positions": cache["positions"].at[:, column].set(position),
            }
        return np.stack(given, 1), np.stack(new, 1)

    return run
