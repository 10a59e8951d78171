"""Transfer regimes: what a policy learns from its peers. One file a regime, found by its module name; never jax.

A regime is a module of this package with

    KINDS: tuple of surrogate forms its batches contain (codes of `mutualrl.types`)
    build(own, cohort, verdicts, config, index, old_logp, ref_logp) -> list[Batch]

which turns typed records into one padded `Batch` for each optimiser update of the step.
"""
