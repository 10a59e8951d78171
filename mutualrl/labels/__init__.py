"""Label sources: who says what is right. One file a source, found by its module name; numpy only, never jax.

A source is a module of this package with

    Options                   a frozen dataclass of its settings
    REWARDS                   what its rewards are good for: `settings.SUCCESS` (right or wrong) or `OWN_SCALE`
    needs(options)            a `Needs`: what it judges by, beside the rollouts
    check(options, run)       raises ConfigError for what cannot work
    label(hearing)            Verdicts of a policy's own rollouts, from a `votes.Hearing`
    judge(record, own, verdicts, grader, same_source)
                              Verdicts of a peer's `RolloutRecord` on the same problems, in the view of the learner
                              whose rollouts `own` are and have these `verdicts`; `same_source`: it was labelled in
                              the same way
    PUBLISHED                 optional: settings of the policies that the method was published with

Ground truth, where the data has it, is seen by `verifier` alone; with every other source it feeds metrics only.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a label source judges by.

    Attributes:
      gold: gold answers.
      votes: whose majority votes: '' nobody's, `own`, `predecessor` (the policy before it, cyclic) or `all`.
      n_vote: rollouts a problem that vote, of which the first `group_size` are trained on; 0: the group.
      signal: of `types.SIGNALS`, computed where rollouts are sampled.
      teacher: the votes are those of a slowly following copy of the policy, `n_vote` rollouts a problem.
      views: wordings of each problem that are sampled and trained on, 1 or 2.
    """

    gold: bool = False
    votes: str = ""
    n_vote: int = 0
    signal: str = ""
    teacher: bool = False
    views: int = 1
