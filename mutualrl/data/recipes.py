"""The table of recipes: well-known problem sets by name. Where each comes from, how its fields read, how it is graded.

A recipe's `row` turns one row of the hub's data set into a record with the fields of the JSON lines files (`question`,
`answer`, `choices`, `subject`, `level`, others for the grader), or None for a row that is no part of the set.
`mutualrl/data/recipe.py` reads them. In a folder of files, `test_files` are tried in their order: ARC, CommonsenseQA
and OpenBookQA are often kept as their validation split, which then serves as the test split; so does the hub's
validation split of CommonsenseQA, whose test answers are not public.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mutualrl.rewards.reply import boxes

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
LETTER = "{question}\nPlease reason step by step, and put the letter of the right option within \\boxed{}."
FUNCTION = "Complete this Python function. Reply with all of it in one ```python block.\n\n```python\n{question}```"
TESTED = "{question}\nReply with Python code in one ```python block. It has to pass these tests:\n\n{test_list}"
PROGRAM = (
    "{question}\n{starter_code}\nReply with one ```python block: the completed starter code where there is one, else a "
    "program that reads standard input and writes standard output."
)

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One problem set.

    Attributes:
      name: what it is called here; also the `source` of its problems and the start of their ids.
      hub, config: data set and configuration on the Hugging Face hub ('' where it has one only).
      train, test: the hub's splits that serve as either, joined by `+`; '' where there is no such split.
      row: (row of the hub, its number) -> record as above, or None.
      prompt: what is asked around a question; `{field}` stands for that field of the record.
      grader: a module of `mutualrl.rewards`.
      licence: of the data set; '' where none is stated.
      train_file, test_files: names without `.jsonl` in a folder; the first test file that is there is read.
      levels: the levels there are. train_levels: those of the train split unless others are asked for; () for all.
      hub_files: JSON lines files of the hub that are the test split, where the library cannot read the data set.
    """

    name: str
    hub: str
    config: str
    train: str
    test: str
    row: Callable[[Row, int], dict[str, Any] | None]
    prompt: str
    grader: str
    licence: str
    train_file: str = ""
    test_files: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    train_levels: tuple[int, ...] = ()
    hub_files: tuple[str, ...] = ()


def names() -> list[str]:
    """Names of the recipes there are."""
    return list(_RECIPES)


def find(name: str) -> Recipe:
    """The recipe called `name`; ValueError naming those there are if there is none."""
    if not isinstance(name, str) or name not in _RECIPES:
        raise ValueError(f"recipe is {name!r}; allowed are {', '.join(_RECIPES)}")
    return _RECIPES[name]


def _math(row: Row, number: int) -> dict[str, Any]:
    found = boxes(row["solution"])
    digit = re.search(r"\d", row["level"])  # a few rows say "Level ?"
    return {
        "question": row["problem"],
        "answer": found[-1][2] if found else "",
        "subject": row["type"],
        "solution": row["solution"],
        **({"level": int(digit.group())} if digit else {}),
    }


def _math500(row: Row, number: int) -> dict[str, Any]:
    kept = {k: row[k] for k in ("answer", "subject", "solution")}
    return {
        "id": f"math500/{row['unique_id'].removesuffix('.json')}",
        "question": row["problem"],
        "level": int(row["level"]),
        **kept,
    }


def _gsm8k(row: Row, number: int) -> dict[str, Any]:
    solution, _, answer = row["answer"].rpartition("####")
    solution = re.sub(r"<<.*?>>", "", solution).strip()  # the calculator's marks
    return {"question": row["question"], "answer": answer.strip().replace(",", ""), "solution": solution}


def _contest(row: Row, number: int) -> dict[str, Any]:
    return {"question": row.get("problem") or row["question"], "answer": _whole(row["answer"])}


def _svamp(row: Row, number: int) -> dict[str, Any]:
    question = f"{row['Body'].strip()} {row['Question'].strip()}"
    return {"id": f"svamp/{row['ID']}", "question": question, "answer": _whole(row["Answer"]), "subject": row["Type"]}


def _whole(value: Any) -> str:
    return str(value).strip().removesuffix(".0")  # the hub keeps whole numbers as floats


# Science and mathematics without anatomy and medicine.
_STEM = frozenset(
    "abstract_algebra astronomy college_biology college_chemistry college_computer_science college_mathematics "
    "college_physics computer_security conceptual_physics electrical_engineering elementary_mathematics "
    "high_school_biology high_school_chemistry high_school_computer_science high_school_mathematics "
    "high_school_physics high_school_statistics machine_learning".split()
)


def _mmlu_stem(row: Row, number: int) -> dict[str, Any] | None:
    if row["subject"] not in _STEM:
        return None
    return {**{k: row[k] for k in ("question", "choices", "subject")}, "answer": LETTERS[row["answer"]]}


def _labelled(prefix: str, question: str) -> Callable[[Row, int], dict[str, Any]]:
    """Rows whose options are {'text': [...], 'label': [...]}; labels are letters or, in a part of ARC, 1 to 4."""

    def row(row: Row, number: int) -> dict[str, Any]:
        labels, key = list(row["choices"]["label"]), row["answerKey"]
        return {
            "id": f"{prefix}/{row['id']}",
            "question": row[question],
            "choices": row["choices"]["text"],
            "answer": LETTERS[labels.index(key)] if key in labels else "",
        }

    return row


def _gpqa(row: Row, number: int) -> dict[str, Any]:
    """The options in an order that depends on the id alone: the hub has the right one first, always."""
    name = f"gpqa/{row['Record ID']}"
    options = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    order = np.argsort(np.random.Generator(np.random.PCG64(seed)).random(4)).tolist()
    return {
        "id": name,
        "question": row["Question"].strip(),
        "choices": [options[i].strip() for i in order],
        "answer": LETTERS[order.index(0)],
        "subject": row["High-level domain"],
    }


def _humaneval(row: Row, number: int) -> dict[str, Any]:
    kept = {k: row[k] for k in ("entry_point", "test")}
    return {"id": row["task_id"], "question": row["prompt"], "answer": row["canonical_solution"], **kept}


def _mbpp(row: Row, number: int) -> dict[str, Any]:
    record = {"id": f"mbpp/{row['task_id']}", "question": row["text"], "answer": row["code"]}
    record["test_list"] = list(row["test_list"])
    if row.get("test_setup_code"):
        record["test_setup"] = row["test_setup_code"]
    if row.get("challenge_test_list"):
        record["challenge_test_list"] = list(row["challenge_test_list"])
    return record


def _livecodebench(row: Row, number: int) -> dict[str, Any]:
    """Tests on standard input become `inputs` and `outputs`; those that call a function stay as they are."""
    cases = json.loads(row["public_test_cases"]) + _unpacked(row["private_test_cases"])
    if name := json.loads(row["metadata"] or "{}").get("func_name"):
        tests: dict[str, Any] = {"func_name": name, "test_cases": cases}
    else:
        tests = {"inputs": [c["input"] for c in cases], "outputs": [c["output"] for c in cases]}
    return {
        "id": f"livecodebench/{row['question_id']}",
        "question": row["question_content"],
        "answer": None,
        "subject": row["difficulty"],
        "starter_code": row["starter_code"],
        "contest_date": str(row["contest_date"]),
        **tests,
    }


class _TextOnly(pickle.Unpickler):
    """Reads texts, numbers and lists; whatever would run code is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"packed test cases name {module}.{name}; allowed is plain data")


def _unpacked(text: str) -> Any:
    """Test cases as JSON, or as JSON in a pickle, compressed, in base 64."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(_TextOnly(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load())


# name, hub, config, train, test, row, prompt, grader, licence, train_file, test_files
_TABLE = (
    Recipe("math", "DigitalLearningGmbH/MATH-lighteval", "default", "train", "test", _math, BOXED, "math", "MIT",
           "math_train", ("math_test", "math500"), levels=(1, 2, 3, 4, 5), train_levels=(3, 4, 5)),
    Recipe("gsm8k", "openai/gsm8k", "main", "train", "test", _gsm8k, BOXED, "math", "MIT",
           "gsm8k_train", ("gsm8k_test",)),
    Recipe("math500", "HuggingFaceH4/MATH-500", "", "", "test", _math500, BOXED, "math", "MIT",
           "", ("math500",), levels=(1, 2, 3, 4, 5)),
    Recipe("amc", "AI-MO/aimo-validation-amc", "", "", "train", _contest, BOXED, "math", "Apache-2.0",
           "", ("amc",)),  # 83 problems of 2022 and 2023
    Recipe("amc23", "math-ai/amc23", "", "", "test", _contest, BOXED, "math", "",
           "", ("amc23",)),  # 40 problems
    Recipe("aime24", "HuggingFaceH4/aime_2024", "", "", "train", _contest, BOXED, "math", "",
           "", ("aime24",)),
    Recipe("aime25", "math-ai/aime25", "", "", "test", _contest, BOXED, "math", "",
           "", ("aime25",)),
    Recipe("minerva", "math-ai/minervamath", "", "", "test", _contest, BOXED, "math", "",
           "", ("minerva",)),
    Recipe("svamp", "ChilleD/SVAMP", "", "", "train+test", _svamp, BOXED, "math", "MIT",
           "", ("svamp",)),  # all 1000, as papers report it
    Recipe("mmlu_stem", "cais/mmlu", "all", "", "test", _mmlu_stem, LETTER, "choice", "MIT",
           "", ("mmlu_stem",)),
    Recipe("arc_challenge", "allenai/ai2_arc", "ARC-Challenge", "train", "test", _labelled("arc_c", "question"),
           LETTER, "choice", "CC BY-SA 4.0", "arc_challenge_train", ("arc_challenge_test", "arc_challenge_validation")),
    Recipe("arc_easy", "allenai/ai2_arc", "ARC-Easy", "train", "test", _labelled("arc_e", "question"),
           LETTER, "choice", "CC BY-SA 4.0", "arc_easy_train", ("arc_easy_test", "arc_easy_validation")),
    Recipe("commonsense_qa", "tau/commonsense_qa", "", "train", "validation", _labelled("csqa", "question"),
           LETTER, "choice", "MIT", "commonsense_qa_train", ("commonsense_qa_validation",)),
    Recipe("openbookqa", "allenai/openbookqa", "main", "train", "test", _labelled("obqa", "question_stem"),
           LETTER, "choice", "Apache-2.0", "openbookqa_train", ("openbookqa_test", "openbookqa_validation")),
    Recipe("gpqa_diamond", "Idavidrein/gpqa", "gpqa_diamond", "", "train", _gpqa, LETTER, "choice", "CC BY 4.0",
           "", ("gpqa_diamond",)),  # access has to be asked for; its authors ask not to publish it in plain text
    Recipe("humaneval", "openai/openai_humaneval", "", "", "test", _humaneval, FUNCTION, "code", "MIT",
           "", ("humaneval",)),
    Recipe("mbpp", "google-research-datasets/mbpp", "full", "train", "test", _mbpp, TESTED, "code", "CC BY 4.0",
           "mbpp", ("mbpp",)),  # the file holds all splits, in its field `split`
    Recipe("livecodebench", "livecodebench/code_generation_lite", "", "", "test", _livecodebench, PROGRAM, "code", "CC",
           "", ("livecodebench",), hub_files=("test.jsonl", *(f"test{i}.jsonl" for i in range(2, 7)))),  # release 6
)  # fmt: skip

_RECIPES = {recipe.name: recipe for recipe in _TABLE}
