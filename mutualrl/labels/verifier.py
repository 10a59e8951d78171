"""Ground truth: the grader compares each rollout with the problem's gold answer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mutualrl.rewards.workers import GraderPool
from mutualrl.types import Rollouts, Verdicts


def label(own: Rollouts, cohort: Mapping[str, Rollouts], grader: GraderPool) -> Verdicts:
    """The grader's reward of every rollout; success where it is full (1), unknown where it is not finite.

    `cohort` is not looked at.

    Returns:
      Verdicts f64[P, G] and i8[P, G].
    """
    p, g = own.tokens.shape[:2]
    rewards, _ = grader.grade([t for group in own.text for t in group], [x for x in own.problems for _ in range(g)])
    reward = rewards.reshape(p, g)
    return Verdicts(reward=reward, success=np.where(np.isfinite(reward), reward >= 1.0, -1).astype(np.int8))
