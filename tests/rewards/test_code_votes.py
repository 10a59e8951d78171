"""Votes among programs: what they give for the inputs is the answer, and no expected output is seen."""

import dataclasses
import types

import numpy as np
import pytest

from mutualrl import votes
from mutualrl.config import ConfigError
from mutualrl.rewards import code, sandbox
from mutualrl.rewards.workers import GraderPool
from mutualrl.types import Problem

if sandbox.unavailable():
    pytest.skip(f"no isolation: {sandbox.unavailable()}", allow_module_level=True)

PIPED = Problem("s", "Add.", extra={"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
CALLED = Problem(
    "f",
    "Add.",
    extra={
        "func_name": "add",
        "test_cases": [{"input": "1\n2", "output": "3"}, {"input": "[3]\n[4]", "output": "[3, 4]"}],
    },
)
QUICK = code.Options(timeout_s=2.0)
RIGHT = {
    "s": ["a, b = map(int, input().split())\nprint(a + b)", "print(sum(map(int, input().split())), ' \\n')"],
    "f": [
        "def add(a, b):\n    return a + b",
        "class Solution:\n    def add(self, a, b):\n        b = a + b\n        return b",
    ],
}
WRONG = {
    "s": ["a, b = map(int, input().split())\nprint(a * b)", "a, b = map(int, input().split())\nprint(b * a)"],
    "f": ["def add(a, b):\n    return b + a", "add = lambda a, b: b + a"],  # not the same of lists
}


def block(text):
    return f"```python\n{text}\n```"


@pytest.mark.parametrize("problem", [PIPED, CALLED], ids=lambda x: x.id)
def test_programs_that_do_the_same_have_the_same_answer(problem):
    blind = votes.blind(problem)
    right, wrong = ({code.extract(block(x), blind, QUICK) for x in some[problem.id]} for some in (RIGHT, WRONG))
    assert len(right) == len(wrong) == 1 and right != wrong and None not in wrong
    assert right == {code.gold(problem)}
    (label,), reply = wrong, block(WRONG[problem.id][0])
    labelled = dataclasses.replace(blind, answer=label)
    assert code.grade(reply, labelled, QUICK) == code.grade(label, labelled, QUICK) == 1.0
    assert code.grade(block(RIGHT[problem.id][0]), labelled, QUICK) == 0.0
    assert code.grade(code.gold(problem), labelled, QUICK) == code.grade("no program", labelled, QUICK) == 0.0
    assert code.grade(code.gold(problem), problem, QUICK) == 1.0 and code.grade(label, problem, QUICK) == 0.0
    assert np.isnan(code.grade(reply, blind, QUICK))
    assert np.isnan(code.grade(reply, dataclasses.replace(blind, answer=RIGHT[problem.id][0]), QUICK))


@pytest.mark.parametrize("problem", [PIPED, CALLED], ids=lambda x: x.id)
def test_expected_outputs_do_not_move_votes(problem):
    other = {"outputs": ["8", "9"], "test_cases": [{**c, "output": "8"} for c in problem.extra.get("test_cases", ())]}
    other = {**problem.extra, **{k: v for k, v in other.items() if k in problem.extra}}
    assert votes.blind(problem) == votes.blind(dataclasses.replace(problem, answer="x", extra=other))
    assert not {"outputs", "output"} & set(str(votes.blind(problem).extra).replace("'", " ").split())


@pytest.mark.parametrize(
    "value, same",
    [("1", "True"), ("1", "1.0"), ("(1, 2)", "[1, 2]"), ("{'a': 1, 'b': 2}", "{'b': 2, 'a': 1.0}"), ("-0.0", "0")],
)
def test_answers_are_equal_where_the_tests_would_hold_them_equal(value, same):
    digest = lambda v: code.extract(f"def add(a, b):\n    return {v}", votes.blind(CALLED), QUICK)  # noqa: E731
    assert digest(value) == digest(same) != None  # noqa: E711
    different = {digest(v) for v in ("1", "'1'", "[1]", "[[1]]", "1.5", "[1, 2]", "['1, 2']", "{'a': 1}", "10**5000")}
    assert len(different) == 9 and None not in different


NO_ANSWER = {
    "crash": "x = 1 / 0",
    "crash in the call": "def add(a, b):\n    raise KeyError",
    "nothing": "def add(a, b):\n    pass",
    "white space": "print(' \\n')",
    "no JSON": "def add(a, b):\n    return {1}",
    "object": "class E:\n    def __eq__(self, o): return True\n    __hash__ = None\ndef add(a, b):\n    return E()",
    "tuple within": "def add(a, b):\n    return [(1, 2)]",
    "deep": "def add(a, b):\n    x = []\n    for _ in range(5000): x = [x]\n    return x",
    "exit": "import os\ndef add(a, b):\n    os._exit(0)\nos._exit(0) if __name__ == '__main__' else 0",
    "loop": "def add(a, b):\n    while True: pass\nif __name__ == '__main__':\n    add(0, 0)",
    "second never": "def add(a, b):\n    while a != 1: pass\n    return 3\n"
    "if __name__ == '__main__':\n    print(add(int(input()[0]), 0), flush=True)",
    "output": "while True: print('x' * 99999)",
    "a digest": f"'{'0' * 64}'",
    "forged": "import os\ndef add(a, b):\n    for fd in range(3, 64):\n"
    f"        try: os.write(fd, b'{'0' * 64}\\n' * 9)\n        except OSError: pass",
}


@pytest.mark.parametrize("problem", [PIPED, CALLED], ids=lambda x: x.id)
@pytest.mark.parametrize("name", NO_ANSWER)
def test_programs_that_give_nothing_do_not_vote(problem, name):
    compile(NO_ANSWER[name], name, "exec")
    assert code.extract(block(NO_ANSWER[name]), votes.blind(problem), code.Options(timeout_s=1.0)) is None


def test_some_crashes_are_part_of_the_answer():
    some = "def add(a, b):\n    return 3 if a == 1 else 1 / 0"
    answer = code.extract(some, votes.blind(CALLED), QUICK)
    assert answer == code.extract(some.replace("1 / 0", "None"), votes.blind(CALLED), QUICK)
    assert answer not in (None, code.gold(CALLED))


def test_a_wrong_majority_wins_and_gives_the_rewards():
    texts = [[block(x) for x in (*WRONG[p.id], RIGHT[p.id][0], "1 / 0")] + ["prose"] for p in (PIPED, CALLED)]
    problems = (PIPED, CALLED)
    with GraderPool("code", options={"timeout_s": 3.0}, timeout_s=20.0) as pool:
        answers = votes.answers_in(texts, problems, pool)
        labels = votes.elect(votes.count(answers, longest=128))
        verdicts = votes.judged(labels, texts, answers, problems, pool)
        by_grader = votes.count(answers, votes.same_by(pool, problems))
        golds = [pool.gold(p) for p in problems]
        right = votes.matching(golds, texts, answers, problems, pool)
        assert (pool.timeouts, pool.crashes) == (0, 0)
    np.testing.assert_array_equal(verdicts.reward, [[1, 1, 0, 0, 0]] * 2)
    np.testing.assert_allclose(labels.share, 2 / 3)
    assert by_grader.answers == votes.count(answers).answers and all(len(x) == 2 for x in by_grader.answers)
    np.testing.assert_array_equal(right, [[0, 0, 1, 0, 0]] * 2)


@pytest.mark.parametrize("label", ["peer_vote", "self_vote"])
def test_problems_without_inputs_are_refused(label):
    run = types.SimpleNamespace(grader="code", label={"name": label})
    votes.check_problems(run, [PIPED, CALLED])
    listed = Problem("mbpp/1", "q", answer="x", extra={"test_list": ["assert f() == 1"]})
    with pytest.raises(ConfigError) as error:
        votes.check_problems(run, [PIPED, listed])
    assert str(error.value).startswith(f"label.name={label!r}: problem 'mbpp/1' of grader 'code' has no `inputs`")
    votes.check_problems(types.SimpleNamespace(grader="math", label={"name": label}), [listed])
