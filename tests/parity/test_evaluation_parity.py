"""The cross-check of evaluation with transformers runs on a tiny model, and sees what it is there to see."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from mutualrl import testing
from mutualrl.policy import Policy

pytest.importorskip("torch", reason="the cross-check needs PyTorch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a chat template, and five problems."""
    folder = testing.tiny_model(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=1024)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    records = [{"question": f"What is {n} + {'1' * n}?", "answer": str(n)} for n in range(1, 6)]
    (folder / "gsm8k_test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture
def check(folder, tmp_path, monkeypatch):
    """Runs the command: its rows by name, and what it says at its end."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("evaluation_parity")

    def run():
        given = {"model": folder, "data": folder, "out": tmp_path / "rows.json", "recipes": "gsm8k"}
        given |= {"new_tokens": TOKENS, "batch": 3}
        monkeypatch.setattr(sys, "argv", ["evaluation_parity.py", *(f"--{k}={v}" for k, v in given.items())])
        said = ""
        try:
            script.main()
        except SystemExit as end:
            said = end.code
        return {r["name"]: r["value"] for r in json.loads((tmp_path / "rows.json").read_text())}, said

    return run


def test_equal(check):
    rows, said = check()
    assert said == ""
    assert rows["gsm8k.problems"] == rows["gsm8k.prompts_equal"] == rows["gsm8k.answers_equal"] == 5
    assert rows["gsm8k.faults"] == 0 and rows["gsm8k.completions_equal"] + rows["gsm8k.ties"] == 5
    assert 5 < rows["gsm8k.tokens"] <= 5 * TOKENS
    assert rows["gsm8k.gap_max"] < 1e-3 and rows["gsm8k.logprob_difference_max"] < 1e-3


def test_another_model_is_a_fault(check, monkeypatch):
    place = Policy._place

    def turned(self, params, *rest):
        place(self, {**params, "norm": -params["norm"]}, *rest)

    monkeypatch.setattr(Policy, "_place", turned)
    rows, said = check()
    assert said == f"{rows['gsm8k.faults']:.0f} differences that no tie explains"
    assert rows["gsm8k.faults"] == 5 and rows["gsm8k.gap_max"] > 1e-3


def test_another_prompt_is_a_fault(check, monkeypatch):
    prompt = Policy.prompt
    monkeypatch.setattr(Policy, "prompt", lambda self, problem: prompt(self, problem)[1:])
    rows, said = check()
    assert said == "5 differences that no tie explains" and rows["gsm8k.prompts_equal"] == 0
