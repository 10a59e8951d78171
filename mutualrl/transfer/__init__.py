"""Transfer regimes: what a policy learns from its peers. One file a regime, found by its module name; never jax.

A regime is a module of this package with

    Options                        frozen keyword-only dataclass: `config.transfer.<regime>.<option>`, with defaults
    topics(options) -> tuple       what policies send each other: names of `mutualrl.experience.TOPICS`; nothing else is
    forms(options) -> dict         fields of `mutualrl.losses.LossSettings` that its batches need (`kinds`, ...)
    check(options, run) -> None    raises `mutualrl.config.ConfigError` for a setting that cannot work
    to_score(material) -> Batch    rows whose log-probs it needs from the learner at the start of the step, or None
    build(material) -> (batches, metrics)     one padded Batch an optimiser update, and numbers worth a look

and, where the published method sets the objective too, PUBLISHED: settings of `config.policy` as published.
`mutualrl.assembly` has the Material and what all regimes share. Without peers the batches of every regime but
`sft`, a control, are those of `none`, bit for bit.
"""
