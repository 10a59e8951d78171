"""Graders: from a reply and a problem to a reward. One file a grader, found by its module name; never jax.

A grader is a module of this package with

    extract(reply, problem) -> str | None   canonical text of the answer given (equal answers vote together), or None
    grade(reply, problem) -> float          1.0 right, 0.0 wrong, NaN where there is no gold answer to judge
                                            by; pure, deterministic, callable from any thread
    BY_ANSWER: bool                         True where the verdict is by `problem.answer` alone, so that the label of
                                            a vote can stand in for the gold answer
    IN_WORKER: bool                         True where grading parses what a model wrote: only worker processes may

and, where it needs them,

    VERSION: str                            raised with every change of a verdict; logged with every run
    PACKAGES: tuple[str, ...]               distributions whose versions its verdicts depend on, too
    Options                                 a frozen dataclass; the functions then take one as keyword `options`
    votable(problem) -> str | None          why answers to a problem cannot be compared without its gold answer, in a
                                            few words; None if they can
    gold(problem) -> str | None             the gold answer as `extract` would give it, where that is not
                                            `problem.answer`
    check(options)                          ValueError, in one line, where it cannot work on this machine
    warm_up()                               pays for imports and first calls, before any clock runs

Use `workers.GraderPool(name)`, which knows where each may run.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Mapping
from typing import Any

_NOT_GRADERS = ("notation", "program", "reply", "sandbox", "worker", "workers")


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


def keywords(grader: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a grader's functions take beside reply and problem: nothing, or its `Options` with these values.

    Raises:
      ValueError: there is no such option, or the grader cannot work here with these.
    """
    cls = getattr(grader, "Options", None)
    known = [f.name for f in dataclasses.fields(cls)] if cls else []
    if unknown := [k for k in options if k not in known]:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise ValueError(f"grader {grader.__name__.rpartition('.')[2]!r} has no option {unknown[0]!r}; {has}")
    if cls is None:
        return {}
    made = cls(**options)
    if hasattr(grader, "check"):
        grader.check(made)
    return {"options": made}


def version(grader: Any) -> str:
    """A grader's name and version with those of the packages that it depends on, e.g. `math 1, math-verify 0.9.0`."""
    parts = [f"{grader.__name__.rpartition('.')[2]} {getattr(grader, 'VERSION', 'without version')}"]
    return ", ".join([*parts, *(f"{p} {importlib.metadata.version(p)}" for p in getattr(grader, "PACKAGES", ()))])
