"""Held-out evaluation: pass@k, avg@k, maj@k, a vote of the whole cohort, and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mutualrl import votes
from mutualrl.rewards.workers import GraderPool
from mutualrl.types import Problem

if TYPE_CHECKING:  # numbers alone need no device
    from mutualrl.policy import Policy


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


def evaluate(
    policies: Sequence[Policy],
    problems: Sequence[Problem],
    grader: GraderPool,
    *,
    samples: int,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    batch: int = 64,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, dict[str, Any]]:
    """Accuracy of every policy on the same problems, with the same random streams each time it is called.

    Problems that the grader cannot judge (no gold answer) do not count.

    Args:
      samples: rollouts a problem. temperature: 0 is greedy.
      batch: problems sampled at a time.
      advance: told the number of problems done.

    Returns:
      {policy: {accuracy (pass@1 over all samples), interval, n, kinds: {kind: the same three}, pass@k, maj,
      generated tokens, and `ensemble_maj` under every policy; all in [0, 1]. `right`: right samples of each problem, -1
      where it could not be judged; `wrong`: of each problem the answers of its wrong samples, None for no answer}}.

    Raises:
      ValueError: no problem can be judged.
    """
    correct = {p.name: np.zeros((len(problems), samples)) for p in policies}
    answers: dict[str, list[list[str | None]]] = {p.name: [] for p in policies}
    tokens = dict.fromkeys(correct, 0)
    for start in range(0, len(problems), batch):
        chunk = list(problems[start : start + batch])
        padded = chunk + [chunk[0]] * (min(batch, len(problems)) - len(chunk))  # one shape, one compilation
        pending = {
            p.name: p.sample(
                padded, 0, samples=samples, temperature=temperature, top_p=top_p, top_k=top_k, purpose="evaluate"
            )
            for p in policies
        }
        for name, work in pending.items():
            rollouts = work.result()
            replies = [t for group in rollouts.text[: len(chunk)] for t in group]
            reward, extracted = grader.grade(replies, [x for x in chunk for _ in range(samples)])
            correct[name][start : start + len(chunk)] = np.where(np.isfinite(reward), reward >= 1.0, np.nan).reshape(
                -1, samples
            )
            answers[name] += [extracted[i : i + samples] for i in range(0, len(extracted), samples)]
            tokens[name] += int(rollouts.lengths[: len(chunk)].sum())
        advance(start + len(chunk))

    judged = np.isfinite([c for c in correct.values()]).all(axis=(0, 2))
    if not judged.any():
        raise ValueError("no held-out problem can be judged: none has a gold answer")
    problems, every = [p for p, ok in zip(problems, judged) if ok], answers
    answers = {name: [a for a, ok in zip(given, judged) if ok] for name, given in answers.items()}
    results = {name: _summary(problems, c[judged], samples) for name, c in correct.items()}
    if samples > 1:
        for name in results:
            results[name]["maj"] = _vote(problems, answers[name], grader)
        pooled = [[a for name in answers for a in answers[name][i]] for i in range(len(problems))]
        ensemble = _vote(problems, pooled, grader)
        for name in results:
            results[name]["ensemble_maj"] = ensemble
    for name, n in tokens.items():
        results[name]["generated"] = n
        results[name]["wrong"] = [
            [a for a, c in zip(given, right) if c == 0] for given, right in zip(every[name], correct[name])
        ]
        results[name]["right"] = np.where(judged, np.nan_to_num(correct[name]).sum(1), -1).astype(int).tolist()
    return results


def _summary(problems: Sequence[Problem], correct: np.ndarray, samples: int) -> dict[str, Any]:
    kinds = sorted({p.kind for p in problems})
    out = _interval(correct)
    if len(kinds) > 1:
        of = np.array([p.kind for p in problems])
        out["kinds"] = {k: _interval(correct[of == k]) for k in kinds}
    if samples > 1:
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= samples]
        out["pass@k"] = {str(k): float(pass_at_k(samples, correct.sum(1), k).mean()) for k in ks}
    return out


def _interval(correct: np.ndarray) -> dict[str, Any]:
    per_problem = correct.mean(1)
    return {
        "accuracy": float(per_problem.mean()),
        "interval": bootstrap_interval(per_problem),
        "n": len(per_problem),
    }


def _vote(problems: Sequence[Problem], answers: Sequence[Sequence[str | None]], grader: GraderPool) -> float:
    """Share of problems whose majority answer is right; no answer, no point."""
    winners = [majority(a) for a in answers]
    voted = [(w, p) for w, p in zip(winners, problems) if w is not None]
    if not voted:
        return 0.0
    reward, _ = grader.grade([w for w, _ in voted], [p for _, p in voted])
    return float((reward >= 1.0).sum() / len(problems))
