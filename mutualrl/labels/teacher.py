"""Co-rewarding-II: labels are the votes of a teacher that slowly follows the policy and is its KL reference too.

After each step the teacher moves towards the policy, in float32 (published; 1 - 1e-4 does not exist in bfloat16):

    teacher <- a policy + (1 - a) teacher     a(t) = end + (start - end)/2 (1 + cos(pi t/T)),  t steps done of T

End points are those of the paper's text and table, the form is the code's (our choice between published accounts that
differ: the printed equation does not reach the table's values). PRESETS has the released script's and the code's own.
"""

from __future__ import annotations

import dataclasses
import math

from mutualrl import votes
from mutualrl.labels import Needs
from mutualrl.settings import SUCCESS, RunConfig, within
from mutualrl.types import Verdicts
from mutualrl.votes import Hearing, judge

__all__ = ["PRESETS", "PUBLISHED", "REWARDS", "Options", "check", "judge", "label", "needs", "policy_weight"]

REWARDS = SUCCESS
PUBLISHED = {"kl_coef": 0.001}
PRESETS = {"paper": {}, "script": {"end": 1e-5}, "code": {"start": 0.3, "end": 0.05, "every": 30}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How fast the teacher follows, and how its votes are counted."""

    n_vote: int = 8  # the teacher's rollouts of each problem
    start: float = 0.01  # weight a of the policy in the first update of the teacher
    end: float = 1e-4  # and in the last
    every: int = 1  # steps between updates
    vote_identity: str = "string"  # equal answers are equal strings, or equal to the `grader`
    min_share: float = 0.0  # a winner must have more than this share of the vote; 0: any winner will do


def needs(options: Options) -> Needs:
    """The teacher's votes."""
    return Needs(votes="own", n_vote=options.n_vote, teacher=True)


def check(options: Options, run: RunConfig) -> None:
    """Refuses values outside their limits.

    Raises:
      ConfigError.
    """
    votes.check(run, options)
    for field in ("n_vote", "every"):
        within(f"label.teacher.{field}", getattr(options, field), 1)
    for field in ("start", "end"):
        within(f"label.teacher.{field}", getattr(options, field), 0, 1)


def label(hearing: Hearing) -> Verdicts:
    """Rewards by the teacher's vote."""
    return hearing.by_label(votes.elect(hearing.votes[hearing.own.policy], hearing.options.min_share))


def policy_weight(options: Options, step: int, steps: int) -> float:
    """a after cohort step `step` (from 0) of `steps`; 0 where the teacher is not updated."""
    if (step + 1) % options.every:
        return 0.0
    return options.end + (options.start - options.end) / 2 * (1 + math.cos(math.pi * step / steps))
