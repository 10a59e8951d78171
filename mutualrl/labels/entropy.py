"""RENT: the reward is minus the entropy of the distributions that a rollout's tokens were drawn from (published).

    -mean over all completion tokens of H(softmax z)     z: raw logits that predict the token, over the real vocabulary

It says nothing about right or wrong, so it does not go with regimes that count successes or pool rewards.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl.labels import Needs
from mutualrl.labels.self_certainty import judge
from mutualrl.settings import OWN_SCALE, RunConfig
from mutualrl.types import Verdicts
from mutualrl.votes import Hearing

__all__ = ["PUBLISHED", "REWARDS", "UNPARSEABLE", "Options", "check", "judge", "label", "needs"]

REWARDS = OWN_SCALE
PUBLISHED = {"kl_coef": 0.001, "group_size": 5, "lr": 1e-6}
UNPARSEABLE = -7.0  # nats; published option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What becomes of rollouts without an answer."""

    penalise_unparseable: bool = False  # reward -7 where the grader finds no answer


def needs(options: Options) -> Needs:
    """The entropies, from the sampler."""
    return Needs(signal="entropy")


def check(options: Options, run: RunConfig) -> None:
    """Goes with every run whose regime takes such rewards."""


def label(hearing: Hearing) -> Verdicts:
    """Minus the mean entropy as the reward; success unknown."""
    reward = -hearing.own.signal.astype(np.float64)
    if hearing.options.penalise_unparseable:
        found = np.array([[bool(a) for a in given] for given in hearing.answers])
        reward = np.where(found, reward, UNPARSEABLE)
    return Verdicts(
        reward=reward, success=np.full(reward.shape, -1, np.int8), answers=tuple(map(tuple, hearing.answers))
    )
