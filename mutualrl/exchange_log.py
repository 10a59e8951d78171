"""Published records on disk: `exchange.log/<topic>/part-<first step>-<last step>.parquet`, one row a rollout or group.

The folder of a topic opens as one table with `pandas.read_parquet` or `pyarrow.dataset`. Nothing is padded there. The
table `used` says which received rows entered an update: step, problem, learner, source, sample, their weights. Parts
are written when the run is saved, each under another name first, so that a run that was killed leaves whole parts up
to its last checkpoint.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mutualrl import experience
from mutualrl.batches import from_peers
from mutualrl.experience import CapabilityRecord, Header, Record, RolloutRecord, StatsRecord, TeacherRecord, WireShape
from mutualrl.settings import ConfigError, LogSource
from mutualrl.types import Batch, GroupStats, Problem

USED = "used"
REPLAYED = ("rollout", "stats", "capability")  # what a teacher or a vote said of texts that are not there says nothing
KEYS = ("run", "step", "problem", "occurrence", "policy", "version", "label_source", "schema")  # of every record
SETTINGS = ("temperature", "top_p", "top_k", "renormalised")  # the same for all rows of a record


class LogWriter:
    """Keeps records until `flush` writes them."""

    def __init__(self, folder: Path):
        """Takes the run's `exchange.log` folder; made when something is written."""
        self.folder = Path(folder)
        self._rows: dict[str, list[pa.Table]] = collections.defaultdict(list)

    def add(self, record: Record) -> None:
        """Keeps a published record."""
        self._rows[experience.topic_of(record)].append(_table(record))

    def add_used(self, step: int, learner: str, me: int, names: Sequence[str], problems: Sequence[Problem],
                 batches: Sequence[Batch]) -> None:  # fmt: skip
        """Keeps which received rows a learner trained on.

        Args:
          me: the learner's index. names: of all sources, by index. batches: of the step.
        """
        keys = occurrences([x.id for x in problems])
        for update, batch in enumerate(batches):
            rows = np.flatnonzero(from_peers(batch, me))
            if len(rows):
                columns = {
                    "step": np.full(len(rows), step),
                    "problem": [keys[g][0] for g in batch.group[rows]],
                    "occurrence": np.array([keys[g][1] for g in batch.group[rows]], np.int32),
                    "learner": [learner] * len(rows),
                    "source": [names[j] for j in batch.source[rows]],
                    "sample": batch.sample[rows],
                    "update": np.full(len(rows), update),
                    "surr_weight": batch.surr_weight[rows],
                    "nll_weight": batch.nll_weight[rows],
                }
                self._rows[USED].append(pa.table(columns))

    def flush(self, step: int) -> None:
        """Writes everything kept so far, which belongs to the steps before `step`."""
        for topic, tables in self._rows.items():
            whole = pa.concat_tables(tables, promote_options="default")
            if not len(whole):
                continue
            steps = whole["step"].to_numpy()
            folder = self.folder / topic
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"part-{steps.min():08d}-{step - 1:08d}.parquet"
            temporary = folder / f".{path.name}.writing"  # a name that readers of the folder pass over
            pq.write_table(whole, temporary, compression="zstd", write_page_checksum=True)
            temporary.replace(path)
        self._rows.clear()

    def keep_to(self, step: int) -> None:
        """Removes parts of an earlier try that hold steps at or after `step`, from which the run goes on."""
        for path in self.folder.glob("*/part-*.parquet"):
            if int(path.stem.split("-")[2]) >= step:
                path.unlink()
        for path in self.folder.glob("*/.part-*.writing"):
            path.unlink()


class LogReader:
    """What one policy published in an earlier run.

    Attributes:
      damaged: parts that could not be read.
    """

    def __init__(self, source: LogSource, field: str, topics: Sequence[str] = ()):
        """Args:
        source: folder, policy, and whose use restricts the rollouts.
        field: the setting to name in an error.
        topics: of `experience.TOPICS`, what must be there of those that can be replayed.

        Raises:
          ConfigError: there is no log, or it has nothing of that policy.
        """
        self._folder, self._policy = Path(source.folder).expanduser(), source.policy
        self.damaged = 0
        if not self._folder.is_dir():
            raise ConfigError(f"{field}.folder={source.folder!r}: no such folder; must be a run's exchange.log")
        self._tables: dict[str, pa.Table] = {}
        self._places: dict[str, dict[tuple[str, int], dict[int, list[int]]]] = {}
        for topic in REPLAYED:
            self._open(topic)
        needed = [t for t in topics if t in REPLAYED] or ["rollout"]
        if missing := [t for t in needed if not self._places.get(t)]:
            raise ConfigError(
                f"{field}.policy={source.policy!r}: {source.folder} has no {missing[0]} of it; "
                f"must be one of {', '.join(self._policies(missing[0])) or 'the policies of another log'}"
            )
        if "trace" in topics and not self._traced():
            raise ConfigError(f"{field}.folder={source.folder!r}: has no log-probs of tokens, which are needed here")
        self._used = self._used_rows(source.used_by) if source.used_by else None
        if self._used is not None and not self._used:
            raise ConfigError(
                f"{field}.used_by={source.used_by!r}: trained on no row of {source.policy!r} in {source.folder}"
            )

    def _read(self, topic: str, columns: Sequence[str]) -> pa.Table | None:
        parts = []
        for path in sorted((self._folder / topic).glob("part-*.parquet")):
            try:
                part = pq.read_table(path, page_checksum_verification=True)
                if missing := set(columns) - set(part.column_names):
                    raise pa.ArrowInvalid(f"there is no column {min(missing)}")
                parts.append(part)
            except (OSError, pa.ArrowException) as error:
                self.damaged += 1
                logging.warning("%s cannot be read and is passed over: %s", path, str(error).partition("\n")[0])
        return pa.concat_tables(parts, promote_options="default").combine_chunks() if parts else None

    def _open(self, topic: str) -> None:
        table = self._read(topic, (*KEYS, *_COLUMNS[topic]))
        if table is None:
            return
        places: dict[tuple[str, int], dict[int, list[int]]] = collections.defaultdict(dict)
        foreign = 0
        columns = (table[c].to_pylist() for c in ("policy", "schema", "step", "problem", "occurrence"))
        for row, (policy, schema, step, problem, occurrence) in enumerate(zip(*columns)):
            if policy == self._policy and schema == experience.SCHEMA:
                places[problem, occurrence].setdefault(step, []).append(row)
            foreign += schema != experience.SCHEMA
        if foreign:
            logging.warning("%s: %d rows of another schema are passed over", self._folder / topic, foreign)
        self._tables[topic], self._places[topic] = table, dict(places)

    def _policies(self, topic: str) -> list[str]:
        return sorted(set(self._tables[topic]["policy"].to_pylist())) if topic in self._tables else []

    def _traced(self) -> bool:
        table = self._tables["rollout"]
        rows = [r for steps in self._places["rollout"].values() for found in steps.values() for r in found]
        return "token_logp" in table.column_names and table["token_logp"].take(rows).null_count < len(rows)

    def _used_rows(self, learner: str) -> set[int]:
        """Rows of the rollouts that a policy trained on at the step they were published."""
        columns = ("learner", "source", "step", "problem", "occurrence", "sample")
        used = self._read(USED, columns)
        if used is None or "rollout" not in self._places:
            return set()
        keys = {
            ((problem, occurrence), step, sample)
            for who, source, step, problem, occurrence, sample in zip(*(used[c].to_pylist() for c in columns))
            if (who, source) == (learner, self._policy)
        }
        samples = self._tables["rollout"]["sample"].to_pylist()
        return {
            row
            for key, steps in self._places["rollout"].items()
            for step, found in steps.items()
            for row in found
            if (key, step, samples[row]) in keys
        }

    def record(
        self, topic: str, step: int, problems: Sequence[str], shape: WireShape, traced: bool
    ) -> tuple[Record | None, dict[str, int]]:
        """What the policy published about the step's problems: at that step, or else at the nearest earlier one at
        which it had the problem, never at a later one. Only then are rollouts restricted to those used.

        Returns:
          the record (problems that are not there are empty), or None where nothing is there; what is missing, by cause:
          `absent` (all), `overflow` (rows that do not fit the wire), `trace` (rows without log-probs).
        """
        places = self._places.get(topic, {})
        keys = [("", 0)] if topic == "capability" else occurrences(problems)
        rows = []
        for p, key in enumerate(keys):
            steps = [s for s in places.get(key, ()) if s <= step]
            rows += [(p, row) for row in places[key][max(steps)]] if steps else []
        if not rows:
            return None, {"absent": 1}
        if self._used is not None and topic == "rollout":
            rows = [(p, row) for p, row in rows if row in self._used]
            if not rows:
                return None, {}
        found = self._tables[topic].take([row for _, row in rows])
        at = np.array([p for p, _ in rows])
        labels = set(found["label_source"].to_pylist())
        head = Header(
            run=found["run"][0].as_py(),
            step=step,
            policy=self._policy,
            version=max(found["version"].to_pylist()),
            label_source=labels.pop() if len(labels) == 1 else "",
            problems=tuple(problems),
        )
        return _RECORDS[topic](head, found, at, shape, traced)


def occurrences(names: Sequence[str]) -> list[tuple[str, int]]:
    """Each name with how often it came before."""
    seen: collections.Counter[str] = collections.Counter()
    return [(name, (seen.update([name]), seen[name] - 1)[1]) for name in names]


def _table(record: Record) -> pa.Table:
    """A record's rows: the P·G valid rollouts, the P groups, or the one window."""
    h = record.header
    if isinstance(record, CapabilityRecord):
        keys, columns = [("", 0)], {"window": [record.window]}
    elif isinstance(record, StatsRecord):
        keys = occurrences(h.problems)
        columns = {f.name: getattr(record.stats, f.name)[: len(keys)] for f in dataclasses.fields(GroupStats)}
    elif isinstance(record, (RolloutRecord, TeacherRecord)):
        problem, sample = np.nonzero(record.valid)
        every = occurrences(h.problems)
        keys, columns = [every[p] for p in problem], {"sample": sample, **_rows(record)}
    else:
        keys, columns = occurrences(h.problems), _votes(record)
    n = len(keys)
    # Types are given, since a record may have no rows.
    return pa.table(
        {
            "run": pa.array([h.run] * n, pa.string()),
            "step": np.full(n, h.step, np.int64),
            "problem": pa.array([k for k, _ in keys], pa.string()),
            "occurrence": pa.array([i for _, i in keys], pa.int32()),
            "policy": pa.array([h.policy] * n, pa.string()),
            "version": np.full(n, h.version, np.int64),
            "label_source": pa.array([h.label_source] * n, pa.string()),
            "schema": np.full(n, h.schema, np.int32),
            **columns,
        }
    )


def _rows(record: RolloutRecord | TeacherRecord) -> dict[str, Any]:
    """Columns of the valid rows of rollouts or of a teacher's scores."""
    v, n = record.valid, record.n[record.valid]
    out: dict[str, Any] = {}
    if isinstance(record, RolloutRecord):
        out["text"] = pa.array([bytes(t[:k]) for t, k in zip(record.text[v], record.text_bytes[v])], pa.binary())
        answers = zip(record.answer[v], record.answer_bytes[v])
        out["answer"] = pa.array(
            [None if k < 0 else bytes(a[:k]).decode(errors="replace") for a, k in answers], pa.string()
        )
        for name in ("finish", "tail_bytes", "logp_sum", "reward", "success"):
            out[name] = getattr(record, name)[v]
        for name in SETTINGS:
            out[name] = np.full(len(n), getattr(record, name))
    else:
        out["learner"] = pa.array([experience.learner_of(record)] * len(n), pa.string())
        out["text_bytes"] = record.text_bytes[v]
    out["n"], out["eos_logp"] = n, record.eos_logp[v]
    if record.token_bytes is not None:
        for name, kind in (("token_bytes", pa.uint16()), ("token_logp", pa.float32())):
            out[name] = pa.array([x[:k] for x, k in zip(getattr(record, name)[v], n)], pa.list_(kind))
    return out


def _votes(record: experience.VoteRecord) -> dict[str, Any]:
    p = len(record.header.problems)
    buckets = [np.flatnonzero(c) for c in record.count[:p]]
    text = lambda i, b: bytes(record.answer[i, b, : record.answer_bytes[i, b]]).decode(errors="replace")  # noqa: E731
    return {
        "answers": pa.array([[text(i, b) for b in bs] for i, bs in enumerate(buckets)], pa.list_(pa.string())),
        "count": pa.array([record.count[i, bs] for i, bs in enumerate(buckets)], pa.list_(pa.int32())),
        "first": pa.array([record.first[i, bs] for i, bs in enumerate(buckets)], pa.list_(pa.int32())),
        **{name: getattr(record, name)[:p] for name in ("winner", "parseable", "n")},
    }


Found = tuple[Record, dict[str, int]]


def _rollouts(head: Header, found: pa.Table, at: np.ndarray, shape: WireShape, traced: bool) -> Found:
    g = found["sample"].to_numpy()
    text, answers, n = found["text"].to_pylist(), found["answer"].to_pylist(), found["n"].to_numpy()
    raw = [None if a is None else a.encode() for a in answers]
    fits = np.array([len(t) <= shape.U and (a is None or len(a) <= shape.A) for t, a in zip(text, raw)])
    fits &= (g >= 0) & (g < shape.G) & (n <= shape.T)
    has_trace = np.ones(len(fits), bool)
    for name in ("token_bytes", "token_logp") if traced else ():
        lengths = pc.list_value_length(found[name]).fill_null(-1).to_numpy() if name in found.column_names else -1
        has_trace &= lengths == n
    missing = {"overflow": int((~fits).sum()), "trace": int((fits & ~has_trace).sum())}
    keep = np.flatnonzero(fits & has_trace)
    where = at[keep], g[keep]
    grid = lambda kind, fill, *tail: np.full((shape.P, shape.G, *tail), fill, kind)  # noqa: E731

    def column(name: str, kind: Any, fill: Any = 0) -> np.ndarray:
        out = grid(kind, fill)
        out[where] = found[name].to_numpy()[keep]
        return out

    def ragged(values: Sequence[Any], kind: Any, width: int) -> np.ndarray:
        out = grid(kind, 0, width)
        for p, s, i in zip(*where, keep):
            out[p, s, : len(values[i])] = values[i]
        return out

    lengths, valid = grid(np.int32, 0), grid(bool, False)
    lengths[where], valid[where] = [len(text[i]) for i in keep], True
    answer_bytes = grid(np.int32, -1)
    answer_bytes[where] = [-1 if raw[i] is None else len(raw[i]) for i in keep]
    settings = {name: found[name][0].as_py() for name in SETTINGS}
    record = RolloutRecord(
        header=head,
        text=ragged([np.frombuffer(t, np.uint8) for t in text], np.uint8, shape.U),
        text_bytes=lengths,
        answer=ragged([np.frombuffer(a or b"", np.uint8) for a in raw], np.uint8, shape.A),
        answer_bytes=answer_bytes,
        finish=column("finish", np.int8),
        tail_bytes=column("tail_bytes", np.int8),
        n=column("n", np.int32),
        eos_logp=column("eos_logp", np.float32, np.nan),
        logp_sum=column("logp_sum", np.float64),
        reward=column("reward", np.float64, np.nan),
        success=column("success", np.int8, -1),
        temperature=np.float32(settings["temperature"]),
        top_p=np.float32(settings["top_p"]),
        top_k=np.int32(settings["top_k"]),
        renormalised=np.bool_(settings["renormalised"]),
        valid=valid,
        token_bytes=ragged(found["token_bytes"].to_pylist(), np.uint16, shape.T) if traced else None,
        token_logp=ragged(found["token_logp"].to_pylist(), np.float32, shape.T) if traced else None,
    )
    return record, {cause: n for cause, n in missing.items() if n}


def _stats(head: Header, found: pa.Table, at: np.ndarray, shape: WireShape, traced: bool) -> Found:
    def column(name: str) -> np.ndarray:
        out = np.zeros(shape.P, np.int32 if name.startswith("n") else np.float64)
        out[at] = found[name].to_numpy()
        return out

    return StatsRecord(head, GroupStats(**{f.name: column(f.name) for f in dataclasses.fields(GroupStats)})), {}


def _capability(head: Header, found: pa.Table, at: np.ndarray, shape: WireShape, traced: bool) -> Found:
    return CapabilityRecord(head, np.array(found["window"][0].as_py(), np.float32)), {}


_RECORDS: Mapping[str, Any] = dict(zip(REPLAYED, (_rollouts, _stats, _capability)))
_COLUMNS: Mapping[str, Sequence[str]] = {
    "rollout": (
        *("sample", "text", "answer", "finish", "tail_bytes", "logp_sum", "reward", "success", "n", "eos_logp"),
        *SETTINGS,
    ),
    "stats": tuple(f.name for f in dataclasses.fields(GroupStats)),
    "capability": ("window",),
}
