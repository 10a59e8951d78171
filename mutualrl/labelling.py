"""Labels of a step: every policy's rollouts are sampled, votes cross, and what counts as right is decided for each."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from mutualrl import experience, votes
from mutualrl.config import label_options, label_source
from mutualrl.exchange import Exchange
from mutualrl.experience import RolloutRecord
from mutualrl.policy import Pending, Policy
from mutualrl.rewards.workers import GraderPool
from mutualrl.settings import RunConfig
from mutualrl.types import Problem, Rollouts, Verdicts, Vote


class Labelling:
    """The run's label source as the trainer sees it.

    Attributes:
      source: module of `mutualrl.labels`. options: its `Options`. needs: its `Needs`.
      name: of the source and its grader, as records carry it.
      causes: by `<policy>/vote/overlong`, answers that were too long to vote.
    """

    def __init__(self, run: RunConfig, cohort: Sequence[Policy], exchange: Exchange, grader: GraderPool):
        """Args:
        exchange: carries votes. grader: finds and compares answers.
        """
        self.run, self.cohort, self.exchange, self.grader = run, cohort, exchange, grader
        self.source, self.options = label_source(run), label_options(run)
        self.needs = self.source.needs(self.options)
        self.name = f"{run.label['name']}:{run.grader}"
        self.causes: collections.Counter[str] = collections.Counter()
        self._voters: dict[str, Rollouts] = {}

    def sample(self, problems: Sequence[Problem], step: int) -> dict[str, tuple[Pending, Pending | None]]:
        """Starts every policy's rollouts, and its teacher's if the source asks for one; all are at work before anyone
        is waited for."""
        if self.needs.votes:
            votes.check_problems(self.run, problems)
        views = wordings(problems, self.needs.views)
        samples = 0 if self.needs.teacher else self.needs.n_vote
        pending = {}
        for p in self.cohort:
            mine = [x.wording(p.config.view) for x in views]
            own = p.sample(mine, step, samples=samples, signal=self.needs.signal)
            ask = dict(samples=self.needs.n_vote, purpose="teacher", teacher=True)
            pending[p.name] = own, p.sample(mine, step, **ask) if self.needs.teacher else None
        return pending

    def collect(
        self, pending: Mapping[str, tuple[Pending, Pending | None]]
    ) -> tuple[dict[str, Rollouts], dict[str, int]]:
        """Waits for what `sample` has started.

        Returns:
          the rollouts that are trained on, G for each problem, and the tokens that were generated, by policy.
        """
        rollouts, tokens = {}, {}
        for p in self.cohort:
            own, teacher = (None if x is None else x.result() for x in pending[p.name])
            self._voters[p.name] = own if teacher is None else teacher
            rollouts[p.name] = own.first(p.config.group_size)
            tokens[p.name] = sum(int(x.lengths.sum()) for x in (own, teacher) if x is not None)
        return rollouts, tokens

    def label(
        self, step: int, rollouts: Mapping[str, Rollouts]
    ) -> tuple[dict[str, Verdicts], dict[str, dict[str, float]]]:
        """Verdicts of every policy's rollouts, and the metrics of labels (`metrics`)."""
        answers = {}
        if not self.needs.gold:
            answers = {name: votes.extract(own, self.grader) for name, own in rollouts.items()}
        cast = self._cast(rollouts, answers) if self.needs.votes else {}
        heard = self._exchanged(step, rollouts, cast)
        verdicts = {
            name: self.source.label(
                votes.Hearing(own, answers.get(name), heard[name], tuple(self.run.policies), self.options, self.grader)
            )
            for name, own in rollouts.items()
        }
        return verdicts, metrics(rollouts, verdicts, self.grader)

    def judge(self, record: RolloutRecord, own: Rollouts, verdicts: Verdicts) -> Verdicts:
        """A peer's rollouts in the view of the learner that has these rollouts and verdicts."""
        return self.source.judge(record, own, verdicts, self.grader, record.header.label_source == self.name)

    def end_step(self, step: int) -> None:
        """After the updates of a step teachers follow their policies."""
        if self.needs.teacher and (weight := self.source.policy_weight(self.options, step, self.run.steps)):
            for p in self.cohort:
                if not p.config.frozen:
                    p.follow(weight)

    def _cast(self, rollouts: Mapping[str, Rollouts], answers: Mapping[str, votes.Answers]) -> dict[str, Vote]:
        """Every policy's vote."""
        cast, longest = {}, self.exchange.shape.A
        for name, voters in self._voters.items():
            if voters.tokens.shape[:2] == rollouts[name].tokens.shape[:2] and not self.needs.teacher:
                given = answers[name]
            else:
                given = votes.extract(voters, self.grader)
            same = votes.same_by(self.grader, voters.problems) if self.options.vote_identity == "grader" else None
            cast[name] = votes.count(given, same, longest=longest)
            if over := sum(len(a.encode()) > longest for group in given for a in group if a):
                self.causes[f"{name}/vote/overlong"] += over
        return cast

    def _exchanged(
        self, step: int, rollouts: Mapping[str, Rollouts], cast: Mapping[str, Vote]
    ) -> dict[str, dict[str, Vote]]:
        """For each policy the votes it has: its own, and those of the policies it hears, in the cohort's order."""
        found = {name: {name: cast[name]} if name in cast else {} for name in rollouts}
        if not self.exchange.voters:
            return found
        for name, vote in cast.items():
            head = experience.header(self.exchange.run_id, rollouts[name], self.name)
            self.exchange.publish(experience.vote_record(head, vote, self.exchange.shape))
        problems = next(iter(rollouts.values())).problems
        heard = self.exchange.gather(step, ["vote"], [x.id for x in problems])
        for name in found:
            found[name] |= {s.name: experience.vote_of(r["vote"], len(problems)) for s, r in heard.of(name)}
            found[name] = {other: found[name][other] for other in self.run.policies if other in found[name]}
        return found


def wordings(problems: Sequence[Problem], views: int) -> list[Problem]:
    """What a policy is asked: the problems, and with two views behind them each in its first other wording, as a
    problem of its own whose name ends in `#2`."""
    others = [dataclasses.replace(x.wording(1), id=f"{x.id}#2") for x in problems] if views == 2 else []
    return [*problems, *others]


def metrics(
    rollouts: Mapping[str, Rollouts], verdicts: Mapping[str, Verdicts], grader: GraderPool
) -> dict[str, dict[str, float]]:
    """What labels are worth, by policy; gold answers are seen here and in evaluation only.

    Of runs whose rewards are by labels: `label/missing` problems without a label, `label/share` mean share of the vote
    that labels won, `label/acc` share of labels that are right, `label/reward_acc` share of rollouts whose success is
    the true one (both over what has a gold answer and a label). Of every cohort: `agreement`, the share of problems on
    which this policy's majority answer and another's are the same to the grader, and `wrong_consensus`, the share on
    which they are the same and wrong, over problems where both have one, mean over the other policies.
    """
    out: dict[str, dict[str, float]] = {name: {} for name in rollouts}
    winners = {name: votes.elect(votes.count(v.answers)) for name, v in verdicts.items() if v.answers is not None}
    for name, own in rollouts.items():
        v, gold = verdicts[name], [grader.gold(x) for x in own.problems]
        if v.labels is None:
            continue
        missing = np.array([x is None for x in v.labels])
        out[name] |= {"label/missing": float(missing.sum()), "label/share": votes.mean(v.share)}
        as_texts = [[x or ""] for x in v.labels]
        right = votes.matching(gold, as_texts, [[x] for x in v.labels], own.problems, grader)
        out[name]["label/acc"] = votes.mean([r for (r,), none in zip(right, missing) if not none])
        truth = np.array(votes.matching(gold, own.text, v.answers, own.problems, grader))
        known = ~np.isnan(truth) & (v.success >= 0)
        out[name]["label/reward_acc"] = float((truth == v.success)[known].mean()) if known.any() else float("nan")
    if len(winners) > 1:
        problems = next(iter(rollouts.values())).problems
        pairs = votes.agreement(winners, problems, grader)
        gold = [grader.gold(x) for x in problems]
        shared: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        for (a, b), same in pairs.items():
            given = winners[a].answers
            right = votes.matching(gold, [[x or ""] for x in given], [[x] for x in given], problems, grader)
            wrong = [np.nan if np.isnan(s) else float(s == 1 and r == 0) for s, (r,) in zip(same, right)]
            wrong = [np.nan if g is None else w for w, g in zip(wrong, gold)]
            for name in (a, b):
                shared[name].append((votes.mean(same), votes.mean(wrong)))
        for name, found in shared.items():
            out[name]["agreement"] = votes.mean([a for a, _ in found])
            out[name]["wrong_consensus"] = votes.mean([w for _, w in found])
    return {name: {k: v for k, v in found.items() if v == v} for name, found in out.items()}
