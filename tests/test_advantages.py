"""Advantages and row weights: identities and edge cases; published numbers are in tests/acceptance."""

import numpy as np
import pytest

from mutualrl.advantages import (
    AGGREGATIONS,
    ESTIMATORS,
    group_advantages,
    mixed_groups,
    overlong_penalty,
    row_weights,
)

RNG = np.random.default_rng(0)
REWARDS = RNG.normal(size=24)
GROUPS = [f"p{i % 5}" for i in range(24)]  # interleaved, uneven: 5, 5, 5, 5, 4


def by_group(groups):
    return [np.array([i for i, g in enumerate(groups) if g == key]) for key in sorted(set(groups))]


def reference(r, groups, estimator, ddof=1, eps=1e-6):
    """The estimators as a plain loop."""
    out = np.zeros(len(r))
    for i, key in enumerate(groups):
        own = np.array([x for x, k in zip(r, groups) if k == key])
        others = np.array([x for j, (x, k) in enumerate(zip(r, groups)) if k == key and j != i])
        centred = r[i] - own.mean()
        out[i] = {
            "grpo": centred / (own.std(ddof=ddof) + eps),
            "rloo": r[i] - others.mean(),
            "batch_std": centred / (np.std(r, ddof=ddof) + eps),
        }.get(estimator, centred)
    if estimator == "reinforce_pp_baseline":
        out = (out - out.mean()) / (out.std(ddof=ddof) + eps)
    return out


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("ddof", (0, 1))
def test_estimators_against_a_plain_loop(estimator, ddof):
    adv, valid = group_advantages(REWARDS, GROUPS, estimator, ddof=ddof, eps=1e-3)
    np.testing.assert_allclose(adv, reference(REWARDS, GROUPS, estimator, ddof, 1e-3), rtol=1e-12)
    assert valid.all() and adv.dtype == np.float64


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_row_order_and_key_names_do_not_matter(estimator):
    adv, _ = group_advantages(REWARDS, GROUPS, estimator)
    order = RNG.permutation(len(REWARDS))
    moved, _ = group_advantages(REWARDS[order], [(7, GROUPS[i]) for i in order], estimator)
    np.testing.assert_allclose(moved, adv[order], rtol=1e-9)


def test_equal_prompts_under_two_keys_do_not_merge():
    rewards = np.r_[np.zeros(4), np.ones(4)]
    for estimator in set(ESTIMATORS) - {"batch_std", "reinforce_pp_baseline"}:
        apart, _ = group_advantages(rewards, [("q", "a")] * 4 + [("q", "b")] * 4, estimator)
        merged, _ = group_advantages(rewards, ["q"] * 8, estimator)
        assert not apart.any() and merged.all()


def test_rloo_and_ddof_identities():
    rewards, groups = RNG.normal(size=32), np.repeat(np.arange(4), 8).tolist()
    rloo, _ = group_advantages(rewards, groups, "rloo")
    centred, _ = group_advantages(rewards, groups, "dr_grpo")
    np.testing.assert_allclose(rloo, 8 / 7 * centred)
    sample, _ = group_advantages(rewards, groups, "grpo", ddof=1, eps=0)
    population, _ = group_advantages(rewards, groups, "grpo", ddof=0, eps=0)
    np.testing.assert_allclose(population * np.sqrt(7 / 8), sample)
    scaled, _ = group_advantages(3.5 * rewards - 2, groups, "grpo", eps=0)
    np.testing.assert_allclose(scaled, sample)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("value", (0.35, 0.1, 1e6, 0.0))
def test_no_spread_gives_zero(estimator, value):
    adv, valid = group_advantages(np.full(7, value), ["a"] * 7, estimator)
    assert valid.all() and not adv.any()
    residue, _ = group_advantages(value + 1e-8 * np.arange(7), ["a"] * 7, estimator)
    assert not residue.any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_without_spread_has_exactly_none_beside_others(estimator):
    """Exactly 0, whatever the other groups hold: rows are dropped by it."""
    rewards, groups = np.r_[REWARDS, np.full(5, 0.35)], [*GROUPS, *["flat"] * 5]
    adv, _ = group_advantages(rewards, groups, estimator)
    assert (adv[24:] == 0).all() and (adv[:24] != 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_a_non_finite_reward_leaves_everything(estimator, bad):
    rewards = np.array([1.0, bad, 0.0, 0.5, 2.0, bad])
    groups = ["a", "a", "a", "b", "b", "c"]
    adv, valid = group_advantages(rewards, groups, estimator)
    assert valid.tolist() == [True, False, True, True, True, False]
    assert np.isfinite(adv).all() and not adv[~valid].any()
    rest, _ = group_advantages(rewards[valid], [g for g, v in zip(groups, valid) if v], estimator)
    np.testing.assert_allclose(adv[valid], rest)
    assert adv[valid].all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_valid_row(estimator):
    for rewards in ([0.7], [np.nan, 0.7, np.nan]):
        adv, valid = group_advantages(np.array(rewards), ["a"] * len(rewards), estimator)
        assert not adv.any() and valid.sum() == 1
    assert not group_advantages(np.array([np.nan, np.nan]), ["a", "a"], estimator)[0].any()


def test_bad_arguments():
    with pytest.raises(ValueError, match="estimator='gpro'.*rloo"):
        group_advantages(np.zeros(2), ["a", "a"], "gpro")
    with pytest.raises(ValueError, match="equal length"):
        group_advantages(np.zeros(2), ["a"])
    with pytest.raises(ValueError, match="aggregation='mean'.*token_mean"):
        row_weights("mean", np.ones(2), np.ones(2, bool), 8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_row_weights(aggregation):
    lengths, rows = np.array([3, 5, 2, 0, 4]), np.array([True, True, False, True, True])
    weight = row_weights(aggregation, lengths, rows, 10)
    total = (weight * lengths).sum()  # of a loss of 1 on every token
    assert weight[2] == weight[3] == 0 and weight.dtype == np.float64
    expected = {"token_mean": 1, "seq_mean_token_mean": 1, "seq_mean_token_sum": 12 / 3, "dr_grpo": 12 / 30}
    np.testing.assert_allclose(total, expected[aggregation])
    per_row = weight[[0, 1, 4]] * (lengths[[0, 1, 4]] if aggregation == "seq_mean_token_mean" else 1)
    np.testing.assert_allclose(per_row, per_row[0])
    assert not row_weights(aggregation, lengths, np.zeros(5, bool), 10).any()
    assert not row_weights(aggregation, np.zeros(5), np.ones(5, bool), 10).any()


def test_overlong_penalty():
    np.testing.assert_allclose(overlong_penalty(np.array([[5, 6, 8, 10]]), 10, 4, 0.5), [[0, 0, -0.25, -0.5]])
    for buffer in (0, -1, 11):
        with pytest.raises(ValueError, match=f"overlong_buffer={buffer}.*10"):
            overlong_penalty(np.array([1]), 10, buffer)


def test_mixed_groups_do_not_count_the_unknown_as_right():
    success = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, -1], [-1, 0, -1]])
    assert mixed_groups(success).tolist() == [False, False, True, True, False]
