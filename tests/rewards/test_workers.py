"""The pool: order and number of rewards, and graders that hang, crash, raise and eat memory."""

import os
import sys
import threading
import time

import numpy as np
import pytest

from mutualrl.rewards import names
from mutualrl.rewards.workers import GraderPool, self_check
from mutualrl.types import Problem

WILD = """
import os, sys, time
IN_WORKER = True
def extract(reply, problem):
    return reply.strip() or None
def grade(reply, problem):
    if reply == "hang": time.sleep(3600)
    if reply == "spin": 10 ** 10 ** 10
    if reply == "die": os._exit(3)
    if reply == "raise": raise RuntimeError("no")
    if reply == "eat": bytearray(1 << 36)
    if reply == "print": print("noise"); os.write(1, b"noise")
    if reply in ("nan", "inf"): return float(reply)
    if reply == "pid": return os.getpid()
    if reply == "env": return float("jax" in sys.modules or os.environ["CUDA_VISIBLE_DEVICES"] != "")
    return float(reply == problem.answer)
"""

# Imports in the parent, which only reads IN_WORKER, but not in a worker.
BROKEN = """
import os
IN_WORKER = True
if os.environ.get("PYTHONSAFEPATH"): raise ImportError("no such library")
"""


@pytest.fixture
def wild(tmp_path, monkeypatch):
    (tmp_path / "wild_graders").mkdir()
    (tmp_path / "wild_graders" / "__init__.py").touch()
    (tmp_path / "wild_graders" / "wild.py").write_text(WILD)
    (tmp_path / "wild_graders" / "broken.py").write_text(BROKEN)
    for module in ("wild_graders", "wild_graders.wild", "wild_graders.broken"):  # of an earlier test's folder
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "wild_graders.wild"


def problems(n, answer="5"):
    return [Problem(str(i), "q", answer=answer) for i in range(n)]


def test_inline():
    with GraderPool("exact") as pool:
        rewards, answers = pool.grade(["5", "6", " "], problems(3))
    assert rewards.dtype == np.float64 and rewards.tolist() == [1, 0, 0] and answers == ["5", "6", None]
    assert not pool._all


@pytest.mark.parametrize("inline", [True, False])
def test_what_cannot_be_judged_is_nan(wild, inline, monkeypatch):
    with GraderPool(wild, workers=1) as pool:
        monkeypatch.setattr(pool._grader, "IN_WORKER", not inline)
        rewards, _ = pool.grade(["5", "nan", "inf", "4"], problems(4))
    np.testing.assert_array_equal(rewards, [1, np.nan, np.nan, 0])


def test_unparsable_answer_has_exactly_one_reward():
    pytest.importorskip("math_verify")
    with GraderPool("math", workers=1) as pool:
        rewards, answers = pool.grade([r"\boxed{42}", "I don't know.", r"\boxed{137}"], problems(3, "42"))
        assert rewards.tolist() == [1, 0, 0] and len(answers) == 3 and answers[0] == "42"

        # From a thread that is not the main one, two threads at a time.
        seen = []
        threads = [
            threading.Thread(target=lambda: seen.append(pool.grade([r"\boxed{\frac{1}{3}}"], problems(1, "1/3"))[0][0]))
            for _ in range(2)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert seen == [1.0, 1.0]

        assert [
            p.answer for p in self_check(pool, problems(1, r"\frac{3}{4}") + problems(1, "") + problems(1, None))
        ] == [""]
        assert (pool.timeouts, pool.crashes) == (0, 0)


@pytest.mark.parametrize("bad", ["hang", "spin"])
def test_a_hanging_reply_costs_its_limit_and_no_more(wild, bad):
    with GraderPool(wild, workers=1, timeout_s=1.0) as pool:
        before = pool.grade(["pid"], problems(1))[0][0]
        start = time.monotonic()
        rewards, answers = pool.grade([bad, "5", "4"], problems(3))
        assert time.monotonic() - start < 2.0
        assert rewards.tolist() == [0, 1, 0] and answers == [None, "5", "4"]
        assert (pool.timeouts, pool.crashes) == (1, 0)
        assert pool.grade(["pid"], problems(1))[0][0] != before  # replaced
        with pytest.raises(ProcessLookupError):
            os.kill(int(before), 0)


def test_crashes_cost_one_reply_each(wild):
    with GraderPool(wild, workers=2, memory_mb=1024) as pool:
        replies = ["5", "die", "5", "raise", "5", "eat", "5", "print", "nan", "env", "5"]
        rewards, _ = pool.grade(replies, problems(len(replies)))
        np.testing.assert_array_equal(rewards, [1, 0, 1, 0, 1, 0, 1, 0, np.nan, 0, 1])  # NaN: cannot be judged
        assert (pool.timeouts, pool.crashes) == (0, 3)


def test_order_and_reuse(wild):
    with GraderPool(wild, workers=2) as pool:
        replies = [str(i % 7) for i in range(300)]
        rewards, answers = pool.grade(replies, problems(300))
        assert rewards.tolist() == [float(r == "5") for r in replies] and answers == replies
        pids = {pool.grade(["pid"], problems(1))[0][0] for _ in range(10)}
        assert len(pids) <= 2
        assert pool.grade([], [])[0].shape == (0,)
    assert not pool._all


def test_a_grader_that_does_not_import_is_an_error_not_a_zero(wild):
    with pytest.raises(RuntimeError, match="no such library"), GraderPool("wild_graders.broken") as pool:
        pool.grade(["5"], problems(1))


def test_refusals():
    with pytest.raises(ValueError, match="choice, code, exact, math, reasoning_gym"):
        GraderPool("maths")
    with pytest.raises(ValueError, match="no_package.grader"):
        GraderPool("no_package.grader")
    with pytest.raises(ValueError, match="timeout_s is 0"):
        GraderPool("exact", timeout_s=0)
    with GraderPool("exact") as pool, pytest.raises(ValueError, match="1 replies for 2"):
        pool.grade(["5"], problems(2))
    assert names() == ["choice", "code", "exact", "math", "reasoning_gym"]


@pytest.mark.parametrize("inline", [True, False])
def test_options_reach_the_grader(wild, tmp_path, inline):
    code = f"""
import dataclasses
IN_WORKER, VERSION, PACKAGES = {not inline}, "7", ("numpy",)
@dataclasses.dataclass(frozen=True)
class Options:
    bonus: int = 0
    broken: bool = False
def check(options):
    if options.broken: raise ValueError("broken cannot work here")
def extract(reply, problem, options): return reply * options.bonus
def grade(reply, problem, options): return float(options.bonus)
"""
    name = f"choosy_{inline}"
    (tmp_path / "wild_graders" / f"{name}.py").write_text(code)
    with GraderPool(f"wild_graders.{name}", options={"bonus": 2}, workers=1) as pool:
        rewards, answers = pool.grade(["a"], problems(1))
        assert rewards.tolist() == [2] and answers == ["aa"]
        assert pool.version == f"{name} 7, numpy {np.__version__}"
    with pytest.raises(ValueError, match="broken cannot work here"):
        GraderPool(f"wild_graders.{name}", options={"broken": True})
    with pytest.raises(ValueError, match="no option 'malus'; it has bonus, broken"):
        GraderPool(f"wild_graders.{name}", options={"malus": 1})
    with pytest.raises(ValueError, match="no option 'malus'; it has none"):
        GraderPool("exact", options={"malus": 1})
