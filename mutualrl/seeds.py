"""Random streams from names, so that none depends on the order of policies, problems or processes."""

from __future__ import annotations

import hashlib

import numpy as np


def hashed(text: str) -> int:
    """A stable 32-bit number for a name."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def generator(seed: int, step: int, *names: str) -> np.random.Generator:
    """The generator of one choice in one step, keyed by the run's seed, the step and names."""
    return np.random.default_rng([seed, step, *map(hashed, names)])
