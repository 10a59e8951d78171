"""The `datasets` library as a source: its cache, saved folders, files; nothing asks the network unless told to."""

import json
import socket
import subprocess
import sys

import pytest

from mutualrl import data

datasets = pytest.importorskip("datasets")

ROWS = [
    {"q": f"q{i}", "c": {"text": ["x", "y"]}, "label": i % 2, "topic": ["easy", "hard"][i % 2], "n": i}
    for i in range(6)
]
FIELDS = {"question": "q", "answer": "label", "choices": "c.text", "subject": "topic", "level": "n"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was asked"))


def told(problems):
    return [(p.question, p.answer, p.choices, p.kind, p.extra) for p in problems]


def expected(rows):
    return [(r["q"], "AB"[r["label"]], ("x", "y"), r["topic"], {"level": r["n"]}) for r in rows]


@pytest.mark.parametrize("online", [True, False])
def test_a_set_of_the_hub_is_read_from_the_cache(cached, monkeypatch, online):
    for place in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", not online)
    cached("someone/TinySet", "main", {"train": ROWS[:4], "test": ROWS[4:]})
    train = data.load("hf", "train", name="someone/TinySet", config="main", **FIELDS)
    assert told(train) == expected(ROWS[:4])
    assert train[0].id == "someone/TinySet/train/0" and train[0].source == "someone/TinySet"
    assert train == data.load("hf", "train", name="someone/TinySet", config="main", **FIELDS)
    parts = dict(train="train[:50%]", test="train[50%:]")
    assert told(data.load("hf", "test", name="someone/TinySet", **FIELDS, **parts)) == expected(ROWS[2:4])
    with pytest.raises(ValueError, match="split 'valid'"):
        data.load("hf", "train", name="someone/TinySet", config="main", train="valid", **FIELDS)
    for name, config in (("someone/Else", ""), ("someone/TinySet", "other")):
        with pytest.raises(FileNotFoundError, match="is not in the Hugging Face cache; download=True fetches it") as e:
            data.load("hf", "train", name=name, config=config, **FIELDS)
        assert "\n" not in str(e.value)
    assert datasets.config.HF_HUB_OFFLINE is not online  # as it was


def test_only_download_asks_the_network(cached, monkeypatch):
    asked = []
    for place in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", False)

    def fetch(name, config, split):
        asked.append((name, config, split, datasets.config.HF_HUB_OFFLINE))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", fetch)
    for download in (False, True):
        data.load("hf", "train", name="someone/TinySet", download=download, **FIELDS)
    assert asked == [("someone/TinySet", None, "train", True), ("someone/TinySet", None, "train", False)]


def test_saved_folders_and_files(cached, tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    labels = table.cast_column("label", datasets.ClassLabel(names=["x", "y"]))
    datasets.DatasetDict(train=labels.select(range(4)), test=labels.select([4, 5])).save_to_disk(tmp_path / "both")
    assert told(data.load("hf", "train", path=str(tmp_path / "both"), **FIELDS)) == expected(ROWS[:4])
    assert told(data.load("hf", "test", path=str(tmp_path / "both"), **FIELDS)) == expected(ROWS[4:])
    with pytest.raises(ValueError, match="no split 'valid'; allowed are test, train"):
        data.load("hf", "test", path=str(tmp_path / "both"), test="valid", **FIELDS)
    table.save_to_disk(tmp_path / "one")
    assert len(data.load("hf", "train", path=str(tmp_path / "one"), **FIELDS)) == 6
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    (tmp_path / "folder").mkdir()
    table.to_parquet(tmp_path / "folder" / "train.parquet")
    for path in ("a.parquet", "a.jsonl", "folder"):
        assert told(data.load("hf", "train", path=str(tmp_path / path), **FIELDS)) == expected(ROWS)
    hard = data.load("hf", "train", path=str(tmp_path / "a.jsonl"), kinds=("hard",), limit=2, **FIELDS)
    assert told(hard) == expected([ROWS[1], ROWS[3]])
    with pytest.raises(ValueError, match="no problems are left"):
        data.load("hf", "train", path=str(tmp_path / "a.jsonl"), kinds=("harder",), **FIELDS)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        data.load("hf", "train", path=str(tmp_path / "nowhere"))
    (tmp_path / "a.txt").write_text("q")
    with pytest.raises(ValueError, match="end in .parquet, .json, .jsonl, .csv"):
        data.load("hf", "train", path=str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="question is 'text'; allowed are the columns c, label, n, q, topic"):
        data.load("hf", "train", path=str(tmp_path / "a.jsonl"), question="text")


@pytest.mark.parametrize(
    "options, told",
    [
        ({}, "give one of them"),
        ({"name": "a/b", "path": "c"}, "give one of them"),
        ({"name": 5}, "name is 5"),
        ({"name": "a/b", "question": ""}, "question is ''"),
        ({"name": "a/b", "download": 1}, "download is 1"),
        ({"name": "a/b", "train": "test"}, "must not overlap"),
        ({"name": "a/b", "limit": -1}, "limit is -1"),
        ({"name": "a/b", "kinds": "x"}, "list of names"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, told):
    with pytest.raises(ValueError, match=told) as e:
        data.load("hf", "train", **options)
    assert "\n" not in str(e.value)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install mutualrl\[hf\]"):
        data.load("hf", "train", name="a/b")


def test_the_library_is_loaded_only_when_it_reads():
    code = "import sys, mutualrl.data.hf, mutualrl.data.recipe; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
