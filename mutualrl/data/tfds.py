"""Problems from TensorFlow Datasets: a prepared directory, or a data set by name. Asks no network unless told to."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from mutualrl.data.split import check_count, check_split, check_text
from mutualrl.types import Problem

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def load(
    split: str,
    *,
    path: str = "",
    name: str = "",
    data_dir: str = "",
    question: str = "question",
    answer: str = "answer",
    choices: str = "",
    id: str = "",
    kind: str = "",
    train: str = "train",
    test: str = "test",
    limit: int = 0,
    download: bool = False,
) -> list[Problem]:
    """Problems of a data set, in its stored order.

    Args:
      split: 'train' or 'test'.
      path: directory of the prepared data (the one with dataset_info.json); or give `name`.
      name: a data set's name as for `tfds.builder`, e.g. 'gsm8k' or 'ai2_arc/ARC-Easy'.
      data_dir: where data sets found by name are kept; '' for the library's own place.
      question, answer, choices, id, kind: names of the features to take, dots for nested ones ('' for none). A class
        label becomes its name; an index into `choices` becomes its letter.
      train, test: what to read for either split, in the library's notation, e.g. 'train[:90%]' and 'train[90%:]'.
      limit: at most so many problems, the first ones; 0 for all.
      download: prepare the data set first, from the network, where `name` is not prepared yet.

    Raises:
      ValueError: a bad option or feature name.
      FileNotFoundError: the data set is not prepared.
    """
    check_split(split)
    check_count("limit", limit)
    fields = {"question": question, "answer": answer, "choices": choices, "id": id, "kind": kind}
    places = {"path": path, "name": name, "data_dir": data_dir, "train": train, "test": test}
    for option, value in {**places, **fields}.items():
        check_text(option, value)
    if not isinstance(download, bool):
        raise ValueError(f"download is {download!r}; allowed are True and False")
    if not question:
        raise ValueError("question is ''; allowed is the name of a feature")
    if bool(path) == bool(name):
        raise ValueError(f"path is {path!r} and name is {name!r}; give one of them")
    part = train if split == "train" else test
    if train == test:
        raise ValueError(f"train and test are both {train!r}; they must not overlap")
    builder = _builder(path, name, data_dir, download)
    for option, feature in fields.items():
        if feature:
            _feature(builder, option, feature)
    try:
        builder.info.splits[part]
    except (KeyError, ValueError) as e:
        raise ValueError(
            f"{split} is {part!r}; allowed are the splits {', '.join(sorted(builder.info.splits))} and parts of them"
        ) from e
    title = name or builder.name
    problems = []
    for i, record in enumerate(_records(builder, part, limit)):
        options = tuple(_text(c) for c in nested(record, choices)) if choices else ()
        problems.append(
            Problem(
                id=_text(nested(record, id)) if id else f"{title}/{part}/{i}",
                question=_text(nested(record, question)),
                answer=gold(nested(record, answer), _feature(builder, "answer", answer), options) if answer else None,
                choices=options,
                source=title,
                kind=class_label(nested(record, kind), _feature(builder, "kind", kind)) if kind else title,
            )
        )
    return problems


def _builder(path: str, name: str, data_dir: str, download: bool) -> Any:
    import tensorflow_datasets as tfds

    if path:
        if not (pathlib.Path(path).expanduser() / "dataset_info.json").is_file():
            raise FileNotFoundError(f"path {path!r} holds no prepared data set (no dataset_info.json)")
        return tfds.builder_from_directory(os.path.expanduser(path))
    # Else the library looks in its public bucket for what it knows of a set that is not prepared here.
    tfds.core.utils.gcs_utils._is_gcs_disabled = not download
    kwargs = {"data_dir": os.path.expanduser(data_dir)} if data_dir else {}
    try:
        builder = tfds.builder(name, try_gcs=False, **kwargs)
    except tfds.core.DatasetNotFoundError as e:
        raise FileNotFoundError(f"name {name!r} is no data set here: {str(e).splitlines()[0]}") from e
    if not builder.is_prepared():
        if not download:
            raise FileNotFoundError(
                f"data set {name!r} is not prepared in {builder.data_dir}; download=True fetches it"
            )
        builder.download_and_prepare()
    return builder


def _records(builder: Any, part: str, limit: int) -> Any:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    if builder.info.file_format in tfds.core.FileFormat.with_random_access():
        try:
            source = builder.as_data_source(split=part)
        except ImportError as e:
            raise ValueError(
                f"{builder.name} is stored as {builder.info.file_format.value}, which needs a package: {e}"
            ) from e
        return (source[i] for i in range(min(limit, len(source)) if limit else len(source)))
    tf.config.set_visible_devices([], "GPU")  # the accelerator belongs to the policies
    # Interleaving would mix the files' records in an order that depends on the machine.
    config = tfds.ReadConfig(interleave_cycle_length=1, shuffle_seed=0, try_autocache=False)
    data = builder.as_dataset(split=part, shuffle_files=False, read_config=config)
    return tfds.as_numpy(data.take(limit) if limit else data)


def _feature(builder: Any, option: str, name: str) -> Any:
    feature = builder.info.features
    for part in name.split("."):
        inner = getattr(feature, "feature", feature)  # of a sequence
        if not hasattr(inner, "keys") or part not in inner:
            raise ValueError(
                f"{option} is {name!r}; allowed are the features {', '.join(sorted(builder.info.features))}"
            )
        feature = inner[part]
    return feature


def nested(record: Any, name: str) -> Any:
    """The value of a feature, dots in its name for nested ones."""
    for part in name.split("."):
        record = record[part]
    return record


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def class_label(value: Any, feature: Any) -> str:
    """A value as text, a class label by its name."""
    return feature.int2str(int(value)) if hasattr(feature, "int2str") else _text(value)


def gold(value: Any, feature: Any, options: tuple[str, ...]) -> str:
    """A gold answer as text; where there are options the letter of the one that it is, by its text or its index."""
    text = class_label(value, feature)
    if not options:
        return text
    if text in options:
        return _LETTERS[options.index(text)]
    return _LETTERS[int(text)] if text.isdigit() and int(text) < len(options) else text
