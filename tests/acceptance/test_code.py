"""HumanEval and MBPP: every reference solution passes its tests, and programs that do nothing do not."""

import ast
import json
import pathlib

import pytest

from mutualrl.rewards import code, sandbox
from mutualrl.rewards.workers import GraderPool
from mutualrl.types import Problem

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
if not SHARED.is_dir():
    pytest.skip(f"no shared data at {SHARED}", allow_module_level=True)
if sandbox.unavailable():
    pytest.skip(f"no isolation: {sandbox.unavailable()}", allow_module_level=True)


@pytest.fixture(scope="module")
def pool():
    # One MBPP reference needs four seconds for itself.
    with GraderPool("code", options={"timeout_s": 55.0}, timeout_s=60.0) as pool:
        yield pool


def load(name, every=1):
    problems = []
    for line in (SHARED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[::every]:
        row = json.loads(line)
        extra = {k: v for k, v in row.items() if k not in ("id", "question", "answer", "source")}
        problems.append(Problem(row["id"], row["question"], answer=row["answer"], extra=extra))
    return problems


class _Gutted(ast.NodeTransformer):
    def visit_FunctionDef(self, node):
        node.body = [ast.Return(ast.Constant(None))]
        return node


def gutted(problem):
    """The reference with `return None` for the body of every function."""
    text = code.extract(problem.answer, problem)
    return f"```python\n{ast.unparse(ast.fix_missing_locations(_Gutted().visit(ast.parse(text))))}\n```"


def check(pool, problems, count):
    assert len(problems) == count
    rewards, _ = pool.grade([p.answer for p in problems], problems)
    assert [p.id for p, r in zip(problems, rewards) if r != 1] == []
    rewards, _ = pool.grade([gutted(p) for p in problems], problems)
    assert [p.id for p, r in zip(problems, rewards) if r != 0] == []
    assert (pool.timeouts, pool.crashes) == (0, 0)


def test_humaneval(pool):
    check(pool, load("humaneval"), 164)


def test_a_third_of_mbpp(pool):
    check(pool, load("mbpp", 3), 325)


@pytest.mark.slow
def test_mbpp(pool):
    check(pool, load("mbpp"), 973)


def test_fenced_references_in_prose_pass(pool):
    problems = load("humaneval", 8) + load("mbpp", 40)
    replies = [f"Here it is.\n```python\n{code.extract(p.answer, p)}\n```\nIt works." for p in problems]
    rewards, _ = pool.grade(replies, problems)
    assert (rewards == 1).all()
