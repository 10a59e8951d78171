"""Every source: disjoint splits, same problems each time, options refused by name."""

import dataclasses
import json

import numpy as np
import pytest

from mutualrl import data
from mutualrl.data import procedural


def test_sources_are_found_by_module_name():
    assert data.names() == ["hf", "jsonl", "procedural", "reasoning_gym", "recipe", "tfds"]


@pytest.mark.parametrize(
    "name, options, told",
    [
        ("nothing", {}, "nothing"),
        ("procedural", {"kind": "sort"}, "kinds, size, seed, views"),
        ("procedural", {"kinds": ("sort", "nope")}, "nope"),
        ("procedural", {"kinds": "sort"}, "list of names"),
        ("procedural", {"size": -1}, "size is -1"),
        ("procedural", {"size": True}, "size is True"),
        ("procedural", {"seed": 0.5}, "seed is 0.5"),
        ("procedural", {"views": 4}, "views is 4; allowed are whole numbers up to 3"),
        ("procedural", {"views": -1}, "views is -1; allowed are whole numbers from 0"),
        ("procedural", {"views": 1.0}, "views is 1.0; allowed are whole numbers from 0"),
        ("procedural", {"kinds": ()}, "allowed are some of max"),
        ("procedural", {"kinds": [["sort"]]}, "list of names"),
        ("jsonl", {"train": 5}, "train is 5"),
        ("jsonl", {}, "train is ''"),
        ("jsonl", {"train": "x", "holdout": 2}, "holdout is 2"),
        ("tfds", {}, "give one of them"),
        ("tfds", {"path": 5}, "path is 5"),
        ("tfds", {"path": "x", "question": ""}, "question is ''"),
        ("tfds", {"path": "x", "answer": None}, "answer is None"),
        ("tfds", {"path": "x", "download": "no"}, "download is 'no'"),
    ],
)
def test_bad_options_are_refused_in_one_line(name, options, told):
    with pytest.raises(ValueError, match=told) as e:
        data.load(name, "train", **options)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["procedural", "jsonl", "tfds", "hf", "recipe"])
def test_unknown_split_is_refused(name):
    with pytest.raises(ValueError, match="'valid'"):
        data.load(name, "valid")


def test_procedural_splits_are_disjoint_and_rules_disagree():
    train, test = (data.load("procedural", s) for s in ("train", "test"))
    assert not {p.question for p in train} & {p.question for p in test}
    assert 0.18 < len(test) / (len(train) + len(test)) < 0.22
    for kind in procedural.KINDS:
        mine = [p for p in train + test if p.kind == kind]
        assert len(mine) > 5000
        assert all(p.answer != p.extra["wrong"] for p in mine)
        assert len({len(a) for p in mine for a in (p.answer, p.extra["wrong"])}) == 1
    assert len({p.id for p in train + test}) == len(train) + len(test)


@pytest.mark.parametrize(
    "question, right, wrong",
    [
        ("max:4172=", "72", "41"),
        ("min:4172=", "41", "72"),
        ("rev:4172=", "2714", "4172"),
        ("comp:4172=", "5827", "4172"),
        ("odd:4172=", "2", None),
        ("odd:4372=", "2", None),
        ("odd:4112=", "2", None),
        ("odd:1112=", "3", "1"),
        ("sort:4172=", "1247", "7421"),
        ("inc:4190=", "5201", "3089"),
        ("swap:4172=", "7241", "1427"),
        ("dup:4172=", "4141", "7272"),
        ("ends:4172=", "42", "24"),
        ("ends:4174=", None, None),
    ],
)
def test_procedural_rules(question, right, wrong):
    found = {p.question: p for s in ("train", "test") for p in procedural.load(s, kinds=(question.split(":")[0],))}
    if wrong is None:  # both rules agree: no such problem
        assert question not in found
    else:
        assert (found[question].answer, found[question].extra["wrong"]) == (right, wrong)


def test_procedural_draws_are_seeded_and_do_not_depend_on_other_kinds():
    alone = procedural.load("train", kinds=("sort",), size=20, seed=3)
    among = procedural.load("train", kinds=("rev", "sort"), size=20, seed=3)
    assert [p.id for p in alone] == [p.id for p in among[20:]]
    assert [p.id for p in alone] != [p.id for p in procedural.load("train", kinds=("sort",), size=20, seed=4)]
    assert len({p.id for p in alone}) == 20


def test_demonstrations():
    problems = procedural.load("train", kinds=("rev", "sort"), size=2)
    questions, right, wrong, chance = procedural.demonstrations(problems, {"rev": 0.25, "sort": 1.0})
    assert questions == [p.question for p in problems]
    assert right == [p.answer for p in problems] and wrong == [p.extra["wrong"] for p in problems]
    assert chance.tolist() == [0.25, 0.25, 1.0, 1.0]
    with pytest.raises(ValueError, match="'sort'"):
        procedural.demonstrations(problems, {"rev": 0.5})


def test_procedural_views_change_nothing_else():
    plain = procedural.load("train", size=30, seed=1)
    assert all(p.views == () for p in plain)
    for n in range(len(procedural.WORDINGS) + 1):
        viewed = procedural.load("train", size=30, seed=1, views=n)
        assert all(p.views == procedural.wordings(p)[:n] for p in viewed)
        assert [dataclasses.replace(p, views=()) for p in viewed] == plain
    (p,) = (p for p in procedural.load("train", kinds=("rev",), views=3) if p.question == "rev:0417=")
    assert p.views == ("0417:rev=", "rev(0417)", "0417>rev=")


def test_procedural_wordings_are_short_and_never_shared():
    problems = [p for s in ("train", "test") for p in procedural.load(s, views=len(procedural.WORDINGS))]
    texts = [t for p in problems for t in (p.question, *p.views)]
    assert len(set(texts)) == len(texts)
    assert max(map(len, texts)) == 10


def test_demonstrations_teach_every_wording():
    problems = procedural.load("train", kinds=("rev", "sort"), size=2, views=2)
    questions, right, wrong, chance = procedural.demonstrations(problems, {"rev": 0.25, "sort": 1.0})
    a = problems[0]
    assert questions[:4] == [a.question, *a.views, problems[1].question]
    assert right == [p.answer for p in problems for _ in range(3)]
    assert wrong == [p.extra["wrong"] for p in problems for _ in range(3)]
    assert chance.tolist() == [0.25] * 6 + [1.0] * 6 and chance.dtype == np.float32


def _write(path, records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def test_jsonl_fields(tmp_path):
    train = _write(
        tmp_path / "a.jsonl",
        [
            {"id": "1", "question": "q1", "answer": 72, "subject": "algebra", "level": 3},
            {"question": "q2", "answer": "B", "choices": ["x", "y"], "source": "s", "images": ["i.png"]},
            {"id": "3", "question": "q3", "answer": "So 1+1=2.\n#### 1,234"},
            {"id": "4", "question": "q4"},
            {"id": "5", "question": "q5", "answer": "#### 4\n#### 5"},
        ],
    )
    a, b, c, d, e = data.load("jsonl", "train", train=train, holdout=0.0)
    assert (a.answer, a.kind, a.extra) == ("72", "algebra", {"level": 3})
    assert (b.id, b.answer, b.choices, b.kind) == ("a.jsonl/2", "B", ("x", "y"), "s")
    assert b.images == (str(tmp_path / "i.png"),)
    assert (c.answer, c.kind) == ("1234", "a") and c.extra["solution"].startswith("So")
    assert d.answer is None and e.answer == "5"
    assert data.load("jsonl", "train", train=train, holdout=0.0, kinds=("algebra",)) == [a]
    assert data.load("jsonl", "train", train=train, holdout=0.0, limit=2) == [a, b]
    with pytest.raises(ValueError, match="allowed are a, algebra, s"):
        data.load("jsonl", "train", train=train, holdout=0.0, kinds=("geometry",))


def test_jsonl_drops_bad_records_and_says_so_once(tmp_path, caplog):
    train = _write(
        tmp_path / "a.jsonl",
        [
            {"id": "1", "question": "q", "answer": "1"},
            "not json",
            "",
            [1],
            {"id": "2", "answer": "1"},
            {"id": "1", "question": "again", "answer": "1"},
            {"id": "5", "question": "q", "answer": [1]},
            {"id": "6", "question": "q", "answer": "C", "choices": ["x", "y"]},
            {"id": "7", "question": " ", "answer": "1"},
            '{"id": "9", "question": "q", "answer": 1e400}',
        ],
    )
    with open(train, "ab") as f:
        f.write(b'{"id": "8", "question": "\xff"}\n')
    assert [p.id for p in data.load("jsonl", "train", train=train, holdout=0.0)] == ["1"]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{train}: 9 bad records dropped, first line 2:")


def test_jsonl_splits(tmp_path):
    records = [{"id": str(i), "question": f"q{i}", "answer": "1"} for i in range(500)]
    one = _write(tmp_path / "one.jsonl", records)
    train, test = (data.load("jsonl", s, train=one, holdout=0.2) for s in ("train", "test"))
    assert len(train) + len(test) == 500 and 70 < len(test) < 130
    assert not {p.id for p in train} & {p.id for p in test}
    two = _write(tmp_path / "two.jsonl", [{"id": "t", "question": "q7", "answer": "1"}])
    assert len(data.load("jsonl", "train", train=one, test=two)) == 499  # q7 is a test question
    assert [p.id for p in data.load("jsonl", "test", test=two)] == ["t"]
    with pytest.raises(ValueError, match="train split"):
        data.load("jsonl", "train", test=two)


def test_jsonl_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        data.load("jsonl", "train", train=str(tmp_path / "nowhere.jsonl"))


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    tasks = {"gcd": {"max_value": 12, "size": 5}, "products": {}}
    train, test = (data.load("reasoning_gym", s, tasks=tasks, size=6) for s in ("train", "test"))
    assert [p.kind for p in train] == ["gcd"] * 5 + ["products"] * 6
    assert train == data.load("reasoning_gym", "train", tasks=tasks, size=6)
    assert not {p.question for p in train} & {p.question for p in test}
    for bad, told in (
        ({"tasks": ["gdc"]}, "gcd"),
        ({"tasks": {"gcd": {"biggest": 3}}}, "max_value"),
        ({"tasks": {"gcd": {"max_value": -1}}}, "refused"),
        ({"tasks": "gcd"}, "list of names"),
        ({"tasks": []}, "list of task names"),
        ({"tasks": [["gcd"]]}, "list of names"),
        ({"tasks": {"gcd": 5}}, r"tasks\['gcd'\] is 5"),
        ({"size": 0}, "size is 0"),
    ):
        with pytest.raises(ValueError, match=told):
            data.load("reasoning_gym", "train", **bad)


def test_reasoning_gym_checks_every_task_before_it_makes_any(monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr("mutualrl.data.reasoning_gym._generate", lambda *_: pytest.fail("made before all were checked"))
    for bad, told in ((["gcd", "gdc"], "gdc"), ({"gcd": {}, "lcm": {"size": 0}}, "lcm"), ({"gcd": {"min": 1}}, "min")):
        with pytest.raises(ValueError, match=told):
            data.load("reasoning_gym", "train", tasks=bad)


def test_reasoning_gym_splits_stay_disjoint_when_questions_run_out(caplog):
    pytest.importorskip("reasoning_gym")
    options = {"tasks": {"gcd": {"max_value": 6}}, "size": 200}
    train, test = (data.load("reasoning_gym", s, **options) for s in ("train", "test"))
    assert train and test and not {p.question for p in train} & {p.question for p in test}
    assert len(caplog.records) == 2


def test_tfds_prepared_directory_asks_no_network(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    features = tfds.features.FeaturesDict(
        {
            "q": tfds.features.Text(),
            "options": tfds.features.Sequence(tfds.features.Text()),
            "label": tfds.features.Scalar(np.int64),
            "topic": tfds.features.ClassLabel(names=["easy", "hard"]),
        }
    )
    rows = [{"q": f"q{i}", "options": ["x", "y"], "label": i % 2, "topic": i % 2} for i in range(6)]
    path = str(tmp_path / "tiny" / "1.0.0")
    (tmp_path / "tiny" / "1.0.0").mkdir(parents=True)
    identity = tfds.core.dataset_info.DatasetIdentity("tiny", tfds.core.Version("1.0.0"), path, "tests")
    writer = tfds.core.SequentialWriter(tfds.core.DatasetInfo(builder=identity, features=features), 100, overwrite=True)
    for part, its in (("train", rows[:4]), ("test", rows[4:])):
        writer.initialize_splits([part], fail_if_exists=False)
        writer.add_examples({part: its})
    writer.close_all()
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    fields = {"question": "q", "answer": "label", "choices": "options", "kind": "topic"}
    train = data.load("tfds", "train", path=path, **fields)
    assert [(p.question, p.answer, p.choices, p.kind) for p in train[:2]] == [
        ("q0", "A", ("x", "y"), "easy"),
        ("q1", "B", ("x", "y"), "hard"),
    ]
    assert len(train) == 4 and len(data.load("tfds", "test", path=path, limit=1, **fields)) == 1
    assert len(data.load("tfds", "train", name="tiny", data_dir=str(tmp_path), **fields)) == 4
    with pytest.raises(ValueError, match="question is 'text'; allowed are the features label, options, q, topic"):
        data.load("tfds", "train", path=path, question="text")
    with pytest.raises(ValueError, match="data source 'tfds': the id '0' comes twice in the train split"):
        data.load("tfds", "train", path=path, question="q", answer="", id="topic")
    with pytest.raises(ValueError, match="train is 'valid'; allowed are the splits test, train and parts of them"):
        data.load("tfds", "train", path=path, question="q", answer="", train="valid")
    assert len(data.load("tfds", "train", path=path, question="q", answer="", train="train[:50%]")) == 2
    with pytest.raises(FileNotFoundError, match="nowhere"):
        data.load("tfds", "train", path=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nothing_like_it"):
        data.load("tfds", "train", name="nothing_like_it", data_dir=str(tmp_path))


@pytest.mark.parametrize("package", ["data", "rewards"])
def test_no_jax(package):
    import subprocess
    import sys

    code = (
        f"import sys, importlib, pkgutil, mutualrl.{package} as p\n"
        f"for m in pkgutil.iter_modules(p.__path__): importlib.import_module('mutualrl.{package}.' + m.name)\n"
        "sys.exit(any(m in sys.modules for m in ('jax', 'tensorflow', 'sympy', 'reasoning_gym')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
