"""Golden diagnostics by the way that a run takes to them: from evaluated samples to pair statistics and votes.

The formulas alone are checked in test_golden.py.
"""

import json
import pathlib

import numpy as np
import pytest

from mutualrl import votes
from mutualrl.analysis.decoupling import of_runs
from mutualrl.analysis.runs import open_runs
from mutualrl.evaluate import evaluate
from mutualrl.policy import Pending
from mutualrl.rewards.workers import GraderPool
from mutualrl.train import note_held_out
from mutualrl.types import Problem, Rollouts

PATH = pathlib.Path(__file__).parents[3] / "shared" / "design" / "methods_golden.json"
if not PATH.is_file():
    pytest.skip(f"no golden numbers at {PATH}", allow_module_level=True)
CASES = {c["id"]: c for c in json.loads(PATH.read_text())["cases"]}


class Says:
    """A policy whose replies to a problem are given."""

    def __init__(self, name, replies):
        self.name, self.replies = name, replies

    def sample(self, problems, step, *, samples, temperature, **_):
        p = len(problems)
        ids, row = np.zeros((p, 1), np.int32), np.zeros((p, samples), np.int8)
        text = tuple(tuple(self.replies[x.id]) for x in problems)
        one = np.ones((p, samples, 1))
        rollouts = Rollouts(
            self.name, 0, step, tuple(problems), ids, ids, one.astype(np.int32), one > 0, -one, row, text, temperature
        )
        return Pending(lambda: rollouts)


def evaluated(replies, problems, samples):
    """What an evaluation finds, by policy, where each says what `replies` has for it: policy -> problem -> texts."""
    with GraderPool("exact", workers=1) as grader:
        policies = [Says(name, said) for name, said in replies.items()]
        return evaluate(policies, problems, grader, samples=samples, temperature=0.6)


def test_decoupling_of_a_run(tmp_path):
    case = CASES["diag.decoupling"]
    x, expected = case["inputs"], case["expected"]
    n = [x["both_right"], x["only_A"], x["only_B"], x["both_wrong_same_answer"]]
    said = [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2"), ("2", "3")]
    each = np.repeat(range(5), [*n, x["both_wrong"] - x["both_wrong_same_answer"]])
    problems = [Problem(id=f"p{i}", question="", answer="1", kind="one") for i in range(len(each))]
    replies = {who: {f"p{i}": [said[k][j]] for i, k in enumerate(each)} for j, who in enumerate("AB")}
    note_held_out(tmp_path, 0, problems, 1, evaluated(replies, problems, 1))
    config = {"steps": 0, "label": {"name": "verifier"}, "policies": {p: {"frozen": False} for p in "AB"}}
    (tmp_path / "summary.json").write_text(json.dumps({"config": config}))
    (tmp_path / "metrics.jsonl").write_text("")
    found = of_runs(open_runs([str(tmp_path)]))["pairs"]["A & B"]["before"]
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=case["tolerance"], rel=0), key


def test_majority_and_ensemble_of_an_evaluation():
    case = CASES["diag.maj_ensemble"]
    x, expected = case["inputs"], case["expected"]
    problems = [Problem(id="p", question="", answer=x["gold"], kind="one")]
    replies = {who: {"p": [a or "" for a in x[who]]} for who in "AB"}
    found = evaluated(replies, problems, len(x["A"]))
    assert [found[who]["maj"] for who in "AB"] == [expected["maj_A"], expected["maj_B"]]
    assert [found[who]["ensemble_maj"] for who in "AB"] == [expected["ensemble"]] * 2
    vote = votes.count([x["A"] + x["B"]])
    assert dict(zip(vote.answers[0], vote.counts[0])) == expected["counts"]
