"""The exchange (SEE): who is heard by whom in a step, whatever carries the records.

A step has one or more rounds: every process publishes the records of its own policies and then gathers, in the same
order everywhere. What arrives is checked; what cannot be right is dropped and counted, and never touches a learner's
own rows. Whether a source is absent in a step is decided once, by the transport, for every learner: then all of them
take the same branch, which is to learn without that source. All of this is our definition.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mutualrl import experience, wire
from mutualrl.config import label_options, label_source
from mutualrl.exchange_log import REPLAYED, LogReader, LogWriter, occurrences
from mutualrl.experience import Record, StatsRecord, WireShape
from mutualrl.settings import ConfigError, RunConfig
from mutualrl.sources import LIVE, LOG, Source, edges, sources, voters

# (slot, step, {policy: its record, or None if it has none in time}, seconds left) -> the same for all policies of the
# run. Called by every process, in the same order, with the arrays of `wire.layout`. It has to give all processes the
# same answer: a policy whose record came too late for one is None for all.
Transport = Callable[[str, int, Mapping[str, wire.Wire | None], float], Mapping[str, wire.Wire | None]]


def in_process(
    slot: str, step: int, mine: Mapping[str, wire.Wire | None], seconds: float
) -> Mapping[str, wire.Wire | None]:
    """The transport where one process has all policies. There is nobody to wait for, so no record is late."""
    return dict(mine)


@dataclasses.dataclass(frozen=True)
class Heard:
    """What a step's gathering brought: checked records by source and topic, problems in the order of the step."""

    records: Mapping[str, Mapping[str, Record]]
    edges: Mapping[str, Sequence[Source]]

    def of(self, learner: str) -> list[tuple[Source, Mapping[str, Record]]]:
        """The records that a learner hears, by source index; sources that are absent are left out."""
        return [(s, found) for s in self.edges[learner] if (found := self.records.get(s.name))]


class Exchange:
    """The rounds of a run.

    Attributes:
      shape: sizes on the wire.
      heard: the sources that some learner hears. voters: by policy, whose votes it needs; empty where none cross.
      causes: what was dropped or missing over the run, by `<source>/<cause>`: `absent` (no record in time), `stale`,
        `policy` (a record in another's name, or in another slot than its own), `overflow`, `trace` (rows of a log, see
        `LogReader.record`) and the causes of `wire.from_wire` and `wire.validate`.
      bytes_sent: by source: texts, six bytes for each token with a log-prob, and a row's numbers.
      rates: by policy, the share of its rewards above 0 in each of its last completed steps.
      log: the LogWriter, or None.
    """

    def __init__(
        self,
        run: RunConfig,
        topics: Sequence[str],
        *,
        run_id: str,
        folder: Path | None = None,
        transport: Transport = in_process,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Args:
        topics: of `experience.TOPICS`, what the regime asks for.
        run_id: name of the run, in every record.
        folder: where published records are kept (`exchange.log`), or None.
        transport: carries records between processes.

        Raises:
          ConfigError: a log cannot be read, or the run's name is too long.
        """
        needs = label_source(run).needs(label_options(run))
        self.voters = voters(run, needs.votes)
        if (topics or self.voters) and len(run_id.encode()) > experience.NAME_BYTES:
            raise ConfigError(f"workdir={run_id!r}: its name must have at most {experience.NAME_BYTES} bytes")
        self.shape, self.run_id = WireShape.of(run, needs.views), run_id
        self._settings, self._transport, self._clock = run.exchange, transport, clock
        self._sources, self._edges = sources(run), edges(run)
        self.heard = {s.name for heard in self._edges.values() for s in heard}
        self._traced = "trace" in topics
        self._logs = {
            name: LogReader(log, f"exchange.logs.{name}", topics) for name, log in run.exchange.logs.items() if topics
        }
        self._voting = {s.name for found in self.voters.values() for s in found}
        self.log = LogWriter(folder) if folder and (topics or self.voters) else None
        self.causes: collections.Counter[str] = collections.Counter()
        self.bytes_sent: collections.Counter[str] = collections.Counter()
        self.rates: dict[str, list[float]] = {name: [] for name in run.policies}
        self._published: dict[tuple[str, str], tuple[Record, float]] = {}
        self._opened = clock()

    def open(self) -> None:
        """A step begins, and with it its first round."""
        self._opened = self._clock()
        self._published = {}

    def publish(self, record: Record) -> None:
        """Gives a record of one of this process's policies to the round; see `slot`. If nobody hears the policy, the
        record only goes into the log."""
        name = record.header.policy
        if name in (self._voting if slot(record) == "vote" else self.heard):
            self._published[slot(record), name] = record, self._clock()
            self.bytes_sent[name] += _payload(record)
        if self.log:
            self.log.add(record)

    def gather(self, step: int, slots: Sequence[str], problems: Sequence[str]) -> Heard:
        """Ends a round: sends what was published in some slots since it began, and waits for what others sent. The next
        round begins, and its deadline counts from now.

        Args:
          slots: names of `slot`, in the same order in every process.
          problems: names of the step's problems, into whose order records are brought.

        Returns:
          what every learner can hear; records by slot.
        """
        records: dict[str, dict[str, Record]] = collections.defaultdict(dict)
        for name in slots:
            for source, record in self._round(name, step).items():
                records[source][name] = _in_order(record, problems)
            topic = name.partition("/")[0]
            for source, log in self._logs.items() if topic in REPLAYED else ():
                record, missing = log.record(topic, step, problems, self.shape, self._traced)
                self.causes.update({f"{source}/{cause}": n for cause, n in missing.items()})
                if record is not None:
                    records[source][name] = self._checked(source, record)
        self._opened = self._clock()
        return Heard(records, self.voters if list(slots) == ["vote"] else self._edges)

    def _round(self, name: str, step: int) -> dict[str, Record]:
        """One slot: the checked records of the policies that are there."""
        learner = name.partition("/")[2]  # of teachers' scores only those who hear it are asked
        asked = self._edges[learner] if learner else self._sources
        heard = self._voting if name == "vote" else self.heard
        policies = [s for s in asked if s.kind != LOG and s.name in heard]
        mine: dict[str, wire.Wire | None] = {}
        for s in policies:
            record, stamp = self._published.get((name, s.name), (None, 0.0))
            late = self._transport is not in_process and stamp - self._opened > self._settings.deadline_s
            mine[s.name] = None if record is None or late else wire.to_wire(record, self.shape)
        left = max(0.0, self._settings.deadline_s - (self._clock() - self._opened))
        sent = self._transport(name, step, mine, left)
        found = {s.name: self._received(name, s, sent.get(s.name), step) for s in policies}
        return {source: record for source, record in found.items() if record is not None}

    def _received(self, name: str, source: Source, sent: wire.Wire | None, step: int) -> Record | None:
        """The checked record of one source, or None, with the cause counted."""
        if sent is None:
            self.causes[f"{source.name}/absent"] += 1
            return None
        record, cause = wire.from_wire(name.partition("/")[0], sent, self.shape, self._traced)
        if record is not None and (record.header.policy != source.name or slot(record) != name):
            cause = "policy"
        elif record is not None and source.kind == LIVE:
            oldest = step if name == "vote" else step - self._settings.max_staleness
            cause = "" if oldest <= record.header.step <= step else "stale"
        if cause:
            self.causes[f"{source.name}/{cause}"] += 1
            return None
        return self._checked(source.name, record, self.shape.G)

    def _checked(self, source: str, record: Record, largest_group: int | None = None) -> Record:
        record, causes = wire.validate(record, largest_group)
        self.causes.update({f"{source}/{cause}": n for cause, n in causes.items()})
        return record

    # What is remembered from step to step

    def note_rewards(self, name: str, reward: np.ndarray) -> None:
        """A step is completed: f64[P, G] rewards of a policy, NaN where there is none."""
        valid = np.isfinite(reward)
        if valid.any():
            self.rates[name] = [*self.rates[name], float((reward[valid] > 0).mean())][-experience.WINDOW :]

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold, as JSON."""
        rates = {name: list(rates) for name, rates in self.rates.items()}
        return {"causes": dict(self.causes), "bytes_sent": dict(self.bytes_sent), "rates": rates}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up the `state` of an earlier try."""
        self.causes = collections.Counter(state["causes"])
        self.bytes_sent = collections.Counter(state["bytes_sent"])
        self.rates = {name: list(rates) for name, rates in state["rates"].items()}


def slot(record: Record) -> str:
    """Where a record goes: its topic, and for a TeacherRecord `teacher_score/<learner>`."""
    topic = experience.topic_of(record)
    return f"{topic}/{experience.learner_of(record)}" if topic == "teacher_score" else topic


def _payload(record: Record) -> int:
    """Bytes of a record that say something: texts, answers, six for each token with a log-prob, numbers of its rows.
    Rows that are not valid say nothing."""
    body = record.stats if isinstance(record, StatsRecord) else record
    arrays = {
        f.name: x for f in dataclasses.fields(body) if f.name != "header" and (x := getattr(body, f.name)) is not None
    }
    if "valid" in arrays:
        rows = arrays["valid"]
        arrays = {name: x[rows] if np.shape(x)[:2] == rows.shape else x for name, x in arrays.items()}
    padded = ("text", "answer", "token_bytes", "token_logp", "learner")
    total = sum(np.asarray(x).nbytes for name, x in arrays.items() if name not in padded)
    total += sum(int(np.maximum(arrays[f"{x}_bytes"], 0).sum()) for x in ("text", "answer") if x in arrays)
    return total + (6 * int(arrays["n"].sum()) if "token_bytes" in arrays else 0)


def _in_order(record: Record, problems: Sequence[str]) -> Record:
    """The record with its problems in the order of the step's: by name, a name's k-th occurrence to its k-th. Problems
    that the source has nothing about are empty."""
    theirs = record.header.problems
    if tuple(problems) == theirs or isinstance(record, experience.CapabilityRecord):
        return record
    body = record.stats if isinstance(record, StatsRecord) else record
    place = {key: i for i, key in enumerate(occurrences(theirs))}
    index = np.full(len(body.n), -1)
    index[: len(problems)] = [place.get(key, -1) for key in occurrences(problems)]

    def moved(x: np.ndarray, empty: Any) -> np.ndarray:
        out = x[np.maximum(index, 0)]
        out[index < 0] = empty
        return out

    empty = {"winner": -1, "answer_bytes": -1, "eos_logp": np.nan, "reward": np.nan, "success": -1}
    arrays = {
        f.name: moved(x, empty.get(f.name, 0))
        for f in dataclasses.fields(body)
        if f.name not in ("header", "learner") and np.ndim(x := getattr(body, f.name)) >= 1
    }
    body = dataclasses.replace(body, **arrays)
    header = dataclasses.replace(record.header, problems=tuple(problems))
    if isinstance(record, StatsRecord):
        return StatsRecord(header, body)
    return dataclasses.replace(body, header=header)
