"""Graders on shared data: cases with known verdicts, gold answers against themselves, one reply that hangs."""

import json
import pathlib
import time

import pytest

from mutualrl import data
from mutualrl.rewards.workers import GraderPool, self_check
from mutualrl.types import Problem

pytest.importorskip("math_verify")
SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
if not SHARED.is_dir():
    pytest.skip(f"no shared data at {SHARED}", allow_module_level=True)


@pytest.fixture(scope="module")
def math_pool():
    with GraderPool("math") as pool:
        yield pool


@pytest.mark.parametrize(
    "kind, grader, floor", [("plain", "math", 1.0), ("extract", "math", 1.0), ("choice", "choice", 1.0)]
)
def test_cases(kind, grader, floor):
    cases = [c for c in map(json.loads, (SHARED / "grader_cases.jsonl").open()) if c["kind"] == kind]
    with GraderPool(grader) as pool:
        rewards, answers = pool.grade(
            [c["pred"] for c in cases], [Problem(str(i), "", answer=c["gold"]) for i, c in enumerate(cases)]
        )
    wrong = [(c["gold"], c["pred"], a) for c, r, a in zip(cases, rewards, answers) if (r == 1) != c["equal"]]
    assert len(rewards) == len(cases) and 1 - len(wrong) / len(cases) >= floor, wrong
    assert (pool.timeouts, pool.crashes) == (0, 0)


def test_conventions_are_stable(math_pool):
    """Where graders differ ours follows its own written rules; this tells when a change moves it."""
    cases = [c for c in map(json.loads, (SHARED / "grader_cases.jsonl").open()) if c["kind"] == "convention"]
    rewards, _ = math_pool.grade([c["pred"] for c in cases], [Problem("", "", answer=c["gold"]) for c in cases])
    assert sum((r == 1) == c["equal"] for r, c in zip(rewards, cases)) >= 53  # of 68


@pytest.mark.parametrize("name", ["gsm8k_train", "gsm8k_test", "math_train", "math500", "svamp"])
def test_gold_answers_grade_right(math_pool, name):
    problems = data.load("jsonl", "train", train=str(SHARED / f"{name}.jsonl"), holdout=0.0)
    assert not [p.answer for p in self_check(math_pool, problems)]
    boxed = [rf"Therefore the answer is $\boxed{{{p.answer}}}$, as was to be shown." for p in problems]
    rewards, answers = math_pool.grade(boxed, problems)
    assert rewards.mean() == 1 and None not in answers
    # And nothing is right because everything is: another problem's answer is, unless it is written alike.
    shifted, _ = math_pool.grade([p.answer for p in problems[1:]], problems[:-1])
    alike = sum(a.answer == b.answer for a, b in zip(problems, problems[1:]))
    assert shifted.sum() <= alike + 0.002 * len(problems)


@pytest.mark.parametrize(
    "name", ["aqua_test", "mmlu_stem", "mmlu_validation", "arc_challenge_validation", "openbookqa_validation"]
)
def test_gold_letters_grade_right(name):
    problems = data.load("jsonl", "test", test=str(SHARED / f"{name}.jsonl"))
    with GraderPool("choice") as pool:
        assert not self_check(pool, problems)
        for form in ("The answer is ({}).", r"\boxed{{{}}}", "**{}**", "Thinking about it.\nAnswer: {}"):
            rewards, _ = pool.grade([form.format(p.answer) for p in problems], problems)
            assert rewards.mean() == 1, form
        # The option's own text, but for options that are written alike.
        texts = [p.choices[ord(p.answer) - ord("A")] for p in problems]
        rewards, _ = pool.grade([f"The answer is {t}" for t in texts], problems)
        assert rewards.mean() > 0.98


def test_a_tower_of_powers_costs_neither_time_nor_its_neighbour():
    problems = [Problem(str(i), "", answer="5") for i in range(2)]
    with GraderPool("math", workers=1, timeout_s=5.0) as pool:
        pool.grade(["5"], problems[:1])
        start = time.monotonic()
        rewards, _ = pool.grade([r"\boxed{10^{10^{10}}}", r"\boxed{5}"], problems)
        assert rewards.tolist() == [0, 1] and time.monotonic() - start < 6
