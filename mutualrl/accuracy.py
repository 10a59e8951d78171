"""Numbers of an evaluation, from which samples were right and what they answered. Numpy only, never jax.

Right samples are f64[P, K]: 1 right, 0 wrong, of P problems with K samples each, in the order in which they were
sampled; answers are P lists of K canonical answers, None where there is none. Everything is a mean over problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mutualrl import votes
from mutualrl.types import Problem


def pass_at_k(n: int, c: np.ndarray, k: int) -> np.ndarray:
    """Unbiased pass@k, 1 - C(n-c, k)/C(n, k), from n samples of which c are right (published: openai/human-eval).

    Args:
      n: samples a problem. c: i[...] right ones. k: at most n.

    Returns:
      f64[...].

    Raises:
      ValueError: k is above n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be between 1 and the number of samples, {n}")
    c = np.asarray(c, np.int64)
    i = np.arange(k)
    # Product form; a factor reaches 0 exactly where n - c < k.
    return 1.0 - np.prod(np.maximum(n - c[..., None] - i, 0) / (n - i), axis=-1)


def majority(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer, the first seen among equals; None and '' do not vote."""
    return votes.elect(votes.count([answers])).answers[0]


def bootstrap_interval(values: np.ndarray, *, level: float = 0.95, draws: int = 2000, seed: int = 0) -> list[float]:
    """Percentile bootstrap interval of a mean over problems.

    Args:
      values: f[n] one number a problem.

    Returns:
      [low, high].
    """
    values = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [rng.choice(values, (min(200, draws - i), len(values))).mean(1) for i in range(0, draws, 200)]
    )
    tail = (1 - level) / 2
    return [float(x) for x in np.quantile(means, [tail, 1 - tail])]


def spread_over_kinds(problems: Sequence[Problem], n: int, seed: int = 0) -> list[Problem]:
    """Up to n problems with the kinds as even as they can be, drawn by seed; in a fixed order."""
    by_kind: dict[str, list[Problem]] = {}
    for p in problems:
        by_kind.setdefault(p.kind, []).append(p)
    rng = np.random.default_rng(seed)
    queues = [[group[i] for i in rng.permutation(len(group))] for _, group in sorted(by_kind.items())]
    picked: list[Problem] = []
    for rank in range(max(map(len, queues), default=0)):
        for queue in queues:
            if rank < len(queue) and len(picked) < n:
                picked.append(queue[rank])
    return sorted(picked, key=lambda p: (p.kind, p.id))


def ks(samples: int) -> list[int]:
    """The k for which pass@k and maj@k are given: powers of two up to the number of samples, and that number."""
    return sorted({*(1 << i for i in range(samples.bit_length())), samples})


def mean(right: np.ndarray) -> dict[str, Any]:
    """{accuracy, interval, n} of right samples f64[P, K], or of one number a problem f64[P]; P above 0."""
    each = np.asarray(right, np.float64).reshape(len(right), -1).mean(1)
    return {"accuracy": float(each.mean()), "interval": bootstrap_interval(each), "n": len(each)}


def by(right: np.ndarray, labels: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """`mean` of the problems of each label, sorted; {} where there are not at least two labels. None is no label."""
    found = sorted({x for x in labels if x is not None}, key=lambda x: (str(type(x)), x))
    if len(found) < 2:
        return {}
    return {str(x): mean(right[np.array([y == x for y in labels])]) for x in found}


def passed(right: np.ndarray) -> dict[str, float]:
    """pass@k of right samples f64[P, K], for every k of `ks`."""
    n = right.shape[1]
    return {str(k): float(pass_at_k(n, right.sum(1), k).mean()) for k in ks(n)}


def voted(right: np.ndarray, answers: Sequence[Sequence[str | None]]) -> np.ndarray:
    """f64[P]: 1 where the majority's answer is right, 0 where it is wrong or nobody answered.

    An answer is as right as the first sample that gave it.
    """
    vote = votes.count(answers)
    winners = votes.elect(vote).answers
    first = [0 if w is None else f[a.index(w)] for w, f, a in zip(winners, vote.first, vote.answers)]
    has_winner = np.array([w is not None for w in winners], bool)
    return np.where(has_winner, right[np.arange(len(right)), first] == 1, False).astype(np.float64)


def majorities(right: np.ndarray, answers: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """maj@k by the first k samples, for every k of `ks`."""
    return {str(k): float(voted(right[:, :k], [a[:k] for a in answers]).mean()) for k in ks(right.shape[1])}


def pooled(
    right: Sequence[np.ndarray], answers: Sequence[Sequence[Sequence[str | None]]]
) -> tuple[np.ndarray, list[list[str | None]]]:
    """Right samples f64[P, N·K] and answers of N policies together, in their order: the voters of a cohort's vote."""
    return np.concatenate(right, axis=1), [[a for given in each for a in given] for each in zip(*answers)]
