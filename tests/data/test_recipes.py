"""Recipes: files in a folder and the hub's own fields become the same kind of problem."""

import base64
import collections
import dataclasses
import json
import pickle
import socket
import zlib

import pytest

from mutualrl import data, rewards
from mutualrl.data import recipes
from mutualrl.rewards import choice


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.delenv("MUTUALRL_DATA", raising=False)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was asked"))


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")


def labelled(question):
    return {
        "id": "a1",
        question: "Which?",
        "choices": {"text": ["w", "x", "y"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }


MATH = {"problem": "1+1?", "level": "Level 3", "type": "Algebra", "solution": r"It is $\boxed{\frac{4}{2}}$."}
MBPP = {"task_id": 7, "text": "Add.", "code": "def f(): pass", "test_list": ["assert f(1) == 2", "assert f(2) == 3"],
        "test_setup_code": "import math", "challenge_test_list": []}  # fmt: skip
TESTS = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(TESTS)))).decode()
CODE = {"question_id": "abc_a", "question_content": "Add one.", "difficulty": "easy", "starter_code": "def g():",
        "metadata": "{}", "public_test_cases": json.dumps(TESTS), "contest_date": "2024-01-06"}  # fmt: skip
GPQA = {"Record ID": "rec1", "Question": "Why? ", "Correct Answer": "right\n", "High-level domain": "Physics",
        **{f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}}  # fmt: skip

# recipe, split, a row of the hub, what the problem then is
HUB = [
    ("math", "train", MATH, dict(question="1+1?", answer=r"\frac{4}{2}", kind="Algebra", id="math/train/0",
                                 extra={"level": 3, "solution": MATH["solution"]})),
    ("gsm8k", "train", {"question": "How many?", "answer": "It is <<1000+234=1234>>1,234.\n#### 1,234"},
     dict(question="How many?", answer="1234", kind="gsm8k", id="gsm8k/train/0", extra={"solution": "It is 1,234."})),
    ("math500", "test", {"problem": "How?", "solution": "s", "answer": "2", "subject": "Geometry", "level": 4,
                         "unique_id": "test/geometry/1.json"},
     dict(question="How?", answer="2", kind="Geometry", id="math500/test/geometry/1",
          extra={"level": 4, "solution": "s"})),
    ("amc", "test", {"id": 0, "problem": "How?", "answer": 142.0, "url": "u"}, dict(question="How?", answer="142")),
    ("amc23", "test", {"id": 0, "question": "How?", "answer": "27.0", "url": "u"}, dict(question="How?", answer="27")),
    ("aime24", "test", {"id": 60, "problem": "How?", "solution": "s", "answer": "204", "year": "2024"},
     dict(question="How?", answer="204", kind="aime24")),
    ("aime25", "test", {"id": "0", "problem": "How?", "answer": "70"}, dict(question="How?", answer="70")),
    ("minerva", "test", {"question": "How?", "answer": "1.6"}, dict(question="How?", answer="1.6")),
    ("svamp", "test", {"ID": "chal-1", "Body": "He has 3.", "Question": "How many?", "Answer": "3.0", "Type": "Sum"},
     dict(question="He has 3. How many?", answer="3", kind="Sum", id="svamp/chal-1")),
    ("mmlu_stem", "test", {"question": "q", "subject": "astronomy", "choices": ["w", "x", "y", "z"], "answer": 3},
     dict(question="q", choices=("w", "x", "y", "z"), answer="D", kind="astronomy")),
    ("arc_challenge", "train", labelled("question"),
     dict(question="Which?", choices=("w", "x", "y"), answer="B", id="arc_c/a1", kind="arc_challenge")),
    ("arc_easy", "test",
     labelled("question") | {"choices": {"text": ["w", "x"], "label": ["1", "2"]}, "answerKey": "2"},
     dict(choices=("w", "x"), answer="B", id="arc_e/a1")),
    ("commonsense_qa", "test", labelled("question"), dict(answer="B", id="csqa/a1")),
    ("openbookqa", "test", labelled("question_stem"), dict(question="Which?", answer="B", id="obqa/a1")),
    ("gpqa_diamond", "test", GPQA, dict(question="Why?", kind="Physics", id="gpqa/rec1")),
    ("humaneval", "test", {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass\n",
                           "test": "def check(c): pass", "entry_point": "f"},
     dict(question="def f():\n", answer="    pass\n", extra={"entry_point": "f", "test": "def check(c): pass"})),
    ("mbpp", "train", MBPP, dict(question="Add.", answer="def f(): pass", id="mbpp/7",
                                 extra={"test_list": MBPP["test_list"], "test_setup": "import math"})),
]  # fmt: skip


@pytest.mark.parametrize("name, split, row, told", HUB, ids=[name for name, *_ in HUB])
def test_the_fields_of_the_hub(name, split, row, told, cached):
    found = recipes.find(name)
    asked, *others = dict.fromkeys("+".join(filter(None, (getattr(found, split), found.train, found.test))).split("+"))
    other = {k: f"{v} or not" if isinstance(v, str) else v for k, v in row.items()}
    cached(found.hub, found.config or "default", {asked: [row], **{s: [other] for s in others}})
    problem, *_ = data.load("recipe", split, recipe=name)
    assert {field: getattr(problem, field) for field in told} == told
    assert problem.source == name and problem.asked.count(problem.question) == 1


def test_every_recipe_has_its_fields_tested():
    assert {name for name, *_ in HUB} | {"livecodebench"} == set(recipes.names())


@pytest.mark.parametrize("private", [json.dumps(TESTS), PACKED])
def test_live_code_bench_is_read_from_its_files(private, tmp_path, monkeypatch):
    asked = []

    def fetch(name, file, repo_type, local_files_only):
        asked.append((name, file, repo_type, local_files_only))
        write(tmp_path / file, [{**CODE, "question_id": file, "private_test_cases": private}])
        return str(tmp_path / file)

    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    first, second = data.load("recipe", "test", recipe="livecodebench", limit=2)
    assert (first.id, second.id) == ("livecodebench/test.jsonl", "livecodebench/test2.jsonl")
    assert (first.extra["inputs"], first.extra["outputs"]) == (["1\n", "1\n"], ["2\n", "2\n"])
    assert (first.answer, first.kind) == (None, "easy")
    assert "Add one.\ndef g():\n" in first.asked
    assert len(asked) == 6 and all(local for *_, local in asked)


def test_live_code_bench_keeps_tests_that_call_a_function():
    row = {**CODE, "private_test_cases": PACKED, "metadata": '{"func_name": "g"}'}
    record = recipes.find("livecodebench").row(row, 0)
    assert (record["func_name"], record["test_cases"]) == ("g", TESTS + TESTS) and "inputs" not in record


def test_packed_tests_that_would_run_code_are_refused():
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(ValueError, match="allowed is plain data"):
        recipes.find("livecodebench").row({**CODE, "private_test_cases": packed}, 0)


def test_gpqa_options_stand_in_an_order_of_their_own():
    row = recipes.find("gpqa_diamond").row
    records = [row({**GPQA, "Record ID": f"rec{i}"}, i) for i in range(200)]
    assert records == [row({**GPQA, "Record ID": f"rec{i}"}, 0) for i in range(200)]
    assert all(r["choices"]["ABCD".index(r["answer"])] == "right" for r in records)
    assert sorted(records[0]["choices"]) == ["right", "wrong 1", "wrong 2", "wrong 3"]
    assert min(collections.Counter(r["answer"] for r in records).values()) > 30


def test_rows_that_are_no_problem_are_left_out(cached, caplog):
    row = {"question": "q", "subject": "astronomy", "choices": ["w", "x", "y", "z"], "answer": 0}
    cached("cais/mmlu", "all", {"test": [{**row, "subject": "world_religions"}, row]})
    assert [p.kind for p in data.load("recipe", "test", recipe="mmlu_stem")] == ["astronomy"] and not caplog.records
    answered = labelled("question")
    cached("tau/commonsense_qa", "default", {"validation": [{**answered, "id": "a2", "answerKey": ""}, answered]})
    caplog.clear()
    assert [p.id for p in data.load("recipe", "test", recipe="commonsense_qa")] == ["csqa/a1"]
    (record,) = caplog.records
    assert "1 rows without a question or an answer dropped, first csqa/a2" in record.getMessage()


def test_math_levels_and_disjoint_splits(cached):
    train = [{**MATH, "problem": f"q{i}", "level": f"Level {i or '?'}"} for i in range(6)]
    cached("DigitalLearningGmbH/MATH-lighteval", "default", {"train": train, "test": [{**MATH, "problem": " q4"}]})
    levels = lambda **options: [p.extra.get("level") for p in data.load("recipe", "train", recipe="math", **options)]
    assert levels() == [3, 5]  # q4 is a test question
    assert levels(levels=(1, 2, 3, 4, 5)) == [1, 2, 3, 5] and levels(levels=[1]) == [1] and levels(limit=1) == [3]
    with pytest.raises(ValueError, match="no problems are left"):
        data.load("recipe", "test", recipe="math", levels=(1,))


def test_a_folder_of_files(tmp_path, monkeypatch):
    records = [
        {"id": f"m{i}", "question": f"q{i}", "answer": "1", "level": i, "subject": "Algebra"} for i in range(1, 6)
    ]
    write(tmp_path / "math_train.jsonl", records)
    write(tmp_path / "math500.jsonl", [{**records[3], "id": "t4"}])
    tested = {"question": "Add.", "answer": "x", "source": "s", "test_list": ["assert f(1) == 2"]}
    splits = [("train", "Add."), ("test", "Sub."), ("validation", "Mul."), ("test", "Add. ")]
    rows = [{**tested, "id": f"p{i}", "split": s, "question": q} for i, (s, q) in enumerate(splits)]
    write(tmp_path / "mbpp.jsonl", [*rows, {**rows[0], "id": "p9", "question": "Div."}])
    options = [{"id": "a", "question": "Which?", "answer": "B", "choices": ["x", "y"], "source": "s"}]
    write(tmp_path / "arc_easy_validation.jsonl", options)
    monkeypatch.setenv("MUTUALRL_DATA", str(tmp_path))
    train = data.load("recipe", "train", recipe="math")
    assert [p.id for p in train] == ["m3", "m5"] and train[0].extra == {"level": 3} and train[0].kind == "Algebra"
    assert train == data.load("recipe", "train", recipe="math", folder=str(tmp_path))
    assert train[0].asked == "q3\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert [p.id for p in data.load("recipe", "test", recipe="math")] == ["t4"]
    write(tmp_path / "math_test.jsonl", records[:2])  # all of it, rather than the 500
    assert [p.id for p in data.load("recipe", "test", recipe="math")] == ["m1", "m2"]
    assert [p.id for p in data.load("recipe", "train", recipe="mbpp")] == ["p9"]
    first, second = data.load("recipe", "test", recipe="mbpp")
    assert (first.id, second.id, first.kind) == ("p1", "p3", "mbpp") and "split" not in first.extra
    assert first.asked.endswith("these tests:\n\nassert f(1) == 2")
    (which,) = data.load("recipe", "test", recipe="arc_easy")
    assert which.kind == which.source == "arc_easy" and which.asked.startswith("Which?\nA. x\nB. y\n")
    assert choice.grade(r"\boxed{B}", which) == 1.0
    assert data.load("recipe", "test", recipe="math", kinds=("Algebra",), limit=1)[0].id == "m1"
    with pytest.raises(ValueError, match="kinds has 'Geometry'; allowed are Algebra"):
        data.load("recipe", "test", recipe="math", kinds=("Geometry",))
    with pytest.raises(FileNotFoundError, match="no file arc_challenge_test.jsonl or arc_challenge_validation.jsonl"):
        data.load("recipe", "test", recipe="arc_challenge")
    with pytest.raises(ValueError, match="download is True, but the folder"):
        data.load("recipe", "test", recipe="math", download=True)


@pytest.mark.parametrize(
    "split, options, told",
    [
        ("train", {}, "recipe is ''; allowed are math, gsm8k"),
        ("train", {"recipe": "maths"}, "recipe is 'maths'"),
        ("train", {"recipe": ["math"]}, "allowed are math"),
        ("train", {"recipe": "math500"}, "recipe 'math500' has no train split: it is for tests only"),
        ("train", {"recipe": "math", "levels": (6,)}, "levels has 6; allowed are 1, 2, 3, 4, 5"),
        ("train", {"recipe": "math", "levels": (True,)}, "levels has True"),
        ("train", {"recipe": "math", "levels": ([1],)}, "levels has"),
        ("train", {"recipe": "math", "levels": "3"}, "list of whole numbers"),
        ("train", {"recipe": "gsm8k", "levels": (3,)}, "has no levels"),
        ("train", {"recipe": "math", "folder": None}, "folder is None"),
        ("train", {"recipe": "math", "download": 1}, "download is 1"),
        ("train", {"recipe": "math", "kinds": "Algebra"}, "list of names"),
        ("train", {"recipe": "math", "limit": -1}, "limit is -1"),
    ],
)
def test_bad_options_are_refused_in_one_line(split, options, told):
    with pytest.raises(ValueError, match=told) as e:
        data.load("recipe", split, **options)
    assert "\n" not in str(e.value)


def test_what_is_in_no_cache_is_named(cached):
    with pytest.raises(FileNotFoundError, match="'openai/gsm8k' is not in the Hugging Face cache; download=True"):
        data.load("recipe", "test", recipe="gsm8k")
    with pytest.raises(FileNotFoundError, match="'livecodebench/code_generation_lite/test.jsonl' is not in the"):
        data.load("recipe", "test", recipe="livecodebench")


def test_the_table_holds_together():
    for name in recipes.names():
        found = recipes.find(name)
        assert found.name == name and found.grader in ("math", "choice", "code") and found.test and found.test_files
        assert found.grader in rewards.names() or found.grader == "code"
        assert found.prompt.count("{question}") == 1 and bool(found.train) == bool(found.train_file)
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.hub = ""
