"""From what a policy sampled and heard in a step to the batches of its updates: what all transfer regimes share.

Host-side numpy. A regime chooses rows, gives them advantages and says which belong to the surrogate; `updates` cuts
them into optimiser updates by whole problems and normalises the row weights over each update. A ratio's denominator
is by default the learner itself at the start of the step (`denom_self`); where a step makes several updates, the
trainer fills in those log-probs before the first one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mutualrl import advantages, batches, seeds, types
from mutualrl.settings import PolicyConfig
from mutualrl.tokenizers import bridge
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.types import Batch, GroupStats, Received, Rollouts, Trace, Verdicts


@dataclasses.dataclass(frozen=True)
class Material:
    """What one policy has to learn from in one step.

    Attributes:
      own: the policy's rollouts. verdicts: what its label source says of them.
      reward: f64[P, G] rewards with the policy's shaping; NaN where a rollout could not be judged.
      config: its objective. index: its place in the cohort. tokenizer: its tokenizer.
      options: the regime's `Options`.
      step, seed: the cohort step, and the seed of the run.
      received: peers' rollouts, if the regime asks for the topic `rollout`; else K is 0.
      stats: group sums of each peer heard, if the regime asks for `stats`; n is 0 where a peer has no such group.
      capability: f64[sources] share of positive rewards over the last completed steps by source index, NaN before
        any history, if the regime asks for `capability`.
      own_trace: the own rollouts over their byte spans, [P, G]; teachers: the same texts as each peer scores them,
        if the regime asks for `teacher_score`.
      scored: f32[B, T] log-probs of the rows that the regime's `to_score` returned, under the policy at the start of
        the step; None where it returned none.
    """

    own: Rollouts
    verdicts: Verdicts
    reward: np.ndarray
    config: PolicyConfig
    index: int
    tokenizer: Tokenizer
    options: Any
    step: int
    seed: int
    received: Received
    stats: tuple[GroupStats, ...] = ()
    capability: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    own_trace: Trace | None = None
    teachers: tuple[Trace, ...] = ()
    scored: np.ndarray | None = None

    def random(self, problem: int) -> np.random.Generator:
        """The generator of a choice about one problem: depends on run, step, learner and problem, on nothing else."""
        return seeds.generator(self.seed, self.step, self.own.policy, self.own.problems[problem].id)


def no_peers(problems: int, length: int) -> Received:
    """No peers: P problems with K = 0 rows."""
    row = lambda dtype, *shape: np.zeros((problems, 0, *shape), dtype)  # noqa: E731
    return Received(
        source=np.zeros(0, np.int32),
        sample=np.zeros(0, np.int32),
        live=np.zeros(0, bool),
        heard=row(bool),
        usable=row(bool),
        reward=row(np.float64),
        success=row(np.int8),
        tokens=row(np.int32, length),
        mask=row(bool, length),
        surr_mask=row(bool, length),
        ends=row(np.int32, length),
        n=row(np.int32),
        finish=row(np.int8),
        trace=Trace(
            text=row(np.uint8, 1),
            text_bytes=row(np.int32),
            ends=row(np.int32, 1),
            n=row(np.int32),
            logp=row(np.float32, 1),
            eos_logp=row(np.float32),
            valid=row(bool),
        ),
    )


def shaped_reward(
    own: Rollouts,
    verdicts: Verdicts,
    config: PolicyConfig,
    old_logp: np.ndarray | None = None,
    ref_logp: np.ndarray | None = None,
) -> np.ndarray:
    """Rewards with the overlong penalty and the KL in the reward (summed k1, detached), where they are on.

    Verdicts are not changed by shaping.

    Args:
      old_logp, ref_logp: f32[P·G, T] under the snapshot and the reference; with `kl_in_reward`. A policy that is never
        trained has none.

    Returns:
      f64[P, G].
    """
    reward = verdicts.reward + length_penalty(own.lengths, config)
    if config.kl_in_reward and config.kl_coef and not config.frozen:
        k1 = np.where(own.mask, (old_logp - ref_logp).reshape(own.mask.shape), 0.0).sum(-1, dtype=np.float64)
        reward = reward - config.kl_coef * k1
    return reward


def length_penalty(lengths: np.ndarray, config: PolicyConfig) -> np.ndarray:
    """f64, shape of `lengths`: the overlong penalty (0 or less) of completions of so many tokens; 0 where it is off."""
    if not config.overlong_factor:
        return np.zeros(np.shape(lengths))
    return advantages.overlong_penalty(lengths, config.max_new_tokens, config.overlong_buffer, config.overlong_factor)


def own_rows(m: Material) -> Batch:
    """The own rollouts as rows, problem-major, with the policy's clip and ratio level."""
    rows = batches.own_rows(m.own, m.index)
    return _on_terms(rows, m.config)


def received_rows(m: Material, use: np.ndarray) -> Batch:
    """The chosen received rows (bool[P, K], usable ones) with the policy's clip, token level, ratio to the learner's
    own snapshot."""
    rows = _on_terms(batches.received_rows(m.own, m.received, use), m.config)
    rows.level[:] = types.TOKEN
    return rows


def _on_terms(rows: Batch, config: PolicyConfig) -> Batch:
    rows.clip[:] = config.clip_low, config.clip_high
    rows.level[:] = types.SEQUENCE if config.ratio_level == "sequence" else types.TOKEN
    return rows


def received_reward(m: Material) -> np.ndarray:
    """f64[P, K] rewards of the received rows with the learner's length penalty; NaN where nothing valid came."""
    lengths = np.where(m.received.usable, m.received.mask.sum(-1), 0)
    return np.where(m.received.heard, m.received.reward + length_penalty(lengths, m.config), np.nan)


def right_rows(m: Material) -> np.ndarray:
    """bool[P, K] received rows that can be imitated: right by the learner's labels, usable, and not cut off."""
    r = m.received
    return r.usable & (r.success == 1) & np.isfinite(r.reward) & (r.finish != types.LENGTH)


def both_sides(
    m: Material, use: np.ndarray, stop: np.ndarray | bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What of the chosen received rows (bool[P, K], with a trace) both sides have a log-prob of: all of a text, unless
    it was cut to fit the learner's row, and the terminal stop id if the source ended by one.

    Args:
      stop: bool or bool[R], whether the stop id counts.

    Returns:
      bool[R, T] the learner's tokens; f64[R] the source's log-prob of the same in nats; i[R] over how many of its
      tokens; i[R] bytes.
    """
    r = m.received
    ends = r.ends[use]
    aligned = bridge.align(r.trace.at(use), ends, r.n[use], granularity="finest")  # sums over a row depend on no option
    counted = r.surr_mask[use] & aligned.known & ((aligned.group >= 0) | np.reshape(stop, (-1, 1)))
    tokens = (aligned.source_group >= 0).sum(-1) + (counted & (aligned.group < 0)).sum(-1)
    text_bytes = np.where(aligned.group >= 0, ends, 0).max(-1, initial=0)
    return counted, np.where(counted, aligned.logp, 0.0).sum(-1), tokens, text_bytes


def trainable(m: Material, use: np.ndarray | None = None) -> np.ndarray:
    """bool[B] rows of `own_rows` (then of `received_rows(use)`) that `mask_truncated` leaves in the loss."""
    finish = m.own.finish.ravel()
    if use is not None:
        finish = np.concatenate([finish, m.received.finish[use]])
    return (finish != types.LENGTH) | (not m.config.mask_truncated)


def problems_of_updates(m: Material, last: np.ndarray | None = None) -> list[np.ndarray]:
    """Indices of the problems of each optimiser update, in order: `updates_per_step` of them, fewer if there are fewer
    problems.

    Args:
      last: bool[P] problems to be put last (GRAFT); None keeps the order.
    """
    p = len(m.own.problems)
    order = np.arange(p) if last is None else np.argsort(last, kind="stable")
    return np.array_split(order, min(m.config.updates_per_step, p))


def group_advantages(
    m: Material, rows: Batch, reward: np.ndarray, last: np.ndarray | None = None, *, by_source: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages of rows within their problem, by the policy's estimator, and whether each row has a valid reward.

    Estimators that scale over the whole update see each update on its own.

    Args:
      reward: f64[B] of the rows.
      last: as in `problems_of_updates`.
      by_source: within their problem and source.

    Returns:
      f64[B], bool[B].
    """
    adv, valid = np.zeros(len(reward)), np.zeros(len(reward), bool)
    for problems in problems_of_updates(m, last):
        index = np.flatnonzero(np.isin(rows.group, problems))
        keys = [(m.own.problems[g].id, s if by_source else None) for g, s in zip(rows.group[index], rows.source[index])]
        adv[index], valid[index] = advantages.group_advantages(
            reward[index], keys, m.config.estimator, ddof=m.config.advantage_ddof, eps=m.config.advantage_eps
        )
    return adv, valid


def updates(
    m: Material, rows: Batch, adv: np.ndarray, surrogate: np.ndarray, *, last: np.ndarray | None = None
) -> list[Batch]:
    """The batches of a step: rows cut into updates, advantages and normalised weights filled in.

    Args:
      rows: own rows, then whatever else is trained on.
      adv: f64[B] or f64[B, T], with non-negative row weights folded in.
      surrogate: bool[B] members of the surrogate term. The KL term takes the same rows, peers' only with
        `kl_rows="all"`. Rows outside it (certificates) carry no weight yet.
      last: as in `problems_of_updates`.

    Returns:
      one Batch an update.
    """
    config = m.config
    rows.adv[:] = adv if adv.ndim == 2 else adv[:, None]
    surrogate = surrogate.copy()
    if config.drop_zero_variance:
        spread = np.zeros(len(m.own.problems), bool)
        np.logical_or.at(spread, rows.group, (rows.adv != 0).any(-1) & surrogate)
        surrogate &= spread[rows.group]
    out = []
    for problems in problems_of_updates(m, last):
        index = np.flatnonzero(np.isin(rows.group, problems))
        batch, keep = batches.take(rows, index), surrogate[index]
        batch.surr_weight[:] = advantages.row_weights(
            config.aggregation, batch.surr_mask.sum(-1), keep, config.max_new_tokens
        )
        if config.kl_coef and not config.kl_in_reward:
            anchored = keep & ((batch.source == m.index) | (config.kl_rows == "all"))
            weight = advantages.row_weights(config.aggregation, batch.mask.sum(-1), anchored, config.max_new_tokens)
            batch.kl_weight[:] = config.kl_coef * weight
        out.append(batch)
    return out
