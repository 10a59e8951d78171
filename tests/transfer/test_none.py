"""GRPO's batch: advantages to rows, weights, masks, several updates a step, KL in the reward."""

import dataclasses
import types as std_types

import numpy as np
import pytest

from mutualrl import advantages, types
from mutualrl.config import PolicyConfig
from mutualrl.scores import Scores, shaped_rewards
from mutualrl.testing import alone
from mutualrl.transfer import none
from mutualrl.types import Batch, Problem, Rollouts, Verdicts

P, G, S, T = 5, 4, 3, 6
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, T + 1, (P, G))
MASK = np.arange(T) < LENGTHS[..., None]
OWN = Rollouts(
    policy="a",
    version=3,
    step=3,
    problems=tuple(Problem(id=f"q{i}", question="the same") for i in range(P)),
    prompt=np.full((P, S), 9, np.int32),
    prompt_positions=np.tile(np.arange(S), (P, 1)),
    tokens=RNG.integers(0, 50, (P, G, T)).astype(np.int32),
    mask=MASK,
    logprobs=np.where(MASK, RNG.normal(-2, 1, (P, G, T)), 0).astype(np.float32),
    finish=np.where(LENGTHS == T, types.LENGTH, types.STOP).astype(np.int8),
    text=(("",) * G,) * P,
    temperature=1.0,
)
REWARD = np.round(RNG.normal(size=(P, G)), 1)
REWARD[2] = 0.5  # a group without spread
VERDICTS = Verdicts(REWARD, (REWARD > 0).astype(np.int8))
CONFIG = PolicyConfig(model="m", group_size=G, max_new_tokens=T)


def build(verdicts=VERDICTS, old=None, ref=None, own=OWN, **settings):
    config = dataclasses.replace(CONFIG, **settings)
    return none.build(alone(own, verdicts, config, 1, old, ref))[0]


@pytest.mark.parametrize("estimator", advantages.ESTIMATORS)
@pytest.mark.parametrize("aggregation", advantages.AGGREGATIONS)
def test_one_update(estimator, aggregation):
    (batch,) = build(estimator=estimator, aggregation=aggregation, advantage_ddof=0, advantage_eps=1e-2, clip_high=0.28)
    keys = np.repeat(np.arange(P), G).tolist()
    adv, _ = advantages.group_advantages(REWARD.ravel(), keys, estimator, ddof=0, eps=1e-2)
    np.testing.assert_allclose(batch.adv, np.repeat(adv[:, None], T, 1), rtol=1e-6)
    weight = advantages.row_weights(aggregation, LENGTHS.ravel(), np.ones(P * G, bool), T)
    np.testing.assert_allclose(batch.surr_weight, weight, rtol=1e-6)
    np.testing.assert_array_equal(batch.mask, MASK.reshape(-1, T))
    np.testing.assert_array_equal(batch.tokens[:, S:], OWN.tokens.reshape(-1, T))  # as sampled
    np.testing.assert_allclose(batch.clip, [[0.2, 0.28]] * (P * G))
    assert batch.denom_self.all() and not batch.kl_weight.any() and not batch.nll_weight.any()
    assert (batch.kind == types.PPO).all() and (batch.level == types.TOKEN).all() and (batch.source == 1).all()
    assert all(getattr(batch, f.name).dtype in (np.int32, np.int8, np.float32, bool) for f in dataclasses.fields(Batch))


def test_advantages_agree_with_the_rows_they_belong_to():
    """A marker reward comes out on the row of its own tokens, whatever the problem order."""
    reward = np.zeros((P, G))
    reward[3, 1] = 1.0
    order = [4, 3, 0, 1, 2]
    moved = dataclasses.replace(
        OWN, problems=tuple(OWN.problems[i] for i in order),
        **{n: getattr(OWN, n)[order] for n in ("prompt", "prompt_positions", "tokens", "mask", "logprobs", "finish")},
    )  # fmt: skip
    for own, rows in ((OWN, reward), (moved, reward[order])):
        (batch,) = build(Verdicts(rows, rows.astype(np.int8)), own=own, estimator="dr_grpo")
        best = batch.adv[:, 0].argmax()
        np.testing.assert_array_equal(batch.tokens[best, S:], OWN.tokens[3, 1])
        np.testing.assert_allclose(np.unique(batch.adv), [-0.25, 0, 0.75])


def test_sequence_level():
    (batch,) = build(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4)
    assert (batch.level == types.SEQUENCE).all() and np.isnan(batch.seq_denom).all()
    np.testing.assert_array_equal(batch.seq_norm, LENGTHS.ravel())


@pytest.mark.parametrize("updates", (2, 3, 5, 9))
def test_several_updates_are_whole_problems_and_weighted_alone(updates):
    out = build(updates_per_step=updates, estimator="batch_std")
    assert len(out) == min(updates, P)
    np.testing.assert_array_equal(np.concatenate([b.tokens for b in out])[:, S:], OWN.tokens.reshape(-1, T))
    start = 0
    for batch in out:
        rows = slice(start, start + len(batch.tokens))
        start = rows.stop
        assert len(batch.tokens) % G == 0 and batch.denom_self.all()  # the trainer fills in the snapshot
        total = (batch.surr_weight * batch.mask.sum(1)).sum()
        assert total == pytest.approx(1, rel=1e-5)
        keys = np.repeat(np.arange(P), G)[rows].tolist()
        adv, _ = advantages.group_advantages(REWARD.ravel()[rows], keys, "batch_std")
        np.testing.assert_allclose(batch.adv[:, 0], adv, rtol=1e-5, atol=1e-7)


def test_rows_that_leave_the_loss():
    """Cut-off rows stay in the statistics of their group; groups without spread leave only if asked."""
    (batch,) = build(mask_truncated=True)
    cut_off = (OWN.finish == types.LENGTH).ravel()
    assert cut_off.any()
    np.testing.assert_array_equal(batch.surr_weight == 0, cut_off)
    np.testing.assert_allclose(batch.surr_weight[~cut_off], 1 / LENGTHS.ravel()[~cut_off].sum(), rtol=1e-6)
    np.testing.assert_array_equal(batch.adv, build()[0].adv)
    np.testing.assert_array_equal(batch.mask, MASK.reshape(-1, T))

    several = build(mask_truncated=True, updates_per_step=3)
    np.testing.assert_array_equal(np.concatenate([b.surr_weight for b in several]) == 0, cut_off)

    flat = np.repeat(np.arange(P) == 2, G)
    assert (build()[0].surr_weight[flat] > 0).all()
    (batch,) = build(drop_zero_variance=True)
    np.testing.assert_array_equal(batch.surr_weight == 0, flat)
    np.testing.assert_allclose(batch.surr_weight[~flat], 1 / LENGTHS.ravel()[~flat].sum(), rtol=1e-6)
    # A row at the mean of a group with spread has no advantage but stays.
    reward = REWARD.copy()
    reward[0] = [0, 1, 0.5, 0.5]
    (batch,) = build(Verdicts(reward, VERDICTS.success), drop_zero_variance=True)
    assert batch.adv[2, 0] == 0 and batch.surr_weight[2] > 0


def test_unjudged_rollouts():
    reward = REWARD.copy()
    reward[1, 2] = np.nan
    (batch,) = build(Verdicts(reward, VERDICTS.success))
    assert (batch.surr_weight == 0).tolist() == (np.arange(P * G) == G + 2).tolist()
    assert np.isfinite(batch.adv).all()
    rest = reward[1][[0, 1, 3]]
    np.testing.assert_allclose(batch.adv[G, 0], (rest[0] - rest.mean()) / (rest.std(ddof=1) + 1e-6), rtol=1e-5)
    (batch,) = build(Verdicts(np.full((P, G), np.nan), VERDICTS.success))
    assert not batch.surr_weight.any() and not batch.adv.any()


def test_kl_in_the_loss():
    for estimator in ("k2", "k3", "k3_k2"):
        (batch,) = build(kl_coef=0.3, kl_estimator=estimator, mask_truncated=True)
        np.testing.assert_allclose(batch.kl_weight, 0.3 * batch.surr_weight, rtol=1e-6)
    np.testing.assert_array_equal(batch.adv, build()[0].adv)


def test_kl_in_the_reward():
    """r - beta sum k1 over the completion, before group statistics; no KL in the loss; pads may hold NaN."""
    rows = MASK.reshape(-1, T)
    old = np.where(rows, RNG.normal(size=(P * G, T)), np.nan)
    ref = np.where(rows, RNG.normal(size=(P * G, T)), np.nan)
    (batch,) = build(old=old, ref=ref, kl_coef=0.3, kl_in_reward=True, estimator="dr_grpo")
    shaped = REWARD - 0.3 * np.where(rows, old - ref, 0).sum(1).reshape(P, G)
    np.testing.assert_allclose(batch.adv[:, 0], (shaped - shaped.mean(1, keepdims=True)).ravel(), rtol=1e-4, atol=1e-6)
    assert not batch.kl_weight.any()
    np.testing.assert_array_equal(VERDICTS.reward, REWARD)  # verdicts are not shaped


def test_overlong_penalty_goes_before_the_statistics():
    (batch,) = build(overlong_factor=2.0, overlong_buffer=4, estimator="dr_grpo")
    shaped = REWARD + 2.0 * np.minimum(-(LENGTHS - (T - 4)) / 4, 0)
    np.testing.assert_allclose(batch.adv[:, 0], (shaped - shaped.mean(1, keepdims=True)).ravel(), rtol=1e-5, atol=1e-7)


def test_every_policy_shapes_its_rewards_by_itself():
    """The overlong penalty stays where the KL in the reward is asked for but off, and where a policy is frozen."""
    config = dataclasses.replace(CONFIG, overlong_factor=2.0, overlong_buffer=4, kl_in_reward=True)
    kinds = dict(off=dict(kl_coef=0.0), frozen=dict(kl_coef=0.1, frozen=True))
    cohort = [
        std_types.SimpleNamespace(name=name, index=i, config=dataclasses.replace(config, **change))
        for i, (name, change) in enumerate(kinds.items())
    ]
    found = shaped_rewards(Scores(cohort), cohort, dict.fromkeys(kinds, OWN), dict.fromkeys(kinds, VERDICTS))
    want = REWARD + 2.0 * np.minimum(-(LENGTHS - (T - 4)) / 4, 0)
    for name in kinds:
        np.testing.assert_allclose(found[name], want)
