"""Evaluation against brute force, and its independence of how problems are batched."""

import itertools

import numpy as np
import pytest

from mutualrl.accuracy import bootstrap_interval, majority, pass_at_k, spread_over_kinds
from mutualrl.evaluate import evaluate
from mutualrl.policy import Pending, hashed
from mutualrl.rewards.workers import GraderPool
from mutualrl.types import Problem, Rollouts


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    n = 6
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [i < c for i in range(n)]
        subsets = list(itertools.combinations(right, k))
        assert pass_at_k(n, np.array([c]), k)[0] == pytest.approx(sum(map(any, subsets)) / len(subsets))
    for k in (0, 7):
        with pytest.raises(ValueError, match=f"k={k}.*6"):
            pass_at_k(n, np.array([1]), k)


def test_pass_at_k_of_many_samples_is_finite():
    np.testing.assert_allclose(pass_at_k(2000, np.array([0, 1, 2000]), 1000), [0, 0.5, 1])


def test_majority():
    assert majority(["b", "a", "a", "b"]) == "b"  # the first seen among equals
    assert majority(["b", "a", "a"]) == "a"
    assert majority([None, "", None, "a"]) == "a" and majority([None, ""]) is None and majority([]) is None


def test_bootstrap_interval():
    values = np.random.default_rng(0).random(400) < 0.3
    low, high = bootstrap_interval(values)
    error = 1.96 * np.sqrt(0.3 * 0.7 / 400)
    assert low < values.mean() < high
    assert low == pytest.approx(values.mean() - error, abs=0.01) and high == pytest.approx(
        values.mean() + error, abs=0.01
    )
    assert bootstrap_interval(values) == [low, high]
    assert bootstrap_interval(np.ones(5)) == [1.0, 1.0]


def test_spread_over_kinds():
    problems = [
        Problem(id=f"{k}{i}", question="", kind=k) for k, n in (("a", 20), ("b", 20), ("c", 2)) for i in range(n)
    ]
    picked = spread_over_kinds(problems, 12, seed=1)
    assert [sum(p.kind == k for p in picked) for k in "abc"] == [5, 5, 2]
    assert (
        picked
        == spread_over_kinds(list(reversed(problems))[::-1], 12, seed=1)
        == sorted(picked, key=lambda p: (p.kind, p.id))
    )
    assert spread_over_kinds(problems, 12, seed=2) != picked
    assert len(spread_over_kinds(problems, 999)) == len(problems) and spread_over_kinds([], 5) == []


class Oracle:
    """A policy whose reply to a problem is read off a table; it takes note of how it was called."""

    def __init__(self, name, replies):
        self.name, self.replies, self.shapes, self.calls = name, replies, [], []

    def sample(self, problems, step, *, samples, temperature, top_p, top_k, purpose):
        self.shapes.append(len(problems))
        self.calls.append((step, temperature, top_p, top_k, purpose))
        p, t = len(problems), 4
        text = tuple(tuple(self.replies[x.id][:samples]) for x in problems)
        lengths = np.array([[1 + hashed(x.id + r) % t for r in row] for x, row in zip(problems, text)])
        return Pending(
            lambda: Rollouts(
                self.name,
                0,
                step,
                tuple(problems),
                np.zeros((p, 1)),
                np.zeros((p, 1)),
                np.zeros((p, samples, t)),
                np.arange(t) < lengths[..., None],
                np.zeros((p, samples, t)),
                np.zeros((p, samples)),
                text,
                temperature,
            )  # fmt: skip
        )


PROBLEMS = [Problem(id=f"q{i}", question="", answer="1", kind="xy"[i % 2]) for i in range(5)]
FIRST = {k: v.split(",") for k, v in dict(q0="1,1,2,", q1="2,2,1,1", q2=",,,", q3="3,1,1,1", q4="2,2,2,2").items()}
SECOND = {
    k: v.split(",") for k, v in dict(q0="2,2,2,2", q1="1,1,1,1", q2="1,2,3,4", q3="3,3,3,3", q4="1,1,1,1").items()
}


@pytest.mark.parametrize("batch", (1, 2, 5, 64))
def test_evaluate(batch):
    policies, done = [Oracle("a", FIRST), Oracle("b", SECOND)], []
    with GraderPool("exact") as grader:
        found = evaluate(
            policies, PROBLEMS, grader, samples=4, temperature=0.6, top_p=0.9, top_k=3, batch=batch, advance=done.append
        )
    a, b = found["a"], found["b"]
    assert a["accuracy"] == pytest.approx((2 + 2 + 0 + 3 + 0) / 20) and a["n"] == 5
    assert b["accuracy"] == pytest.approx((0 + 4 + 1 + 0 + 4) / 20)
    assert a["kinds"]["x"]["accuracy"] == pytest.approx(2 / 12) and a["kinds"]["x"]["n"] == 3
    assert a["kinds"]["y"]["accuracy"] == pytest.approx(5 / 8)
    assert a["pass@k"]["1"] == pytest.approx(a["accuracy"]) and a["pass@k"]["4"] == pytest.approx(3 / 5)
    # Winners: 1, 2 (first seen), none, 1, 2 and 2, 1, 1, 3, 1.
    assert a["maj"] == pytest.approx(2 / 5) and b["maj"] == pytest.approx(3 / 5)
    # All eight votes: 2, 1, 1, 3, and 2 on a tie of four each.
    assert a["ensemble_maj"] == b["ensemble_maj"] == pytest.approx(2 / 5)
    lengths = sum(1 + hashed(f"q{i}{r}") % 4 for i in range(5) for r in FIRST[f"q{i}"])
    assert a["generated"] == lengths  # rows that only fill up a batch are not counted
    assert len(set(policies[0].shapes)) == 1 and set(policies[0].calls) == {(0, 0.6, 0.9, 3, "evaluate")}
    assert done[-1] == 5 and done == sorted(done)


def test_one_sample_has_no_votes():
    with GraderPool("exact") as grader:
        found = evaluate([Oracle("a", FIRST)], PROBLEMS, grader, samples=1, temperature=0.0)["a"]
    assert found["accuracy"] == pytest.approx(1 / 5) and "maj" not in found and "pass@k" not in found
