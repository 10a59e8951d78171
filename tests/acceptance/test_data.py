"""The shared problem sets through the sources."""

import json
import pathlib
import socket

import pytest

from mutualrl import data
from mutualrl.data.stream import ProblemStream

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
if not SHARED.is_dir():
    pytest.skip(f"no shared data at {SHARED}", allow_module_level=True)


@pytest.mark.parametrize("path", sorted(SHARED.glob("*.jsonl")), ids=lambda p: p.stem)
def test_every_set_loads_whole_and_offline(path, caplog, monkeypatch):
    if path.stem == "grader_cases":
        pytest.skip("no problem set")
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    rows = [json.loads(line) for line in path.open(encoding="utf-8")]
    problems = data.load("jsonl", "test", test=str(path))
    assert [p.id for p in problems] == [r["id"] for r in rows] and not caplog.records
    assert [p.answer for p in problems] == [r["answer"] for r in rows]
    assert all(p.kind for p in problems)


def test_stream_over_a_real_set_resumes_in_order():
    problems = data.load(
        "jsonl", "train", train=str(SHARED / "gsm8k_train.jsonl"), test=str(SHARED / "gsm8k_test.jsonl")
    )
    stream = ProblemStream(problems, seed=7)
    for _ in range(3):
        stream.next(32)
    state = json.loads(json.dumps(stream.state()))
    resumed = ProblemStream(problems, seed=7)
    resumed.restore(state)
    rest = [p.id for p in stream.next(7000)]
    assert [p.id for p in resumed.next(7000)] == rest and len(set(rest)) == 7000
    with pytest.raises(ValueError, match="checkpoint"):
        ProblemStream(problems[:-1], seed=7).restore(state)
