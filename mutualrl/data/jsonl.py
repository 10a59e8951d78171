"""Problems from JSON lines files: one object a line, UTF-8.

Fields read: `question` (the only one a record must have), `answer` (text or number; for a choice problem the letter of
the option), `id` (file name and line number where absent), `choices`, `subject`, `source`, `images` (paths, relative to
the file), `views`. The rest goes to `Problem.extra`. A problem's `kind` is its subject, else its source, else the
file's name. An answer in GSM8K's own form (`#### 1,234`, mostly behind a solution) becomes the number; the whole is
kept as `extra['solution']`.
"""

from __future__ import annotations

import json
import logging
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from mutualrl.data.split import check_count, check_fraction, check_names, check_split, check_text, held_out
from mutualrl.types import Problem

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MARKED = re.compile(r"(?:.*\n)?#### (.*)", re.DOTALL)  # what follows the last mark
_OWN_FIELDS = ("id", "question", "answer", "choices", "source", "subject", "images", "views")


def load(
    split: str,
    *,
    train: str = "",
    test: str = "",
    holdout: float = 0.1,
    limit: int = 0,
    kinds: Sequence[str] = (),
) -> list[Problem]:
    """Problems of a file, in its order.

    Bad records are dropped, with one warning a file that tells how many and the first of them. Questions of the test
    file are left out of the train split.

    Args:
      split: 'train' or 'test'.
      train: the training file. Alone, it serves both splits, divided by a hash of the id.
      test: the test file.
      holdout: share of the training file that is the test split where there is no test file.
      limit: at most so many problems, the first ones; 0 for all.
      kinds: only problems of these kinds; () for all.

    Raises:
      ValueError: a bad option, or nothing left.
      FileNotFoundError: a file that is not there.
    """
    check_split(split)
    check_fraction("holdout", holdout)
    check_count("limit", limit)
    kinds = check_names("kinds", kinds)
    check_text("train", train)
    check_text("test", test)
    if not train and (split == "train" or not test):
        raise ValueError(f"train is {train!r}; the {split} split needs the path of a file")
    if test:
        problems = _read(train if split == "train" else test)
        if split == "train":
            asked = {p.question for p in _read(test)}
            problems = [p for p in problems if p.question not in asked]
    else:
        problems = [p for p in _read(train) if held_out(p.id, holdout) == (split == "test")]
    if kinds:
        there = sorted({p.kind for p in problems})
        problems = [p for p in problems if p.kind in kinds]
        if missing := [k for k in kinds if k not in there]:
            raise ValueError(f"kinds has {missing[0]!r}; allowed are {', '.join(there)}")
    if not problems:
        raise ValueError(f"no problems are left for the {split} split of {train or test}")
    return problems[:limit] if limit else problems


def _read(name: str) -> list[Problem]:
    path = pathlib.Path(name).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"problem file {str(path)!r} does not exist")
    problems: dict[str, Problem] = {}
    bad: list[tuple[int, str]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                problem = _problem(json.loads(line.decode("utf-8-sig")), path, number)
                if problem.id in problems:
                    raise ValueError(f"id {problem.id!r} is there already")
                problems[problem.id] = problem
            except (ValueError, RecursionError) as e:  # of JSON, of UTF-8, or ours
                bad.append((number, str(e)))
    if bad:
        line, reason = bad[0]
        logging.getLogger(__name__).warning(
            "%s: %d bad records dropped, first line %d: %s", path, len(bad), line, reason
        )
    return list(problems.values())


def _problem(record: Any, path: pathlib.Path, number: int) -> Problem:
    if not isinstance(record, dict):
        raise ValueError("not an object")
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("no question")
    texts = {field: _text(record, field) for field in ("id", "answer", "source", "subject")}
    lists = {field: _texts(record, field) for field in ("choices", "images", "views")}
    extra = {k: v for k, v in record.items() if k not in _OWN_FIELDS}
    answer = texts["answer"]
    if answer is not None and (found := _MARKED.match(answer)):
        extra.setdefault("solution", answer)
        answer = found.group(1).strip().replace(",", "")
    choices = lists["choices"]
    if choices and answer is not None and (len(answer) != 1 or answer not in _LETTERS[: len(choices)]):
        raise ValueError(f"answer {answer!r} is none of {len(choices)} choices")
    return Problem(
        id=texts["id"] or f"{path.name}/{number}",
        question=question,
        answer=answer,
        choices=choices,
        source=texts["source"] or "",
        kind=texts["subject"] or texts["source"] or path.stem,
        images=tuple(str(path.parent / image) for image in lists["images"]),
        views=lists["views"],
        extra=extra,
    )


def _text(record: dict, field: str) -> str | None:
    value = record.get(field)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):  # 1e400, NaN
            raise ValueError(f"{field} is no finite number")
        return repr(value)
    raise ValueError(f"{field} is no text")


def _texts(record: dict, field: str) -> tuple[str, ...]:
    value = record.get(field) or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{field} is no list of texts")
    return tuple(value)
