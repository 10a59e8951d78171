"""Label sources: who says what is right. One file a source, found by its module name; numpy only, never jax.

A source is a module of this package with

    label(own, cohort, grader) -> Verdicts

where `own` are the receiver's rollouts, `cohort` the rollouts of every policy by name (own included) on the same
problems, and `grader` a `mutualrl.rewards.workers.GraderPool`.
"""
