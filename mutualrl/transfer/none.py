"""No transfer: GRPO on the policy's own rollouts (published; the loss as in `mutualrl.losses`)."""

from __future__ import annotations

import dataclasses

from mutualrl import assembly, types
from mutualrl.assembly import Material
from mutualrl.settings import OWN_SCALE, RunConfig
from mutualrl.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Nothing to set."""


def topics(options: Options) -> tuple[str, ...]:
    """Nothing is sent."""
    return ()


def forms(options: Options) -> dict:
    """PPO surrogates only."""
    return {"kinds": (types.PPO,)}


def labels(options: Options) -> tuple[int, str]:
    """Any: rewards are compared within the own group only."""
    return OWN_SCALE, ""


def check(options: Options, run: RunConfig) -> None:
    """Goes with every run."""


def to_score(m: Material) -> None:
    """Nothing beyond what the objective itself needs."""


def build(m: Material) -> tuple[list[Batch], dict[str, float]]:
    """One Batch an optimiser update, rows problem-major, over whole problems. No metrics of its own."""
    rows = assembly.own_rows(m)
    adv, valid = assembly.group_advantages(m, rows, m.reward.ravel())
    return assembly.updates(m, rows, adv, valid & assembly.trainable(m)), {}
