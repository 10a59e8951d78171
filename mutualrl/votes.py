"""Majority votes: from answers to buckets, from buckets to labels, from labels to rewards. Numpy only, never jax.

One procedure for every label source that votes (published: the Co-RL code; what differs is marked as ours): answers are
what the grader extracts, None and '' do not vote; equal ones share a bucket (by string, or by the grader against each
bucket's first member, in order: ours); the largest bucket wins, of equals the one seen first; its share is of the
answers that voted; with `min_share` above 0 the share must exceed it. A problem without a label has reward 0 for all
its rollouts, hence no advantage (ours: the code has a sentinel that could match). A rollout has reward 1 if the grader
says that its answer equals the label, so that equivalent spellings split a vote by string, but not the rewards.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mutualrl import rewards
from mutualrl.experience import RolloutRecord
from mutualrl.rewards.workers import GraderPool
from mutualrl.settings import ConfigError, RunConfig, one_of, within
from mutualrl.types import Problem, Rollouts, Verdicts, Vote

IDENTITIES = ("string", "grader")
TIE = 1e-12  # weighted scores nearer than this are equal

# (answer, other answer, index of the problem) -> whether they are the same
Same = Callable[[str, str, int], bool]
Answers = Sequence[Sequence[str | None]]


@dataclasses.dataclass(frozen=True)
class Labels:
    """P answers that count as right, None where there is none, and the share f64[P] that each won, NaN there."""

    answers: tuple[str | None, ...]
    share: np.ndarray


@dataclasses.dataclass(frozen=True)
class Hearing:
    """What a label source judges one policy's rollouts by.

    Attributes:
      own: the rollouts. answers: P lists of the G answers found in them; nobody looked at the gold answers for it.
      votes: by policy, in the order of the cohort, of those whose votes the source needs and that came.
      policies: names of the cohort in order.
      options: the source's `Options`. grader: compares answers.
    """

    own: Rollouts
    answers: Answers
    votes: Mapping[str, Vote]
    policies: tuple[str, ...]
    options: Any
    grader: GraderPool

    def by_label(self, labels: Labels) -> Verdicts:
        """The rollouts judged by labels."""
        return judged(labels, self.own.text, self.answers, self.own.problems, self.grader)


def count(answers: Answers, same: Same | None = None, *, longest: int = 1 << 30) -> Vote:
    """Buckets of equal answers, in the order first seen.

    Args:
      answers: P lists in sample order. same: by the grader; None: equal strings.
      longest: bytes; a longer answer does not vote.
    """
    found = []
    for p, given in enumerate(answers):
        buckets: dict[str, list[int]] = {}
        for sample, a in enumerate(given):
            if a and len(a.encode()) <= longest:
                key = a if same is None else next((b for b in buckets if b == a or same(a, b, p)), a)
                buckets.setdefault(key, []).append(sample)
        found.append(buckets)
    return Vote(
        answers=tuple(tuple(b) for b in found),
        counts=tuple(tuple(map(len, b.values())) for b in found),
        first=tuple(tuple(x[0] for x in b.values()) for b in found),
        n=tuple(map(len, answers)),
    )


def elect(vote: Vote, min_share: float = 0.0) -> Labels:
    """The winners of one policy's vote."""
    return _labels([_top(a, list(map(float, c)), min_share) for a, c in zip(vote.answers, vote.counts)])


def pool(votes: Sequence[Vote], *, uniform: bool = False, min_share: float = 0.0, same: Same | None = None) -> Labels:
    """The winners of several policies' votes together: score(a) = sum_j w_j count_j(a)/n_j with n_j the answers of
    policy j that voted and w_j its top share, or 1 with `uniform` (idea of RLCCF; the weights are our definition).

    `min_share` is compared with the winner's score over the sum of scores. Scores within 1e-12 are equal: then the
    order of policies and samples decides.
    """
    out = []
    for p in range(len(votes[0].answers) if votes else 0):
        scores: dict[str, float] = {}
        for vote in votes:
            n = sum(vote.counts[p])
            weight = 1.0 if uniform else max(vote.counts[p], default=0) / max(n, 1)
            for a, c in zip(vote.answers[p], vote.counts[p]):
                key = a if same is None else next((b for b in scores if b == a or same(a, b, p)), a)
                scores[key] = scores.get(key, 0.0) + weight * c / n
        out.append(_top(tuple(scores), list(scores.values()), min_share))
    return _labels(out)


def _top(answers: Sequence[str], scores: Sequence[float], min_share: float) -> tuple[str | None, float]:
    if not answers:
        return None, np.nan
    best = next(i for i, s in enumerate(scores) if s >= max(scores) - TIE)
    share = scores[best] / sum(scores)
    return (None, np.nan) if min_share and not share > min_share else (answers[best], share)


def _labels(found: Sequence[tuple[str | None, float]]) -> Labels:
    return Labels(tuple(a for a, _ in found), np.array([s for _, s in found], np.float64))


def no_labels(problems: int) -> Labels:
    """No label for any problem."""
    return Labels((None,) * problems, np.full(problems, np.nan))


# What the grader says, without the gold answers


def blind(problem: Problem) -> Problem:
    """A problem without its ground truth; what programs are to be given stays (see the grader `code`)."""
    extra = {k: problem.extra[k] for k in ("inputs", "func_name") if k in problem.extra}
    if cases := problem.extra.get("test_cases"):
        extra["test_cases"] = [{"input": c["input"]} for c in cases]
    return dataclasses.replace(problem, answer=None, extra=extra)


def extract(own: Rollouts, grader: GraderPool) -> tuple[tuple[str | None, ...], ...]:
    """P lists of the G answers in a policy's rollouts, found without the gold answers."""
    return answers_in([list(group) for group in own.text], own.problems, grader)


def answers_in(
    texts: Sequence[Sequence[str]], problems: Sequence[Problem], grader: GraderPool
) -> tuple[tuple[str | None, ...], ...]:
    """The answers in texts, P lists."""
    flat = [t for group in texts for t in group]
    _, found = grader.grade(flat, [blind(x) for x, group in zip(problems, texts) for _ in group])
    ends = np.cumsum([0, *map(len, texts)])
    return tuple(tuple(found[a:b]) for a, b in zip(ends, ends[1:]))


def matching(
    wanted: Sequence[str | None],
    texts: Sequence[Sequence[str]],
    answers: Answers,
    problems: Sequence[Problem],
    grader: GraderPool,
) -> list[list[float]]:
    """1.0 where the grader says that a text's answer is the wanted one, 0.0 where not or where there is no answer, NaN
    where nothing is wanted. Each different answer to a problem is looked at once."""
    asked: dict[tuple[int, str], str] = {}
    for p, (group, found) in enumerate(zip(texts, answers)):
        for text, a in zip(group, found):
            if a and wanted[p] is not None:
                asked.setdefault((p, a), text)
    known = [dataclasses.replace(blind(problems[p]), answer=wanted[p]) for p, _ in asked]
    reward, _ = grader.grade(list(asked.values()), known)
    verdict = dict(zip(asked, reward))
    return [
        [np.nan if wanted[p] is None else float(verdict.get((p, a), 0.0) >= 1) for a in found]
        for p, found in enumerate(answers)
    ]


def judged(
    labels: Labels,
    texts: Sequence[Sequence[str]],
    answers: Answers,
    problems: Sequence[Problem],
    grader: GraderPool,
) -> Verdicts:
    """Rewards by labels: f64[P, G] of 0 and 1; where a problem has no label 0 for all, and success unknown."""
    found = np.array(matching(labels.answers, texts, answers, problems, grader), np.float64)
    return Verdicts(
        reward=np.nan_to_num(found),
        success=np.where(np.isnan(found), -1, found).astype(np.int8),
        answers=tuple(map(tuple, answers)),
        labels=labels.answers,
        share=labels.share,
    )


def judge(record: RolloutRecord, own: Rollouts, verdicts: Verdicts, grader: GraderPool, same_source: bool) -> Verdicts:
    """A peer's rollouts in the learner's view: by the learner's labels. See `mutualrl.labels`."""
    p, g = record.valid.shape
    del same_source  # the peer's own labels may be other ones
    text = lambda i, j: bytes(record.text[i, j, : record.text_bytes[i, j]]).decode(errors="replace")  # noqa: E731
    texts = [[text(i, j) if record.valid[i, j] else "" for j in range(g)] for i in range(len(own.problems))]
    answers = answers_in(texts, own.problems, grader)
    found = judged(Labels(verdicts.labels, verdicts.share), texts, answers, own.problems, grader)
    reward, success = np.full((p, g), np.nan), np.full((p, g), -1, np.int8)
    reward[: len(texts)], success[: len(texts)] = found.reward, found.success
    return Verdicts(np.where(record.valid, reward, np.nan), np.where(record.valid, success, -1).astype(np.int8))


def same_by(grader: GraderPool, problems: Sequence[Problem]) -> Same:
    """Whether two answers are the same to the grader; asked once for each pair."""
    known: dict[tuple[str, str, int], bool] = {}

    def same(a: str, b: str, p: int) -> bool:
        if (a, b, p) not in known:
            reward, _ = grader.grade([a], [dataclasses.replace(blind(problems[p]), answer=b)])
            known[a, b, p] = bool(reward[0] >= 1)
        return known[a, b, p]

    return same


def check(run: RunConfig, options: Any) -> None:
    """Refuses settings of a vote that cannot work, and graders that do not compare answers.

    Raises:
      ConfigError.
    """
    where = f"label.{run.label['name']}"
    one_of(f"{where}.vote_identity", options.vote_identity, IDENTITIES)
    within(f"{where}.min_share", options.min_share, 0, 1)
    by_answer = [x for x in rewards.names() if compares(x)]
    if run.grader not in by_answer:
        raise ConfigError(
            f"grader={run.grader!r}: does not compare an answer with a label, as label {run.label['name']!r} needs; "
            f"allowed are {', '.join(by_answer)}"
        )


def compares(grader: str) -> bool:
    """Whether a grader's verdict is by `Problem.answer` alone, so that a label can stand in for it."""
    return getattr(importlib.import_module(rewards.find(grader)), "BY_ANSWER", False)


def check_problems(run: RunConfig, problems: Sequence[Problem]) -> None:
    """Refuses problems whose answers cannot be compared without the gold answers.

    Raises:
      ConfigError.
    """
    votable = getattr(importlib.import_module(rewards.find(run.grader)), "votable", None)
    for x in problems if votable else ():
        if reason := votable(blind(x)):
            raise ConfigError(f"label.name={run.label['name']!r}: problem {x.id!r} of grader {run.grader!r} {reason}")


def agreement(
    votes: Mapping[str, Labels], problems: Sequence[Problem], grader: GraderPool
) -> dict[tuple[str, str], np.ndarray]:
    """f64[P] for each pair of policies: whether their winners are the same to the grader; NaN where one has none."""
    names, out = list(votes), {}
    same = same_by(grader, problems)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            pairs = zip(votes[a].answers, votes[b].answers)
            out[a, b] = np.array(
                [np.nan if x is None or y is None else float(x == y or same(x, y, p)) for p, (x, y) in enumerate(pairs)]
            )
    return out


def mean(values: Sequence[float]) -> float:
    """Mean of the numbers that are none of NaN; NaN without any."""
    known = [v for v in values if v == v]
    return float(np.mean(known)) if known else float("nan")
