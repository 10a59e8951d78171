"""What a learner makes of its peers' records: rows in its own tokens, judged in its own view. Host-side numpy."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mutualrl import types
from mutualrl.assembly import no_peers
from mutualrl.experience import RolloutRecord, spans_of
from mutualrl.sources import LIVE, Source
from mutualrl.tokenizers import bridge
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.types import Received, Trace, Verdicts


def receive(
    heard: Sequence[tuple[Source, RolloutRecord]],
    problems: int,
    tokenizer: Tokenizer,
    judge: Callable[[RolloutRecord], Verdicts],
    *,
    length: int,
    overlong: str,
    two_way: Mapping[str, bool],
    table: bridge.ByteTable | None = None,
) -> tuple[Received, dict[str, int]]:
    """The records of all peers, by source, as the learner's rows.

    Args:
      heard: validated records whose problems are those of the step, in its order.
      problems: P.
      tokenizer: the learner's.
      judge: the learner's verdicts on a record, [P, G].
      length: T, the learner's longest completion; `overlong`: what becomes of a longer text, `drop` or `truncate`.
      two_way: whether each source hears the learner too.
      table: bytes of the learner's ids, if at hand.

    Returns:
      the rows, and how many heard rows were dropped on retokenisation, by cause.
    """
    parts, causes = [], collections.Counter()
    for source, record in heard:
        part, dropped = _rows(source, record, tokenizer, judge(record), length, overlong, two_way[source.name], table)
        parts.append(part)
        causes.update(dropped)
    if not parts:
        return no_peers(problems, length), {}
    return _join(parts), dict(causes)


def _rows(
    source: Source,
    record: RolloutRecord,
    tokenizer: Tokenizer,
    verdicts: Verdicts,
    length: int,
    overlong: str,
    two_way: bool,
    table: bridge.ByteTable | None,
) -> tuple[Received, dict[str, int]]:
    p, g = record.valid.shape
    heard = record.valid & np.isfinite(verdicts.reward)
    again = bridge.retokenise(
        record.text.reshape(p * g, -1),
        record.text_bytes.ravel(),
        heard.ravel(),
        tokenizer,
        stopped=(record.finish != types.LENGTH).ravel(),
        length=length,
        overlong=overlong,
        table=table,
    )
    grid = lambda x: x.reshape(p, g, *x.shape[1:])  # noqa: E731
    mask, n, cut = grid(again.mask), grid(again.n), grid(again.cut)
    # A text that was ended by a stop string has no log-prob for the end-of-turn id it gets here.
    unbacked = (record.finish == types.STOP_TEXT)[..., None] & (np.arange(length) == n[..., None])
    return Received(
        source=np.full(g, source.index, np.int32),
        sample=np.arange(g, dtype=np.int32),
        live=np.full(g, source.kind == LIVE and two_way),
        heard=heard,
        usable=heard & grid(again.ok),
        reward=np.where(heard, verdicts.reward, np.nan),
        success=np.where(heard, verdicts.success, -1).astype(np.int8),
        tokens=grid(again.tokens),
        mask=mask,
        surr_mask=mask & ~unbacked,
        ends=grid(again.ends),
        n=n,
        finish=np.where(cut, types.LENGTH, record.finish).astype(np.int8),
        trace=spans_of(record),
    ), again.causes


def _join(parts: Sequence[Received]) -> Received:
    """Parts side by side along K; texts and traces padded to the widest."""
    rows = {"source": 0, "sample": 0, "live": 0}
    fields = {
        f.name: np.concatenate([getattr(x, f.name) for x in parts], rows.get(f.name, 1))
        for f in dataclasses.fields(Received)
        if f.name != "trace"
    }
    trace = {}
    for f in dataclasses.fields(Trace):
        arrays = [getattr(x.trace, f.name) for x in parts]
        if arrays[0].ndim == 3:
            width = max(a.shape[2] for a in arrays)
            mode = "edge" if f.name == "ends" else "constant"
            arrays = [np.pad(a, ((0, 0), (0, 0), (0, width - a.shape[2])), mode=mode) for a in arrays]
        trace[f.name] = np.concatenate(arrays, 1)
    return Received(**fields, trace=Trace(**trace))
