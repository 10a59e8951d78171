"""XGRPO: own rows only, measured against the rewards of all policies on the same problem (our definition of it;
methods 4.2). Only group sums travel.

With n, S1, S2, min, max of the valid rewards of the learner and every peer heard:

    mu_pool = sum S1 / sum n        var_pool = max(0, (sum S2 - n mu_pool²)/(n - ddof))
    A_i = (r_i - mu)/(sd + eps)     mu = (1 - w) mu_own + w mu_pool,  w: 1 `pool`, 0 `own`, rho `shrink`

A group has no spread, and A is 0, if the set that supplies the standard deviation has none (by min and max).

What to know: the mean of A over a group is w (mu_own - mu_pool)/(sd + eps), not 0. A group that fails as a whole is
pushed down by one common amount where a peer succeeds, one that is right as a whole is pushed up where a peer fails,
and no mass goes to a solution that only the peer knows. Normalising each policy by its own group is the published
counter-argument (Dr. MAS, arXiv 2602.08847). With mean and std `own` this is GRPO.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl import advantages, assembly, types
from mutualrl.assembly import Material
from mutualrl.settings import SUCCESS, RunConfig, one_of, trained_with, within
from mutualrl.types import Batch

ALLOWED = {"mean": ("pool", "own", "shrink"), "std": ("pool", "own")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How peers' rewards enter the baseline."""

    mean: str = "pool"  # or `own`, `shrink`
    rho: float = 1.0  # weight of the pool's mean with `shrink`
    std: str = "pool"  # or `own`


def topics(options: Options) -> tuple[str, ...]:
    """Group sums; no texts."""
    return ("stats",)


def forms(options: Options) -> dict:
    """PPO surrogates only."""
    return {"kinds": (types.PPO,)}


def labels(options: Options) -> tuple[int, str]:
    """Right or wrong."""
    return SUCCESS, "pools rewards of several policies, whose scales differ"


def check(options: Options, run: RunConfig) -> None:
    """Refuses what does not exist, estimators without a pooled form, and rewards that mean something else for every
    policy.

    Raises:
      ConfigError.
    """
    for field, allowed in ALLOWED.items():
        one_of(f"transfer.xgrpo.{field}", getattr(options, field), allowed)
    within("transfer.xgrpo.rho", options.rho, 0, 1)
    trained_with(run, "xgrpo", ", which pools rewards", estimator="grpo", kl_in_reward=False)


def to_score(m: Material) -> None:
    """Nothing."""


def build(m: Material) -> tuple[list[Batch], dict[str, float]]:
    """The batches of `none` with pooled advantages.

    Metrics: `transfer/pooled` share of problems for which a peer's sums came; `transfer/sender_verdicts` 1 where
    rewards are by labels: the sums are of what the senders' labels say, which may be other ones.
    """
    rows = assembly.own_rows(m)
    adv, valid = assembly.group_advantages(m, rows, m.reward.ravel())
    shared = np.zeros(len(m.own.problems), bool)
    for stats in m.stats:
        shared |= stats.n > 0
    adv = np.where(shared[rows.group], pooled_advantages(m).ravel(), adv)
    metrics = {"transfer/pooled": float(shared.mean())} if m.stats else {}
    if m.stats and m.verdicts.labels is not None:
        metrics["transfer/sender_verdicts"] = 1.0
    return assembly.updates(m, rows, adv, valid & assembly.trainable(m)), metrics


def pooled_advantages(m: Material) -> np.ndarray:
    """f64[P, G] advantages by the formula above; 0 on invalid rewards."""
    valid = np.isfinite(m.reward)
    own = np.where(valid, m.reward, 0.0)
    n_own = valid.sum(1)
    n, s1, s2 = n_own.astype(np.float64), own.sum(1), (own**2).sum(1)
    low, high = np.where(valid, m.reward, np.inf).min(1), np.where(valid, m.reward, -np.inf).max(1)
    mean_own = s1 / np.maximum(n_own, 1)
    centred = np.where(valid & (high - low > advantages.ZERO_RANGE)[:, None], m.reward - mean_own[:, None], 0.0)
    if m.options.std == "own":
        var = (centred**2).sum(1) / np.maximum(n_own - m.config.advantage_ddof, 1)
        spread = high - low > advantages.ZERO_RANGE
    for stats in m.stats:
        there = stats.n > 0  # the other sums may be anything
        n += stats.n
        s1, s2 = s1 + np.where(there, stats.sum, 0.0), s2 + np.where(there, stats.sumsq, 0.0)
        low = np.where(there, np.minimum(low, stats.min), low)
        high = np.where(there, np.maximum(high, stats.max), high)
    mean = s1 / np.maximum(n, 1)
    if m.options.std == "pool":
        var = np.maximum(s2 - n * mean**2, 0.0) / np.maximum(n - m.config.advantage_ddof, 1)
        spread = high - low > advantages.ZERO_RANGE
    share = {"pool": 1.0, "own": 0.0, "shrink": m.options.rho}[m.options.mean]
    scale = np.where(spread, 1.0 / (np.sqrt(var) + np.where(spread, m.config.advantage_eps, 1.0)), 0.0)
    return np.where(valid, (centred + share * (mean_own - mean)[:, None]) * scale[:, None], 0.0)
