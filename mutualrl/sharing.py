"""What crosses between policies in a step: their records go out, what each has to learn from comes back."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mutualrl import batches, experience, metrics, sources, types
from mutualrl.advantages import failed_groups
from mutualrl.assembly import Material
from mutualrl.config import regime, transfer_options
from mutualrl.exchange import Exchange, Heard
from mutualrl.experience import TeacherRecord
from mutualrl.labelling import Labelling
from mutualrl.policy import Policy
from mutualrl.received import receive
from mutualrl.scores import Scores
from mutualrl.settings import RunConfig
from mutualrl.tokenizers import bridge
from mutualrl.types import Batch, Received, Rollouts, Trace, Verdicts


class Sharing:
    """The exchange as the policies of a run see it.

    Attributes:
      topics: what the regime has policies send; empty where nothing is exchanged.
      names: of all sources, by index.
      rescued: per learner, the problems whose own rollouts all failed at their last visit and that a received row was
        trained on then.
      causes: rows dropped over the run, by `<source or learner>/<stage>/<cause>`: `text` on the way from tokens to
        bytes, `wire` for want of room, `roundtrip` on the way to the learner's tokens.
    """

    def __init__(self, run: RunConfig, cohort: Sequence[Policy], labelling: Labelling, exchange: Exchange):
        """Args:
        labelling: judges what is heard.
        """
        self.run, self.cohort, self.labelling, self.exchange = run, cohort, labelling, exchange
        self.options = transfer_options(run)
        self.topics = regime(run).topics(self.options)
        self.edges = sources.edges(run)
        self.names = [s.name for s in sources.sources(run)]
        self._policies = {p.name: p for p in cohort}
        # Ids that the model does not have count as having no bytes, so that the round trip guard refuses them.
        self._tables = {
            p.name: bridge.ByteTable([b if i < p.real_vocab else b"" for i, b in enumerate(p.tokenizer.token_bytes)])
            for p in cohort
        }
        self.rescued: dict[str, set[str]] = {p.name: set() for p in cohort}
        self.causes: collections.Counter[str] = collections.Counter()

    def begin_step(self) -> None:
        """A step begins; what is sampled too slowly from now on comes too late for the exchange."""
        self.exchange.open()

    def share(
        self,
        step: int,
        rollouts: Mapping[str, Rollouts],
        verdicts: Mapping[str, Verdicts],
        rewards: Mapping[str, np.ndarray],
        scores: Scores,
    ) -> dict[str, Material]:
        """Publishes what the regime asks for and gathers what every learner hears.

        Args:
          rollouts, verdicts: of every policy. rewards: f64[P, G] with each policy's shaping.
          scores: lets teachers score.

        Returns:
          the Material of every policy that is trained.
        """
        spans = {name: self._spans(name, own) for name, own in rollouts.items()} if "rollout" in self.topics else {}
        self._publish(rollouts, verdicts, rewards, spans)
        problems = [x.id for x in next(iter(rollouts.values())).problems]
        first_round = [t for t in self.topics if t in ("rollout", "stats", "capability")]
        heard = self.exchange.gather(step, first_round, problems)
        teachers = self._teach(step, rollouts, spans, scores) if "teacher_score" in self.topics else {}
        return {
            p.name: Material(
                own=rollouts[p.name],
                verdicts=verdicts[p.name],
                reward=rewards[p.name],
                config=p.config,
                index=p.index,
                tokenizer=p.tokenizer,
                options=self.options,
                step=step,
                seed=self.run.seed,
                received=self._received(p, rollouts[p.name], verdicts[p.name], heard),
                stats=tuple(r["stats"].stats for _, r in heard.of(p.name) if "stats" in r),
                capability=self._capability(p.name, heard),
                own_trace=spans[p.name][0] if spans else None,
                teachers=teachers.get(p.name, ()),
            )
            for p in self.cohort
            if not p.config.frozen
        }

    def _spans(self, name: str, own: Rollouts) -> tuple[Trace, np.ndarray]:
        """A policy's rollouts over the bytes of their texts, and the bytes taken off their ends."""
        policy = self._policies[name]
        trace, tail_bytes, causes = bridge.trace(
            own.tokens,
            own.mask,
            own.logprobs,
            own.finish,
            self._tables[name],
            stop_text=policy.config.stop_text,
            real_vocab=policy.real_vocab,
        )
        self._count(name, "text", causes)
        return trace, tail_bytes

    def _publish(
        self,
        rollouts: Mapping[str, Rollouts],
        verdicts: Mapping[str, Verdicts],
        rewards: Mapping[str, np.ndarray],
        spans: Mapping[str, tuple[Trace, np.ndarray]],
    ) -> None:
        shape = self.exchange.shape
        for name, own in rollouts.items():
            head = experience.header(self.exchange.run_id, own, self.labelling.name)
            if "rollout" in self.topics:
                record, too_long = experience.rollout_record(
                    head,
                    own,
                    *spans[name],
                    verdicts[name],
                    shape,
                    with_trace="trace" in self.topics,
                    answers=verdicts[name].answers,
                )
                self._count(name, "wire", {"overflow": too_long})
                self.exchange.publish(record)
            if "stats" in self.topics:
                self.exchange.publish(experience.stats_record(head, rewards[name], verdicts[name].success, shape))
            if "capability" in self.topics:
                self.exchange.publish(experience.capability_record(head, self.exchange.rates[name]))

    def _received(self, p: Policy, own: Rollouts, verdicts: Verdicts, heard: Heard) -> Received:
        records = [(s, found["rollout"]) for s, found in heard.of(p.name) if "rollout" in found]
        received, causes = receive(
            records,
            len(own.problems),
            p.tokenizer,
            lambda record: self.labelling.judge(record, own, verdicts),
            length=p.config.max_new_tokens,
            overlong=self.run.exchange.overlong,
            two_way={s.name: any(x.name == p.name for x in self.edges.get(s.name, ())) for s, _ in records},
            table=self._tables[p.name],
        )
        self._count(p.name, "roundtrip", causes)
        return received

    def _capability(self, learner: str, heard: Heard) -> np.ndarray:
        """f64[sources] by source index: mean share of positive rewards over each window; NaN where there is none."""
        out = np.full(len(self.names), np.nan)
        if "capability" in self.topics:
            windows = {self.names.index(learner): self.exchange.rates[learner]}
            windows |= {s.index: found["capability"].window for s, found in heard.of(learner) if "capability" in found}
            for index, window in windows.items():
                known = [x for x in window if np.isfinite(x)]
                out[index] = np.mean(known) if known else np.nan
        return out

    def _teach(
        self, step: int, rollouts: Mapping[str, Rollouts], spans: Mapping[str, tuple[Trace, np.ndarray]], scores: Scores
    ) -> dict[str, tuple[Trace, ...]]:
        """The second round of distillation: every source scores the texts of the policies that hear it."""
        shape, out = self.exchange.shape, {}
        for learner, heard_from in self.edges.items():
            text, own = spans[learner][0], rollouts[learner]
            p, g = own.tokens.shape[:2]
            again, rows = {}, {}
            for s in heard_from:
                if s.kind == sources.LOG:
                    continue
                teacher = self._policies[s.name]
                again[s.name] = bridge.retokenise(
                    text.text.reshape(p * g, -1),
                    text.text_bytes.ravel(),
                    text.valid.ravel(),
                    teacher.tokenizer,
                    stopped=(own.finish == types.STOP).ravel(),
                    length=teacher.config.max_new_tokens,
                    table=self._tables[s.name],
                )
                self._count(s.name, "roundtrip", again[s.name].causes)
                if again[s.name].ok.any():
                    problem = np.repeat(np.arange(p), g)[again[s.name].ok]
                    tokens, mask = (x[again[s.name].ok] for x in (again[s.name].tokens, again[s.name].mask))
                    rows[s.name] = batches.completions(rollouts[s.name], problem, tokens, mask)
            scored_rows = scores.of(rows)
            for name in again:
                logp = scored_rows.get(name, np.zeros((0, again[name].tokens.shape[1]), np.float32))
                head = experience.header(self.exchange.run_id, rollouts[name], self.labelling.name)
                scored = _scored(text, again[name], logp, own.finish == types.STOP)
                record = experience.teacher_record(head, learner, scored, shape)
                self._count(name, "wire", {"overflow": int(scored.valid.sum() - record.valid.sum())})
                self.exchange.publish(record)
            slot = f"teacher_score/{learner}"
            heard = self.exchange.gather(step, [slot], [x.id for x in own.problems])
            found = [records[slot] for _, records in heard.of(learner) if slot in records]
            out[learner] = tuple(_over(text, record) for record in found)
        return out

    # After the updates

    def learnt(
        self, step: int, p: Policy, m: Material, trained: Sequence[Batch], updates: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        """Metrics of what a policy made of its peers' records in a step; keeps what the log and later visits need.

        Beside `metrics.of_peers`: `rescue/stuck`, of the problems that were `rescued` at their last visit the share
        whose own rollouts all fail again.
        """
        if not self.edges[p.name] or not self.topics:
            return {}
        found = metrics.of_peers(m.verdicts, m.received, m.stats, trained, updates, p.index)
        failed = failed_groups(m.verdicts.success)
        again = [bool(f) for x, f in zip(m.own.problems, failed) if x.id in self.rescued[p.name]]
        if again:
            found["rescue/stuck"] = float(np.mean(again))
        used = np.zeros(len(failed), bool)
        for b in trained:
            used[b.group[batches.from_peers(b, p.index)]] = True
        visited, now = ({x.id for x, y in zip(m.own.problems, which) if y} for which in (used | True, used & failed))
        self.rescued[p.name] = (self.rescued[p.name] - visited) | now
        if self.exchange.log:
            self.exchange.log.add_used(step, p.name, p.index, self.names, m.own.problems, trained)
        return found

    def end_step(self, verdicts: Mapping[str, Verdicts]) -> None:
        """The step is completed."""
        for name, found in verdicts.items():
            self.exchange.note_rewards(name, found.reward)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold, as JSON."""
        rescued = {name: sorted(ids) for name, ids in self.rescued.items()}
        return {
            "exchange": self.exchange.state(),
            "rescued": rescued,
            "causes": dict(self.causes),
            "votes": dict(self.labelling.causes),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up the `state` of an earlier try."""
        self.exchange.restore(state["exchange"])
        self.rescued = {name: set(ids) for name, ids in state["rescued"].items()}
        self.causes = collections.Counter(state["causes"])
        self.labelling.causes = collections.Counter(state["votes"])

    def counts(self) -> dict[str, int]:
        """Everything dropped or missing so far, by `<source or learner>/<stage>/<cause>`."""
        records = {k.replace("/", "/record/", 1): n for k, n in self.exchange.causes.items()}
        return {**self.causes, **self.labelling.causes, **records}

    def summary(self) -> dict[str, Any]:
        """The `exchange` part of summary.json; empty where nothing is exchanged."""
        voters = self.exchange.voters
        if not self.topics and not voters:
            return {}
        return {
            "topics": [*self.topics, *(["vote"] if voters else [])],
            "edges": {name: [s.name for s in heard] for name, heard in self.edges.items()} if self.topics else {},
            "votes": {name: [s.name for s in heard] for name, heard in voters.items()},
            "kinds": {s.name: s.kind for s in sources.sources(self.run)},
            "bytes_sent": dict(self.exchange.bytes_sent),
            "dropped": dict(sorted(self.counts().items())),
        }

    def _count(self, name: str, stage: str, causes: Mapping[str, int]) -> None:
        self.causes.update({f"{name}/{stage}/{cause}": n for cause, n in causes.items() if n})


def _scored(text: Trace, again: bridge.Retokenised, logp: np.ndarray, stopped: np.ndarray) -> Trace:
    """A learner's texts in a teacher's tokens, with the teacher's log-probs f32[rows that are ok, T]."""
    p, g = text.valid.shape
    t = again.tokens.shape[1]
    every = np.zeros((p * g, t), np.float32)
    every[again.ok] = logp
    real = np.arange(t) < again.n[:, None]
    at_end = np.take_along_axis(every, np.minimum(again.n, t - 1)[:, None], 1)[:, 0]
    grid = lambda x: x.reshape(p, g, *x.shape[1:])  # noqa: E731
    return Trace(
        text=text.text,
        text_bytes=text.text_bytes,
        ends=grid(again.ends),
        n=grid(again.n),
        logp=grid(np.where(real, every, 0).astype(np.float32)),
        eos_logp=np.where(stopped & grid(again.ok), grid(at_end), np.nan).astype(np.float32),
        valid=text.valid & grid(again.ok),
    )


def _over(text: Trace, record: TeacherRecord) -> Trace:
    """A teacher's scores over a learner's own texts [P, G]; not valid where they are of other texts."""
    p, g = text.valid.shape
    spans = experience.spans_of(record, text.text)
    scored = spans.at((slice(p), slice(g)))
    same = (scored.text_bytes == text.text_bytes) & (np.isfinite(scored.eos_logp) == np.isfinite(text.eos_logp))
    return dataclasses.replace(scored, valid=scored.valid & text.valid & same)
