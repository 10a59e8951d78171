"""The order of problems, and taking it up again."""

import json

import pytest

from mutualrl.data.stream import ProblemStream
from mutualrl.types import Problem


def problems(n, answer="1"):
    return [Problem(str(i), f"q{i}", answer=answer) for i in range(n)]


def ids(stream, n):
    return [p.id for p in stream.next(n)]


def test_each_epoch_has_each_problem_once_in_its_own_order():
    stream = ProblemStream(problems(10), seed=1)
    epochs = [ids(stream, 10) for _ in range(4)]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 4
    assert epochs == [ids(s, 10) for s in [ProblemStream(problems(10), seed=1)] for _ in range(4)]
    assert epochs[0] != ids(ProblemStream(problems(10), seed=2), 10)


@pytest.mark.parametrize("n", [1, 3, 4, 7, 10])
def test_no_problem_twice_in_a_call_and_none_lost(n):
    stream = ProblemStream(problems(10), seed=5)
    calls = [ids(stream, n) for _ in range(100)]
    assert all(len(set(c)) == n for c in calls)
    counts = [sum(calls, []).count(str(i)) for i in range(10)]
    assert max(counts) - min(counts) <= 1


def test_more_than_there_are():
    assert sorted(ids(ProblemStream(problems(3)), 6)) == sorted("012" * 2)
    assert len(ids(ProblemStream(problems(3)), 8)) == 8


@pytest.mark.parametrize("before", [0, 2, 5, 6])
def test_resume_goes_on_where_it_stopped(before):
    # 10 rows, batches of 4: stopped in the first epoch, at its end, and in later ones.
    unbroken = ProblemStream(problems(10), seed=0)
    for _ in range(before):
        unbroken.next(4)
    state = json.loads(json.dumps(unbroken.state()))
    resumed = ProblemStream(problems(10), seed=99)
    resumed.restore(state)
    assert [ids(resumed, 4) for _ in range(12)] == [ids(unbroken, 4) for _ in range(12)]


@pytest.mark.parametrize("other", [problems(9), problems(10, answer="2"), problems(10)[::-1]])
def test_another_data_set_is_refused(other):
    state = ProblemStream(problems(10)).state()
    with pytest.raises(ValueError, match="not the one of the checkpoint") as e:
        ProblemStream(other).restore(state)
    assert "\n" not in str(e.value)


def test_no_problems():
    with pytest.raises(ValueError, match="at least one"):
        ProblemStream([])
