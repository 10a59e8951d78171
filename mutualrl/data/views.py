"""Other wordings of problems from a JSON lines file, for any source: one object a line, UTF-8.

    {"id": "gsm8k/17", "views": ["the problem in other words", ...]}

Other fields are ignored. `mutualrl.rephrase` writes such files.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from mutualrl.files import replace_text
from mutualrl.types import Problem


def attach(problems: Sequence[Problem], path: str | pathlib.Path) -> list[Problem]:
    """The problems with the views of a file, found by id, behind those they have; in their order.

    Problems without a line stay as they are, and lines of the same id add up. Lines of unknown ids and bad records are
    dropped, with one warning that tells how many.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: no line has the id of a problem.
    """
    path = pathlib.Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"views file {str(path)!r} does not exist")
    found: dict[str, list[str]] = {p.id: [] for p in problems}
    fits, unknown, bad = False, 0, []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                name, views = _record(json.loads(line.decode("utf-8-sig")))
            except (ValueError, RecursionError) as e:  # of JSON, of UTF-8, or ours
                bad.append((number, str(e)))
                continue
            if name in found:
                found[name] += views
                fits = True
            else:
                unknown += 1
    if not fits:
        raise ValueError(
            f"views file {str(path)!r}: no line has the id of a problem ({unknown} unknown ids, {len(bad)} bad records)"
        )
    if unknown or bad:
        first = f", first line {bad[0][0]}: {bad[0][1]}" if bad else ""
        logging.getLogger(__name__).warning(
            "%s: %d lines of unknown ids and %d bad records dropped%s", path, unknown, len(bad), first
        )
    return [dataclasses.replace(p, views=(*p.views, *found[p.id])) if found[p.id] else p for p in problems]


def write(path: str | pathlib.Path, views: Mapping[str, Sequence[str]]) -> None:
    """Writes views by problem id, a line each, as `attach` reads them.

    Raises:
      OSError: it cannot be written.
    """
    lines = [json.dumps({"id": name, "views": list(texts)}, ensure_ascii=False) + "\n" for name, texts in views.items()]
    replace_text(pathlib.Path(path).expanduser(), "".join(lines))


def _record(record: Any) -> tuple[str, list[str]]:
    if not isinstance(record, dict):
        raise ValueError("not an object")
    name, views = record.get("id"), record.get("views")
    if isinstance(name, bool) or not isinstance(name, (str, int, float)):
        raise ValueError("no id")
    if not isinstance(views, list) or not all(isinstance(v, str) and v.strip() for v in views):
        raise ValueError("views is no list of texts")
    for text in views:
        text.encode()  # half of a surrogate pair is no text; UnicodeEncodeError is a ValueError
    return str(name), views
