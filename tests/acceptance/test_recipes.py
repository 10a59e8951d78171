"""Recipes over the shared problem sets: whole, offline, with prompts that ask and gold answers that grade right."""

import json
import pathlib
import re
import socket

import pytest

from mutualrl import data
from mutualrl.data import recipes
from mutualrl.rewards.workers import GraderPool, self_check

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
if not SHARED.is_dir():
    pytest.skip(f"no shared data at {SHARED}", allow_module_level=True)

ROWS = dict(
    re.findall(r"^\| (\w+)\.jsonl \| (\d+) \|", (SHARED / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
)


def file_of(name, split):
    found = recipes.find(name)
    files = found.test_files if split == "test" else (found.train_file,)
    return next((f for f in files if f and (SHARED / f"{f}.jsonl").is_file()), None)


HERE = [(n, s) for n in recipes.names() for s in ("train", "test") if file_of(n, s)]
LEFT_OUT = {("mbpp", "train"): 3, ("mbpp", "test"): 0}  # questions that the test split has, too


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.setenv("MUTUALRL_DATA", str(SHARED))


def test_the_shared_files_are_used():
    used = {file_of(*which) for which in HERE}
    assert used == set(ROWS) - {"grader_cases", "aqua_test", "mmlu_validation"}


@pytest.mark.parametrize("name, split", HERE)
def test_a_set_is_whole_and_asks_its_questions_once(name, split, caplog):
    problems = data.load("recipe", split, recipe=name, levels=recipes.find(name).levels)
    file = file_of(name, split)
    if name == "mbpp":
        rows = [json.loads(line) for line in (SHARED / "mbpp.jsonl").open(encoding="utf-8")]
        assert len(rows) == int(ROWS[file])
        expected = sum(r["split"] == split for r in rows) - LEFT_OUT[name, split]
    else:
        expected = int(ROWS[file])
    assert len(problems) == expected and not caplog.records
    assert all(p.asked.count(p.question) == 1 for p in problems if len(p.question) > 40)
    assert all(p.asked != p.question and not re.search(r"\{(question|test_list)\}", p.asked) for p in problems)
    assert problems == data.load("recipe", split, recipe=name, levels=recipes.find(name).levels)


@pytest.mark.parametrize("name", sorted({n for n, s in HERE if (n, "train") in HERE}))
def test_splits_are_disjoint(name):
    train, test = (
        {"".join(p.question.split()) for p in data.load("recipe", s, recipe=name)} for s in ("train", "test")
    )
    assert train and test and not train & test


def test_training_on_math_is_of_levels_3_to_5():
    problems = data.load("recipe", "train", recipe="math")
    assert len(problems) == 1582 + 1680 + 2294 and {p.extra["level"] for p in problems} == {3, 4, 5}


@pytest.mark.parametrize("name, split", HERE)
def test_gold_answers_grade_right(name, split):
    grader = recipes.find(name).grader
    try:
        pool = GraderPool(grader, workers=2, timeout_s=60.0)
    except ValueError as e:  # programs cannot be isolated here
        pytest.skip(str(e))
    with pool:
        assert self_check(pool, data.load("recipe", split, recipe=name, limit=20 if grader == "code" else 200)) == []
        assert pool.timeouts == pool.crashes == 0
