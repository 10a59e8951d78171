"""HACPO: pooled rewards weighted by capability, and peers' rows under a sequence ratio that is only ever lowered.

Published (arXiv 2603.02604, `recipe/hacpo` of its code), with P_i the learner's and P_j a source's capability: the
share of its rewards above 0 over the last completed steps, 1 before there are any, at least 1e-8.

    baseline    mu = mean over own and received rows of omega r, omega = clip(P_i/P_j, .1, 10), 1 for own rows; the
                plain mean if all rewards are equal; the mean of the own rewards if mu > 1
    advantages  (r - mu)/(sd + eps), sd of the rewards as they are; those of received rows times clip(P_j/P_i, .1, 10)
    own rows    GSPO: PPO at sequence level
    received    q sg(q)^alpha A, q = clip(s, low, 1), s = exp(learner's mean log-prob a token - source's), each over its
                own tokens; low = min(1, .8 + .025 v) in update v = 0, 1, ... of a step; no gradient outside the bounds.
                The terminal stop id is left out, unless the reply is nothing else

The method needs as many rows of each source as of the learner. Our definition: a source is in the pool of a problem if
it sent as many judged rollouts as the learner's group has rows, at least one of which can be trained on, and if any own
rollout could be judged. Rollouts that cannot be trained on (not usable, or sent without log-probs) then still count in
the pool's statistics. Problems without peers in the pool are those of `none`, bit for bit.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl import advantages, assembly, batches, types
from mutualrl.assembly import Material
from mutualrl.settings import SUCCESS, ConfigError, RunConfig, trained_with, within
from mutualrl.types import Batch

LEAST = 1e-8  # capability

PUBLISHED = {
    "estimator": "grpo",
    "ratio_level": "sequence",
    "aggregation": "seq_mean_token_mean",
    "clip_low": 3e-4,
    "clip_high": 4e-4,
    "kl_coef": 0.001,
    "kl_rows": "all",
    "group_size": 8,
    "updates_per_step": 2,
    "lr": 1e-6,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How peers' rows weigh."""

    alpha: float = 1.0  # power of the detached ratio of received rows; 0: the ratio alone
    delta: float = 0.2  # the lower bound of that ratio is 1 - delta in the first update of a step
    delta_step: float = 0.025  # and grows by this in each further one
    capability_floor: float = 0.1  # bounds of ratios of capabilities
    capability_ceiling: float = 10.0
    warmup_steps: int = 0  # steps in which capabilities count as equal


def topics(options: Options) -> tuple[str, ...]:
    """Texts, to be judged by the learner, the source's log-probs, and capabilities."""
    return ("rollout", "trace", "capability")


def forms(options: Options) -> dict:
    """PPO for own rows, the capped form for received ones, all at sequence level."""
    return {"kinds": (types.PPO, types.CAP), "levels": (types.SEQUENCE,), "cap_alpha": options.alpha}


def labels(options: Options) -> tuple[int, str]:
    """Right or wrong."""
    return SUCCESS, "pools rewards of several policies, whose scales differ"


def check(options: Options, run: RunConfig) -> None:
    """Refuses options out of their limits, and objectives and groups that the method does not have.

    Raises:
      ConfigError.
    """
    for field in ("alpha", "delta_step", "warmup_steps"):
        within(f"transfer.hacpo.{field}", getattr(options, field), 0)
    within("transfer.hacpo.delta", options.delta, 0, 1)
    within("transfer.hacpo.capability_floor", options.capability_floor, 0, 1, open_low=True)
    within("transfer.hacpo.capability_ceiling", options.capability_ceiling, 1)
    group_size = next(iter(run.policies.values())).group_size
    for name, policy in run.policies.items():
        if policy.group_size != group_size:
            raise ConfigError(
                f"policies.{name}.group_size={policy.group_size}: with transfer 'hacpo' all policies must have the "
                f"same, here {group_size}"
            )
    trained_with(run, "hacpo", ", which pools rewards", ratio_level="sequence", estimator="grpo", kl_in_reward=False)


def to_score(m: Material) -> None:
    """Nothing: the ratio is to the source."""


def build(m: Material) -> tuple[list[Batch], dict[str, float]]:
    """Own rows, then the received rows of the pool.

    Metrics: `transfer/pooled` received rows trained on; `transfer/uneven` groups of peers left out of the pool because
    their number of rows is another; `transfer/own_baseline` share of pooled problems whose weighted baseline was above
    1; `transfer/capability_ratio` mean factor of received rows.
    """
    rows = assembly.own_rows(m)
    adv, valid = assembly.group_advantages(m, rows, m.reward.ravel())
    surrogate = valid & assembly.trainable(m)
    if not m.received.heard.size:
        return assembly.updates(m, rows, adv, surrogate), {}

    pool, use, uneven = pooled(m)
    to_learner, to_source = capability_ratios(m)
    own_adv, peer_adv, own_baseline = pool_advantages(m, pool, to_learner)
    peer_adv = peer_adv * to_source
    adv = np.where(pool.any(1)[rows.group], own_adv.ravel(), adv)
    received = assembly.received_rows(m, use)
    set_ratios(m, use, received)

    rows = batches.join(rows, received)
    adv = np.concatenate([adv, peer_adv[use]])
    surrogate = np.concatenate([surrogate, received.surr_mask.any(-1)])
    surrogate &= assembly.trainable(m, use)
    out = assembly.updates(m, rows, adv, surrogate)
    for v, batch in enumerate(out):
        batch.clip[batch.source != m.index] = min(1.0, 1.0 - m.options.delta + m.options.delta_step * v), 1.0
    metrics = {"transfer/pooled": float(use.sum()), "transfer/uneven": float(uneven)}
    if use.any():
        metrics["transfer/own_baseline"] = float(own_baseline[pool.any(1)].mean())
        metrics["transfer/capability_ratio"] = float(np.broadcast_to(to_source, use.shape)[use].mean())
    return out, metrics


def pooled(m: Material) -> tuple[np.ndarray, np.ndarray, int]:
    """bool[P, K] received rollouts that count in the pool, bool[P, K] those that are trained on, and how many groups of
    peers were left out because of their number of rows."""
    r = m.received
    judged = r.heard & np.isfinite(r.reward)
    trainable = judged & r.usable & r.trace.valid
    judged_own = np.isfinite(m.reward).any(1)
    pool, uneven = np.zeros(judged.shape, bool), 0
    for j in np.unique(r.source):
        of = r.source == j
        count = judged[:, of].sum(1)
        even = count == m.reward.shape[1]
        uneven += int((~even & trainable[:, of].any(1)).sum())
        pool[:, of] = judged[:, of] & (even & judged_own & trainable[:, of].any(1))[:, None]
    return pool, pool & trainable, uneven


def capability_ratios(m: Material) -> tuple[np.ndarray, np.ndarray]:
    """f64[K], f64[K] clipped ratios of capabilities for each received row: the learner's to the source's, and the
    reverse."""
    o, source = m.options, m.received.source
    if m.step < o.warmup_steps:
        return np.ones(len(source)), np.ones(len(source))
    capability = np.maximum(np.where(np.isfinite(m.capability), m.capability, 1.0), LEAST)
    ratio = capability[m.index] / capability[source]
    bounds = o.capability_floor, o.capability_ceiling
    return np.clip(ratio, *bounds), np.clip(1.0 / ratio, *bounds)


def pool_advantages(m: Material, pool: np.ndarray, omega: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Advantages of own and received rows against the weighted pool.

    Args:
      pool: bool[P, K] rollouts that count. omega: f64[K] weights of their rewards in the baseline.

    Returns:
      f64[P, G], f64[P, K] advantages, 0 where there is no valid reward, and bool[P] whether the baseline is the mean of
      the own rewards.
    """
    own = np.isfinite(m.reward)
    reward = np.concatenate([m.reward, assembly.received_reward(m)], 1)
    there = np.concatenate([own, pool], 1)
    r = np.where(there, reward, 0.0)
    n = np.maximum(there.sum(1), 1)
    mean = r.sum(1) / n
    spread = np.ptp(np.where(there, reward, mean[:, None]), axis=1) > advantages.ZERO_RANGE
    centred = np.where(there, r - mean[:, None], 0.0)
    sd = np.sqrt((centred**2).sum(1) / np.maximum(n - m.config.advantage_ddof, 1))
    weighted = (r * np.concatenate([np.ones(own.shape[1]), omega])).sum(1) / n
    own_mean = r[:, : own.shape[1]].sum(1) / np.maximum(own.sum(1), 1)
    own_baseline = spread & (weighted > 1.0)
    mu = np.where(own_baseline, own_mean, weighted)
    scale = np.where(spread, 1.0 / np.where(spread, sd + m.config.advantage_eps, 1.0), 0.0)
    adv = np.where(there, (r - mu[:, None]) * scale[:, None], 0.0)
    return adv[:, : own.shape[1]], adv[:, own.shape[1] :], own_baseline


def set_ratios(m: Material, use: np.ndarray, rows: Batch) -> None:
    """Gives received rows, in place, their form and the source's mean log-prob as denominator."""
    if not use.any():
        return
    counted, source_sum, source_tokens, _ = assembly.both_sides(m, use, stop=m.received.n[use] == 0)
    rows.surr_mask[:] = counted
    tokens = rows.surr_mask.sum(-1)
    rows.kind[:], rows.level[:] = types.CAP, types.SEQUENCE
    rows.denom_self[:] = False
    rows.seq_denom[:] = tokens * source_sum / np.maximum(source_tokens, 1)
    rows.seq_norm[:] = np.maximum(tokens, 1)
    rows.source_logp[:], rows.source_tokens[:] = source_sum, source_tokens  # of what the row's ratio is over
