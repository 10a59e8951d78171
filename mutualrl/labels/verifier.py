"""Ground truth: the grader compares each rollout with the problem's gold answer."""

from __future__ import annotations

import numpy as np

from mutualrl.experience import RolloutRecord
from mutualrl.rewards.workers import GraderPool
from mutualrl.types import Problem, Rollouts, Verdicts

NAME = "verifier"


def label(own: Rollouts, grader: GraderPool) -> Verdicts:
    """The grader's reward of every rollout; success where it is full (1), unknown where it is not finite.

    Returns:
      Verdicts f64[P, G] and i8[P, G].
    """
    return _verdicts([t for group in own.text for t in group], own.problems, own.tokens.shape[1], grader)


def judge(record: RolloutRecord, own: Rollouts, verdicts: Verdicts, grader: GraderPool) -> Verdicts:
    """A peer's rollouts of the same problems in the learner's view.

    A peer that asked ground truth too has the same verdict; texts labelled otherwise are graded here.

    Args:
      record: the peer's, [P, G]. own, verdicts: the learner's rollouts of the same problems and their verdicts.
    """
    if record.header.label_source == NAME:
        return Verdicts(reward=record.reward, success=record.success)
    p, g = record.valid.shape
    texts = [
        bytes(t[:n]).decode(errors="replace") for t, n in zip(record.text.reshape(p * g, -1), record.text_bytes.flat)
    ]
    return _verdicts(texts, own.problems, g, grader)


def _verdicts(texts: list[str], problems: tuple[Problem, ...], g: int, grader: GraderPool) -> Verdicts:
    rewards, _ = grader.grade(texts, [x for x in problems for _ in range(g)])
    reward = rewards.reshape(len(problems), g)
    return Verdicts(reward=reward, success=np.where(np.isfinite(reward), reward >= 1.0, -1).astype(np.int8))
