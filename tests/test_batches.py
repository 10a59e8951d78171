"""Rollouts to rows: layout, positions, masks, padding and cutting."""

import dataclasses

import numpy as np

from mutualrl import batches, types
from mutualrl.types import Batch, Problem, Rollouts

P, G, S, T = 3, 2, 4, 5
PROMPT_LENGTHS = np.array([4, 1, 3])
LENGTHS = np.array([[5, 1], [2, 3], [4, 5]])


def rollouts(pad=0):
    """Distinct ids everywhere; pads are `pad`, which may be an ordinary id."""
    prompt = np.full((P, S), pad, np.int32)
    positions = np.full((P, S), -1, np.int32)
    for i, n in enumerate(PROMPT_LENGTHS):
        prompt[i, S - n :] = 100 * (i + 1) + np.arange(n)
        positions[i, S - n :] = np.arange(n)
    mask = np.arange(T) < LENGTHS[..., None]
    tokens = 1000 + np.arange(P * G * T, dtype=np.int32).reshape(P, G, T)
    return Rollouts(
        policy="a",
        version=0,
        step=0,
        problems=tuple(Problem(id=str(i), question="") for i in range(P)),
        prompt=prompt,
        prompt_positions=positions,
        tokens=np.where(mask, tokens, pad).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -tokens / 1000, 0).astype(np.float32),
        finish=np.zeros((P, G), np.int8),
        text=(("",) * G,) * P,
        temperature=1.0,
    )


def test_own_rows_layout():
    own = rollouts()
    rows = batches.own_rows(own, source=3)
    assert rows.tokens.shape == (P * G, S + T) and rows.tokens.dtype == np.int32
    for p in range(P):
        for g in range(G):
            b, n, s = p * G + g, LENGTHS[p, g], PROMPT_LENGTHS[p]
            np.testing.assert_array_equal(rows.tokens[b, :S], own.prompt[p])
            np.testing.assert_array_equal(rows.tokens[b, S : S + n], own.tokens[p, g, :n])
            np.testing.assert_array_equal(rows.positions[b], [-1] * (S - s) + list(range(s + n)) + [-1] * (T - n))
            assert rows.mask[b].tolist() == [True] * n + [False] * (T - n)
            np.testing.assert_array_equal(rows.sampler_logp[b, :n], own.logprobs[p, g, :n])
            assert np.isnan(rows.sampler_logp[b, n:]).all()
    np.testing.assert_array_equal(rows.seq_norm, LENGTHS.ravel())
    assert (rows.source == 3).all() and rows.denom_self.all() and np.isnan(rows.seq_denom).all()
    for name in ("surr_weight", "nll_weight", "kl_weight", "adv"):
        assert not getattr(rows, name).any()


def test_masks_come_from_lengths_and_not_from_ids():
    """A pad id that is an ordinary id, or the stop id that was sampled, changes nothing."""
    a, b = batches.own_rows(rollouts(pad=0), 0), batches.own_rows(rollouts(pad=1000), 0)
    for name in ("positions", "mask", "surr_mask"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    np.testing.assert_array_equal(a.tokens[a.positions >= 0], b.tokens[b.positions >= 0])


def test_no_two_arrays_of_a_batch_share_memory():
    rows = batches.own_rows(rollouts(), 0)
    arrays = [getattr(rows, f.name) for f in dataclasses.fields(Batch)]
    for i, x in enumerate(arrays):
        assert not any(np.shares_memory(x, y) for y in arrays[i + 1 :])


def test_pad_rows():
    rows = batches.own_rows(rollouts(), 0)
    for name in ("surr_weight", "nll_weight", "kl_weight", "adv"):
        getattr(rows, name)[:] = 2.0
    assert batches.pad_rows(rows, 3) is rows
    padded = batches.pad_rows(rows, 4)
    assert len(padded.tokens) == 8
    for f in dataclasses.fields(Batch):
        assert len(getattr(padded, f.name)) == 8
        np.testing.assert_array_equal(getattr(padded, f.name)[:6], getattr(rows, f.name))
    for name in ("mask", "surr_mask", "surr_weight", "nll_weight", "kl_weight", "adv"):
        assert not getattr(padded, name)[6:].any() and getattr(rows, name).any()
    assert np.isnan(padded.sampler_logp[6:]).all()
    assert (padded.positions[6:] >= 0).any()  # an ordinary row for the model


def test_cut_and_take():
    rows = batches.own_rows(rollouts(), 0)
    cut = batches.cut(rows, 2)
    for f in dataclasses.fields(Batch):
        x = getattr(rows, f.name)
        assert getattr(cut, f.name).shape == (3, 2, *x.shape[1:])
        np.testing.assert_array_equal(getattr(cut, f.name)[1, 1], x[3])
    taken = batches.take(rows, np.array([4, 0]))
    np.testing.assert_array_equal(taken.tokens, rows.tokens[[4, 0]])
    taken.adv[:] = 1
    assert not rows.adv.any()
    assert types.PAD_POSITION == -1
