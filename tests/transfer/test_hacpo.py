"""HACPO: the pool, baseline and guards, capabilities, ratios of received rows, where it must be GRPO; settings."""

import dataclasses
import types as std_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from material import Peer, Text, assert_equal, build, material, rows_of

from mutualrl import losses, types
from mutualrl.losses import LossSettings
from mutualrl.settings import ConfigError, PolicyConfig
from mutualrl.transfer import hacpo, none

NAN = np.nan
OWN = [[1, 0, 0], [0, 0, 0], [1, 1, NAN]]
PEERS = [Peer([[1, 0, 1], [0, 1, 0], [1, 1, 1]]), Peer([[0, 1, 1], [1, 1, 0], [0, 0, 0]])]
SETTINGS = dict(ratio_level="sequence", aggregation="seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4)


def make(own=OWN, peers=PEERS, capability=(0.4, 0.2, 0.8), step=0, options=(), **others):
    return material(
        own, peers, hacpo.Options(**dict(options)), capability=capability, step=step, **{**SETTINGS, **others}
    )


# ---- Where it is GRPO


@pytest.mark.parametrize(
    "peers",
    [
        [],
        [Peer([[1, 1, 0]] * 3, heard=[[0, 0, 0]] * 3)],
        [Peer([[1, 1, 0]] * 3, usable=[[0, 0, 0]] * 3)],
        [Peer([[1, 1, 0]] * 3, traced=[[0, 0, 0]] * 3)],
        [Peer([[NAN] * 3] * 3)],
        [Peer([[1, 1, 0, 1]] * 3), Peer([[1, 1]] * 3)],  # not as many rows as the learner
        [Peer([[1, 1, 0]] * 3, heard=[[0, 1, 1]] * 3)],
    ],
)
@pytest.mark.parametrize("capability", [(0.4, 0.2, 0.8), (NAN, NAN, NAN)])
def test_without_a_pool_it_is_none(peers, capability):
    m = make(peers=peers, capability=capability, longest=9, updates_per_step=2, kl_coef=0.1, drop_zero_variance=True)
    assert hacpo.to_score(m) is None
    out, metrics = build(m, hacpo)
    assert_equal(out, none.build(m)[0])
    assert all(np.isfinite(x) for x in metrics.values())


def test_own_rows_keep_their_objective():
    m = make(longest=9)
    assert_equal([rows_of(build(m, hacpo)[0], 0)], [rows_of(none.build(m)[0], 0)], but=("adv", "surr_weight"))


# ---- Pool, baseline, advantages


def by_hand(own, peers, capability, floor=0.1, ceiling=10.0, eps=1e-6):
    """Advantages of own rows and of each peer's, straight from the formulas."""
    factor = lambda a, b: min(max(a / b, floor), ceiling)
    c = [1.0 if x != x else max(x, 1e-8) for x in capability]
    pool = [*own, *(r for peer in peers for r in peer)]
    mean, sd = sum(pool) / len(pool), np.std(pool, ddof=1)
    mu = sum([*own, *(factor(c[0], c[j]) * r for j, peer in enumerate(peers, 1) for r in peer)]) / len(pool)
    if mu > 1:
        mu = sum(own) / len(own)
    if max(pool) - min(pool) < 1e-7:
        mu = mean
    adv = lambda r: (r - mu) / (sd + eps)
    return [adv(r) for r in own], [[factor(c[j], c[0]) * adv(r) for r in peer] for j, peer in enumerate(peers, 1)]


@pytest.mark.parametrize(
    "capability",
    [(0.5, 0.5, 0.5), (0.4, 0.2, 0.8), (0.9, 0.01, 0.3), (0.0, 0.5, 0.0), (1e-4, 5e-4, 2e-5), (NAN, 0.5, NAN)],
)
def test_advantages(capability):
    own = [[1, 0, 0], [0.5, 0, 0], [1, 1, 1]]
    (batch,), _ = build(make(own, capability=capability), hacpo)
    for p in range(3):
        want = by_hand(own[p], [x.reward[p] for x in PEERS], capability)
        for source, adv in enumerate([want[0], *want[1]]):
            rows = (batch.group == p) & (batch.source == source)
            np.testing.assert_allclose(batch.adv[rows, 0], adv, rtol=2e-6, atol=1e-7)


def test_limits_of_capability_ratios():
    def own(capability, step=0, **options):
        return build(make([[1, 0, 0]], [Peer([[1, 1, 0]])], capability, step, options), hacpo)[1]

    assert own((0.5, 0.001))["transfer/capability_ratio"] == pytest.approx(0.1)
    assert own((0.001, 0.5))["transfer/capability_ratio"] == pytest.approx(10)
    limits = dict(capability_floor=0.5, capability_ceiling=3.0)
    assert own((0.9, 0.1), **limits)["transfer/capability_ratio"] == pytest.approx(0.5)
    assert own((0.1, 0.9), **limits)["transfer/capability_ratio"] == pytest.approx(3)
    for step, ratio in ((0, 1), (1, 1), (2, 3)):
        assert own((0.3, 0.9), step, warmup_steps=2)["transfer/capability_ratio"] == pytest.approx(ratio)


def test_rows_that_cannot_be_trained_on_count_in_the_pool():
    peer = Peer([[1, 1, 0]], usable=[[1, 0, 1]], traced=[[1, 1, 0]])
    (batch,), metrics = build(make([[1, 0, 0]], [peer], (0.5, 0.5)), hacpo)
    rows = rows_of([batch], 1)
    assert rows.sample.tolist() == [0] and metrics["transfer/pooled"] == 1
    pool = np.array([1, 0, 0, 1, 1, 0])
    np.testing.assert_allclose(rows.adv[:, 0], (1 - pool.mean()) / pool.std(ddof=1), rtol=1e-5)
    live = batch.surr_weight * batch.surr_mask.sum(1)
    np.testing.assert_allclose(live, 1 / 4, rtol=1e-6)  # every row equal, over the rows that are there


def test_uneven_groups_leave_the_pool_of_their_problem():
    peers = [dataclasses.replace(PEERS[0], heard=[[1, 1, 1], [1, 1, 0], [1, 1, 1]]), PEERS[1]]
    (batch,), metrics = build(make(peers=peers), hacpo)
    sources = [sorted(set(batch.source[batch.group == p].tolist())) for p in range(3)]
    assert sources == [[0, 1, 2], [0, 2], [0, 1, 2]] and metrics["transfer/uneven"] == 1
    silent = dataclasses.replace(PEERS[0], heard=[[0] * 3] * 3)
    assert build(make(peers=[silent, PEERS[1]]), hacpo)[1]["transfer/uneven"] == 0
    want, _ = by_hand(OWN[1], [PEERS[1].reward[1]], (0.4, 0.8))
    np.testing.assert_allclose(batch.adv[(batch.group == 1) & (batch.source == 0), 0], want, rtol=1e-6)


def test_unjudged_rows():
    (batch,), _ = build(make([[1, NAN, 0], [NAN] * 3], [Peer([[1, 1, 0], [1, 1, 1]])], (0.5, 0.5)), hacpo)
    assert np.isfinite(batch.adv).all() and not batch.surr_weight[batch.group == 1].any()
    pool = np.array([1, 0, 1, 1, 0])
    want = (np.array([1, 0]) - pool.mean()) / pool.std(ddof=1)
    np.testing.assert_allclose(batch.adv[[0, 2], 0], want, rtol=1e-5)
    assert (batch.surr_weight > 0).tolist() == [True, False, True, False, False, False, True, True, True]


# ---- Ratios of received rows


def texts():
    return [
        Text("abcdef", (2, 4, 6), (-0.5, -0.1, -0.9), (1, 2, 3, 6), -0.7),
        Text("", (), (), (), -0.3),  # an end of turn is all there is
    ]


def test_the_end_of_turn_counts_only_where_it_is_all():
    peer = Peer([[1, 0]], texts=[texts()])
    rows = rows_of(build(make([[1, 0]], [peer], (0.5, 0.5)), hacpo)[0], 1)
    assert rows.mask.sum(1).tolist() == [5, 1] and rows.surr_mask.sum(1).tolist() == [4, 1]
    np.testing.assert_allclose(rows.seq_denom, [4 * -0.5, -0.3], rtol=1e-6)
    np.testing.assert_allclose(rows.seq_norm, [4, 1])
    assert (rows.kind == types.CAP).all() and (rows.level == types.SEQUENCE).all() and not rows.denom_self.any()
    np.testing.assert_allclose(rows.surr_weight, [1 / 16, 1 / 4])


def test_objective_of_a_received_row():
    """The ratio is exp of the difference of the means; above 1 and below the bound there is no gradient."""
    peer = Peer([[1, 1]], texts=[[texts()[0]] * 2])
    options = hacpo.Options(alpha=2.0)
    m = make([[0, 0]], [peer], (0.5, 1.0), options=dict(alpha=2.0))
    rows = rows_of(build(m, hacpo)[0], 1)
    form = LossSettings(**hacpo.forms(options))
    for mean, s, live in ((-0.6, np.exp(-0.1), True), (-0.4, 1.0, False), (-1.0, 0.8, False)):
        logp = np.zeros(rows.mask.shape, np.float32)
        logp[:, :4] = mean + np.array([0.1, -0.1, 0.2, -0.2])
        logp[:, 4] = -5.0  # the end of turn does not count
        j = lambda p: losses.surrogate(p, losses.log_ratios(p, p, rows, form.levels), rows, form)[:, :4].sum()
        value, grad = jax.value_and_grad(j)(jnp.asarray(logp))
        # Factor 2 of capability; the shared advantage of the two is rows.adv.
        np.testing.assert_allclose(value, 2 * 4 * s**3 * rows.adv[0, 0], rtol=1e-5)
        assert grad[0, 0] == pytest.approx(s**3 * rows.adv[0, 0] if live else 0, rel=1e-5)


def test_bounds_tighten_from_update_to_update():
    m = make(OWN, PEERS, longest=9, updates_per_step=3, options=dict(delta=0.3, delta_step=0.2))
    out, _ = build(m, hacpo)
    for batch, low in zip(out, (0.7, 0.9, 1.0)):
        np.testing.assert_allclose(batch.clip[batch.source > 0], [[low, 1.0]] * 6)
        np.testing.assert_allclose(batch.clip[batch.source == 0], [[3e-4, 4e-4]] * 3)
        live = batch.surr_weight > 0
        np.testing.assert_allclose(batch.surr_weight[live], 1 / (batch.surr_mask.sum(1)[live] * live.sum()), rtol=1e-6)


def test_a_cut_text_without_a_common_boundary_leaves():
    text = Text("abcdef", (6,), (-0.5,), (1, 2, 4), NAN)
    peer = Peer([[1, 0]], texts=[[text] * 2], finish=[[types.LENGTH] * 2])
    (batch,), _ = build(make([[1, 0]], [peer], (0.5, 0.5), longest=3, kl_coef=0.1, kl_rows="all"), hacpo)
    assert (batch.surr_weight > 0).tolist() == [True, True, False, False]
    assert (batch.kl_weight > 0).tolist() == [True, True, False, False]


def test_order_of_peers_and_problems_does_not_matter():
    numbered = [dataclasses.replace(x, index=i + 1) for i, x in enumerate(PEERS)]
    (one,), (other,) = (build(make(peers=x, longest=9), hacpo)[0] for x in (numbered, numbered[::-1]))
    for source in (0, 1, 2):
        assert_equal([rows_of([one], source)], [rows_of([other], source)], tolerance=1e-6)
    order = [2, 0, 1]
    moved = [dataclasses.replace(x, reward=[x.reward[i] for i in order]) for x in numbered]
    (other,), _ = build(make([OWN[i] for i in order], moved, ids=["q2", "q0", "q1"], longest=9), hacpo)
    for p in range(3):
        a, b = (x.group == g for x, g in ((one, order[p]), (other, p)))
        for name in ("tokens", "adv", "surr_weight", "seq_denom", "source"):
            np.testing.assert_allclose(getattr(one, name)[a], getattr(other, name)[b], rtol=1e-6)


# ---- Settings


def run_of(peer=8, **settings):
    settings = {"ratio_level": "sequence", **settings}
    policies = {
        "a": PolicyConfig(model="m", **settings),
        "b": PolicyConfig(model="m", frozen=True, kl_in_reward=True, group_size=peer),
    }
    return std_types.SimpleNamespace(policies=policies)


@pytest.mark.parametrize(
    "others, settings, message",
    [
        (dict(alpha=-1.0), {}, "transfer.hacpo.alpha=-1"),
        (dict(delta=1.1), {}, "transfer.hacpo.delta=1.1"),
        (dict(delta_step=-0.1), {}, "transfer.hacpo.delta_step=-0.1"),
        (dict(capability_floor=0.0), {}, "transfer.hacpo.capability_floor=0"),
        (dict(capability_ceiling=0.9), {}, "transfer.hacpo.capability_ceiling=0.9"),
        (dict(warmup_steps=-1), {}, "transfer.hacpo.warmup_steps=-1"),
        ({}, dict(ratio_level="token"), "policies.a.ratio_level='token'"),
        ({}, dict(estimator="rloo"), "policies.a.estimator='rloo'"),
        ({}, dict(kl_in_reward=True), "policies.a.kl_in_reward=True"),
        ({}, dict(peer=4), "policies.b.group_size=4"),
    ],
)
def test_refused(others, settings, message):
    with pytest.raises(ConfigError, match=message):
        hacpo.check(hacpo.Options(**others), run_of(**settings))


def test_published_settings_pass():
    hacpo.check(hacpo.Options(), run_of(**hacpo.PUBLISHED))
    forms = hacpo.forms(hacpo.Options(alpha=0.5))
    assert forms == {"kinds": (types.PPO, types.CAP), "levels": (types.SEQUENCE,), "cap_alpha": 0.5}
