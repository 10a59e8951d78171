"""Small Materials from plain lists, for tests of regimes.

What a row contains depends only on (who wrote it, problem id, sample number), so that the same rows come out wherever
a problem or a peer stands. Unless said otherwise a learner's text token is one byte and a source's token two, the last
one whatever is left; every sixth byte is a space.
"""

import dataclasses
import types as std_types

import numpy as np

from mutualrl import seeds, types
from mutualrl.assembly import Material
from mutualrl.settings import PolicyConfig
from mutualrl.transfer import none
from mutualrl.types import Batch, GroupStats, Problem, Received, Rollouts, Trace, Verdicts

S, EOT = 3, 1  # padded prompt length, id of the learner's end of turn


@dataclasses.dataclass(frozen=True)
class Text:
    """One text under two tokenizers; ends are byte ends, log-probs those of whoever scored the source's tokens."""

    text: str
    source_ends: tuple[int, ...]
    source_logp: tuple[float, ...]
    target_ends: tuple[int, ...]
    eos_logp: float = np.nan  # NaN: the source did not end by a stop id


@dataclasses.dataclass(frozen=True)
class Peer:
    """What came from one source: everything [P, G of the source], as nested lists; None is the default.

    reward: NaN where there is none. success: default reward > 0, -1 on NaN. lengths: learner's tokens, its end of turn
    included unless finish is LENGTH (default 3 and more, mixed). finish: default STOP. heard, usable: default true.
    texts: `Text`s instead of made-up rows. traced: a trace was sent. same_tokens: both have the same tokens.
    """

    reward: list
    success: list | None = None
    lengths: list | None = None
    finish: list | None = None
    heard: list | None = None
    usable: list | None = None
    texts: list | None = None
    traced: list | None = None
    same_tokens: bool = False
    index: int | None = None  # source index; default 1, 2, ... by place
    live: bool = True
    name: str = ""  # of the writer; default by index


def material(
    reward, peers=(), options=None, *, ids=None, success=None, lengths=None, finish=None, index=0, step=0, seed=0,
    longest=None, name="me", capability=(), own_texts=None, teachers=(), **config,
) -> Material:  # fmt: skip
    """A Material. `reward` and the like are [P][G] lists of the learner; `config` are settings of its objective.

    ids: P problem ids (default q0, q1, ...). lengths: of own rows in tokens, the end of turn included. longest: T.
    own_texts: [P][G] `Text`s: the own rows are their target tokens, `own_trace` those tokens with log-probs of
    `own_logp`. teachers: for each teacher such a list, whose source side is what the teacher says. Group statistics of
    the peers are always there.
    """
    reward = np.asarray(reward, np.float64)
    p, g = reward.shape
    ids = [f"q{i}" for i in range(p)] if ids is None else ids
    if own_texts is not None:
        lengths = [[len(t.target_ends) + np.isfinite(t.eos_logp) for t in row] for row in own_texts]
        finish = [[types.STOP if np.isfinite(t.eos_logp) else types.LENGTH for t in row] for row in own_texts]
    lengths = _lengths(name, ids, g) if lengths is None else np.asarray(lengths)
    sides = [
        _peer_rows(x if x.index is not None else dataclasses.replace(x, index=i + 1), ids) for i, x in enumerate(peers)
    ]
    t = longest or int(max([lengths.max(), *(side["mask_lengths"].max(initial=0) for side in sides)]))
    finish = np.full((p, g), types.STOP) if finish is None else np.asarray(finish)
    mask = np.arange(t) < lengths[..., None]
    tokens = np.where(mask, _tokens(name, ids, g, t), 0)
    tokens[mask & (np.arange(t) == lengths[..., None] - 1) & (finish == types.STOP)[..., None]] = EOT
    own = Rollouts(
        policy=name,
        version=step,
        step=step,
        problems=tuple(Problem(id=i, question="the same") for i in ids),
        prompt=np.full((p, S), 9, np.int32),
        prompt_positions=np.tile(np.arange(S), (p, 1)).astype(np.int32),
        tokens=tokens.astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, row_logp(tokens), 0).astype(np.float32),
        finish=finish.astype(np.int8),
        text=(("",) * g,) * p,
        temperature=1.0,
    )
    return Material(
        own=own,
        verdicts=Verdicts(reward, _success(reward, success)),
        reward=reward,
        config=PolicyConfig(**{"model": "m", "group_size": g, "max_new_tokens": t, **config}),
        index=index,
        tokenizer=std_types.SimpleNamespace(eot_id=EOT, stop_ids=(EOT,)),
        options=none.Options() if options is None else options,
        step=step,
        seed=seed,
        received=_received(sides, p, t),
        stats=tuple(stats(side["reward"], side["success"]) for side in sides),
        capability=np.asarray(capability, np.float64),
        own_trace=None if own_texts is None else trace(own_texts, target=True),
        teachers=tuple(trace(texts) for texts in teachers),
    )


def stats(reward, success=None) -> GroupStats:
    """Group sums of rewards [P, G] over the valid ones."""
    r = np.asarray(reward, np.float64)
    valid, success = np.isfinite(r), _success(r, success)
    filled = np.where(valid, r, 0)
    return GroupStats(
        n=valid.sum(1).astype(np.int32),
        sum=filled.sum(1),
        sumsq=(filled**2).sum(1),
        min=np.where(valid, r, np.inf).min(1, initial=np.inf),
        max=np.where(valid, r, -np.inf).max(1, initial=-np.inf),
        n_success=((success == 1) & valid).sum(1).astype(np.int32),
    )


def row_logp(tokens) -> np.ndarray:
    """f64 log-probs of a learner that knows a token only by its id; the shape of `tokens`."""
    return -0.05 * (1 + np.asarray(tokens) % 37)


def scored(m: Material, regime, logp=None) -> Material:
    """The Material with what the regime wants scored: by `row_logp`, or the given f[B, T]."""
    rows = regime.to_score(m)
    if rows is None:
        return m
    t = rows.mask.shape[1]
    logp = row_logp(rows.tokens[:, -t:]) if logp is None else np.asarray(logp)
    return dataclasses.replace(m, scored=np.where(rows.mask, logp, 0).astype(np.float32))


def build(m: Material, regime):
    """Batches and metrics of a regime, as the trainer asks for them."""
    return regime.build(scored(m, regime))


def assert_equal(got: list[Batch], want: list[Batch], *, tolerance: float = 0.0, but=()) -> None:
    """The batches are equal, bit for bit unless there is a tolerance, in every field but those named in `but`."""
    assert len(got) == len(want)
    for a, b in zip(got, want):
        for f in dataclasses.fields(Batch):
            if f.name not in but:
                x, y = getattr(a, f.name), getattr(b, f.name)
                assert x.dtype == y.dtype and x.shape == y.shape, f.name
                np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=f.name)


def rows_of(batches: list[Batch], source: int) -> Batch:
    """The rows of one source in all updates together."""
    return Batch(
        **{
            f.name: np.concatenate([getattr(b, f.name)[b.source == source] for b in batches])
            for f in dataclasses.fields(Batch)
        }
    )


def trace(texts, target: bool = False) -> Trace:
    """The Trace of [P][K] `Text`s (None: not valid): the source's side, or the target's with `row_logp`-like values."""
    p, k = len(texts), len(texts[0]) if texts else 0
    flat = [t for row in texts for t in row]
    side = [(t.target_ends if target else t.source_ends) if t else () for t in flat]
    u = max([1, *(len(t.text.encode()) for t in flat if t)])
    q = max([1, *map(len, side)])
    text, ends, logp = np.zeros((p * k, u), np.uint8), np.zeros((p * k, q), np.int32), np.zeros((p * k, q), np.float32)
    for i, (t, e) in enumerate(zip(flat, side)):
        if t:
            raw = t.text.encode()
            text[i, : len(raw)] = list(raw)
            ends[i] = len(raw)
            ends[i, : len(e)] = e
            logp[i, : len(e)] = row_logp(np.asarray(e, int)) if target else t.source_logp
    fold = lambda x: np.asarray(x).reshape(p, k, *np.shape(x)[1:])
    return Trace(
        text=fold(text),
        text_bytes=fold([len(t.text.encode()) if t else 0 for t in flat]).astype(np.int32),
        ends=fold(ends),
        n=fold([len(e) for e in side]).astype(np.int32),
        logp=fold(logp),
        eos_logp=fold([t.eos_logp if t else np.nan for t in flat]).astype(np.float32),
        valid=fold([t is not None for t in flat]).astype(bool),
    )


def _success(reward, success):
    if success is not None:
        return np.asarray(success, np.int8)
    return np.where(np.isfinite(reward), reward > 0, -1).astype(np.int8)


def _lengths(name, ids, g):
    return np.array([[seeds.generator(0, k, name, i).integers(3, 9) for k in range(g)] for i in ids])


def _tokens(name, ids, g, t):
    return np.array([[seeds.generator(1, k, name, i).integers(2, 50, 64)[:t] for k in range(g)] for i in ids])


def _peer_rows(peer: Peer, ids):
    """Arrays [P, G] of one peer, and its rows' `Text`s."""
    reward = np.asarray(peer.reward, np.float64)
    p, g = reward.shape
    name = peer.name or f"source {peer.index}"
    fill = lambda x, value, kind: np.full((p, g), value, kind) if x is None else np.asarray(x).astype(kind)
    texts, finish = peer.texts, fill(peer.finish, types.STOP, np.int8)
    if texts is None:
        lengths = _lengths(name, ids, g) if peer.lengths is None else np.asarray(peer.lengths)
        texts = [
            [_text(name, i, k, lengths[a, k], finish[a, k], peer.same_tokens) for k in range(g)]
            for a, i in enumerate(ids)
        ]
    heard = fill(peer.heard, True, bool)
    usable = fill(peer.usable, True, bool) & heard
    traced = fill(peer.traced, True, bool) & usable
    n = np.array([[len(t.target_ends) if t else 0 for t in row] for row in texts])
    return dict(
        source=np.full(g, peer.index), live=np.full(g, peer.live), heard=heard, usable=usable, traced=traced,
        reward=np.where(heard, reward, np.nan), success=np.where(heard, _success(reward, peer.success), -1),
        finish=finish, n=np.where(usable, n, 0), mask_lengths=np.where(usable, n + (finish != types.LENGTH), 0),
        tokens=_tokens(name, ids, g, 64), texts=texts,
    )  # fmt: skip


def _text(name, i, k, length, finish, same_tokens):
    n = int(length) - (finish != types.LENGTH)
    ends = tuple(range(1, n + 1))
    source = ends if same_tokens else tuple(sorted({*range(2, n, 2), n} - {0}))
    logp = -seeds.generator(2, k, name, i).uniform(0.05, 2.0, len(source))
    eos = -0.25 if finish == types.STOP else np.nan
    return Text("".join(" " if b % 6 == 5 else "abcde"[b % 5] for b in range(n)), source, tuple(logp), ends, eos)


def _received(sides, p, t) -> Received:
    cat = lambda key, empty: np.concatenate([s[key] for s in sides], -1) if sides else empty
    none_, flags = np.zeros((p, 0), np.int64), np.zeros((p, 0), bool)
    n, lengths, finish = cat("n", none_), cat("mask_lengths", none_), cat("finish", none_)
    k = n.shape[1]
    mask = np.arange(t) < lengths[..., None]
    is_eot = mask & (np.arange(t) == n[..., None])
    tokens = np.concatenate([s["tokens"][..., :t] for s in sides], 1) if sides else np.zeros((p, 0, t))
    texts = [[x for s in sides for x in s["texts"][a]] for a in range(p)]
    ends = np.zeros((p, k, t), np.int32)
    for a in range(p):
        for b in range(k):
            if n[a, b]:
                e = texts[a][b].target_ends
                ends[a, b], ends[a, b, : len(e)] = e[-1], e
    traced = cat("traced", flags)
    return Received(
        source=cat("source", np.zeros(0)).astype(np.int32),
        sample=np.concatenate([np.arange(len(s["source"])) for s in sides] or [np.zeros(0)]).astype(np.int32),
        live=cat("live", np.zeros(0)).astype(bool),
        heard=cat("heard", flags),
        usable=cat("usable", flags),
        reward=cat("reward", np.zeros((p, 0))).astype(np.float64),
        success=cat("success", none_).astype(np.int8),
        tokens=np.where(is_eot, EOT, np.where(mask, tokens, 0)).astype(np.int32),
        mask=mask,
        surr_mask=mask & ~(is_eot & (finish == types.STOP_TEXT)[..., None]),
        ends=ends,
        n=n.astype(np.int32),
        finish=finish.astype(np.int8),
        trace=trace([[x if traced[a, b] else None for b, x in enumerate(row)] for a, row in enumerate(texts)]),
    )
