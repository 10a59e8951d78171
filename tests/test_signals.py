"""How sure a policy is of its tokens, as sampled, against a plain forward pass over the whole text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl import batches, testing, types
from mutualrl.config import PolicyConfig
from mutualrl.losses import LossSettings
from mutualrl.meshes import make_plan
from mutualrl.models.config import ModelConfig
from mutualrl.models.decoder import init_params
from mutualrl.policy import Policy
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.types import Problem

CONFIG = PolicyConfig(
    group_size=6, max_new_tokens=6, prompt_bucket=8, max_prompt_tokens=16, template="{question}", temperature=0.7,
    stop_text=":",
)  # fmt: skip
PROBLEMS = [Problem(id=f"p{i}", question=q) for i, q in enumerate(("1", "22+3=", "rev:1234=", "max:1"))]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = testing.tiny_model(tmp_path_factory.mktemp("signals"), "llama", bos=True, padded_vocab=5)
    tokenizer, model = Tokenizer.load(folder, template="{question}"), ModelConfig.from_hf(folder)
    params = jax.device_get(init_params(model, jax.random.key(1)))
    embed = np.array(params["embed"])
    embed[tokenizer.encode("0123456789:") + list(tokenizer.stop_ids)] *= 2.5  # completions of many lengths
    embed[tokenizer.size :] *= 5  # ids that no token has would count most

    def build(**settings):
        config = dataclasses.replace(CONFIG, **settings)
        params_ = jax.tree.map(jnp.array, {**params, "embed": embed})
        return Policy(
            "a", 0, config, model, tokenizer, make_plan({"a": config}).meshes["a"], params_, total_updates=1, seed=0,
            loss_settings=LossSettings(),
        )  # fmt: skip

    return build


def by_hand(policy, own, signal):
    """f64[P, G] from the logits of the whole prompt and completion at once."""
    rows = batches.own_rows(own, 0)
    hidden, _ = policy.decoder.apply({"params": policy.state["params"]}, rows.tokens, rows.positions)
    logits = policy.decoder.apply({"params": policy.state["params"]}, hidden, method="head")
    s = rows.tokens.shape[1] - rows.mask.shape[1]
    z = np.asarray(logits, np.float64)[:, s - 1 : -1, : policy.tokenizer.size]  # those that predict the completion
    if signal == "self_certainty_tempered":
        z = z / CONFIG.temperature
    top = z.max(-1, keepdims=True)
    logz = np.log(np.exp(z - top).sum(-1)) + top[..., 0]
    p = np.exp(z - logz[..., None])
    each = logz - (p * z).sum(-1) if signal == "entropy" else logz - z.mean(-1)
    mean = np.where(rows.mask, each, 0).sum(-1) / rows.mask.sum(-1)
    return mean.reshape(own.finish.shape)


@pytest.mark.parametrize("settings", [{}, dict(slots=5)], ids=["a slot each", "refilled slots"])
@pytest.mark.parametrize("signal", types.SIGNALS)
def test_signals_are_those_of_a_plain_forward_pass(make, signal, settings):
    policy = make(**settings)
    own = policy.sample(PROBLEMS, 0, signal=signal).result()
    assert len(np.unique(own.lengths)) > 2  # so that a row that stands in another's place is seen
    np.testing.assert_allclose(own.signal, by_hand(policy, own, signal), rtol=1e-4)


def test_asking_for_a_signal_changes_no_sample(make):
    policy = make()
    plain, asked = policy.sample(PROBLEMS, 0).result(), policy.sample(PROBLEMS, 0, signal="entropy").result()
    np.testing.assert_array_equal(plain.tokens, asked.tokens)
    assert plain.signal is None
