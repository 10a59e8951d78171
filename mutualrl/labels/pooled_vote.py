"""One vote of the whole cohort, each policy's share weighted by how sure it is (idea of RLCCF; weights our definition).

score(a) = sum_j w_j count_j(a)/n_j     w_j: policy j's own top share, n_j its answers that can be read
"""

from __future__ import annotations

import dataclasses

from mutualrl import votes
from mutualrl.labels import Needs
from mutualrl.settings import SUCCESS, ConfigError, RunConfig
from mutualrl.types import Verdicts
from mutualrl.votes import Hearing, judge

__all__ = ["REWARDS", "Options", "check", "judge", "label", "needs"]

REWARDS = SUCCESS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Who votes, and how votes are counted."""

    exclude_self: bool = False  # a policy's own answers do not vote on its labels
    uniform: bool = False  # every policy has the same weight
    vote_identity: str = "string"  # equal answers are equal strings, or equal to the `grader`
    min_share: float = 0.0  # the winner's score over the sum of scores must exceed this; 0: any winner will do


def needs(options: Options) -> Needs:
    """All votes."""
    return Needs(votes="all")


def check(options: Options, run: RunConfig) -> None:
    """Refuses a cohort of one without itself.

    Raises:
      ConfigError.
    """
    votes.check(run, options)
    if len(run.policies) < 2 and options.exclude_self:
        raise ConfigError("label.pooled_vote.exclude_self=True: nobody is left to vote; needs at least two policies")


def label(hearing: Hearing) -> Verdicts:
    """Rewards by the pooled vote of those whose votes came."""
    o, me = hearing.options, hearing.own.policy
    voters = [v for name, v in hearing.votes.items() if name != me or not o.exclude_self]
    same = votes.same_by(hearing.grader, hearing.own.problems) if o.vote_identity == "grader" else None
    if not voters:
        return hearing.by_label(votes.no_labels(len(hearing.own.problems)))
    return hearing.by_label(votes.pool(voters, uniform=o.uniform, min_share=o.min_share, same=same))
