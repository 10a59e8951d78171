"""Rewordings: what is kept has kept the answer, what is not is counted by its cause; the command line end to end."""

import json
import sys

import numpy as np
import pytest

from mutualrl import data, rephrase
from mutualrl.config import ConfigError, add_policy, base_config, read
from mutualrl.data import procedural, views
from mutualrl.policy import Pending
from mutualrl.rephrase import Request, Reworded, screen
from mutualrl.testing import tiny_model
from mutualrl.types import LENGTH, STOP, Problem, Rollouts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", bos=True)


def settings(model, *names, **policy):
    config = base_config()
    config.data.kinds, config.data.size = ("rev", "sort"), 3
    config.problems_per_step, config.grader_workers = 2, 1
    config.policy.update(
        dict(max_prompt_tokens=32, prompt_bucket=32, max_new_tokens=6, group_size=4, devices=1) | policy
    )
    for name in names or ("a",):
        add_policy(config, name, model=str(model))
    return config


class Fake:
    """A policy that replies by a rule, and takes note of what it was asked."""

    def __init__(self, name, reply):
        self.name, self.reply, self.asked, self.how = name, reply, [], []

    def sample(self, problems, step, *, samples, temperature, purpose, **_):
        self.asked += problems
        self.how.append((len(problems), samples, temperature, purpose))
        said = [[self.reply(p, i) for i in range(samples)] for p in problems]
        finish = np.array([[LENGTH if text is None else STOP for text in row] for row in said], np.int8)
        p, ones = len(problems), np.ones((len(problems), samples, 1))
        text = tuple(tuple(t or "half a te" for t in row) for row in said)
        return Pending(
            lambda: Rollouts(
                policy=self.name,
                version=0,
                step=step,
                problems=tuple(problems),
                prompt=np.zeros((p, 1)),
                prompt_positions=np.zeros((p, 1)),
                tokens=ones,
                mask=ones > 0,
                logprobs=ones,
                finish=finish,
                text=text,
                temperature=temperature,
            )
        )


def test_screen_counts_every_cause():
    problem = Problem(id="p", question="What is  1+1?", answer="2", views=("Add 1 and 1.",))
    texts = [
        " what is 1+1?\n", "", " \n", None, "ADD 1  and 1.", "One and one?", "one and ONE?", " A long one? ", "Sum of 1"
    ]  # fmt: skip
    out = Reworded(1)
    kept = list(screen([problem], [texts], out, lambda p: len(p.question) != len("A long one?")))
    assert kept == [(problem, "One and one?"), (problem, "Sum of 1")]
    assert out.made == len(texts)
    assert out.dropped == {"equal to the question": 1, "empty": 2, "cut off": 1, "there already": 2, "too long": 1}


def test_what_is_solved_is_kept(model, tmp_path, monkeypatch):
    config = settings(model, "a", "b")
    run = read(config)
    problems = data.load("procedural", "train", kinds=("rev", "sort"), size=3)
    gold = {p.question: p for p in problems}

    def words(p, i):
        kind, digits = p.question[len("In other words: ") :].rstrip("=").split(":")
        return (f"{digits} {kind}", f"{digits} tros", None, f"{kind}:{digits}=")[i]

    def solves(p, i):  # sometimes right, and only where the kind is still named
        digits, kind = p.question.split()
        return gold[f"{kind}:{digits}="].answer if f"{kind}:{digits}=" in gold and i == 2 else "?"

    fakes = {"a": Fake("a", words), "b": Fake("b", solves)}
    loaded = []
    monkeypatch.setattr(rephrase, "load", lambda run, name, opened, **_: loaded.append(name) or fakes[name])
    out = tmp_path / "made" / "views.jsonl"
    request = Request(out=str(out), policy="a", solver="b", prompt="In other words: {question}", temperature=0.7)
    found = rephrase.rephrase(run, request)

    assert loaded == ["a", "b"] and found.made == 24
    assert found.dropped == {"cut off": 6, "equal to the question": 6, "not solved": 6}
    assert views.attach(problems, out) != problems
    for p in views.attach(problems, out):
        assert p.views == (" ".join(reversed(p.question.rstrip("=").split(":"))),)
    assert {p.question for p in fakes["a"].asked} == {f"In other words: {q}" for q in gold}
    assert {h[1:] for h in fakes["a"].how} == {(4, 0.7, "rephrase")}
    assert len({h[0] for h in fakes["a"].how}) == 1  # one shape
    # Each rewording has random numbers of its own, and the gold answer of its problem.
    asked = {p.id: p for p in fakes["b"].asked}
    assert len(asked) == 12 and {p.answer for p in asked.values()} == {p.answer for p in problems}


def test_too_long_for_any_policy_is_too_long(model, tmp_path, monkeypatch):
    config = settings(model, "a", "b")
    config.policies.b.max_prompt_tokens = 13  # a BOS and twelve bytes
    fakes = {"a": Fake("a", lambda p, i: "x" * (12 + i % 2)), "b": Fake("b", lambda p, i: p.answer)}
    monkeypatch.setattr(rephrase, "load", lambda run, name, opened, **_: fakes[name])
    request = Request(out=str(tmp_path / "v.jsonl"), policy="a", solver="b", tries=2, samples=1)
    found = rephrase.rephrase(read(config), request)
    assert found.dropped == {"too long": 6}  # the request itself may be longer than prompts in training
    assert list(found.views.values()) == [["x" * 12]] * 6


def test_no_room_and_no_gold_answer(model, tmp_path, monkeypatch):
    path = tmp_path / "problems.jsonl"
    rows = [
        {"id": "short", "question": "1?", "answer": "1"},
        {"id": "none", "question": "2?"},
        {"id": "long", "question": "3" * 20, "answer": "3"},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = settings(model)
    config.data = {"name": "jsonl", "train": str(path), "holdout": 0.0}
    fake = Fake("a", lambda p, i: "one?" if p.question.startswith("#") else "1")
    monkeypatch.setattr(rephrase, "load", lambda *_, **__: fake)
    # The tiny model has 256 positions, and a completion takes six.
    request = Request(out=str(tmp_path / "v.jsonl"), policy="a", prompt="#" * 235 + "{question}", tries=3)
    found = rephrase.rephrase(read(config), request)
    assert found.views == {"short": ["one?"]} and found.made == 9
    assert found.dropped == {"no gold answer": 3, "no room to ask": 3, "there already": 2}

    path.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(ConfigError, match="grader='exact': can judge none of the problems"):
        rephrase.rephrase(read(config), request)


def test_a_policy_that_cannot_reword(model, tmp_path, monkeypatch, capsys):
    """A random model, loaded and sampled for good: everything is dropped, and nothing is written."""
    config_file(tmp_path, model)
    out = tmp_path / "v.jsonl"
    argv = [f"--config={tmp_path / 'c.py'}", f"--out={out}", "--policy=a", "--tries=2", "--samples=1"]
    monkeypatch.setattr(sys, "argv", ["rephrase", *argv])
    with pytest.raises(SystemExit) as end:
        rephrase.main()
    assert end.value.code == f"no rewording was kept; {out} is not written" and not out.exists()
    shown = capsys.readouterr().out
    assert "Rewordings of 6 problems" in shown
    counts = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.splitlines() if "│" in line}
    assert (
        counts.pop("made") == "12" and counts.pop("written") == "0" and counts.pop("problems with one or more") == "0"
    )
    assert counts and all(cause.startswith("dropped: ") for cause in counts)
    assert sum(map(int, counts.values())) == 12


def test_a_loaded_policy_is_asked_without_its_template(model, tmp_path, monkeypatch):
    """The plain template and the system text belong to solving; the solver has them."""
    config = settings(model, template="Q: {question} A:", system="Think.", max_prompt_tokens=48)
    seen = []

    class Spy(Fake):
        def __init__(self, policy):
            super().__init__(policy.name, lambda p, i: f"{p.question[-9:]}!" if len(p.question) > 40 else p.answer)
            self.policy = policy

        def sample(self, problems, step, **how):
            ids, positions = self.policy.prompts(problems)
            seen.append(self.policy.tokenizer.decode(ids[0][positions[0] >= 0].tolist()))
            return super().sample(problems, step, **how)

    load = rephrase.load
    monkeypatch.setattr(rephrase, "load", lambda *a, **k: Spy(load(*a, **k)))
    request = Request(out=str(tmp_path / "v.jsonl"), policy="a", prompt="p" * 60 + "{question}", tries=1, samples=1)
    found = rephrase.rephrase(read(config), request)
    assert seen[0].startswith("ppp") and seen[0].endswith("=")
    assert seen[-1].startswith("Think.\n\nQ: ") and seen[-1].endswith("=! A:")
    assert len(found.views) == 6


def config_file(folder, model):
    (folder / "c.py").write_text(
        "from mutualrl.config import add_policy, base_config\n"
        "def get_config():\n"
        "    config = base_config()\n"
        "    config.data.kinds, config.data.size = ('rev', 'sort'), 3\n"
        "    config.problems_per_step = 2\n"
        "    config.policy.group_size, config.policy.max_new_tokens, config.policy.devices = 4, 6, 1\n"
        "    config.policy.max_prompt_tokens = config.policy.prompt_bucket = 16\n"
        f"    add_policy(config, 'a', model={str(model)!r})\n"
        "    return config\n"
    )


def test_templates_end_to_end(model, tmp_path, monkeypatch, capsys):
    config_file(tmp_path, tmp_path / "no_model_is_needed")
    out = tmp_path / "v.jsonl"
    argv = ["--out", str(out), "--config", str(tmp_path / "c.py"), "--config.data.size=5", "--split=test"]
    monkeypatch.setattr(sys, "argv", ["rephrase", *argv])
    rephrase.main()
    shown = capsys.readouterr().out
    assert "Rewordings of 10 problems" in shown and "dropped" not in shown
    assert f"{out} is written; train with --config.views={out}" in shown
    problems = data.load("procedural", "test", kinds=("rev", "sort"), size=5)
    assert views.attach(problems, out) == data.load("procedural", "test", kinds=("rev", "sort"), size=5, views=3)

    monkeypatch.setattr(sys, "argv", ["rephrase", *argv, "--config.data.views=2"])  # the first two are there already
    rephrase.main()
    assert [json.loads(line)["views"] for line in out.read_text().splitlines()] == [
        [procedural.wordings(p)[2]] for p in problems
    ]


@pytest.mark.parametrize(
    "flags, told",
    [
        ([], "--out=FILE is missing"),
        (["--out={}"], "must be a file, in a folder that can be written to"),
        (["--out={}/c.py/v.jsonl"], "out='.*v.jsonl': .*File exists"),
        (["--out={}/v", "--split=valid"], "split='valid': allowed are train, test"),
        (["--out={}/v", "--policy=b"], "policy='b': allowed are a"),
        (["--out={}/v", "--policy=a", "--solver=b"], "solver='b': allowed are a"),
        (["--out={}/v", "--solver=a"], "solver='a': needs a policy whose rewordings it solves; give --policy"),
        (["--out={}/v", "--policy=a", "--prompt=Hello"], "prompt='Hello': must have {question} in it"),
        (["--out={}/v", "--policy=a", "--tries=0"], "tries=0: must be at least 1"),
        (["--out={}/v", "--policy=a", "--tries=many"], "flag --tries=many: invalid literal"),
        (["--out={}/v", "--policy=a", "--temperature=-1"], "temperature=-1.0: must be at least 0"),
        (["--out={}/v", "--policy=a"], "policies.a.model='.*nowhere'"),
        (["--out={}/v", "--poliyc=a"], "poliyc"),
        (["--out={}/v", "stray"], "'stray': not a flag"),
    ],
)
def test_refusals_are_one_line(tmp_path, monkeypatch, flags, told):
    config_file(tmp_path, tmp_path / "nowhere")
    monkeypatch.setattr(
        sys, "argv", ["rephrase", f"--config={tmp_path / 'c.py'}", *(f.format(tmp_path) for f in flags)]
    )
    with pytest.raises(SystemExit, match=told) as end:
        rephrase.main()
    assert end.value.code.startswith("config: ") and "\n" not in end.value.code


def test_a_source_without_templates_says_so(model, tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "1?", "answer": "1"}\n')
    config = settings(model)
    config.data = {"name": "jsonl", "train": str(path), "holdout": 0.0}
    with pytest.raises(ConfigError, match="data.name='jsonl': has no templates .* give --policy, one of a"):
        rephrase.rephrase(read(config), Request(out=str(tmp_path / "v.jsonl")))
