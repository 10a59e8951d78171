"""The control of supervised fine-tuning on peers' right answers."""

import types as std_types

import jax.numpy as jnp
import numpy as np
import pytest
from material import Peer, assert_equal, build, material, rows_of

from mutualrl import losses, types
from mutualrl.losses import LossSettings
from mutualrl.settings import ConfigError, PolicyConfig
from mutualrl.transfer import none, sft

NAN = np.nan
OWN = [[0, 1], [1, 1], [NAN, 0]]
WEIGHTS = ("adv", "surr_weight", "kl_weight", "nll_weight")


def test_every_right_whole_usable_row_has_its_tokens_in_one_mean():
    peers = [
        Peer([[1, 0], [1, 1], [NAN, 1]], finish=[[0, 0], [0, types.LENGTH], [0, types.STOP_TEXT]]),
        Peer([[1], [1], [1]], usable=[[0], [1], [1]], heard=[[1], [1], [0]]),
    ]
    (batch,), metrics = build(material(OWN, peers, sft.Options(nll_coef=0.5), longest=9), sft)
    got = [(int(g), int(s)) for g, s in zip(batch.group, batch.source) if s]
    assert got == [(0, 1), (1, 1), (1, 2), (2, 1)] and metrics == {"transfer/certificates": 4.0}
    foreign = batch.source > 0
    logp = np.random.default_rng(0).normal(-1, 0.3, batch.mask.shape)
    loss, _ = losses.loss(jnp.asarray(logp), jnp.zeros_like(logp), batch, LossSettings(**sft.forms(sft.Options())))
    assert float(loss) == pytest.approx(-0.5 * logp[foreign][batch.mask[foreign]].mean(), rel=1e-5)


def test_own_rows_are_there_without_weight():
    m = material(OWN, [Peer([[1], [1], [1]])], sft.Options(), longest=9, updates_per_step=3)
    out, _ = build(m, sft)
    own = rows_of(out, 0)
    assert_equal([own], [rows_of(none.build(m)[0], 0)], but=WEIGHTS)
    assert all(not getattr(own, k).any() for k in WEIGHTS)
    for b in out:  # the mean is of each update
        assert (b.nll_weight * b.mask.sum(1)).sum() == pytest.approx(1)


def test_without_peers_nothing_is_learnt():
    for peers in ([], [Peer([[0], [0], [0]])]):
        (batch,), _ = build(material(OWN, peers, sft.Options(), longest=9), sft)
        assert not any(getattr(batch, k).any() for k in WEIGHTS)


def test_settings():
    run = lambda **x: std_types.SimpleNamespace(
        policies={"a": PolicyConfig(model="m", **x), "b": PolicyConfig(model="m", frozen=True, kl_coef=0.1)}
    )
    sft.check(sft.Options(), run())
    with pytest.raises(ConfigError, match="sft.nll_coef=0.0: must be above 0"):
        sft.check(sft.Options(nll_coef=0.0), run())
    for field in ("kl_coef", "entropy_coef"):
        with pytest.raises(ConfigError, match=f"policies.a.{field}=0.1: must be 0 with transfer 'sft'"):
            sft.check(sft.Options(), run(**{field: 0.1}))
    assert sft.topics(sft.Options()) == ("rollout",)
