"""Problems through the `datasets` library: a set of the Hugging Face hub, or a local folder or file.

Contacts no network unless told to: a set of the hub is read from the library's own cache, to which `download=True`
fetches it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from mutualrl.data.split import check_count, check_names, check_split, check_text
from mutualrl.data.tfds import class_label, gold, nested
from mutualrl.types import Problem

_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def load(
    split: str,
    *,
    name: str = "",
    path: str = "",
    config: str = "",
    train: str = "train",
    test: str = "test",
    question: str = "question",
    answer: str = "answer",
    choices: str = "",
    id: str = "",
    subject: str = "",
    level: str = "",
    limit: int = 0,
    kinds: Sequence[str] = (),
    download: bool = False,
) -> list[Problem]:
    """Problems of a data set, in its stored order.

    A problem's kind is its subject, else its level, else the set's name; its level is kept as `extra['level']`.

    Args:
      split: 'train' or 'test'.
      name: a data set of the hub, e.g. 'openai/gsm8k'; or give `path`.
      path: a folder (made by `save_to_disk`, or of files that the library knows) or a parquet, json, jsonl or csv file;
        a file alone is a 'train' split, so give `train` and `test` as parts of it.
      config: the set's configuration; '' where it has one only.
      train, test: what to read for either split, in the library's notation, e.g. 'train[:90%]' and 'train[90%:]'.
      question, answer, choices, id, subject, level: names of the columns to take, dots for nested ones ('' for none).
        A class label becomes its name; an index into `choices` becomes its letter.
      limit: at most so many problems, the first ones; 0 for all.
      kinds: only problems of these kinds; () for all.
      download: fetch a set of the hub that is not in the cache, or newer there.

    Raises:
      ValueError: a bad option or column name, nothing left, or the library is not installed.
      FileNotFoundError: the data set is not here.
    """
    check_split(split)
    check_count("limit", limit)
    kinds = check_names("kinds", kinds)
    fields = {"question": question, "answer": answer, "choices": choices, "id": id, "subject": subject, "level": level}
    places = {"name": name, "path": path, "config": config, "train": train, "test": test}
    for option, value in {**places, **fields}.items():
        check_text(option, value)
    if not isinstance(download, bool):
        raise ValueError(f"download is {download!r}; allowed are True and False")
    if not question:
        raise ValueError("question is ''; allowed is the name of a column")
    if bool(path) == bool(name):
        raise ValueError(f"name is {name!r} and path is {path!r}; give one of them")
    if train == test:
        raise ValueError(f"train and test are both {train!r}; they must not overlap")
    part = train if split == "train" else test
    table = _local(path, config, part) if path else dataset(name, config, part, download)
    features = {option: _feature(table, option, column) for option, column in fields.items() if column}
    title = name or pathlib.Path(path).stem
    problems = []
    for i, row in enumerate(table):
        given = {option: nested(row, fields[option]) for option in features}
        options = tuple(str(c) for c in given.get("choices") or ())
        labels = [class_label(given[k], features[k]) for k in ("subject", "level") if given.get(k) is not None]
        kind = labels[0] if labels else title
        if kinds and kind not in kinds:
            continue
        problems.append(
            Problem(
                id=str(given["id"]) if id else f"{title}/{part}/{i}",
                question=str(given["question"]),
                answer=gold(given["answer"], features["answer"], options) if given.get("answer") is not None else None,
                choices=options,
                source=title,
                kind=kind,
                extra={"level": given["level"]} if level else {},
            )
        )
        if limit and len(problems) == limit:
            break
    if not problems:
        raise ValueError(f"no problems are left for the {split} split of {name or path}")
    return problems


def dataset(name: str, config: str, part: str, download: bool) -> Any:
    """One split of a set of the hub as a `datasets.Dataset`: of the cache alone, unless `download`.

    Raises:
      ValueError: there is no such split or configuration, or the library is not installed.
      FileNotFoundError: the set is not in the cache, or could not be fetched.
    """
    library = _library()
    try:
        with contextlib.nullcontext() if download else _offline():
            return library.load_dataset(name, config or None, split=part)
    except (ConnectionError, FileNotFoundError) as e:
        raise _absent(name, download, e) from e
    except (ValueError, KeyError) as e:
        if "find cache" in str(e):  # another configuration of the set is there
            raise _absent(f"{name} ({config})" if config else name, download, e) from e
        raise ValueError(f"data set {name!r}, config {config!r}, split {part!r}: {_line(e)}") from e


def lines(name: str, files: Sequence[str], download: bool) -> Iterator[dict[str, Any]]:
    """The records of JSON lines files of a set of the hub, file after file; of the cache alone, unless `download`.

    Raises:
      ValueError: the library is not installed.
      FileNotFoundError: a file is not in the cache, or could not be fetched.
    """
    _library()
    import huggingface_hub

    for file in files:
        try:
            path = huggingface_hub.hf_hub_download(name, file, repo_type="dataset", local_files_only=not download)
        except (OSError, huggingface_hub.errors.HfHubHTTPError) as e:
            raise _absent(f"{name}/{file}", download, e) from e
        with open(path, encoding="utf-8") as records:
            for line in records:
                yield json.loads(line)


def _library() -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError("the package datasets is not installed; pip install mutualrl[hf]")
    import datasets

    return datasets


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """The libraries as under HF_HUB_OFFLINE=1, which they read at import, long ago perhaps.

    They would warn at each reading that the hub was not asked.
    """
    import datasets.config
    import huggingface_hub.constants

    places = (datasets.config, huggingface_hub.constants)
    before = [place.HF_HUB_OFFLINE for place in places]
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_error()
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, value in zip(places, before):
            place.HF_HUB_OFFLINE = value
        datasets.logging.set_verbosity(verbosity)


def _local(path: str, config: str, part: str) -> Any:
    library = _library()
    place = pathlib.Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(f"path {path!r} does not exist")
    if place.is_file() and place.suffix not in _FORMATS:
        raise ValueError(f"path is {path!r}; allowed are folders and files that end in {', '.join(_FORMATS)}")
    with _offline():
        if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
            saved = library.load_from_disk(str(place))
            if isinstance(saved, library.Dataset):
                saved = {str(saved.split or "train"): saved}
            if part not in saved:
                raise ValueError(f"path {path!r} has no split {part!r}; allowed are {', '.join(sorted(saved))}")
            return saved[part]
        try:
            if place.is_file():
                return library.load_dataset(_FORMATS[place.suffix], data_files=str(place), split=part)
            return library.load_dataset(str(place), config or None, split=part)
        except (ValueError, KeyError) as e:
            raise ValueError(f"path {path!r}, config {config!r}, split {part!r}: {_line(e)}") from e


def _absent(what: str, download: bool, e: Exception) -> FileNotFoundError:
    if download:
        return FileNotFoundError(f"data set {what!r} could not be fetched: {_line(e)}")
    return FileNotFoundError(f"data set {what!r} is not in the Hugging Face cache; download=True fetches it")


def _line(e: Exception) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__


def _feature(table: Any, option: str, name: str) -> Any:
    """The library's type of a column, None where it has none of its own."""
    feature = table.features
    for part in name.split("."):
        feature = getattr(feature, "feature", feature)  # of a sequence
        if not hasattr(feature, "keys") or part not in feature:
            raise ValueError(f"{option} is {name!r}; allowed are the columns {', '.join(sorted(table.features))}")
        feature = feature[part]
    return feature
