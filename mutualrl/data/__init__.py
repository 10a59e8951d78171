"""Problem sources. One file a kind of source, found by its module name; numpy only, never jax.

A source is a module of this package with

    load(split, **options) -> list[Problem]

where `split` is 'train' or 'test' (always disjoint) and every option is keyword-only with a default, so that
`inspect.signature(load)` tells what may be set. A bad value raises ValueError naming option, value and what is allowed,
before anything is read or made.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from mutualrl.types import Problem

_NOT_SOURCES = ("recipes", "split", "stream", "views")


def names() -> list[str]:
    """Names of the sources there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_SOURCES)


def load(name: str, split: str, /, **options: Any) -> list[Problem]:
    """Problems of one split of the source called `name`.

    Raises:
      ValueError: an unknown source, option, split or value, or two problems with one id.
      FileNotFoundError: what a source reads is not there.
    """
    if name not in names():
        raise ValueError(f"data source {name!r} is unknown; there are {', '.join(names())}")
    source = importlib.import_module(f"{__name__}.{name}")
    known = [p.name for p in inspect.signature(source.load).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ValueError(f"data source {name!r} has no option {option!r}; it has {', '.join(known)}")
    problems = source.load(split, **options)
    seen: set[str] = set()
    for p in problems:
        if p.id in seen:
            raise ValueError(f"data source {name!r}: the id {p.id!r} comes twice in the {split} split")
        seen.add(p.id)
    return problems
