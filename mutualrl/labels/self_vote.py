"""A policy's labels are its own majority votes: TTRL, and with two views Co-rewarding-I.

TTRL (published: `PRIME-RL/TTRL`, 64 votes, 32 rollouts trained on): `n_vote` rollouts of each problem vote, the first
`group_size` of them are trained on. Co-rewarding-I (published: equations 6 to 8): each policy answers a problem and
another wording of it; the vote on either is the label of the other, and both are trained on.
"""

from __future__ import annotations

import dataclasses

from mutualrl import votes
from mutualrl.labels import Needs
from mutualrl.settings import SUCCESS, ConfigError, RunConfig, one_of
from mutualrl.types import Verdicts
from mutualrl.votes import Hearing, Labels, judge

__all__ = ["CO_REWARDING", "PUBLISHED", "REWARDS", "Options", "check", "judge", "label", "needs"]

REWARDS = SUCCESS
PUBLISHED = {"group_size": 32, "kl_coef": 0.001, "lr": 5e-7, "temperature": 1.0}
CO_REWARDING = {"views": 2, "n_vote": 0}  # options of Co-rewarding-I, published with kl_coef 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How many rollouts vote, on what, and how votes are counted."""

    n_vote: int = 64  # rollouts a problem that vote; 0: the `group_size` rollouts that are trained on
    views: int = 1  # 2: a problem and its first other wording label each other
    vote_identity: str = "string"  # equal answers are equal strings, or equal to the `grader`
    min_share: float = 0.0  # a winner must have more than this share of the vote; 0: any winner will do


def needs(options: Options) -> Needs:
    """Own votes."""
    return Needs(votes="own", n_vote=options.n_vote, views=options.views)


def check(options: Options, run: RunConfig) -> None:
    """Refuses fewer votes than rollouts that are trained on, and two views of which a policy has only one.

    Raises:
      ConfigError.
    """
    votes.check(run, options)
    one_of("label.self_vote.views", options.views, (1, 2))
    for name, policy in run.policies.items():
        if options.n_vote and options.n_vote < policy.group_size:
            raise ConfigError(
                f"label.self_vote.n_vote={options.n_vote}: must be 0 or at least policies.{name}.group_size="
                f"{policy.group_size}"
            )
        if options.views == 2 and policy.view:
            raise ConfigError(f"policies.{name}.view={policy.view}: must be 0 with label.self_vote.views=2")


def label(hearing: Hearing) -> Verdicts:
    """Rewards by the own vote; with two views, whose problems are the P wordings of each in turn, crosswise."""
    found = votes.elect(hearing.votes[hearing.own.policy], hearing.options.min_share)
    if hearing.options.views == 2:
        found = crossed(found)
    return hearing.by_label(found)


def crossed(labels: Labels) -> Labels:
    """The labels of the second half of the problems for the first, and the reverse."""
    half = len(labels.answers) // 2
    order = [*range(half, 2 * half), *range(half)]
    return Labels(tuple(labels.answers[i] for i in order), labels.share[order])
