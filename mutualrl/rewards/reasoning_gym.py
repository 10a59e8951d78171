"""Tasks of the `reasoning_gym` package, scored by the task itself.

The answer is what stands in the last `<answer>` element or `\\boxed{}`, else after the last "answer is" or "answer:",
else the whole reply without thoughts. The score is the task's own, 0 to 1: some tasks give part of the credit, so only
a score of 1 is a success.
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

from mutualrl.rewards import reply as replies
from mutualrl.types import Problem

IN_WORKER = True
BY_ANSWER = False
VERSION = "1"
PACKAGES = ("reasoning-gym",)

_ANCHOR = re.compile(r"(?:\banswer\s*(?:is\b|:)|####)\s*:?", re.IGNORECASE)


def warm_up() -> None:
    """Pays for the import."""
    import reasoning_gym  # noqa: F401


def extract(reply: str, problem: Problem) -> str | None:
    """The answer's text, which may have several lines, or None."""
    text = replies.final_part(reply, problem)
    if "<answer>" not in reply:
        anchors = list(_ANCHOR.finditer(text))
        if boxes := replies.boxes(text):
            text = boxes[-1][2]
        elif anchors:
            text = text[anchors[-1].end() :].strip().strip("*")
            text = re.sub(r"(?<=\w)\.$", "", text)
    return text.strip() or None


def grade(reply: str, problem: Problem) -> float:
    """The task's score of the answer, from 0 to 1; 0.0 without an answer, or where the task cannot read it."""
    answer = extract(reply, problem)
    if answer is None:
        return 0.0
    task, config, entry = (problem.extra[k] for k in ("task", "config", "entry"))
    try:
        score = float(_scorer(task, json.dumps(config, sort_keys=True)).score_answer(answer, entry))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # tasks parse answers in their own ways and raise anything on nonsense
        return 0.0
    return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


@functools.lru_cache(maxsize=256)
def _scorer(task: str, config: str) -> Any:
    from mutualrl.data.reasoning_gym import make

    return make(task, {**json.loads(config), "seed": 0, "size": 1})
