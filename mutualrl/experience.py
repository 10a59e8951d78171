"""Experience: the typed records that cross between policies, their wire form, and what is checked on receipt (SEE).

A record holds what one source publishes in one step about all problems of that step, as arrays of fixed shapes. Text
is the currency; token ids never cross. Certificates and whole groups are not records of their own: a learner derives
them from the rollouts it hears. All of this is our definition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mutualrl.settings import RunConfig
from mutualrl.types import GroupStats, Rollouts, Trace, Verdicts, Vote

SCHEMA = 1
# What a regime may have policies send. `trace` adds log-probs to the rollouts; `vote` is sent before rewards are known.
TOPICS = ("rollout", "trace", "stats", "vote", "capability", "teacher_score")
WINDOW = 5  # completed steps of a capability record
NAME_BYTES = 160  # longest name of a problem, a run or a policy on the wire
ANSWER_BYTES = 128  # longest answer on the wire
LOGP_CEILING = 1e-4  # nats; above it a number is no log-prob, below it is the rounding of one


@dataclasses.dataclass(frozen=True)
class WireShape:
    """Sizes that all policies of a run use on the wire: P problems, G rollouts, U text bytes, T text tokens, A bytes of
    an answer."""

    P: int
    G: int
    U: int
    T: int
    A: int = ANSWER_BYTES

    @classmethod
    def of(cls, run: RunConfig, views: int = 1) -> WireShape:
        """The sizes a run needs; 8 bytes for each token of the longest completion unless it says otherwise.

        Args:
          views: wordings of each problem that are sampled.
        """
        longest = max(p.max_new_tokens for p in run.policies.values())
        return cls(
            P=run.problems_per_step * views,
            G=max(p.group_size for p in run.policies.values()),
            U=run.exchange.max_text_bytes or 8 * longest,
            T=longest,
        )


@dataclasses.dataclass(frozen=True)
class Header:
    """Where a record comes from: run, cohort step, policy and the optimiser updates it had applied, who said what is
    right, the schema, and the P problems by name, in the order of the arrays."""

    run: str
    step: int
    policy: str
    version: int
    label_source: str
    problems: tuple[str, ...]
    schema: int = SCHEMA


@dataclasses.dataclass(frozen=True)
class RolloutRecord:
    """Topic `rollout`: the completions of one source and what its label source says of them.

    Attributes:
      text: u8[P, G, U] UTF-8, 0 beyond; text_bytes: i32[P, G].
      answer: u8[P, G, A] the answer a grader found, answer_bytes: i32[P, G], -1 where none.
      finish: i8[P, G] STOP, LENGTH, STOP_TEXT. tail_bytes: i8[P, G] of an incomplete last character, taken off.
      n: i32[P, G] tokens of the text. eos_logp: f32[P, G] of the terminal stop id, NaN where there is none.
      logp_sum: f64[P, G] log-prob of the text and the stop id in nats.
      reward: f64[P, G] unshaped, NaN where it could not be judged; success: i8[P, G] 1, 0 or -1 (unknown).
      temperature, top_p: f32[]; top_k: i32[]; renormalised: bool[] log-probs are over a filtered vocabulary.
      token_bytes: u16[P, G, T], token_logp: f32[P, G, T] the text's tokens (topic `trace`), else both None.
      valid: bool[P, G]; smaller groups are padded with false.
    """

    header: Header
    text: np.ndarray
    text_bytes: np.ndarray
    answer: np.ndarray
    answer_bytes: np.ndarray
    finish: np.ndarray
    tail_bytes: np.ndarray
    n: np.ndarray
    eos_logp: np.ndarray
    logp_sum: np.ndarray
    reward: np.ndarray
    success: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    renormalised: np.ndarray
    valid: np.ndarray
    token_bytes: np.ndarray | None = None
    token_logp: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class StatsRecord:
    """Topic `stats`: sums over the rewards of each group (`types.GroupStats`, [P])."""

    header: Header
    stats: GroupStats


@dataclasses.dataclass(frozen=True)
class CapabilityRecord:
    """Topic `capability`: f32[WINDOW] share of rewards above 0 in each of the last completed steps, NaN where none."""

    header: Header
    window: np.ndarray


@dataclasses.dataclass(frozen=True)
class TeacherRecord:
    """Topic `teacher_score`: one learner's texts in the source's tokens, as the source scores them.

    Attributes:
      learner: u8[NAME_BYTES] the policy whose texts these are.
      n: i32[P, G] tokens of the text; token_bytes: u16[P, G, T]; token_logp: f32[P, G, T]; eos_logp: f32[P, G], NaN
        where the learner did not stop by itself; text_bytes: i32[P, G]; valid: bool[P, G].
    """

    header: Header
    learner: np.ndarray
    n: np.ndarray
    text_bytes: np.ndarray
    token_bytes: np.ndarray
    token_logp: np.ndarray
    eos_logp: np.ndarray
    valid: np.ndarray


@dataclasses.dataclass(frozen=True)
class VoteRecord:
    """Topic `vote`: how often each answer was given, [P, G] buckets in the order first seen.

    Attributes:
      answer: u8[P, G, A], answer_bytes: i32[P, G] (-1 beyond the last bucket), count, first: i32[P, G] rollouts in the
        bucket and the sample number of its first.
      winner: i32[P] bucket with most rollouts, the first of equals; -1 where no answer was found.
      parseable, n: i32[P] rollouts with an answer, and all.
    """

    header: Header
    answer: np.ndarray
    answer_bytes: np.ndarray
    count: np.ndarray
    first: np.ndarray
    winner: np.ndarray
    parseable: np.ndarray
    n: np.ndarray

    @property
    def share(self) -> np.ndarray:
        """f64[P] the winner's rollouts over the parseable ones, NaN where there is no winner."""
        top = np.take_along_axis(self.count, np.maximum(self.winner, 0)[:, None], 1)[:, 0]
        return np.where(self.winner >= 0, top / np.maximum(self.parseable, 1), np.nan)


Record = RolloutRecord | StatsRecord | CapabilityRecord | TeacherRecord | VoteRecord
KINDS = {
    "rollout": RolloutRecord,
    "stats": StatsRecord,
    "capability": CapabilityRecord,
    "teacher_score": TeacherRecord,
    "vote": VoteRecord,
}


def topic_of(record: Record) -> str:
    """The topic a record is published under (`trace` is part of `rollout`)."""
    return next(topic for topic, cls in KINDS.items() if isinstance(record, cls))


def packed(name: str) -> np.ndarray:
    """u8[NAME_BYTES] a name as UTF-8, 0 beyond.

    Raises:
      ValueError: it has more bytes.
    """
    raw = name.encode()
    if len(raw) > NAME_BYTES:
        raise ValueError(f"the name {name[:40]!r}… has {len(raw)} bytes: at most {NAME_BYTES} cross the wire")
    return np.frombuffer(raw.ljust(NAME_BYTES, b"\0"), np.uint8)


def unpacked(raw: np.ndarray) -> str:
    """The name that `packed` made; UnicodeDecodeError if it is none."""
    return bytes(raw).rstrip(b"\0").decode()


def learner_of(record: TeacherRecord) -> str:
    """The policy whose texts a source has scored."""
    return unpacked(record.learner)


def header(run: str, own: Rollouts, label_source: str) -> Header:
    """The header of what a policy publishes about its rollouts of a step."""
    return Header(run, own.step, own.policy, own.version, label_source, tuple(p.id for p in own.problems))


def rollout_record(
    head: Header,
    own: Rollouts,
    spans: Trace,
    tail_bytes: np.ndarray,
    verdicts: Verdicts,
    shape: WireShape,
    *,
    with_trace: bool,
    answers: Sequence[Sequence[str | None]] | None = None,
) -> tuple[RolloutRecord, int]:
    """What a policy publishes of its rollouts.

    Args:
      spans: the rollouts over their bytes, from `mutualrl.tokenizers.bridge.trace`, [P, G].
      tail_bytes: i8[P, G] from there too.
      answers: P lists of G answers found, if known.

    Returns:
      the record, and how many rows do not fit the wire (they are not valid; nothing is cut).

    Raises:
      ValueError: log-probs are not float32: sums over thousands of tokens need it.
    """
    _only_float32(own.policy, spans)
    p, g = own.tokens.shape[:2]
    given = answers or ((None,) * g,) * p
    raw = [[None if a is None else a.encode() for a in row] for row in given]
    answer_bytes = np.array([[-1 if a is None else len(a) for a in row] for row in raw], np.int32).reshape(p, g)
    fits = (spans.text_bytes <= shape.U) & (spans.n <= shape.T) & (answer_bytes <= shape.A)
    answer = np.zeros((p, g, shape.A), np.uint8)
    for i, j in np.argwhere(fits & (answer_bytes > 0)):
        answer[i, j, : answer_bytes[i, j]] = np.frombuffer(raw[i][j], np.uint8)
    lengths = np.diff(spans.ends, axis=-1, prepend=0)
    valid = spans.valid & fits
    pad = lambda x, *tail, fill=0: _fitted(x, (shape.P, shape.G, *tail), fill)  # noqa: E731
    record = RolloutRecord(
        header=head,
        text=pad(spans.text, shape.U),
        text_bytes=pad(spans.text_bytes),
        answer=pad(answer, shape.A),
        answer_bytes=pad(answer_bytes, fill=-1),
        finish=pad(own.finish),
        tail_bytes=pad(tail_bytes.astype(np.int8)),
        n=pad(spans.n),
        eos_logp=pad(spans.eos_logp, fill=np.nan),
        logp_sum=pad(spans.total),
        reward=pad(verdicts.reward.astype(np.float64), fill=np.nan),
        success=pad(verdicts.success, fill=-1),
        temperature=np.float32(own.temperature),
        top_p=np.float32(1.0),
        top_k=np.int32(0),
        renormalised=np.bool_(False),
        valid=pad(valid),
        token_bytes=pad(lengths.astype(np.uint16), shape.T) if with_trace else None,
        token_logp=pad(spans.logp, shape.T) if with_trace else None,
    )
    return record, int((spans.valid & ~fits).sum())


def stats_record(head: Header, reward: np.ndarray, success: np.ndarray, shape: WireShape) -> StatsRecord:
    """Group sums over the finite ones of rewards f64[P, G]; `success` i8[P, G]."""
    valid = np.isfinite(reward)
    r = np.where(valid, reward, 0.0)
    low = np.where(valid, reward, np.inf).min(1)
    high = np.where(valid, reward, -np.inf).max(1)
    some = valid.any(1)
    pad = lambda x: _fitted(x, (shape.P,), 0)  # noqa: E731
    stats = GroupStats(
        n=pad(valid.sum(1).astype(np.int32)),
        sum=pad(r.sum(1)),
        sumsq=pad((r**2).sum(1)),
        min=pad(np.where(some, low, 0.0)),
        max=pad(np.where(some, high, 0.0)),
        n_success=pad(((success == 1) & valid).sum(1).astype(np.int32)),
    )
    return StatsRecord(head, stats)


def capability_record(head: Header, rates: Sequence[float]) -> CapabilityRecord:
    """From the shares of the last completed steps, oldest first; more than WINDOW are cut to the newest."""
    window = np.full(WINDOW, np.nan, np.float32)
    window[: len(rates[-WINDOW:])] = rates[-WINDOW:]
    return CapabilityRecord(head, window)


def teacher_record(head: Header, learner: str, scored: Trace, shape: WireShape) -> TeacherRecord:
    """From a learner's texts [P, G] in the source's tokens with the source's log-probs. Rows that do not fit the wire
    are not valid.

    Raises:
      ValueError: as in `rollout_record`.
    """
    _only_float32(head.policy, scored)
    pad = lambda x, *tail, fill=0: _fitted(x, (shape.P, shape.G, *tail), fill)  # noqa: E731
    return TeacherRecord(
        header=head,
        learner=packed(learner),
        n=pad(scored.n),
        text_bytes=pad(scored.text_bytes),
        token_bytes=pad(np.diff(scored.ends, axis=-1, prepend=0).astype(np.uint16), shape.T),
        token_logp=pad(scored.logp, shape.T),
        eos_logp=pad(scored.eos_logp, fill=np.nan),
        valid=pad(scored.valid & (scored.n <= shape.T) & (scored.text_bytes <= shape.U)),
    )


def vote_record(head: Header, vote: Vote, shape: WireShape) -> VoteRecord:
    """From a vote whose answers have at most A bytes."""
    count, first = np.zeros((2, shape.P, shape.G), np.int32)
    answer_bytes = np.full((shape.P, shape.G), -1, np.int32)
    answer = np.zeros((shape.P, shape.G, shape.A), np.uint8)
    winner, parseable, n = np.full(shape.P, -1, np.int32), np.zeros(shape.P, np.int32), np.zeros(shape.P, np.int32)
    for p, given in enumerate(vote.answers):
        for b, a in enumerate(given):
            raw = np.frombuffer(a.encode(), np.uint8)
            answer[p, b, : len(raw)], answer_bytes[p, b] = raw, len(raw)
        count[p, : len(given)], first[p, : len(given)] = vote.counts[p], vote.first[p]
        n[p], parseable[p] = vote.n[p], count[p].sum()
        winner[p] = count[p].argmax() if given else -1
    return VoteRecord(head, answer, answer_bytes, count, first, winner, parseable, n)


def vote_of(record: VoteRecord, problems: int) -> Vote:
    """The vote on the first so many problems of a record."""
    used = [np.flatnonzero(row >= 0) for row in record.answer_bytes[:problems]]
    text = lambda p, b: bytes(record.answer[p, b, : record.answer_bytes[p, b]]).decode()  # noqa: E731
    return Vote(
        answers=tuple(tuple(text(p, b) for b in row) for p, row in enumerate(used)),
        counts=tuple(tuple(record.count[p, row].tolist()) for p, row in enumerate(used)),
        first=tuple(tuple(record.first[p, row].tolist()) for p, row in enumerate(used)),
        n=tuple(record.n[:problems].tolist()),
    )


def spans_of(record: RolloutRecord | TeacherRecord, text: np.ndarray | None = None) -> Trace:
    """A record's log-probs over the byte spans of its texts; `valid` false where none were sent.

    Args:
      text: u8[P, G, U], of the learner, for a TeacherRecord.
    """
    p, g = record.valid.shape
    sent = record.token_bytes is not None
    ends = np.cumsum(record.token_bytes, -1, dtype=np.int32) if sent else np.zeros((p, g, 1), np.int32)
    return Trace(
        text=record.text if text is None else text,
        text_bytes=record.text_bytes,
        ends=ends,
        n=record.n if sent else np.zeros((p, g), np.int32),
        logp=record.token_logp if sent else np.zeros((p, g, 1), np.float32),
        eos_logp=record.eos_logp,
        valid=record.valid & sent,
    )


def _only_float32(policy: str, spans: Trace) -> None:
    for x in (spans.logp, spans.eos_logp):
        if x.dtype != np.float32:
            raise ValueError(f"log-probs of {policy} are {x.dtype}: only float32 is sent")


def _fitted(x: np.ndarray, shape: tuple[int, ...], fill: Any) -> np.ndarray:
    """x in an array of the wire's shape; what does not fit is left out (its row is not valid then)."""
    out = np.full(shape, fill, x.dtype)
    part = tuple(slice(min(a, b)) for a, b in zip(x.shape, shape))
    out[part] = x[part]
    return out
