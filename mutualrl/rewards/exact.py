"""Exact match: the reply is the answer, character by character.

The one normalisation: white space at both ends is dropped, of the reply and of the gold answer. Case, inner spaces and
leading zeros count. An empty reply is no answer. A problem without a gold answer grades 0.
"""

from __future__ import annotations

from mutualrl.types import Problem

IN_WORKER = False


def extract(reply: str, problem: Problem) -> str | None:
    """The reply without white space at its ends, or None if nothing is left."""
    del problem
    return reply.strip() or None


def grade(reply: str, problem: Problem) -> float:
    """1.0 if the reply is the gold answer, else 0.0."""
    return float(problem.answer is not None and extract(reply, problem) == problem.answer.strip())
