"""Exact match: the reply is the answer, character by character.

The one normalisation: white space at both ends is dropped, of the reply and of the gold answer. Case, inner spaces and
leading zeros count. An empty reply is no answer. Without a gold answer nothing can be judged: NaN.
"""

from __future__ import annotations

import math

from mutualrl.types import Problem

IN_WORKER = False
BY_ANSWER = True
VERSION = "1"


def extract(reply: str, problem: Problem) -> str | None:
    """The reply without white space at its ends, or None if nothing is left."""
    del problem
    return reply.strip() or None


def grade(reply: str, problem: Problem) -> float:
    """1.0 if the reply is the gold answer, else 0.0; NaN without a gold answer."""
    if problem.answer is None:
        return math.nan
    return float(extract(reply, problem) == problem.answer.strip())
