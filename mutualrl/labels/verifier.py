"""Ground truth: the grader compares each rollout with the problem's gold answer."""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl.experience import RolloutRecord
from mutualrl.labels import Needs
from mutualrl.rewards.workers import GraderPool
from mutualrl.settings import SUCCESS, RunConfig
from mutualrl.types import Rollouts, Verdicts
from mutualrl.votes import Hearing

REWARDS = SUCCESS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Nothing to set."""


def needs(options: Options) -> Needs:
    """Gold answers; those of the rollouts come with the grades."""
    return Needs(gold=True)


def check(options: Options, run: RunConfig) -> None:
    """Goes with every run."""


def label(hearing: Hearing) -> Verdicts:
    """The grader's reward of every rollout; success where it is full (1), unknown where it is not finite.

    Returns:
      Verdicts f64[P, G] and i8[P, G].
    """
    own = hearing.own
    g = own.tokens.shape[1]
    texts, problems = [t for group in own.text for t in group], [x for x in own.problems for _ in range(g)]
    rewards, answers = hearing.grader.grade(texts, problems)
    found = tuple(tuple(answers[i : i + g]) for i in range(0, len(answers), g))
    return _verdicts(rewards.reshape(len(own.problems), g), found)


def judge(record: RolloutRecord, own: Rollouts, verdicts: Verdicts, grader: GraderPool, same_source: bool) -> Verdicts:
    """A peer's rollouts of the same problems in the learner's view.

    A peer that asked the same grader has the same verdict; texts labelled otherwise are graded here, those of valid
    rows only (the others have reward NaN).

    Args:
      record: the peer's, [P, G]. own, verdicts: the learner's rollouts of the same problems and their verdicts.
      same_source: the peer's verdicts come from the same label source and grader.
    """
    if same_source:
        return Verdicts(reward=record.reward, success=record.success)
    v = record.valid
    texts = [bytes(t[:n]).decode(errors="replace") for t, n in zip(record.text[v], record.text_bytes[v])]
    reward = np.full(v.shape, np.nan)
    reward[v], _ = grader.grade(texts, [own.problems[p] for p in np.nonzero(v)[0]])
    return _verdicts(reward)


def _verdicts(reward: np.ndarray, answers: tuple | None = None) -> Verdicts:
    success = np.where(np.isfinite(reward), reward >= 1.0, -1).astype(np.int8)
    return Verdicts(reward=reward, success=success, answers=answers)
