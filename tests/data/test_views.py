"""Views of a file find their problems by id; what does not fit is dropped and counted."""

import json

import pytest

from mutualrl.data import views
from mutualrl.types import Problem

PROBLEMS = [
    Problem(id="a", question="What is 1+1?", answer="2"),
    Problem(id="b", question="What is 2+2?", answer="4", views=("Add 2 and 2.",)),
    Problem(id="3", question="What is 3+3?", answer="6"),
]


def test_what_is_written_is_attached(tmp_path, caplog):
    path = tmp_path / "views.jsonl"
    views.write(path, {"b": ("Zwei plus zwei – wieviel?", "Sum\n2, 2"), "a": ["One and one?"]})
    a, b, c = views.attach(PROBLEMS, path)
    assert a.views == ("One and one?",)
    assert b.views == ("Add 2 and 2.", "Zwei plus zwei – wieviel?", "Sum\n2, 2")  # behind those it has
    assert c is PROBLEMS[2] and not caplog.records
    assert (a.id, a.question, a.answer) == ("a", "What is 1+1?", "2")
    assert b.wording(2).question == "Zwei plus zwei – wieviel?"
    assert PROBLEMS[0].views == ()


def test_bad_and_unknown_lines_are_dropped_and_counted_once(tmp_path, caplog):
    path = tmp_path / "views.jsonl"
    lines = [
        {"id": "a", "views": ["v1"], "model": "ignored"},
        {"id": "x", "views": ["v"]},
        "not json",
        "",
        ["a", ["v"]],
        {"views": ["v"]},
        {"id": True, "views": ["v"]},
        {"id": "a"},
        {"id": "a", "views": "v"},
        {"id": "a", "views": ["good", 5]},
        {"id": "a", "views": ["good", " "]},
        {"id": "a", "views": ["\ud800"]},
        {"id": "y", "views": ["v"]},
        {"id": 3, "views": ["v3"]},
        {"id": "a", "views": ["v2"]},
    ]
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    with path.open("ab") as file:
        file.write(b'{"id": "b", "views": ["\xff"]}\n')
    a, b, c = views.attach(PROBLEMS, str(path))
    assert a.views == ("v1", "v2") and b is PROBLEMS[1] and c.views == ("v3",)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"{path}: 2 lines of unknown ids and 10 bad records dropped, first line 3: Expecting value"
    )


def test_a_byte_order_mark_is_no_matter(tmp_path):
    path = tmp_path / "views.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"id": "a", "views": ["v"]}).encode() + b"\r\n")
    assert views.attach(PROBLEMS, path)[0].views == ("v",)


@pytest.mark.parametrize(
    "text, told",
    [
        ('{"id": "x", "views": ["v"]}\n[]\n', "(1 unknown ids, 1 bad records)"),
        ("", "(0 unknown ids, 0 bad records)"),
    ],
)
def test_a_file_that_fits_nothing_is_refused(tmp_path, text, told):
    path = tmp_path / "views.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        views.attach(PROBLEMS, path)
    assert str(error.value) == f"views file {str(path)!r}: no line has the id of a problem {told}"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl' does not exist"):
        views.attach(PROBLEMS, tmp_path / "nowhere.jsonl")
