"""Rollouts, own and received, as rows of a padded `Batch`. Host-side numpy."""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl import types
from mutualrl.types import Batch, Received, Rollouts


def own_rows(rollouts: Rollouts, source: int) -> Batch:
    """The policy's own rollouts as P·G rows, ids as sampled, every coefficient still 0.

    Rows are problem-major: row p·G + g is rollout g of problem p.
    """
    p, g, t = rollouts.tokens.shape
    rows = completions(
        rollouts, np.repeat(np.arange(p), g), rollouts.tokens.reshape(-1, t), rollouts.mask.reshape(-1, t)
    )
    rows.source[:] = source
    rows.sample[:] = np.tile(np.arange(g), p)
    rows.sampler_logp[:] = np.where(rows.mask, rollouts.logprobs.reshape(-1, t), np.nan)
    return rows


def received_rows(rollouts: Rollouts, received: Received, use: np.ndarray) -> Batch:
    """The chosen received rows, each behind the learner's own prompt of its problem, every coefficient still 0.

    Args:
      rollouts: the learner's own, for the prompts.
      use: bool[P, K], usable rows only.

    Returns:
      rows in the order of `np.nonzero(use)`. `seq_denom` and `seq_norm` stay those of an own row; `source_logp` and
      `source_tokens` are NaN where the row was cut on retokenisation, since the source's are of the whole text.
    """
    problem, k = np.nonzero(use)
    rows = completions(rollouts, problem, received.tokens[use], received.mask[use])
    rows.surr_mask[:] = received.surr_mask[use]
    rows.source[:], rows.sample[:] = received.source[k], received.sample[k]
    trace = received.trace
    all_text = received.ends[use][:, -1] == trace.text_bytes[use]
    stop = rows.mask.sum(-1) > received.n[use]
    traced = trace.valid[use] & all_text & (stop | np.isnan(trace.eos_logp[use]))
    rows.source_logp[:] = np.where(traced, trace.total[use], np.nan)
    rows.source_tokens[:] = np.where(traced, trace.tokens[use], np.nan)
    return rows


def completions(rollouts: Rollouts, problem: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> Batch:
    """Rows of given completions behind the prompts of given problems; on the policy's own terms (PPO, token level,
    ratio to itself), with every coefficient 0.

    Args:
      problem: i[B] index of each row's problem. tokens, mask: [B, T] completions, right-padded.
    """
    b, t = tokens.shape
    prompt, prompt_positions = rollouts.prompt[problem], rollouts.prompt_positions[problem]
    first = prompt_positions.max(-1, keepdims=True) + 1  # position of the first completion token
    positions = np.where(mask, first + np.arange(t), types.PAD_POSITION)
    zeros = lambda: np.zeros(b, np.float32)  # noqa: E731
    unknown = lambda: np.full(b, np.nan, np.float32)  # noqa: E731
    return Batch(
        tokens=np.concatenate([prompt, tokens], 1).astype(np.int32),
        positions=np.concatenate([prompt_positions, positions], 1).astype(np.int32),
        mask=mask.astype(bool),
        surr_mask=mask.astype(bool),
        adv=np.zeros((b, t), np.float32),
        denom_logp=np.zeros((b, t), np.float32),
        denom_self=np.ones(b, bool),
        sampler_logp=np.full((b, t), np.nan, np.float32),
        ref_logp=np.zeros((b, t), np.float32),
        surr_weight=zeros(),
        nll_weight=zeros(),
        kl_weight=zeros(),
        kind=np.full(b, types.PPO, np.int8),
        level=np.full(b, types.TOKEN, np.int8),
        clip=np.full((b, 2), 0.2, np.float32),
        seq_denom=unknown(),
        seq_norm=mask.sum(-1).astype(np.float32),
        is_weight=np.ones((b, t), np.float32),
        source=np.zeros(b, np.int32),
        sample=np.zeros(b, np.int32),
        group=problem.astype(np.int32),
        source_logp=unknown(),
        source_tokens=unknown(),
    )


def join(*parts: Batch) -> Batch:
    """The rows of all parts, in order."""
    return Batch(**{f.name: np.concatenate([getattr(x, f.name) for x in parts]) for f in dataclasses.fields(Batch)})


def with_snapshot(batch: Batch, rows: np.ndarray, logp: np.ndarray) -> Batch:
    """The batch whose chosen rows, bool[B], have their ratio to a snapshot's log-probs f32[R, T]."""
    denom, to_self = batch.denom_logp.copy(), batch.denom_self.copy()
    denom[rows], to_self[rows] = logp, False
    return dataclasses.replace(batch, denom_logp=denom, denom_self=to_self)


def with_reference(batch: Batch, rows: np.ndarray, logp: np.ndarray) -> Batch:
    """The batch whose chosen rows, bool[B], have a KL reference's log-probs f32[R, T]."""
    ref = batch.ref_logp.copy()
    ref[rows] = logp
    return dataclasses.replace(batch, ref_logp=ref)


def from_peers(batch: Batch, me: int) -> np.ndarray:
    """bool[B]: received rows that the update learns from, in the surrogate or the NLL term."""
    return (batch.source != me) & ((batch.surr_weight != 0) | (batch.nll_weight != 0))


def take(batch: Batch, rows: np.ndarray) -> Batch:
    """The given rows (indices i[R]) of a batch."""
    return Batch(**{f.name: getattr(batch, f.name)[rows] for f in dataclasses.fields(Batch)})


def pad_rows(batch: Batch, multiple: int) -> Batch:
    """Rows appended until their number is a multiple. A padding row is a copy of row 0 (so that its forward pass is
    ordinary and finite) with empty masks and every weight 0."""
    b = len(batch.tokens)
    extra = -b % multiple
    if extra == 0:
        return batch
    padded = take(batch, np.concatenate([np.arange(b), np.zeros(extra, np.int64)]))
    for name in ("mask", "surr_mask", "surr_weight", "nll_weight", "kl_weight", "adv"):
        getattr(padded, name)[b:] = 0
    padded.sampler_logp[b:] = np.nan
    return padded


def cut(batch: Batch, rows: int) -> Batch:
    """[B, ...] to [B/rows, rows, ...], one entry a micro-batch; B must be a multiple of rows."""
    return Batch(
        **{
            f.name: (x := getattr(batch, f.name)).reshape(len(x) // rows, rows, *x.shape[1:])
            for f in dataclasses.fields(Batch)
        }
    )
