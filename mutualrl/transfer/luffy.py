"""LUFFY-style shaping: one right answer of a peer joins the own group, under a surrogate without ratio and clip.

Published (`luffy/verl/verl/mix_src/mix_core_alg.py` and its launch script): the gate is always open; A = r - mean of
the own rewards, for own rows and the external one, without a standard deviation; the external row's objective is
p/(p + gamma) A with p the learner's probability of each token, which lifts unlikely tokens. Constant-length
aggregation; one external row with seven own ones. Our definition: the external row is drawn uniformly from the usable
right answers that were not cut off; a problem without one, or of which no own rollout could be judged, is that of
`none`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl import assembly, batches, types
from mutualrl.assembly import Material
from mutualrl.settings import SUCCESS, RunConfig, trained_with, within
from mutualrl.types import Batch

PUBLISHED = {
    "estimator": "dr_grpo",
    "aggregation": "dr_grpo",
    "entropy_coef": 0.001,
    "kl_coef": 0.0,
    "group_size": 7,
    "lr": 1e-6,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The shape of the external row's objective."""

    gamma: float = 0.1  # p/(p + gamma): the smaller, the more the unlikely tokens weigh


def topics(options: Options) -> tuple[str, ...]:
    """Texts, to be judged by the learner."""
    return ("rollout",)


def forms(options: Options) -> dict:
    """PPO for own rows, the shaped form for external ones."""
    return {"kinds": (types.PPO, types.SHAPE), "shape_gamma": options.gamma}


def labels(options: Options) -> tuple[int, str]:
    """Right or wrong."""
    return SUCCESS, "compares rewards of peers with own ones, whose scales differ"


def check(options: Options, run: RunConfig) -> None:
    """Refuses a gamma that shapes nothing, and estimators other than the method's.

    Raises:
      ConfigError.
    """
    within("transfer.luffy.gamma", options.gamma, 0, open_low=True)
    trained_with(
        run, "luffy", ", which compares rewards of peers with own ones", estimator="dr_grpo", kl_in_reward=False
    )


def to_score(m: Material) -> None:
    """Nothing."""


def build(m: Material) -> tuple[list[Batch], dict[str, float]]:
    """Own rows, then the external ones.

    Metrics: `transfer/external` share of problems with an external row.
    """
    rows = assembly.own_rows(m)
    adv, valid = assembly.group_advantages(m, rows, m.reward.ravel())
    use = chosen(m)
    external = assembly.received_rows(m, use)
    external.kind[:] = types.SHAPE
    own = np.isfinite(m.reward)
    mean = np.where(own, m.reward, 0.0).sum(1) / np.maximum(own.sum(1), 1)
    external_adv = (assembly.received_reward(m) - mean[:, None])[use]
    surrogate = np.concatenate([valid, np.ones(len(external_adv), bool)]) & assembly.trainable(m, use)
    out = assembly.updates(m, batches.join(rows, external), np.concatenate([adv, external_adv]), surrogate)
    return out, {"transfer/external": float(use.any(1).mean())} if use.size else {}


def chosen(m: Material) -> np.ndarray:
    """bool[P, K] the external rows, at most one a problem."""
    possible = assembly.right_rows(m) & np.isfinite(m.reward).any(1)[:, None]
    use = np.zeros(possible.shape, bool)
    for p in np.flatnonzero(possible.any(1)):
        use[p, m.random(p).choice(np.flatnonzero(possible[p]))] = True
    return use
