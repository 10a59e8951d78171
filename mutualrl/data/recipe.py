"""Problems of a well-known set by its name, from a folder of JSON lines files or the Hugging Face cache.

The names, and where each set comes from, are the table in `mutualrl/data/recipes.py`. Prompts, kinds (the subject, else
the set's name) and `extra['level']` are the same from either place. Questions of the test split are left out of the
train split, wherever the test split can be read: MBPP, for one, has some in both.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from mutualrl.data import hf, jsonl
from mutualrl.data.recipes import LETTERS, Recipe, find
from mutualrl.data.split import check_count, check_names, check_split, check_text
from mutualrl.types import Problem


def load(
    split: str,
    *,
    recipe: str = "",
    folder: str = "",
    levels: Sequence[int] = (),
    kinds: Sequence[str] = (),
    limit: int = 0,
    download: bool = False,
) -> list[Problem]:
    """Problems of one split of a set, in its stored order.

    Args:
      split: 'train' or 'test'; many sets have the latter only.
      recipe: the set's name.
      folder: where its files are (names as in the table); '' for the environment's MUTUALRL_DATA and, where that is not
        set either, the Hugging Face cache.
      levels: only problems of these levels, in either split; () for the recipe's own choice: 3 to 5 for training on
        MATH, else all.
      kinds: only problems of these kinds; () for all.
      limit: at most so many problems, the first ones; 0 for all.
      download: fetch a set that is not in the Hugging Face cache; there must be no folder then.

    Raises:
      ValueError: a bad option, a split that the set does not have, or nothing left.
      FileNotFoundError: the file or the data set is not here.
    """
    check_split(split)
    found = find(recipe)
    check_text("folder", folder)
    kinds = check_names("kinds", kinds)
    check_count("limit", limit)
    wanted = _levels(found, levels) or (found.train_levels if split == "train" else ())
    if not isinstance(download, bool):
        raise ValueError(f"download is {download!r}; allowed are True and False")
    if split == "train" and not found.train:
        raise ValueError(f"recipe {recipe!r} has no train split: it is for tests only")
    place = folder or os.environ.get("MUTUALRL_DATA", "")
    if place and download:
        raise ValueError(f"download is True, but the folder {place!r} is read; give one of them")
    problems = _read(found, split, place, download)
    if split == "train":
        try:
            asked = {_asked(p) for p in _read(found, "test", place, download)}
        except FileNotFoundError:  # nothing to compare with
            asked = set()
        problems = [p for p in problems if _asked(p) not in asked]
    if wanted:
        problems = [p for p in problems if p.extra.get("level") in wanted]
    if kinds:
        there = sorted({p.kind for p in problems})
        check_names("kinds", kinds, there)
        problems = [p for p in problems if p.kind in kinds]
    if not problems:
        raise ValueError(f"no problems are left for the {split} split of recipe {recipe!r}")
    return problems[:limit] if limit else problems


def _levels(recipe: Recipe, levels: Any) -> tuple[int, ...]:
    if isinstance(levels, str) or not isinstance(levels, Sequence):
        raise ValueError(f"levels is {levels!r}; allowed is a list of whole numbers")
    if levels and not recipe.levels:
        raise ValueError(f"levels is {levels!r}, but recipe {recipe.name!r} has no levels; allowed is ()")
    for level in levels:
        if isinstance(level, bool) or level not in recipe.levels:
            raise ValueError(f"levels has {level!r}; allowed are {', '.join(map(str, recipe.levels))}")
    return tuple(levels)


def _asked(problem: Problem) -> tuple[str, ...]:
    return ("".join(problem.question.split()), *problem.choices)


def _read(recipe: Recipe, split: str, folder: str, download: bool) -> list[Problem]:
    problems = _from_folder(recipe, split, folder) if folder else _from_hub(recipe, split, download)
    return [_dressed(recipe, p) for p in problems]


def _dressed(recipe: Recipe, problem: Problem) -> Problem:
    """The problem with what does not depend on where it was read."""
    prompt = recipe.prompt
    for field, value in problem.extra.items():
        if f"{{{field}}}" in recipe.prompt:
            prompt = prompt.replace(f"{{{field}}}", value if isinstance(value, str) else "\n".join(value))
    return dataclasses.replace(problem, prompt=prompt, source=recipe.name)


def _from_folder(recipe: Recipe, split: str, folder: str) -> list[Problem]:
    root = pathlib.Path(folder).expanduser()
    files = [root / f"{f}.jsonl" for f in ((recipe.train_file,) if split == "train" else recipe.test_files)]
    path = next((f for f in files if f.is_file()), None)
    if path is None:
        names = " or ".join(f.name for f in files)
        raise FileNotFoundError(f"recipe {recipe.name!r}: folder {folder!r} has no file {names}")
    problems = []
    for p in jsonl.load("test", test=str(path)):
        extra = dict(p.extra)
        if extra.pop("split", split) != split:  # a file of all splits
            continue
        kind = recipe.name if p.kind in (p.source, path.stem) else p.kind  # which stand in for a subject
        problems.append(dataclasses.replace(p, kind=kind, extra=extra))
    return problems


def _from_hub(recipe: Recipe, split: str, download: bool) -> list[Problem]:
    rows: Iterable[dict[str, Any]]
    if recipe.hub_files:
        rows = hf.lines(recipe.hub, recipe.hub_files, download)
    else:
        rows = hf.dataset(recipe.hub, recipe.config, recipe.train if split == "train" else recipe.test, download)
    problems: list[Problem] = []
    bad: list[Problem] = []
    for i, row in enumerate(rows):
        record = recipe.row(row, i)
        if record is None:
            continue
        problem = _problem(recipe, record, f"{recipe.name}/{split}/{i}")
        lost = problem.answer == "" or problem.choices and problem.answer not in LETTERS[: len(problem.choices)]
        (bad if lost or not problem.question.strip() else problems).append(problem)
    if bad:
        logging.getLogger(__name__).warning(
            "recipe %s: %d rows without a question or an answer dropped, first %s", recipe.name, len(bad), bad[0].id
        )
    return problems


def _problem(recipe: Recipe, record: dict[str, Any], id: str) -> Problem:
    rest = {k: v for k, v in record.items() if k not in ("id", "question", "answer", "choices", "subject")}
    return Problem(
        id=record.get("id", id),
        question=record["question"],
        answer=record["answer"],
        choices=tuple(record.get("choices") or ()),
        kind=record.get("subject") or recipe.name,
        extra=rest,
    )
