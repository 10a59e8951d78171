"""Co-RL: a policy's labels are the majority votes of the policy before it (published: the Co-RL code).

Policies stand in a ring, in the order that a config keeps them in, which is alphabetical: the label of policy i is the
vote of policy i - 1 on the same problem, that of the first the vote of the last. Own answers never vote.
"""

from __future__ import annotations

import dataclasses

from mutualrl import votes
from mutualrl.labels import Needs
from mutualrl.settings import SUCCESS, ConfigError, RunConfig
from mutualrl.types import Verdicts
from mutualrl.votes import Hearing, judge

__all__ = ["PUBLISHED", "REWARDS", "Options", "check", "judge", "label", "needs"]

REWARDS = SUCCESS
PUBLISHED = {"lr": 1e-6, "kl_coef": 0.0, "temperature": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How votes are counted."""

    vote_identity: str = "string"  # equal answers are equal strings, or equal to the `grader`
    min_share: float = 0.0  # a winner must have more than this share of the vote; 0: any winner will do


def needs(options: Options) -> Needs:
    """The predecessor's votes."""
    return Needs(votes="predecessor")


def check(options: Options, run: RunConfig) -> None:
    """Refuses a policy without a predecessor other than itself.

    Raises:
      ConfigError.
    """
    votes.check(run, options)
    if len(run.policies) < 2:
        raise ConfigError("label.name='peer_vote': needs at least two policies; with one it would be self_vote")


def label(hearing: Hearing) -> Verdicts:
    """Rewards by the predecessor's votes; no label where they did not come."""
    place = hearing.policies.index(hearing.own.policy)
    vote = hearing.votes.get(hearing.policies[place - 1])
    found = votes.no_labels(len(hearing.own.problems)) if vote is None else votes.elect(vote, hearing.options.min_share)
    return hearing.by_label(found)
