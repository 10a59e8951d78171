"""Intuitor: the reward is how sure the policy is of its tokens (published).

    mean over tokens of logsumexp(z) - mean_v z     z: the logits that predict the token, v over the real vocabulary

which is KL(uniform || p) + log V; the constant changes no advantage. Logits are raw, at temperature 1; Co-RL's port
divides them by the sampling temperature. It says nothing about right or wrong, and has another scale in every
vocabulary, so it does not go with regimes that count successes or pool rewards.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl.experience import RolloutRecord
from mutualrl.labels import Needs
from mutualrl.rewards.workers import GraderPool
from mutualrl.settings import OWN_SCALE, RunConfig
from mutualrl.types import Rollouts, Verdicts
from mutualrl.votes import Hearing

REWARDS = OWN_SCALE
PUBLISHED = {"kl_coef": 0.005, "group_size": 8, "lr": 3e-6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Of which logits."""

    divide_by_temperature: bool = False  # as Co-RL's port does


def needs(options: Options) -> Needs:
    """The number itself, from the sampler."""
    return Needs(signal="self_certainty_tempered" if options.divide_by_temperature else "self_certainty")


def check(options: Options, run: RunConfig) -> None:
    """Goes with every run whose regime takes such rewards."""


def label(hearing: Hearing) -> Verdicts:
    """The signal as the reward; success unknown."""
    return _unknown(hearing.own.signal.astype(np.float64), tuple(map(tuple, hearing.answers)))


def judge(record: RolloutRecord, own: Rollouts, verdicts: Verdicts, grader: GraderPool, same_source: bool) -> Verdicts:
    """A peer's own number where it has one; NaN where it was labelled otherwise."""
    return _unknown(np.where(same_source & record.valid, record.reward, np.nan))


def _unknown(reward: np.ndarray, answers: tuple | None = None) -> Verdicts:
    return Verdicts(reward=reward, success=np.full(reward.shape, -1, np.int8), answers=answers)
