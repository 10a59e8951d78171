"""The tokenizer bridge (THL): a source's log-probs, carried over byte spans to a learner's tokens of the same text.

Both sides' byte ends are merged. Where they share a boundary the text can be cut into groups of source tokens and
groups of target tokens over the same bytes. What is known of a group is its sum, the chain rule over the source's
tokens; a split shares it among the target tokens.

`trace` and `retokenise`, which make the two sides, and `ByteTable` are in `mutualrl.tokenizers.spans`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mutualrl.tokenizers.spans import OVERLONG, ByteTable, Retokenised, retokenise, trace
from mutualrl.types import Trace

__all__ = [
    "GRANULARITIES", "NORMS", "OVERLONG", "SPLITS", "Aligned", "ByteTable", "Retokenised", "align", "metrics",
    "residual_bound", "retokenise", "sequence_log_ratio", "trace",
]  # fmt: skip

GRANULARITIES = ("word", "finest")
SPLITS = ("even", "prior")
NORMS = ("learner", "own_each", "byte", "sum")

WHITE_SPACE = np.isin(np.arange(256), list(b" \t\n\r"))  # bool[256]
DEGENERATE = -1e-8  # nats: a larger sum of the learner's own log-probs cannot be divided by


@dataclasses.dataclass(frozen=True)
class Aligned:
    """A source's log-probs on the learner's tokens. W is the largest number of groups of a row.

    Attributes:
      logp: f64[..., T] nats: on the learner's text tokens their shares of the group sums, at index n the source's
        log-prob of its terminal stop id where there is one, 0 elsewhere.
      known: bool[..., T] tokens for which `logp` says something.
      group: i32[..., T] group of each text token within its row, -1 where it is in none (also at index n).
      source_group: i32[..., Q] the same for the source's tokens.
      sums: f64[..., W] log-prob of each group in nats, 0 beyond the last group.
      target_tokens, source_tokens: i32[..., W] tokens of each group on either side, 0 beyond the last group.
    """

    logp: np.ndarray
    known: np.ndarray
    group: np.ndarray
    source_group: np.ndarray
    sums: np.ndarray
    target_tokens: np.ndarray
    source_tokens: np.ndarray


def align(
    trace: Trace,
    ends: np.ndarray,
    n: np.ndarray,
    *,
    granularity: str = "word",
    split: str = "even",
    prior: np.ndarray | None = None,
) -> Aligned:
    """Carries a trace to other tokens of the same text.

    Groups are cut at boundaries that both sides have (`finest`), or at those of them where a white-space byte follows
    another byte (`word`, published: Mutual RL); a word owns its leading white space, and words whose boundary is not
    common are one group. Our refinement: a word with exactly the same ends on both sides is cut at all of them, so that
    equal tables give the source's own values. The last common boundary always ends a group; after it, in rows whose
    tokens cover only the beginning of the text, nothing is known, nor is the stop id's log-prob carried over.

    Splits of a group's sum L over its target tokens: `even` L / count (published: Mutual RL); `prior` L q with q the
    token's share of the learner's own log-probs of the group (DPCA), or even where their sum is above -1e-8.

    Rows with `trace.valid` false have no groups and nothing known.

    Args:
      trace: the source's side [...].
      ends: i32[..., T] byte ends of the learner's tokens, strictly increasing over the first n.
      n: i32[...] the learner's text tokens.
      prior: f[..., T] the learner's own log-probs of these tokens in nats; read on text tokens and only by `prior`.

    Raises:
      ValueError: unknown granularity or split, or a prior split without `prior`.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r}: allowed are {', '.join(GRANULARITIES)}")
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: allowed are {', '.join(SPLITS)}")
    if split == "prior" and prior is None:
        raise ValueError("split='prior': needs the learner's own log-probs")
    lead, q, t = trace.valid.shape, trace.ends.shape[-1], ends.shape[-1]
    rows, n = trace.valid.size, np.asarray(n).reshape(-1)
    source, target = _Side.of(trace.ends, trace.n, trace.valid), _Side.of(ends, n, trace.valid)
    source, target, cuts, last = _cut(source, target, trace, granularity)
    row = target.row[cuts]  # of each group
    sums = np.bincount(source.group, trace.logp.reshape(-1)[source.at].astype(np.float64), len(row))
    target_tokens, source_tokens = (np.bincount(side.group, minlength=len(row)) for side in (target, source))
    old = np.asarray(prior, np.float64).reshape(-1)[target.at] if split == "prior" else None
    logp = _scatter(target.at, _split(sums, target_tokens, target.group, old), (rows, t), 0.0)
    known = _scatter(target.at, True, (rows, t), False)
    eos_logp = np.where(trace.valid, trace.eos_logp, np.nan).reshape(-1)
    stop = np.flatnonzero(np.isfinite(eos_logp) & (last == trace.text_bytes.reshape(-1)) & (n < t))
    logp[stop, n[stop]], known[stop, n[stop]] = eos_logp[stop], True

    groups = np.bincount(row, minlength=rows)
    first, w = np.cumsum(groups) - groups, int(groups.max(initial=0))
    at = row * w + np.arange(len(row)) - first[row]
    by_token = lambda side, width: _scatter(side.at, side.group - first[side.row], (rows, width), np.int32(-1))
    return Aligned(
        logp=logp.reshape(*lead, t),
        known=known.reshape(*lead, t),
        group=by_token(target, t).reshape(*lead, t),
        source_group=by_token(source, q).reshape(*lead, q),
        sums=_scatter(at, sums, (rows, w), 0.0).reshape(*lead, w),
        target_tokens=_scatter(at, target_tokens, (rows, w), np.int32(0)).reshape(*lead, w),
        source_tokens=_scatter(at, source_tokens, (rows, w), np.int32(0)).reshape(*lead, w),
    )


def residual_bound(aligned: Aligned) -> np.ndarray:
    """f64[..., T] the most by which `logp` of a text token can be off, in nats (our bound, attained).

    For any true token log-probs <= 0 with the same group sums L: |L| max(q, 1 - q) with q the token's share, which is
    |L| (1 - 1/count) for an even split; 0 for the only token of a group, at the stop id and where nothing is known.
    Summed over a group the even split is off by at most 2 |L| (1 - 1/count).
    """
    total, count = (_by_token(x, aligned.group) for x in (aligned.sums, aligned.target_tokens))
    return np.where(count >= 2, np.maximum(np.abs(aligned.logp), np.abs(total - aligned.logp)), 0.0)


def metrics(aligned: Aligned, *, prior: np.ndarray | None = None) -> dict[str, float]:
    """Diagnostics over all groups of all rows, the stop id apart; {} where there is no group (our definitions).

    `thl/bound` sum |L| (1 - 1/count) / sum |L|, count the target tokens of a group (absent where every L is 0);
    `thl/group_tokens` mean count; `thl/one_to_one` share of groups with one token on either side; `thl/split_gap` mean
    |even - prior| over the tokens of groups, if the learner's own log-probs f[..., T] are given as `prior`.
    """
    count = aligned.target_tokens.reshape(-1)
    groups = np.flatnonzero(count)
    if not len(groups):
        return {}
    count, sums = count[groups], aligned.sums.reshape(-1)[groups]
    found = {
        "thl/group_tokens": float(count.mean()),
        "thl/one_to_one": float(((count == 1) & (aligned.source_tokens.reshape(-1)[groups] == 1)).mean()),
    }
    mass = np.abs(sums)
    if mass.sum() > 0:
        found["thl/bound"] = float((mass * (1 - 1 / count)).sum() / mass.sum())
    if prior is not None:
        at = np.flatnonzero(aligned.group >= 0)
        group = np.repeat(np.arange(len(groups)), count)
        even, shared = (_split(sums, count, group, x) for x in (None, np.asarray(prior, np.float64).reshape(-1)[at]))
        found["thl/split_gap"] = float(np.abs(even - shared).mean())
    return found


def sequence_log_ratio(
    learner_sum: np.ndarray,
    source_sum: np.ndarray,
    *,
    learner_tokens: np.ndarray,
    source_tokens: np.ndarray,
    text_bytes: np.ndarray,
    norm: str,
) -> np.ndarray:
    """f64[...] log-ratio of learner to source over whole texts, in nats per unit of the norm. No split matters.

    `learner` (S_l - S_s) / learner's tokens; `own_each` S_l / learner's tokens - S_s / source's tokens (published:
    HACPO, GRAFT; a score rather than a ratio where the counts differ); `byte` (S_l - S_s) / bytes; `sum` S_l - S_s.
    A count of 0 divides as 1.

    Args:
      learner_sum, source_sum: f[...] sums S of log-probs in nats, either both with a stop id or both without.
      learner_tokens, source_tokens: i32[...] tokens behind the sums. text_bytes: i32[...].

    Raises:
      ValueError: unknown norm.
    """
    learner_tokens, source_tokens, text_bytes = (np.maximum(x, 1) for x in (learner_tokens, source_tokens, text_bytes))
    learner_sum, source_sum = (np.asarray(x, np.float64) for x in (learner_sum, source_sum))
    if norm == "own_each":
        return learner_sum / learner_tokens - source_sum / source_tokens
    divisors = {"learner": learner_tokens, "byte": text_bytes, "sum": 1}
    if norm not in divisors:
        raise ValueError(f"norm={norm!r}: allowed are {', '.join(NORMS)}")
    return (learner_sum - source_sum) / divisors[norm]


@dataclasses.dataclass(frozen=True)
class _Side:
    """All tokens of one side, row after row without the padding: arrays of one length, ordered by row and end.

    Attributes:
      at: place in the flattened padded array. row: row. end: byte end. group: group, counted over all rows.
    """

    at: np.ndarray
    row: np.ndarray
    end: np.ndarray
    group: np.ndarray | None = None

    @classmethod
    def of(cls, ends: np.ndarray, n: np.ndarray, valid: np.ndarray) -> _Side:
        ends = ends.reshape(valid.size, ends.shape[-1])
        lengths = np.where(valid.reshape(-1), n.reshape(-1), 0)
        at = np.flatnonzero(np.arange(ends.shape[-1]) < lengths[:, None])
        return cls(at, np.repeat(np.arange(len(ends)), lengths), ends.reshape(-1)[at].astype(np.int64))

    def __getitem__(self, which: np.ndarray) -> _Side:
        return _Side(self.at[which], self.row[which], self.end[which])

    def shares(self, other: _Side) -> np.ndarray:
        """Which of the own tokens end where a token of the other side ends."""
        rows, stride = (
            1 + max(a.max(initial=0), b.max(initial=0)) for a, b in ((self.row, other.row), (self.end, other.end))
        )
        ended = np.zeros(rows * stride, bool)
        ended[other.row * stride + other.end] = True
        return ended[self.row * stride + self.end]

    def grouped(self, cuts: np.ndarray) -> _Side:
        """With the groups that end where `cuts` is true."""
        return dataclasses.replace(self, group=np.cumsum(cuts) - cuts)


def _cut(source: _Side, target: _Side, trace: Trace, granularity: str) -> tuple[_Side, _Side, np.ndarray, np.ndarray]:
    """Cuts texts into groups.

    Returns:
      Both sides with their groups, without tokens after the last common boundary; which target tokens end a group;
      i64[R] the last common boundary of each row, 0 where there is none.
    """
    common = target.shares(source)
    last = np.zeros(trace.valid.size, np.int64)
    np.maximum.at(last, target.row[common], target.end[common])
    inside = target.end <= last[target.row]
    target, common = target[inside], common[inside]
    source = source[source.end <= last[source.row]]
    cuts = common
    if granularity == "word":
        cuts = common & (_word_ends(trace, target) | (target.end == last[target.row]))
        words, source_words = target.grouped(cuts).group, source.grouped(source.shares(target[cuts])).group
        count = np.bincount(words)
        same = (count == np.bincount(words[common], minlength=len(count))) & (count == np.bincount(source_words))
        cuts = cuts | same[words]
    return source.grouped(source.shares(target[cuts])), target.grouped(cuts), cuts, last


def _word_ends(trace: Trace, target: _Side) -> np.ndarray:
    """Which tokens end where a white-space byte follows another byte."""
    u = trace.text.shape[-1]
    space = WHITE_SPACE[trace.text.reshape(-1)]
    at = target.row * u + target.end
    # The end of a text has no byte behind it.
    return (target.end < u) & space[np.minimum(at, len(space) - 1)] & ~space[at - 1]


def _split(sums: np.ndarray, counts: np.ndarray, group: np.ndarray, prior: np.ndarray | None) -> np.ndarray:
    """Shares of group sums for tokens of the groups `group`: even, or in proportion to `prior` where that can be."""
    even = sums[group] / counts[group]
    if prior is None:
        return even
    total = np.bincount(group, prior, len(sums))[group]
    usable = ~(total > DEGENERATE)
    return np.where(usable, sums[group] * (prior / np.where(usable, total, -1.0)), even)


def _scatter(at: np.ndarray, values: np.ndarray | bool, shape: tuple[int, int], fill: Any) -> np.ndarray:
    """An array of the type of `fill`, with the values at the flat places `at`."""
    out = np.full(shape, fill)
    out.reshape(-1)[at] = values
    return out


def _by_token(per_group: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Values [..., W] of the groups that tokens [..., T] are in; 0 for tokens in none."""
    padded = np.concatenate([per_group, np.zeros_like(per_group[..., :1], shape=(*per_group.shape[:-1], 1))], -1)
    return np.take_along_axis(padded, group, -1)
