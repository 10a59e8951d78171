"""Label sources: who says what is right. One file a source, found by its module name; numpy only, never jax.

A source is a module of this package with

    label(own, grader) -> Verdicts                      of the policy's own rollouts
    judge(record, own, verdicts, grader, same_source) -> Verdicts
                                                        of a peer's `RolloutRecord` on the same problems, in the view of
                                                        the learner whose rollouts `own` are and have these `verdicts`;
                                                        `same_source`: it was labelled in the same way

with `grader` a `mutualrl.rewards.workers.GraderPool`.
"""
