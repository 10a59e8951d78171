"""Graders, each on its own: what is read, what is right, what was decided."""

import math
import time

import pytest

from mutualrl.rewards import choice, exact, reasoning_gym
from mutualrl.rewards import math as math_grader
from mutualrl.rewards import reply as replies
from mutualrl.types import Problem

pytest.importorskip("math_verify")


def math_grade(gold, reply, **extra):
    return math_grader.grade(reply, Problem("", "", answer=gold, extra=extra))


# (gold, reply, reward), by the fault that each excludes
CASES = [
    ("1/2", r"\boxed{\frac{1}{2}}", 1),  # nested braces
    ("13", r"$\text{13}$", 1),  # text-wrapped and bold numbers, with and without fences
    ("13", r"\text{13}", 1),
    ("14", "**14**", 1),
    ("73", "2*234 = 468, so the answer is **73**.", 1),
    ("5/4", "1 1/4", 1),  # mixed numbers
    ("71/6", "11 5/6", 1),
    ("2", "2 2/3", 0),
    ("10", "4 10/3", 0),
    ("-3/2", r"-1\frac{1}{2}", 1),
    ("1331 and 1728", "1728", 0),  # parts of an answer
    ("1331 and 1728", "1331 and 1728", 1),
    ("1331 and 1728", r"\boxed{1728, 1331}", 1),
    ("1728", "1331 and 1728", 0),
    ("1,2", r"\boxed{1} and \boxed{2}", 1),
    ("2", r"\boxed{1} or \boxed{2}", 0),
    ("2", r"\boxed{1}. No, \boxed{2}", 1),
    (r"$7.41\%$", r"7.41\%", 1),  # percent
    (r"$7.41\%$", r"7.42\%", 0),
    ("0.5", r"50\%", 1),
    ("50", "50%", 1),
    (r"$\frac{1}{2^{99}}$", r"$\frac{1}{2^{98}}$", 0),  # values below any rounding
    (r"$\frac{1}{2^{99}}$", "2^{-99}", 1),
    (r"$\dfrac{\pi}{2}$", "pi/2", 1),  # code style
    ("$e^{16}-1$", "-1 + exp(16)", 1),
    ("$e^{16}-1$", "-2 + exp(16)", 0),
    (r"2\sqrt{3}", "2*sqrt(3)", 1),
    ("x^2+1", "x**2 + 1", 1),
    ("42", "#### 42" + " and more of it" * 32, 1),  # nothing but the end searched
    ("42", "#### 42\n" + "x" * 480, 1),
    ("80000", "$80,000", 1),  # currency, separators
    ("10{,}000", "10000", 1),
    ("0", "3", 0),
    ("0", "0", 1),
    ("7", "[ans]7", 1),
    ("42", "I don't know.", 0),
    ("42", "", 0),
    ("42", r"\boxed{}", 0),
    ("12", "12 or 13", 0),
    ("12", r"<think>\boxed{12}</think> \boxed{15}", 0),
    ("12", r"<think>it is \boxed{12}", 0),
    ("12", r"x</think><answer>12</answer>", 1),
    ("(3,4)", "x = 3, y = 4", 1),  # order
    ("(3,4)", "(4,3)", 0),
    (r"\{3,4\}", r"\{4,3\}", 1),
    (r"\{3,4\}", "(4,3)", 0),
    ("[0,1)", "(0,1)", 0),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", 1),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}", 0),
    ("1/3", "0.333333", 1),  # decimals
    ("1/3", "0.33", 0),
    ("16386.16", "16386.17", 0),
    ("42", "42.0000", 1),
    ("6 cm", "6 m", 0),  # units
    (r"6\text{ cm}", "6", 1),
    ("204_5", "204_5", 1),  # bases
    ("204_5", "204_6", 0),
    ("p-q", "q-p", 0),  # expressions
    (r"\sin^2 y", r"1-\cos^2 y", 1),
    ("x", "|x|", 0),
    ("x^2-1", "(x-1)(x+1)", 1),
    ("x^2-1", "y^2-1", 0),
    ("x \\le 5", "5 \\ge x", 1),
    ("x < 1", "x > 1", 0),
    (r"\text{Evelyn}", "The answer is Evelyn.", 1),  # words
    (r"\text{odd}", "dod", 0),
    ("5", r"\boxed{10^{10^{10}}}", 0),  # not evaluated at all
    ("12", r"\boxed{__import__('os').getpid()}", 0),
    ("12", "(" * 3000 + "12" + ")" * 3000, 1),
]


@pytest.mark.parametrize("gold, reply, reward", CASES)
def test_math(gold, reply, reward):
    assert math_grade(gold, reply) == reward


def test_math_answer_tag_is_no_pattern():
    assert math_grade("7", "8 [ans]7", answer_tag="[ans]") == 1
    assert math_grade("7", "7 [ans]8", answer_tag="[ans]") == 0


@pytest.mark.parametrize("grader", [choice, exact, math_grader])
def test_without_gold_nothing_can_be_judged(grader):
    assert math.isnan(grader.grade("7", Problem("", "", choices=("7", "8"))))


@pytest.mark.parametrize(
    "replies_, canonical",
    [
        ((r"\boxed{\frac{1}{2}}", "0.5", "1/2", "the answer is $x = 1/2$", r"$\frac12$"), "1/2"),
        (("1,234", "$1234.00", "It is 1234 dollars.", r"\boxed{1{,}234}"), "1234"),
        (("(1, 2)", r"\boxed{\left(1,2\right)}"), "(1,2)"),
        (("I cannot solve this", "", r"\boxed{}"), None),
    ],
)
def test_math_equal_answers_vote_together(replies_, canonical):
    found = {math_grader.extract(r, Problem("", "")) for r in replies_[: 3 if canonical is None else None]}
    assert found == {canonical} or canonical is None and found <= {None, "I cannot solve this"}


@pytest.mark.parametrize(
    "gold, reply, reward",
    [("1247", "1247", 1), ("1247", " 1247\n", 1), ("07", "7", 0), ("a", "A", 0), ("a", "", 0), ("", "", 0)],
)
def test_exact(gold, reply, reward):
    assert exact.grade(reply, Problem("", "", answer=gold)) == reward


def test_exact_extract():
    assert exact.extract(" 12 3 ", Problem("", "")) == "12 3"
    assert exact.extract(" \n", Problem("", "")) is None


OPTIONS = ("bank", "library", "a mall", "7")


@pytest.mark.parametrize(
    "reply, letter",
    [
        ("C", "C"),
        ("(C)", "C"),
        ("c", None),
        (r"\boxed{\text{C}}", "C"),
        (r"\boxed{A} then \boxed{C}", "C"),
        ("The answer is C.", "C"),
        ("the answer is c", "C"),
        ("**Answer:** (C) a mall", "C"),
        ("The answer is A or C.", None),
        ("A good start. It is not B, so C", "C"),
        ("A mall", "C"),
        ("The answer is: library", "B"),
        ("Let me think.\nlibrary", "B"),
        ("The answer is 7", "D"),
        ("Answer: E", None),
        ("", None),
        ("no idea", None),
    ],
)
def test_choice(reply, letter):
    problem = Problem("", "", answer="C", choices=OPTIONS)
    assert choice.extract(reply, problem) == letter
    assert choice.grade(reply, problem) == (letter == "C")


def test_reply_boxes():
    assert [c for _, _, c in replies.boxes(r"\boxed{\{1\}} \boxed{a{b}c} \boxed{open")] == [r"\{1\}", "a{b}c"]


NONSENSE = (
    "A ", "not A ", r"\boxed{", "{", "}", "$", "$1$,", r"\[", r"\(", r"\$", "1", "1,", "1,111,", "**", "**a ", ",",
    "answer is ", "answer: A or ", "answer: $", "#### a b c d\n", "<think>", "<answer>", "<|im", r"\text{", r"\sqrt[",
    "(", "^(", "√(", "1%", r"\boxed{1},", " ", "\n",
)  # fmt: skip


@pytest.mark.parametrize("form", ["%s", r"\boxed{%s}", "answer: %s", "$%s$"])
def test_long_nonsense_is_read_in_linear_time(form):
    """A search that starts anew from many places takes from seconds to minutes at this length."""
    problem = Problem("", "", answer="A", choices=OPTIONS)
    for unit in NONSENSE:
        reply = form.replace("%s", unit * (50_000 // len(unit)))
        for grader in (choice, exact, math_grader, reasoning_gym):
            start = time.perf_counter()
            grader.extract(reply, problem)
            assert time.perf_counter() - start < 5, (grader.__name__, unit)


def test_reasoning_gym_scores():
    pytest.importorskip("reasoning_gym")
    from mutualrl import data

    (problem,) = data.load("reasoning_gym", "train", tasks=["gcd"], size=1)
    for reply in (problem.answer, f"<answer>{problem.answer}</answer>", f"So the answer is {problem.answer}."):
        assert reasoning_gym.grade(reply, problem) == 1
    assert reasoning_gym.grade("<answer>-1</answer>", problem) < 1
    assert reasoning_gym.grade("", problem) == 0
    assert reasoning_gym.extract("<think>5</think> 6", problem) == "6"


def test_the_last_number_is_an_answer_only_where_that_is_asked_for():
    from mutualrl.rewards import math as grader

    strict, problem = grader.Options(last_number=False), Problem("a", "", answer="14")
    assert grader.grade("First 20 less 6, which leaves 14", problem) == 1
    assert grader.grade("First 20 less 6, which leaves 14", problem, strict) == 0
    assert grader.extract("First 20 less 6, which leaves 14", problem, strict) is None
    for stated in (r"20 less 6: \boxed{14}", "20 less 6. The answer is 14.", "#### 14", "14"):
        assert grader.grade(stated, problem, strict) == 1
