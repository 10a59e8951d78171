"""Byte spans of tokens: from sampled ids to a trace over bytes, and from a peer's bytes to a learner's own ids.

Token ids never cross between policies. What crosses is text, with log-probs over spans of its bytes (`Trace`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.types import LENGTH, STOP, STOP_TEXT, Trace

OVERLONG = ("drop", "truncate")


class ByteTable:
    """The bytes of every id of one tokenizer as flat arrays.

    Attributes:
      lengths: i32[V] bytes of each id; 0 for control ids and for ids that name no token.
    """

    def __init__(self, token_bytes: Sequence[bytes]):
        """Takes `Tokenizer.token_bytes`, the bytes of ids 0..V-1."""
        self.lengths = np.array([len(b) for b in token_bytes], np.int32)
        self._starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self._bytes = np.frombuffer(b"".join(token_bytes), np.uint8)

    def ends(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """i32[R, T] byte ends of the masked tokens of ids [R, T], constant where the mask is false.

        Raises:
          IndexError: a masked id outside the table.
        """
        lengths = np.zeros(ids.shape, np.int32)
        lengths[mask] = self.lengths[_inside(ids[mask], len(self.lengths))]
        return np.cumsum(lengths, -1, dtype=np.int32)

    def texts(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of the masked tokens of each row.

        Args:
          ids: i32[R, T]. mask: bool[R, T].

        Returns:
          text u8[R, U], 0 beyond the text, U the longest of the rows; text_bytes i32[R].

        Raises:
          IndexError: a masked id outside the table.
        """
        flat = _inside(ids[mask], len(self.lengths))
        lengths = self.lengths[flat]
        text_bytes = np.zeros(len(ids), np.int64)
        np.add.at(text_bytes, np.nonzero(mask)[0], lengths)
        # Byte m of the concatenation is byte m - (bytes before its token) of its token.
        shift = self._starts[flat] - (np.cumsum(lengths, dtype=np.int64) - lengths)
        text = np.zeros((len(ids), int(text_bytes.max(initial=0))), np.uint8)
        filled = np.arange(text.shape[1]) < text_bytes[:, None]
        text[filled] = self._bytes[np.arange(text_bytes.sum()) + np.repeat(shift, lengths)]
        return text, text_bytes.astype(np.int32)


def trace(
    ids: np.ndarray,
    mask: np.ndarray,
    logprobs: np.ndarray,
    finish: np.ndarray,
    table: ByteTable,
    *,
    stop_text: str = "",
    real_vocab: int | None = None,
) -> tuple[Trace, np.ndarray, dict[str, int]]:
    """Writes sampled completions over the bytes of their texts (source side).

    The terminal stop id (finish STOP) is no token of the text; its log-prob becomes `eos_logp`. A reply that is nothing
    but a stop id is a valid trace of the empty text. A text is cut

      finish LENGTH      before an incomplete UTF-8 character at its end (at most 3 bytes);
      finish STOP_TEXT   before the first occurrence of the stop text, which may begin in any token.

    A token that loses some of its bytes keeps its log-prob over the bytes that stay; a token that loses all of them
    leaves the trace together with its log-prob. `eos_logp` is NaN for both.

    A row is invalid, and counted under the first cause that applies, if

      id_range     a masked id is negative, or not below `real_vocab` (default: the length of the table);
      zero_bytes   a token before the terminal stop id has no bytes (a control id inside the sequence);
      stop_text    finish is STOP_TEXT and the text does not contain the stop text;
      utf8         the text is no UTF-8, the cut end apart;
      empty        nothing was sampled, or nothing is left of a row that did not stop.

    Args:
      ids: i32[..., T] sampled ids, right-padded. mask: bool[..., T] true on tokens, the terminal stop id included.
      logprobs: f32[..., T] behaviour log-probs in nats. finish: i8[...] STOP, LENGTH or STOP_TEXT.
      table: bytes of the ids of the policy that sampled.
      stop_text: what ended the rows with finish STOP_TEXT.
      real_vocab: ids that exist; a model's head may be padded beyond them.

    Returns:
      The trace [...], with Q = T; tail_bytes i8[...], bytes cut from the ends of rows with finish LENGTH (0 for
      others); the causes with their counts.
    """
    lead, t = mask.shape[:-1], mask.shape[-1]
    finish = np.asarray(finish).reshape(-1)
    ids, mask, logprobs = (np.asarray(x).reshape(len(finish), t) for x in (ids, mask, logprobs))
    sampled = mask.sum(-1)
    outside = mask & ((ids < 0) | (ids >= min(len(table.lengths), real_vocab or len(table.lengths))))
    stop = np.flatnonzero((finish == STOP) & (sampled > 0))
    body = mask & ~outside.any(-1, keepdims=True)
    body[stop, sampled[stop] - 1] = False
    ends = table.ends(ids, body)
    starts = np.pad(ends[:, :-1], ((0, 0), (1, 0)))
    text, kept = table.texts(ids, body)
    texts = [row[:end].tobytes() for row, end in zip(text, kept)]
    unfound, broken = np.zeros((2, len(texts)), bool)
    tail_bytes = np.zeros(len(texts), np.int8)
    for r, data in enumerate(texts):
        if finish[r] == STOP_TEXT:
            at = data.find(stop_text.encode()) if stop_text else -1
            unfound[r] = at < 0
            kept[r], data = (at, data[:at]) if at >= 0 else (kept[r], data)
        try:
            data.decode()
        except UnicodeDecodeError as error:
            incomplete = error.reason == "unexpected end of data" and error.end == len(data)
            if finish[r] == LENGTH and incomplete:
                kept[r], tail_bytes[r] = error.start, len(data) - error.start
            else:
                broken[r] = True
    causes, valid = _first_cause(
        id_range=outside.any(-1),
        zero_bytes=(body & (ends == starts)).any(-1),
        stop_text=unfound,
        utf8=broken,
        empty=(sampled == 0) | (kept == 0) & (finish == LENGTH),
    )
    kept[~valid] = 0
    in_text = body & (starts < kept[:, None])
    eos_logp = np.full(len(texts), np.nan, np.float32)
    eos_logp[stop] = logprobs[stop, sampled[stop] - 1]
    u = int(kept.max(initial=0))
    shaped = lambda x: x.reshape(*lead, *x.shape[1:])
    found = Trace(
        text=shaped(np.where(np.arange(u) < kept[:, None], text[:, :u], 0).astype(np.uint8)),
        text_bytes=shaped(kept.astype(np.int32)),
        ends=shaped(np.minimum(ends, kept[:, None])),
        n=shaped(in_text.sum(-1).astype(np.int32)),
        logp=shaped(np.where(in_text, logprobs, 0).astype(np.float32)),
        eos_logp=shaped(np.where(valid, eos_logp, np.float32(np.nan))),
        valid=shaped(valid),
    )
    return found, shaped(np.where(valid, tail_bytes, 0).astype(np.int8)), causes


@dataclasses.dataclass(frozen=True)
class Retokenised:
    """Peers' texts in a learner's own tokens.

    Attributes:
      tokens: i32[R, T] the learner's ids, right-padded with 0, its end-of-turn id last where the source stopped.
      mask: bool[R, T] true on tokens, all false where not `ok`.
      ends: i32[R, T] byte ends of the text tokens, constant beyond the last one.
      n: i32[R] text tokens; the end-of-turn id is not one of them.
      cut: bool[R] the row holds only the first T tokens of a longer text, without an end-of-turn id.
      ok: bool[R] the row can be used; it then has at least one token.
      causes: why valid texts were refused, with counts: `utf8`, `control`, `bytes`, `overlong`, `empty`.
    """

    tokens: np.ndarray
    mask: np.ndarray
    ends: np.ndarray
    n: np.ndarray
    cut: np.ndarray
    ok: np.ndarray
    causes: dict[str, int]


def retokenise(
    text: np.ndarray,
    text_bytes: np.ndarray,
    valid: np.ndarray,
    tokenizer: Tokenizer,
    *,
    stopped: np.ndarray,
    length: int,
    overlong: str = "drop",
    table: ByteTable | None = None,
) -> Retokenised:
    """Encodes peers' texts with a learner's tokenizer and guards the round trip (receiver's side).

    A valid text is refused, and counted under the first cause that applies, if

      utf8       it is no UTF-8;
      control    its encoding has a token without bytes (control ids are such);
      bytes      the bytes of its encoding are not those of the text;
      overlong   its tokens and the end-of-turn id are more than `length`, and `overlong` is "drop";
      empty      it is empty and the source did not stop: there would be no token at all.

    Args:
      text: u8[R, U]. text_bytes: i32[R]. valid: bool[R] rows to encode; the others are not `ok` and not counted.
      tokenizer: the learner's.
      stopped: bool[R] the source stopped by itself or by its stop text: `tokenizer.eot_id` is appended.
      length: T, the most tokens of a row, the end-of-turn id included.
      overlong: "drop" or "truncate": keep the first T text tokens, without an end-of-turn id (`cut`).
      table: the bytes of the tokenizer's ids; made here if not given.

    Raises:
      ValueError: unknown `overlong`.
    """
    if overlong not in OVERLONG:
        raise ValueError(f"overlong={overlong!r}: allowed are {', '.join(OVERLONG)}")
    table = table or ByteTable(tokenizer.token_bytes)
    rows = len(valid)
    valid, stopped = np.asarray(valid, bool), np.asarray(stopped, bool)
    texts: list[str] = []
    broken = np.zeros(rows, bool)
    for r in range(rows):
        try:
            texts.append(text[r, : text_bytes[r]].tobytes().decode() if valid[r] else "")
        except UnicodeDecodeError:
            broken[r] = True
            texts.append("")
    encoded = [tokenizer.encode(x) for x in texts]
    n = np.array([len(x) for x in encoded], np.int32)
    most = int(n.max(initial=0))
    ids = np.zeros((rows, max(most, length)), np.int32)
    mask = np.arange(ids.shape[1]) < n[:, None]
    ids[mask] = [i for x in encoded for i in x]
    ends = table.ends(ids, mask)
    again, again_bytes = table.texts(ids, mask)
    causes, ok = _first_cause(
        invalid=~valid,
        utf8=broken,
        control=(mask & (np.diff(ends, axis=-1, prepend=0) == 0)).any(-1),
        bytes=~_same(again, again_bytes, text, text_bytes),
        overlong=(n + stopped > length) & (overlong == "drop"),
        empty=(n == 0) & ~stopped,
    )
    del causes["invalid"]
    cut = ok & (n + stopped > length)
    n = np.where(ok, np.minimum(n, length), 0)
    tokens = ids[:, :length]
    mask = np.arange(length) < n[:, None]
    tokens[~mask] = 0
    turn_end = np.flatnonzero(ok & stopped & ~cut)
    tokens[turn_end, n[turn_end]] = tokenizer.eot_id
    mask[turn_end, n[turn_end]] = True
    ends = np.where(ok[:, None], ends[:, :length], 0)
    return Retokenised(tokens=tokens, mask=mask, ends=ends, n=n, cut=cut, ok=ok, causes=causes)


def _first_cause(**failed: np.ndarray) -> tuple[dict[str, int], np.ndarray]:
    """Rows counted under the first cause that holds of them, and bool[R], the rows of which none does."""
    causes, fine = {}, True
    for name, rows in failed.items():
        causes[name] = int((rows & fine).sum())
        fine = fine & ~rows
    return causes, fine


def _same(a: np.ndarray, a_bytes: np.ndarray, b: np.ndarray, b_bytes: np.ndarray) -> np.ndarray:
    """bool[R]: the texts of both sides are equal."""
    both = np.arange(min(a.shape[1], b.shape[1])) < a_bytes[:, None]
    differ = (a[:, : both.shape[1]] != b[:, : both.shape[1]]) & both
    return (a_bytes == b_bytes) & ~differ.any(-1)


def _inside(ids: np.ndarray, size: int) -> np.ndarray:
    if ids.size and (ids.min() < 0 or ids.max() >= size):
        raise IndexError(f"ids from {ids.min()} to {ids.max()} in a table of {size} ids")
    return ids
