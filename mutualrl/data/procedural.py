"""Ten string and number tasks on four digits, each with a right rule and a consistent wrong rule.

Made for tiny policies: a question is a kind and four digits (`sort:4172=`), an answer one to four digits
(`1247`). Answers have a fixed length per kind, leading zeros kept. Because the wrong rule is as regular as the right
one, a supervised warm-up that shows the right answer with probability p yields policies with pass@1 near p, which is
the two-outcome world of majority-vote theory with real policies. A question on which both rules agree does not exist
here: it could not tell them apart. Questions can be had in other wordings too (`4172:sort=`), which mean the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mutualrl.data.split import check_count, check_names, check_split, held_out
from mutualrl.types import Problem

HELD_OUT = 0.2  # share of all questions that only the test split has

Rule = Callable[[np.ndarray], np.ndarray]  # i64[n, 4] digits -> i64[n, k] digits


def _extreme(largest: bool) -> Rule:
    def rule(d: np.ndarray) -> np.ndarray:
        first, second = d[:, :2], d[:, 2:]
        take_first = (first @ [10, 1] >= second @ [10, 1]) == largest
        return np.where(take_first[:, None], first, second)

    return rule


def _columns(*index: int) -> Rule:
    return lambda d: d[:, list(index)]


def _count(parity: int) -> Rule:
    return lambda d: (d % 2 == parity).sum(1, keepdims=True)


# kind: (right rule, wrong rule)
RULES: dict[str, tuple[Rule, Rule]] = {
    "max": (_extreme(True), _extreme(False)),  # larger of the two two-digit numbers | smaller
    "min": (_extreme(False), _extreme(True)),  # smaller | larger
    "rev": (_columns(3, 2, 1, 0), _columns(0, 1, 2, 3)),  # reverse | copy
    "comp": (lambda d: 9 - d, _columns(0, 1, 2, 3)),  # nine's complement | copy
    "odd": (_count(1), _count(0)),  # number of odd digits | of even digits
    "sort": (lambda d: np.sort(d, 1), lambda d: np.sort(d, 1)[:, ::-1]),  # ascending | descending
    "inc": (lambda d: (d + 1) % 10, lambda d: (d - 1) % 10),  # each digit plus one | minus one, modulo 10
    "swap": (_columns(2, 3, 0, 1), _columns(1, 0, 3, 2)),  # swap the halves | swap inside each pair
    "dup": (_columns(0, 1, 0, 1), _columns(2, 3, 2, 3)),  # first half twice | second half twice
    "ends": (_columns(0, 3), _columns(3, 0)),  # first and last digit | last and first
}
KINDS = tuple(RULES)

# Other wordings of `{kind}:{digits}=`, none longer than that.
WORDINGS = ("{digits}:{kind}=", "{kind}({digits})", "{digits}>{kind}=")


def wordings(problem: Problem) -> tuple[str, ...]:
    """Every other wording there is of a problem of this source, in the order of `WORDINGS`; the answer is the same."""
    _, kind, digits = problem.id.split("/")
    return tuple(form.format(kind=kind, digits=digits) for form in WORDINGS)


def load(split: str, *, kinds: Sequence[str] = KINDS, size: int = 0, seed: int = 0, views: int = 0) -> list[Problem]:
    """Problems of the given kinds, kind after kind.

    A fifth of all questions, chosen by a hash of the question, is the test split; the rest is the train split.

    Args:
      split: 'train' or 'test'.
      kinds: names of the kinds, out of `KINDS`.
      size: problems a kind, drawn without replacement (fewer where a kind has fewer); 0 for all, in numeric order.
      seed: of that draw.
      views: other wordings each problem gets in `Problem.views`, the first ones of `WORDINGS`.

    Returns:
      Problems with the wrong rule's answer in `extra['wrong']`.

    Raises:
      ValueError: a bad option.
    """
    check_split(split)
    check_count("size", size)
    check_count("seed", seed)
    if check_count("views", views) > len(WORDINGS):
        raise ValueError(f"views is {views}; allowed are whole numbers up to {len(WORDINGS)}")
    if not check_names("kinds", kinds, KINDS):
        raise ValueError(f"kinds is {kinds!r}; allowed are some of {', '.join(KINDS)}")
    problems = []
    for kind in kinds:
        numbers = np.arange(10_000)
        digits = numbers[:, None] // np.array([1000, 100, 10, 1]) % 10
        right, wrong = (rule(digits) for rule in RULES[kind])
        test = np.array([held_out(f"{kind}:{n:04d}=", HELD_OUT) for n in numbers])
        keep = numbers[(right != wrong).any(1) & (test == (split == "test"))]
        if size and size < len(keep):
            # Seeded by the kind's place in the table, so that a kind's draw does not depend on the other kinds.
            keep = np.random.default_rng((seed, KINDS.index(kind))).choice(keep, size, replace=False)
        problems += [
            Problem(
                id=f"procedural/{kind}/{n:04d}",
                question=f"{kind}:{n:04d}=",
                answer="".join(map(str, right[n])),
                source="procedural",
                kind=kind,
                extra={"wrong": "".join(map(str, wrong[n]))},
            )
            for n in keep
        ]
    if views:
        problems = [dataclasses.replace(p, views=wordings(p)[:views]) for p in problems]
    return problems


def demonstrations(
    problems: Sequence[Problem], right: float | Mapping[str, float] = 1.0
) -> tuple[list[str], list[str], list[str], np.ndarray]:
    """What a supervised warm-up needs: question, right answer, wrong answer and probability of showing the right one.

    The coin is the caller's to toss, anew at each step, so that the noise cannot be memorised. Every wording of a
    problem is a row of its own: problem after problem, its question first and then its views.

    Args:
      problems: problems of this source, n wordings in all.
      right: probability of the right answer, for all or by kind.

    Returns:
      questions, right answers, wrong answers (lists of n) and f32[n] probabilities.

    Raises:
      ValueError: a kind without a probability, or a probability outside 0 to 1.
    """
    by_kind = right if isinstance(right, Mapping) else {p.kind: right for p in problems}
    for kind in {p.kind for p in problems}:
        if not 0 <= by_kind.get(kind, -1) <= 1:
            raise ValueError(f"right[{kind!r}] is {by_kind.get(kind)!r}; allowed are numbers from 0 to 1")
    rows = [(text, p) for p in problems for text in (p.question, *p.views)]
    chance = np.array([by_kind[p.kind] for _, p in rows], np.float32)
    return [text for text, _ in rows], [p.answer for _, p in rows], [p.extra["wrong"] for _, p in rows], chance
