"""No transfer: GRPO on the policy's own rollouts (published; the loss as in `mutualrl.losses`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from mutualrl import advantages, batches, types
from mutualrl.config import PolicyConfig
from mutualrl.types import Batch, Rollouts, Verdicts

KINDS = (types.PPO,)


def build(
    own: Rollouts,
    cohort: Mapping[str, Rollouts],
    verdicts: Verdicts,
    config: PolicyConfig,
    index: int,
    old_logp: np.ndarray | None = None,
    ref_logp: np.ndarray | None = None,
) -> list[Batch]:
    """One Batch an optimiser update, over whole problems.

    Args:
      own: the policy's rollouts.
      cohort: rollouts of all policies; not looked at.
      verdicts: rewards of the own rollouts.
      config: the policy's objective.
      index: the policy's place in the cohort.
      old_logp: f32[P·G, T] snapshot log-probs; needed for more than one update (with one, the ratio is exactly 1).
      ref_logp: f32[P·G, T] log-probs under the KL reference; needed if `kl_coef` > 0.

    Returns:
      `updates_per_step` batches (fewer if there are fewer problems), rows problem-major.
    """
    p, g, t = own.tokens.shape
    rows = batches.own_rows(own, index)
    reward = shaped_reward(own, verdicts, config, old_logp, ref_logp).reshape(p * g)
    cut_off = (own.finish == types.LENGTH).reshape(p * g)
    if old_logp is not None:
        rows = dataclasses.replace(rows, denom_logp=old_logp.astype(np.float32), denom_self=np.zeros(p * g, bool))
    if ref_logp is not None:
        rows = dataclasses.replace(rows, ref_logp=ref_logp.astype(np.float32))
    rows.clip[:] = config.clip_low, config.clip_high
    rows.level[:] = types.SEQUENCE if config.ratio_level == "sequence" else types.TOKEN

    out = []
    for problems in np.array_split(np.arange(p), min(config.updates_per_step, p)):
        chosen = (problems[:, None] * g + np.arange(g)).ravel()
        batch = batches.take(rows, chosen)
        keys = [own.problems[i].id for i in problems for _ in range(g)]
        adv, keep = advantages.group_advantages(
            reward[chosen], keys, config.estimator, ddof=config.advantage_ddof, eps=config.advantage_eps
        )
        if config.drop_zero_variance:
            keep &= np.repeat(np.any(adv.reshape(-1, g) != 0, axis=1), g)
        if config.mask_truncated:
            keep &= ~cut_off[chosen]
        weight = advantages.row_weights(config.aggregation, batch.mask.sum(-1), keep, config.max_new_tokens)
        batch.adv[:] = adv[:, None]
        batch.surr_weight[:] = weight
        if config.kl_coef and not config.kl_in_reward:
            batch.kl_weight[:] = config.kl_coef * weight
        out.append(batch)
    return out


def shaped_reward(
    own: Rollouts,
    verdicts: Verdicts,
    config: PolicyConfig,
    old_logp: np.ndarray | None,
    ref_logp: np.ndarray | None,
) -> np.ndarray:
    """Rewards f64[P, G] with the overlong penalty and the KL in the reward (summed k1, detached), where they are on.

    Verdicts are not changed by shaping.
    """
    reward = verdicts.reward.astype(np.float64)
    if config.overlong_factor:
        reward = reward + advantages.overlong_penalty(
            own.lengths, config.max_new_tokens, config.overlong_buffer, config.overlong_factor
        )
    if config.kl_in_reward and config.kl_coef:
        now = own.logprobs if old_logp is None else old_logp.reshape(own.logprobs.shape)
        k1 = np.where(own.mask, now - ref_logp.reshape(own.logprobs.shape), 0.0).sum(-1, dtype=np.float64)
        reward = reward - config.kl_coef * k1
    return reward
