"""Rows of rollouts to the padded `Batch` of an update. Host-side numpy; used by every transfer regime."""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl import types
from mutualrl.types import Batch, Rollouts


def own_rows(rollouts: Rollouts, source: int) -> Batch:
    """The policy's own rollouts as P·G rows, ids as sampled, every coefficient still 0.

    Rows are problem-major: row p·G + g is rollout g of problem p.
    """
    p, g, t = rollouts.tokens.shape
    s = rollouts.prompt.shape[1]
    b = p * g
    mask = rollouts.mask.reshape(b, t)
    prompt = np.repeat(rollouts.prompt, g, 0)
    prompt_positions = np.repeat(rollouts.prompt_positions, g, 0)
    first = prompt_positions.max(-1, keepdims=True) + 1  # position of the first completion token
    positions = np.where(mask, first + np.arange(t), types.PAD_POSITION)
    lengths = mask.sum(-1)
    zeros = np.zeros(b, np.float32)
    return Batch(
        tokens=np.concatenate([prompt, rollouts.tokens.reshape(b, t)], 1).astype(np.int32),
        positions=np.concatenate([prompt_positions, positions], 1).astype(np.int32).reshape(b, s + t),
        mask=mask,
        surr_mask=mask.copy(),
        adv=np.zeros((b, t), np.float32),
        denom_logp=np.zeros((b, t), np.float32),
        denom_self=np.ones(b, bool),
        sampler_logp=np.where(mask, rollouts.logprobs.reshape(b, t), np.nan).astype(np.float32),
        ref_logp=np.zeros((b, t), np.float32),
        surr_weight=zeros,
        nll_weight=zeros.copy(),
        kl_weight=zeros.copy(),
        kind=np.full(b, types.PPO, np.int8),
        level=np.full(b, types.TOKEN, np.int8),
        clip=np.full((b, 2), 0.2, np.float32),
        seq_denom=np.full(b, np.nan, np.float32),
        seq_norm=lengths.astype(np.float32),
        is_weight=np.ones((b, t), np.float32),
        source=np.full(b, source, np.int32),
    )


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
