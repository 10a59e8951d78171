"""Train/test membership by a hash, and the checks that every source makes of its options."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

SPLITS = ("train", "test")


def held_out(key: str, fraction: float) -> bool:
    """Whether the problem called `key` belongs to the held-out `fraction` (0 to 1).

    Depends on nothing but the key, so it is the same in every process, run and subset of the data.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def check_split(split: str) -> None:
    """ValueError unless `split` is 'train' or 'test'."""
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed are {', '.join(map(repr, SPLITS))}")


def check_count(name: str, value: Any, low: int = 0) -> int:
    """`value` as an int of at least `low`; ValueError naming the option otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is {value!r}; allowed are whole numbers from {low}")
    return value


def check_fraction(name: str, value: Any) -> float:
    """`value` as a float from 0 to 1; ValueError naming the option otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}; allowed are numbers from 0 to 1")
    return float(value)


def check_text(name: str, value: Any) -> str:
    """`value` as a string; ValueError naming the option otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; allowed is a text")
    return value


def check_names(name: str, value: Any, allowed: Collection[str] | None = None) -> tuple[str, ...]:
    """`value` as a tuple of distinct strings, all of them in `allowed` where given; ValueError otherwise."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{name} is {value!r}; allowed is a list of names")
    for v in value:
        if allowed is not None and v not in allowed:
            raise ValueError(f"{name} has {v!r}; allowed are {', '.join(allowed)}")
    if len(set(value)) != len(value):
        raise ValueError(f"{name} is {value!r}; a name may stand in it once")
    return tuple(value)
