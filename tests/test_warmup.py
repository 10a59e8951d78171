"""Tiny policies made on the spot: they learn, are found again, and bad recipes are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl import warmup
from mutualrl.cohort import open_models
from mutualrl.config import ConfigError, add_policy, base_config, read
from mutualrl.models.decoder import Decoder
from mutualrl.models.weights import load_params
from mutualrl.testing import TINY


def settings(folder, **recipe):
    config = base_config()
    config.data.kinds = ("dup",)
    config.data.size = 400
    config.policy.max_prompt_tokens, config.policy.max_new_tokens = 16, 6
    add_policy(config, "a", model=warmup.MODEL)
    plan = dict(hf=dict(TINY, model_type="llama", initializer_range=0.05), right=dict(dup=0.5), steps=120, bos=True)
    config.warmup.folder = str(folder)
    config.warmup.policies = dict(a={**plan, **recipe})
    return config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    return folder, warmup.ensure_models(read(settings(folder)))


def test_it_learns(made):
    """An answer begins with a digit; an untrained model puts 10 in 259 there."""
    run = made[1]
    opened = open_models(run)["a"]
    tokenizer, params = opened.tokenizer, load_params(opened.weights, opened.config)
    ids = [tokenizer.prompt(f"dup:{n}=") for n in (1278, 3904, 6152)]
    tokens = np.array(ids, np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    decoder = Decoder(opened.config)
    hidden, _ = decoder.apply({"params": params}, tokens, positions)
    logp = jax.nn.log_softmax(decoder.apply({"params": params}, hidden[:, -1], method="head"))
    digits = [tokenizer.encode(str(d))[0] for d in range(10)]
    assert float(jnp.exp(logp[:, jnp.array(digits)]).sum(1).min()) > 0.6


def test_it_is_found_again(made, monkeypatch):
    folder, run = made
    monkeypatch.setattr(warmup, "make_model", lambda *_: pytest.fail("trained again"))
    assert warmup.ensure_models(read(settings(folder))) == run
    assert [p.name for p in folder.iterdir()] == [run.policies["a"].model.rsplit("/", 1)[1]]


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(stpes=3), "warmup.policies.a.stpes: no such setting; allowed are batch, bos, hf, lr"),
        (dict(steps="3"), "warmup.policies.a.steps='3': must be of type int"),
        (dict(tokenizer="words"), "warmup.policies.a.tokenizer='words': allowed are bytes, bpe"),
        (dict(right={}), "warmup.policies.a.right: has no probability for dup"),
        (dict(right=dict(dup=1.5)), "warmup.policies.a.right.dup=1.5: must be a number from 0 to 1"),
        (dict(steps=0), "warmup.policies.a.steps=0: must be at least 1"),
        (dict(hf=dict(model_type="mamba")), "warmup.policies.a.hf: model_type 'mamba' is not supported"),
    ],
)
def test_bad_recipes(tmp_path, change, says):
    with pytest.raises(ConfigError) as error:
        warmup.ensure_models(read(settings(tmp_path, **change)))
    assert str(error.value).startswith(says)
    assert not list(tmp_path.iterdir())  # refused before anything is made


def test_a_recipe_needs_its_policy(tmp_path):
    config = settings(tmp_path)
    config.policies.a.model = "elsewhere"
    with pytest.raises(ConfigError, match="warmup.policies.a: there must be a policies.a with model='warmup'"):
        warmup.ensure_models(read(config))
