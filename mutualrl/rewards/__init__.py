"""Graders: from a reply and a problem to a reward. One file a grader, found by its module name; never jax.

A grader is a module of this package with

    extract(reply, problem) -> str | None   canonical text of the answer given (equal answers vote together), or None
    grade(reply, problem) -> float          1.0 right, 0.0 wrong, NaN where there is no gold answer to judge
                                            by; pure, deterministic, callable from any thread
    BY_ANSWER: bool                         True where the verdict is by `problem.answer` alone, so that the label of
                                            a vote can stand in for the gold answer
    IN_WORKER: bool                         True where grading parses what a model wrote: only worker processes may

Use `workers.GraderPool(name)`, which knows where each may run.
"""

from __future__ import annotations

import importlib.util
import pkgutil

_NOT_GRADERS = ("notation", "reply", "worker", "workers")


def names() -> list[str]:
    """Names of the graders there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_GRADERS)


def find(name: str) -> str:
    """Full module name of a grader: one of this package, or any other by its dotted name; ValueError if unknown."""
    if "." in name:
        try:
            if importlib.util.find_spec(name):
                return name
        except ModuleNotFoundError:  # of a parent package
            pass
    if name not in names():
        raise ValueError(f"grader {name!r} is unknown; there are {', '.join(names())}, or a module by its dotted name")
    return f"{__name__}.{name}"
