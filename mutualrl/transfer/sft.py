"""A control: plain supervised fine-tuning on peers' right answers (methods 8.5).

Heard from a log that is restricted to the rows another run trained on (`exchange.logs.<name>.used_by`), it trains on
the same certificates as that run, without reinforcement learning. Every usable, right answer that was not cut off is
in the NLL term, every token of an update equal. The policy still samples, for its metrics; its own rows carry no
weight. So unlike with every other regime, nothing at all is learnt without peers.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl import assembly, batches, types
from mutualrl.assembly import Material
from mutualrl.settings import SUCCESS, RunConfig, trained_with, within
from mutualrl.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How strongly."""

    nll_coef: float = 1.0  # weight of the mean NLL over the tokens of an update's certificates


def topics(options: Options) -> tuple[str, ...]:
    """Texts, to be judged by the learner."""
    return ("rollout",)


def forms(options: Options) -> dict:
    """The NLL term only."""
    return {"kinds": (types.PPO,)}


def labels(options: Options) -> tuple[int, str]:
    """Right or wrong."""
    return SUCCESS, "counts successes, which they do not tell"


def check(options: Options, run: RunConfig) -> None:
    """Refuses terms of the loss that own rows would carry, and a weight of nothing.

    Raises:
      ConfigError.
    """
    within("transfer.sft.nll_coef", options.nll_coef, 0, open_low=True)
    trained_with(run, "sft", kl_coef=0, entropy_coef=0)


def to_score(m: Material) -> None:
    """Nothing."""


def build(m: Material) -> tuple[list[Batch], dict[str, float]]:
    """Own rows without weight, then the certificates.

    Metrics: `transfer/certificates` rows trained on.
    """
    use = assembly.right_rows(m)
    rows = batches.join(assembly.own_rows(m), assembly.received_rows(m, use))
    nothing = np.zeros(len(rows.mask))
    out = assembly.updates(m, rows, nothing, nothing.astype(bool))
    for batch in out:
        certificates = batch.source != m.index
        tokens = batch.mask[certificates].sum()
        batch.nll_weight[certificates] = m.options.nll_coef / max(1, tokens)
    return out, {"transfer/certificates": float(use.sum())}
