"""XGRPO: pooled statistics from sums, against the pool written out; where it must be GRPO; settings."""

import dataclasses
import types as std_types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from material import Peer, assert_equal, build, material

from mutualrl import advantages
from mutualrl.settings import ConfigError, PolicyConfig
from mutualrl.transfer import none, xgrpo
from mutualrl.types import GroupStats

NAN = np.nan
OWN = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, NAN, 0]]
PEERS = [Peer([[1, 0], [0, 1], [1, 1]]), Peer([[0, 1, 1], [1, 1, 0], [0, NAN, 0]])]


def adv_of(m):
    out, _ = build(m, xgrpo)
    return np.concatenate([b.adv for b in out])[:, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.3, 0.35, 1.0, -2.0, NAN]), min_size=2, max_size=5),
    st.lists(st.lists(st.sampled_from([0.0, 0.3, 0.35, 1.0, NAN]), min_size=1, max_size=4), max_size=3),
    st.sampled_from(("pool", "own", "shrink")), st.sampled_from(("pool", "own")), st.sampled_from((0.0, 0.3, 1.0)),
    st.integers(0, 1),
)  # fmt: skip
def test_against_the_pool_written_out(own, peers, mean, std, rho, ddof):
    opts = xgrpo.Options(mean=mean, std=std, rho=rho)
    m = material([own], [Peer([r]) for r in peers], opts, advantage_ddof=ddof, advantage_eps=0.01)
    valid = [r for r in own if np.isfinite(r)]
    pool = valid + [r for p in peers for r in p if np.isfinite(r)]
    heard = len(pool) > len(valid)
    want = np.zeros(len(own))
    spread = pool if std == "pool" else valid
    if valid and np.ptp(spread) > 0:
        share = {"pool": 1, "own": 0, "shrink": rho}[mean] if heard else 0
        mu = (1 - share) * np.mean(valid) + share * np.mean(pool)
        want = np.array([(r - mu) / (np.std(spread, ddof=ddof) + 0.01) if np.isfinite(r) else 0 for r in own])
    np.testing.assert_allclose(adv_of(m), want, rtol=1e-5, atol=1e-6)
    (batch,) = build(m, xgrpo)[0]
    assert ((batch.surr_weight > 0) == np.isfinite(own)).all()


def test_problems_without_statistics_are_those_of_grpo_to_the_bit():
    own = [[0.1, 0.35, 0.7, 0.2]] * 3
    unheard = [[NAN] * 3, [0.3, 0.9, 0.1], [NAN] * 3]
    m = material(own, [Peer(unheard)], xgrpo.Options())
    want = none.build(m)[0][0].adv[:, 0]
    got = adv_of(m)
    other = np.repeat([False, True, False], 4)
    np.testing.assert_array_equal(got[~other], want[~other])
    assert (got[other] != want[other]).all()
    for peers in ([], [Peer([[NAN]] * 3)]):
        for opts in (xgrpo.Options(), xgrpo.Options(mean="shrink", rho=0.5), xgrpo.Options(std="own")):
            m = material(own, peers, opts, updates_per_step=2, kl_coef=0.1)
            assert_equal(build(m, xgrpo)[0], none.build(m)[0])


def test_own_mean_and_own_std_are_grpo():
    for opts in (xgrpo.Options(mean="own", std="own"), xgrpo.Options(mean="shrink", rho=0.0, std="own")):
        m = material([[0.1, 0.35, 0.7, NAN], [0.35] * 4, [1, 0, 0, 1]], [Peer([[1, 0]] * 3)], opts)
        assert_equal(build(m, xgrpo)[0], none.build(m)[0], tolerance=1e-6)


def test_small_differences_survive_the_sums():
    """Rewards 1e-5 apart around 1, from float64 sums."""
    m = material([[1.0, 1.0]], [Peer([[1.00001, 1.00001]])], xgrpo.Options())
    np.testing.assert_allclose(adv_of(m), -5e-6 / (1e-5 / np.sqrt(3) + 1e-6), rtol=1e-3)
    m = material([[1 / 3] * 7], [Peer([[1 / 3] * 5])], xgrpo.Options(), drop_zero_variance=True)
    assert not adv_of(m).any() and not build(m, xgrpo)[0][0].surr_weight.any()


def test_a_flat_group_measured_against_itself_leaves_if_asked():
    """A mean of equal rewards is off by a rounding, which must not count as a signal."""
    m = material([[0.35] * 7], [Peer([[0, 1]])], xgrpo.Options(mean="own"), drop_zero_variance=True)
    assert not adv_of(m).any() and not build(m, xgrpo)[0][0].surr_weight.any()


def test_one_valid_row_is_measured_against_the_others():
    pooled = np.array([1, 0, 0])
    m = material([[1, NAN]], [Peer([[0, 0]])], xgrpo.Options())
    np.testing.assert_allclose(adv_of(m), [(1 - 1 / 3) / (pooled.std(ddof=1) + 1e-6), 0], rtol=1e-5)
    assert not adv_of(material([[1, NAN]], [Peer([[0, 1]])], xgrpo.Options(std="own"))).any()
    assert not adv_of(material([[NAN, NAN]], [Peer([[0, 1]])], xgrpo.Options())).any()


def test_what_stands_where_nothing_was_heard_is_not_read():
    m = material(OWN, PEERS, xgrpo.Options())
    blank = m.stats[0]
    junk = GroupStats(n=np.array([0, 2, 2], np.int32), **{
        k: np.where([1, 0, 0], NAN, getattr(blank, k)) for k in ("sum", "sumsq", "min", "max", "n_success")
    })  # fmt: skip
    got = adv_of(dataclasses.replace(m, stats=(junk, m.stats[1])))
    want = adv_of(material(OWN, [Peer([[NAN] * 2, *PEERS[0].reward[1:]]), PEERS[1]], xgrpo.Options()))
    np.testing.assert_array_equal(got, want)


def test_order_updates_and_uneven_groups():
    one = build(material(OWN, PEERS, xgrpo.Options()), xgrpo)[0]
    assert_equal(build(material(OWN, PEERS[::-1], xgrpo.Options()), xgrpo)[0], one)
    several, metrics = build(material(OWN, PEERS, xgrpo.Options(), updates_per_step=3), xgrpo)
    np.testing.assert_array_equal(np.concatenate([b.adv for b in several]), one[0].adv)
    for b in several:
        np.testing.assert_allclose((b.surr_weight * b.surr_mask.sum(1)).sum(), 1, rtol=1e-5)
    assert metrics == {"transfer/pooled": 1.0}
    # Own rows only, and the same weights as without peers.
    np.testing.assert_array_equal(one[0].surr_weight, none.build(material(OWN))[0][0].surr_weight)
    assert (one[0].source == 0).all() and xgrpo.topics(xgrpo.Options()) == ("stats",)

    order = [1, 2, 0]
    moved = material([OWN[i] for i in order], [Peer([x.reward[i] for i in order]) for x in PEERS], xgrpo.Options())
    np.testing.assert_array_equal(adv_of(moved).reshape(3, 4), one[0].adv[:, 0].reshape(3, 4)[order])


def run_of(**values):
    policies = {"a": PolicyConfig(model="m", **values), "b": PolicyConfig(model="m", frozen=True, estimator="rloo")}
    return std_types.SimpleNamespace(policies=policies)


def test_settings():
    xgrpo.check(xgrpo.Options(), run_of())
    for opts, run, message in (
        (dict(mean="all"), {}, "mean='all': allowed are pool, own, shrink"),
        (dict(std="all"), {}, "std='all': allowed are pool, own"),
        (dict(rho=1.5), {}, "rho=1.5: must be at least 0 and at most 1"),
        (dict(rho=-0.5), {}, "rho=-0.5: must be at least 0 and at most 1"),
        (dict(), dict(kl_in_reward=True), "policies.a.kl_in_reward=True"),
        *((dict(), dict(estimator=e), f"policies.a.estimator='{e}'") for e in advantages.ESTIMATORS[1:]),
    ):
        with pytest.raises(ConfigError, match=message):
            xgrpo.check(xgrpo.Options(**opts), run_of(**run))
