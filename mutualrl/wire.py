"""Records as fixed-shape arrays, and what is checked when they come back. Never raises on what a peer has sent."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from mutualrl import types
from mutualrl.experience import (
    KINDS,
    LOGP_CEILING,
    NAME_BYTES,
    SCHEMA,
    WINDOW,
    CapabilityRecord,
    Header,
    Record,
    RolloutRecord,
    StatsRecord,
    TeacherRecord,
    VoteRecord,
    WireShape,
    packed,
    unpacked,
)
from mutualrl.types import GroupStats

Wire = dict[str, np.ndarray]
_HEAD = "header/"


def layout(topic: str, shape: WireShape, with_trace: bool) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Name, shape and dtype of every array of a topic's wire form: all that a transport has to know of it."""
    p, g, u, t, a = shape.P, shape.G, shape.U, shape.T, shape.A
    i8, i32, f32, f64, u8, u16 = np.int8, np.int32, np.float32, np.float64, np.uint8, np.uint16
    row, group = (p, g), (p,)
    head = {
        "run": ((NAME_BYTES,), u8),
        "policy": ((NAME_BYTES,), u8),
        "label_source": ((NAME_BYTES,), u8),
        "problems": ((p, NAME_BYTES), u8),
        "count": ((), i32),
        "step": ((), np.int64),
        "version": ((), np.int64),
        "schema": ((), i32),
    }
    tokens = {"token_bytes": ((p, g, t), u16), "token_logp": ((p, g, t), f32)}
    body = {
        "rollout": {
            "text": ((p, g, u), u8),
            "text_bytes": (row, i32),
            "answer": ((p, g, a), u8),
            "answer_bytes": (row, i32),
            "finish": (row, i8),
            "tail_bytes": (row, i8),
            "n": (row, i32),
            "eos_logp": (row, f32),
            "logp_sum": (row, f64),
            "reward": (row, f64),
            "success": (row, i8),
            "temperature": ((), f32),
            "top_p": ((), f32),
            "top_k": ((), i32),
            "renormalised": ((), np.bool_),
            "valid": (row, np.bool_),
            **(tokens if with_trace else {}),
        },
        "stats": {f.name: (group, i32 if f.name.startswith("n") else f64) for f in dataclasses.fields(GroupStats)},
        "capability": {"window": ((WINDOW,), f32)},
        "teacher_score": {
            "learner": ((NAME_BYTES,), u8),
            "n": (row, i32),
            "text_bytes": (row, i32),
            **tokens,
            "eos_logp": (row, f32),
            "valid": (row, np.bool_),
        },
        "vote": {
            "answer": ((p, g, a), u8),
            "answer_bytes": (row, i32),
            "count": (row, i32),
            "first": (row, i32),
            "winner": (group, i32),
            "parseable": (group, i32),
            "n": (group, i32),
        },
    }[topic]
    return {
        name: (size, np.dtype(kind)) for name, (size, kind) in ({_HEAD + k: v for k, v in head.items()} | body).items()
    }


def to_wire(record: Record, shape: WireShape) -> Wire:
    """A record's arrays, in the shapes of `layout`.

    Raises:
      ValueError: a name is longer than NAME_BYTES.
    """
    h = record.header
    problems = np.zeros((shape.P, NAME_BYTES), np.uint8)
    for row, name in zip(problems, h.problems):
        row[:] = packed(name)
    head = {
        "run": packed(h.run),
        "policy": packed(h.policy),
        "label_source": packed(h.label_source),
        "problems": problems,
        "count": np.int32(len(h.problems)),
        "step": np.int64(h.step),
        "version": np.int64(h.version),
        "schema": np.int32(h.schema),
    }
    body = record.stats if isinstance(record, StatsRecord) else record
    arrays = {f.name: getattr(body, f.name) for f in dataclasses.fields(body) if f.name != "header"}
    arrays = {_HEAD + k: v for k, v in head.items()} | {k: v for k, v in arrays.items() if v is not None}
    return {k: np.asarray(v) for k, v in arrays.items()}


def from_wire(topic: str, wire: Mapping[str, Any], shape: WireShape, with_trace: bool) -> tuple[Record | None, str]:
    """The record of a wire form, or None and why not: `schema` (another version) or `shape` (arrays that are not those
    of `layout`, names that are no UTF-8). Booleans are true where their byte is not 0."""
    schema = wire.get(_HEAD + "schema")
    if isinstance(schema, (np.ndarray, np.generic)) and schema.shape == () and schema.dtype.kind in "iu":
        if int(schema) != SCHEMA:
            return None, "schema"
    expected = layout(topic, shape, with_trace)
    for name, (size, kind) in expected.items():
        x = wire.get(name)
        if not isinstance(x, (np.ndarray, np.generic)) or np.shape(x) != size or x.dtype != kind:
            return None, "shape"
    count = int(wire[_HEAD + "count"])
    if not 0 <= count <= shape.P:
        return None, "shape"
    try:
        head = Header(
            run=unpacked(wire[_HEAD + "run"]),
            step=int(wire[_HEAD + "step"]),
            policy=unpacked(wire[_HEAD + "policy"]),
            version=int(wire[_HEAD + "version"]),
            label_source=unpacked(wire[_HEAD + "label_source"]),
            problems=tuple(unpacked(x) for x in wire[_HEAD + "problems"][:count]),
        )
        if topic == "teacher_score":
            unpacked(wire["learner"])
    except UnicodeDecodeError:
        return None, "shape"
    body = {k: _clean(wire[k]) for k in expected if not k.startswith(_HEAD)}
    if topic == "stats":
        return StatsRecord(head, GroupStats(**body)), ""
    return KINDS[topic](head, **body), ""


def validate(record: Record, largest_group: int | None = None) -> tuple[Record, dict[str, int]]:
    """The record with whatever cannot be right marked as not valid, and how much that was, by cause.

    Rows of a RolloutRecord, the first cause that applies: `range` a finish, success, answer or count that does not
    exist; `reward` not finite; `utf8` the text is no UTF-8; and with log-probs `renormalised` they are over a filtered
    vocabulary; `lengths` the tokens' bytes are not the text's; `logp` not finite, above 0, or not those that add up to
    `logp_sum`. Of a TeacherRecord `lengths` and `logp`. Groups of a StatsRecord and a VoteRecord, and a whole
    CapabilityRecord: `range`; so too what is said of problems that the header does not name.

    Args:
      largest_group: rollouts that a group of the run can have, where that is known.
    """
    causes: collections.Counter[str] = collections.Counter()
    if isinstance(record, StatsRecord):
        return _check_stats(record, causes, largest_group), dict(causes)
    check = {
        RolloutRecord: _check_rollouts,
        TeacherRecord: _check_teacher,
        CapabilityRecord: _check_capability,
        VoteRecord: _check_votes,
    }[type(record)]
    return check(record, causes), dict(causes)


def _check_rollouts(r: RolloutRecord, causes: collections.Counter) -> RolloutRecord:
    p, g, u = r.text.shape
    bad_range = (
        ~np.isin(r.finish, (types.STOP, types.LENGTH, types.STOP_TEXT))
        | ~np.isin(r.success, (-1, 0, 1))
        | (r.text_bytes < 0)
        | (r.text_bytes > u)
        | (r.answer_bytes < -1)
        | (r.answer_bytes > r.answer.shape[2])
        | ~_named(r, p)[:, None]
    )
    if r.token_bytes is None:
        bad_range |= (r.n < 0) | (r.n > r.text_bytes)
    valid = r.valid & ~_count(causes, "range", r.valid & bad_range)
    valid &= ~_count(causes, "reward", valid & ~np.isfinite(r.reward))
    broken = np.zeros_like(valid)
    for i, j in np.argwhere(valid):
        broken[i, j] = not _is_utf8(r.text[i, j, : r.text_bytes[i, j]])
    valid &= ~_count(causes, "utf8", broken)
    stopped = r.finish == types.STOP
    odd = ~_is_logp(r.logp_sum, 1.0 + np.maximum(r.n, 0)) | (_is_logp(r.eos_logp) != stopped)
    if r.token_bytes is not None:
        valid &= ~_count(causes, "renormalised", valid & r.renormalised)
        wrong, unlike = _tokens_wrong(r)
        valid &= ~_count(causes, "lengths", valid & wrong)
        with np.errstate(invalid="ignore"):
            total = r.token_logp.sum(-1, dtype=np.float64) + np.where(stopped, r.eos_logp, 0.0)
            odd |= unlike | ~(np.abs(total - r.logp_sum) <= 1e-3 + 1e-5 * np.abs(total))
    valid &= ~_count(causes, "logp", valid & odd)
    return dataclasses.replace(r, valid=valid)


def _check_teacher(r: TeacherRecord, causes: collections.Counter) -> TeacherRecord:
    wrong, odd = _tokens_wrong(r)
    valid = r.valid & ~_count(causes, "range", r.valid & ~_named(r, len(r.valid))[:, None])
    valid &= ~_count(causes, "lengths", valid & wrong)
    valid &= ~_count(causes, "logp", valid & odd)
    return dataclasses.replace(r, valid=valid)


def _tokens_wrong(r: RolloutRecord | TeacherRecord) -> tuple[np.ndarray, np.ndarray]:
    """bool[P, G] tokens whose bytes are not those of the text; bool[P, G] log-probs that are none."""
    t = r.token_bytes.shape[-1]
    real = np.arange(t) < r.n[..., None]
    empty = (real & (r.token_bytes == 0)).any(-1) | (~real & (r.token_bytes != 0)).any(-1)
    lengths = empty | (r.n < 0) | (r.n > t) | (r.token_bytes.sum(-1, dtype=np.int64) != r.text_bytes)
    logp = ~np.where(real, _is_logp(r.token_logp), r.token_logp == 0).all(-1)
    return lengths, logp | ~(_is_logp(r.eos_logp) | np.isnan(r.eos_logp))


def _is_logp(x: np.ndarray, tokens: np.ndarray | float = 1.0) -> np.ndarray:
    """Which can be the log-prob of so many tokens."""
    return np.isfinite(x) & (x <= LOGP_CEILING * tokens)


def _check_stats(r: StatsRecord, causes: collections.Counter, largest_group: int | None) -> StatsRecord:
    s = r.stats
    n = np.maximum(s.n, 1)
    with np.errstate(invalid="ignore", over="ignore"):
        mean, square = s.sum / n, s.sumsq / n
        largest = np.maximum(s.min**2, s.max**2)
        slack = 1e-9 * (1 + largest)  # of rounding
        right = (
            (s.n >= 0)
            & (s.n <= (np.inf if largest_group is None else largest_group))
            & (s.n_success >= 0)
            & (s.n_success <= s.n)
            & np.isfinite(np.stack([s.sum, s.sumsq, s.min, s.max])).all(0)
            & (s.min - slack <= mean)
            & (mean <= s.max + slack)
            & (mean**2 - slack <= square)
            & (square <= largest + slack)
            & np.where(s.n > 0, _named(r, len(s.n)), (s.sum == 0) & (s.sumsq == 0))
        )
    _count(causes, "range", ~right)
    kept = {f.name: np.where(right, getattr(s, f.name), 0) for f in dataclasses.fields(GroupStats)}
    return StatsRecord(r.header, GroupStats(**{k: x.astype(getattr(s, k).dtype) for k, x in kept.items()}))


def _check_capability(r: CapabilityRecord, causes: collections.Counter) -> CapabilityRecord:
    known = r.window[~np.isnan(r.window)]
    if ((known < 0) | (known > 1)).any():
        causes["range"] += 1
        return dataclasses.replace(r, window=np.full_like(r.window, np.nan))
    return r


def _check_votes(r: VoteRecord, causes: collections.Counter) -> VoteRecord:
    there = r.count > 0
    winner = np.minimum(np.maximum(r.winner, 0), r.count.shape[1] - 1)
    wrong = (
        (r.count < 0).any(1)
        | (r.count.sum(1) != r.parseable)
        | (r.parseable > r.n)
        | np.where(r.parseable > 0, r.winner != winner, r.winner != -1)
        | (np.take_along_axis(r.count, winner[:, None], 1)[:, 0] != r.count.max(1))
        | ((r.answer_bytes > 0) != there).any(1)
        | (r.answer_bytes > r.answer.shape[2]).any(1)
        | (there & ((r.first < 0) | (r.first >= r.n[:, None]))).any(1)
        | ((r.n != 0) & ~_named(r, len(r.n)))
    )
    for p, b in np.argwhere(there & ~wrong[:, None]):
        wrong[p] |= not _is_utf8(r.answer[p, b, : r.answer_bytes[p, b]])
    _count(causes, "range", wrong)
    none = {"winner": -1, "answer_bytes": -1, "count": 0, "parseable": 0, "n": 0}
    arrays = {name: np.array(getattr(r, name)) for name in none}
    for name, x in arrays.items():
        x[wrong] = none[name]
    return dataclasses.replace(r, **arrays)


def _named(r: Record, problems: int) -> np.ndarray:
    """bool[P] the header names the problem."""
    return np.arange(problems) < len(r.header.problems)


def _count(causes: collections.Counter, cause: str, where: np.ndarray) -> np.ndarray:
    if where.any():
        causes[cause] += int(where.sum())
    return where


def _is_utf8(raw: np.ndarray) -> bool:
    try:
        bytes(raw).decode()
    except UnicodeDecodeError:
        return False
    return True


def _clean(x: np.ndarray | np.generic) -> np.ndarray | np.generic:
    # A boolean that is neither 0 nor 1 can come through a buffer; numpy's operators disagree on it.
    return np.asarray(x).view(np.uint8) != 0 if x.dtype == np.bool_ else x
