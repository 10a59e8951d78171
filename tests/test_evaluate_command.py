"""The evaluation command: who is evaluated on what, the files it leaves, a stop in the middle, and what is refused."""

import json
import subprocess
import sys

import numpy as np
import pytest

from mutualrl import evaluate as evaluate_module
from mutualrl import evaluation
from mutualrl.accuracy import pass_at_k
from mutualrl.cohort import build, open_models
from mutualrl.config import ConfigError, add_policy, base_config, read
from mutualrl.entrants import entrants
from mutualrl.evaluation import evaluate_into
from mutualrl.evaluation_request import parse
from mutualrl.rewards.workers import GraderPool
from mutualrl.testing import tiny_model
from mutualrl.train import train
from mutualrl.types import Problem
from mutualrl.votes import count, elect


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": tiny_model(folder / "llama", "llama", bos=True, padded_vocab=5),
        "qwen": tiny_model(folder / "qwen", "qwen3", tokenizer="bpe", seed=1),
    }


def grade(self, replies, problems):
    """Random models are never right. Here the answer is the number of distinct characters of a reply modulo 3, none
    where that is 0, and 1 is right; so is the gold answer itself."""
    found = [len(set(t)) % 3 for t in replies]
    right = [t == x.answer or n == 1 for t, n, x in zip(replies, found, problems)]
    judged = [x.answer is not None for x in problems]
    return np.where(judged, right, np.nan).astype(float), [str(n) if n else None for n in found]


@pytest.fixture(autouse=True)
def some_are_right(monkeypatch):
    monkeypatch.setattr(GraderPool, "grade", grade)


@pytest.fixture
def problems(tmp_path):
    """Two files in a folder: GSM8K and MATH-500 by their recipes, a problem too long and one without a gold answer."""
    folder = tmp_path / "data"
    folder.mkdir()
    gsm8k = [{"id": f"g{i}", "question": f"max:{i:04d}=", "answer": str(i)} for i in range(5)]
    gsm8k += [
        {"id": "long", "question": "9" * 300, "answer": "1"},
        {"id": "open", "question": "sort:1=", "answer": None},
    ]
    math = [
        {"id": f"m{i}", "question": f"rev:{i}=", "answer": "1", "subject": "ab"[i % 2], "level": 1 + i // 2}
        for i in range(4)
    ]
    for name, records in (("gsm8k_test", gsm8k), ("math500", math)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def flags(models, problems, workdir, *more):
    return parse(
        ["evaluate", *(f"--model={name}={path}" for name, path in models.items()), f"--data={problems}"]
        + ["--benchmarks=gsm8k,math500", "--max_new_tokens=6", f"--workdir={workdir}", "--samples=4", "--temperature=1"]
        + list(more)
    )


def contents(workdir):
    """All files of a work folder but the time it took."""
    found = {p.relative_to(workdir).as_posix(): p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    found["evaluation.json"] = {k: v for k, v in json.loads(found["evaluation.json"]).items() if k != "seconds"}
    return found


def test_what_is_written(models, problems, tmp_path):
    found = evaluate_into(flags(models, problems, tmp_path / "one"), tmp_path / "one")
    assert found == json.loads((tmp_path / "one/evaluation.json").read_text())
    gsm8k = found["benchmarks"]["gsm8k"]
    assert gsm8k["n"] == 5 and gsm8k["samples"] == 4
    assert gsm8k["dropped"] == {"prompt": 1, "gold": 0, "unjudged": 1} and gsm8k["grader"].startswith("math ")
    every = {}
    for bench, ids in (("gsm8k", [f"g{i}" for i in range(5)]), ("math500", ["m0", "m1", "m2", "m3"])):
        for name in models:
            lines = [json.loads(x) for x in (tmp_path / f"one/samples/{bench}/{name}.jsonl").read_text().splitlines()]
            every[bench, name] = lines
            assert [x["id"] for x in lines] == ids and all(len(x["samples"]) == 4 for x in lines)
            assert {s["finish"] for x in lines for s in x["samples"]} <= {"stop", "length"}
            assert "put your final answer" in lines[0]["asked"]
            r = found["benchmarks"][bench]["policies"][name]
            right = np.array([[s["right"] for s in x["samples"]] for x in lines], float)
            answers = [[s["answer"] for s in x["samples"]] for x in lines]
            assert 0 < right.mean() < 1 and r["accuracy"] == pytest.approx(right.mean())
            assert r["pass@k"] == {str(k): pytest.approx(pass_at_k(4, right.sum(1), k).mean()) for k in (1, 2, 4)}
            for k in (1, 2, 4):
                winners = elect(count([a[:k] for a in answers])).answers
                assert r["maj@k"][str(k)] == pytest.approx(np.mean([w == "1" for w in winners]))
            tokens = [s["tokens"] for x in lines for s in x["samples"]]
            assert r["tokens"] == {"generated": sum(tokens), "mean": pytest.approx(np.mean(tokens))}
            assert r["truncated"] == pytest.approx(
                np.mean([s["finish"] == "length" for x in lines for s in x["samples"]])
            )
            assert r["unanswered"] == pytest.approx(np.mean([a is None for row in answers for a in row]))
        both = [a["samples"] + b["samples"] for a, b in zip(every[bench, "llama"], every[bench, "qwen"])]
        winners = elect(count([[s["answer"] for s in x] for x in both])).answers
        assert found["benchmarks"][bench]["ensemble_maj"]["accuracy"] == pytest.approx(
            np.mean([w == "1" for w in winners])
        )
    assert gsm8k["policies"]["llama"]["by"] == {}  # one subject, no level
    by = found["benchmarks"]["math500"]["policies"]["llama"]["by"]
    assert by["subject"].keys() == {"a", "b"} and by["level"].keys() == {"1", "2"} and by["level"]["1"]["n"] == 2
    assert evaluation.table(found).row_count == 6
    assert any("max_new_tokens=6" in hint for hint in evaluation.hints(found))


def test_the_batch_does_not_matter(models, problems, tmp_path):
    for batch in (1, 3, 64):
        evaluate_into(flags(models, problems, tmp_path / str(batch), f"--batch={batch}"), tmp_path / str(batch))
    assert contents(tmp_path / "1") == contents(tmp_path / "3") == contents(tmp_path / "64")


class Killed(Exception):
    pass


def test_a_stopped_evaluation_goes_on(models, problems, tmp_path, monkeypatch):
    """Stopped between the two policies of a batch, in the middle of writing a line; files are as if it had not been."""
    evaluate_into(flags(models, problems, tmp_path / "whole", "--batch=2"), tmp_path / "whole")
    append, calls = evaluation.Samples.append, []

    def dies(self, lines):
        calls.append(self.path)
        if len(calls) == 4:
            with self.path.open("ab") as file:
                file.write(b'{"id": "g2", "samp')
            raise Killed
        append(self, lines)

    monkeypatch.setattr(evaluation.Samples, "append", dies)
    with pytest.raises(Killed):
        evaluate_into(flags(models, problems, tmp_path / "killed", "--batch=2"), tmp_path / "killed")
    monkeypatch.setattr(evaluation.Samples, "append", append)
    assert not (tmp_path / "killed/evaluation.json").exists()
    evaluate_into(flags(models, problems, tmp_path / "killed", "--batch=2"), tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")

    # A finished one is not sampled again: no weight is loaded.
    monkeypatch.setattr(evaluation, "build", None)
    before = (tmp_path / "whole/evaluation.json").read_bytes()
    evaluate_into(flags(models, problems, tmp_path / "whole"), tmp_path / "whole")
    assert (tmp_path / "whole/evaluation.json").read_bytes() == before


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A finished run with checkpoints after steps 1 and 2."""
    config = base_config()
    config.update(steps=2, problems_per_step=4, eval_problems=0, checkpoint_every=1, tensorboard=False)
    config.data.size, config.gold_check, config.plan = 20, "off", "time_slice"
    config.eval_samples, config.eval_temperature, config.eval_top_p = 2, 0.7, 0.9
    config.policy.update(group_size=4, max_new_tokens=5, max_prompt_tokens=16, prompt_bucket=16, lr=1e-2)
    for name, folder in models.items():
        add_policy(config, name, model=str(folder))
    workdir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraderPool, "grade", grade)
        train(read(config), workdir)
    return workdir


def test_a_run_is_evaluated_at_its_checkpoints(run, tmp_path):
    """Its own test split and settings; step 2 by default; other policies than at step 1 and than its models are."""
    import jax
    import orbax.checkpoint as ocp

    folder, texts = run, {}
    for step, more in ((2, []), (1, ["--step=1"])):
        out = tmp_path / str(step)
        request = parse(["evaluate", f"--run={folder}", "--benchmarks=data", "--limit=6", f"--workdir={out}", *more])
        found = evaluate_into(request, out)
        assert found["settings"]["step"] == step and found["benchmarks"]["data"]["n"] == 6
        assert found["settings"]["decoding"] == {"samples": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
        texts[step] = (out / "samples/data/qwen.jsonl").read_text()
        entered = entrants(request)
        opened = open_models(entered.run)
        (policy,) = [p for p in evaluation.load(entered, opened, evaluation.make_plan(entered.run.policies)) if p.index]
        saved = ocp.StandardCheckpointer().restore((folder / f"checkpoints/{step}/policy_qwen").absolute())["params"]
        assert jax.tree.structure(saved) == jax.tree.structure(policy.state["params"])
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), saved, policy.state["params"])))
        original = build(entered.run, opened, evaluation.make_plan(entered.run.policies))[1].state["params"]
        assert not all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), saved, original)))
    assert texts[1] != texts[2]
    with pytest.raises(ConfigError, match="step=7: allowed are 1, 2"):
        entrants(parse(["evaluate", f"--run={folder}", "--step=7", "--benchmarks=data", "--workdir=x"]))
    with pytest.raises(ConfigError, match="policies='gpt'.*llama, qwen"):
        entrants(parse(["evaluate", f"--run={folder}", "--policies=gpt", "--benchmarks=data", "--workdir=x"]))
    request = parse(["evaluate", f"--run={folder}", "--policies=qwen", "--benchmarks=data", "--workdir=x"])
    assert list(entrants(request).run.policies) == ["qwen"]
    with pytest.raises(ConfigError, match="config.json"):
        entrants(parse(["evaluate", f"--run={tmp_path}", "--benchmarks=data", "--workdir=x"]))


def test_policies_of_a_config(models, tmp_path):
    """Overrides count, and a file of problems has the grader that is asked for."""
    file = tmp_path / "config.py"
    file.write_text(
        "from mutualrl.config import add_policy, base_config\n"
        "def get_config():\n"
        "    config = base_config()\n"
        "    config.policy.update(max_prompt_tokens=32, max_new_tokens=5)\n"
        f"    add_policy(config, 'llama', model={str(models['llama'])!r})\n"
        "    return config\n"
    )
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"id": i, "question": f"max:{i}=", "answer": "1"}) + "\n" for i in range(3)))
    argv = ["evaluate", f"--config={file}", f"--benchmarks={own},data", "--grader=exact", "--limit=2"]
    found = evaluate_into(
        parse([*argv, "--config.eval_samples=3", "--config.policy.max_new_tokens=4", f"--workdir={tmp_path / 'out'}"]),
        tmp_path / "out",
    )
    assert found["benchmarks"].keys() == {"own", "data"}
    assert found["benchmarks"]["own"]["samples"] == 3 and found["benchmarks"]["own"]["ensemble_maj"] is None
    assert found["settings"]["policies"]["llama"]["max_new_tokens"] == 4


@pytest.mark.parametrize(
    "more, message",
    (
        (["--benchmarks=gsm9k"], "benchmarks='gsm9k': allowed are math, gsm8k"),
        (["--preset=best"], "preset='best': allowed are greedy, papers"),
        (["--preset=config"], "preset='config': allowed are greedy, papers"),
        (["--samples=0"], "samples=0: must be at least 1"),
        (["--batch=0"], "batch=0"),
        (["--top_p=0"], "top_p=0"),
        (["--temperature=-1"], "temperature=-1"),
        (["--temperature=hot"], "temperature.*hot"),
        (["--preset=greedy", "--temperature=0", "--samples=4"], "samples=4: with temperature 0"),
        (["--benchmarks=data"], "benchmarks=data: is the data of a config or a run"),
        (["--benchmarks=none.jsonl"], "grader: must be given"),
        (["--benchmarks=none.jsonl", "--grader=exact"], "benchmarks=none.jsonl: .*does not exist"),
        (["--benchmarks=none.jsonl", "--grader=judge"], "grader='judge': allowed are choice"),
        (["--benchmarks=aime24"], "benchmarks=aime24: .*no file aime24.jsonl"),
        (["--benchmarks=gsm8k,gsm8k"], "benchmarks=gsm8k: is there twice"),
        (["--grader=exact"], "grader='exact': is of .jsonl files only"),
        (["--policies=llama"], "policies=llama"),
        (["--step=3"], "step=3: is of a run"),
        (["--run=runs/demo"], "only one of"),
        (["--model=nowhere"], "model='nowhere'"),
        (["--max_new_tokens=9999"], "exceeds the 256 positions"),
        (["--max_prompt_tokens=4"], "none of 7 problems can be used"),
        (["--nonsense=1"], "'--nonsense=1': no such flag"),
        (["--benchmarks="], "--benchmarks is missing"),
    ),
)
def test_what_is_refused_before_a_weight_is_loaded(models, problems, tmp_path, monkeypatch, more, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(evaluation, "build", None)
    with pytest.raises(ConfigError, match=message) as caught:
        evaluate_into(flags(models, problems, tmp_path / "out", *more), tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_folder_of_another_evaluation_is_refused(models, problems, tmp_path):
    evaluate_into(flags({"llama": models["llama"]}, problems, tmp_path / "out"), tmp_path / "out")
    before = contents(tmp_path / "out")
    for more, what in ((["--samples=2"], "decoding.samples was 4, now 2"), (["--limit=3"], "benchmarks.gsm8k.n was 5")):
        with pytest.raises(ConfigError, match=what):
            evaluate_into(flags({"llama": models["llama"]}, problems, tmp_path / "out", *more), tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_lengths_that_the_positions_allow(models, problems):
    """Tiny models have 256 positions."""
    sizes = {}
    for name, more in {"none": [], "new": ["--max_new_tokens=200"], "prompt": ["--max_prompt_tokens=250"]}.items():
        request = parse(["evaluate", f"--model={models['qwen']}", "--benchmarks=gsm8k", "--workdir=x", *more])
        (policy,) = entrants(request).run.policies.values()
        sizes[name] = policy.max_prompt_tokens, policy.max_new_tokens
    assert sizes == {"none": (64, 192), "new": (56, 200), "prompt": (250, 6)}


def test_presets(models):
    request = lambda *more: parse(["evaluate", "--model=a=b", "--benchmarks=gsm8k", "--workdir=x", *more])  # noqa: E731
    run = read_run(models)
    assert request().decoding(run) == evaluation.Decoding()
    papers = request("--preset=papers", "--samples=8", "--top_k=5").decoding(run)
    assert papers == evaluation.Decoding(8, 0.6, 0.95, 5, 3072)


def read_run(models):
    config = base_config()
    add_policy(config, "llama", model=str(models["llama"]))
    return read(config)


def command(*argv):
    return subprocess.run([sys.executable, "-m", "mutualrl.evaluate", *argv], capture_output=True, text=True)


def test_the_command(models, tmp_path):
    help_ = command("--help")
    assert help_.returncode == 0 and "papers" in help_.stdout and "mmlu_stem" in help_.stdout
    wrong = command("--model=x", "--benchmarks=gsm9k", "--workdir=x")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "gsm9k" in wrong.stderr
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"id": 1, "question": "max:12=", "answer": "2"}) + "\n")
    done = command(
        f"--model={models['llama']}", f"--benchmarks={own}", "--grader=exact", "--max_new_tokens=4",
        f"--workdir={tmp_path / 'out'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Accuracy" in done.stdout and "evaluation.html" in done.stdout
    assert (tmp_path / "out/evaluation.html").stat().st_size > 1000
    assert "Evaluating 1/1" in done.stderr


def test_sampled_yields_each_policys_own_problems():
    """Policies may be asked different problems in one batch: after a stop, one may be ahead."""

    class Says:
        def __init__(self, name):
            self.name, self.shapes = name, []

        def sample(self, problems, step, *, samples, **_):
            self.shapes.append(len(problems))
            texts = tuple(("ab" if x.id == "1" else "abc",) * samples for x in problems)
            return type("Pending", (), {"result": lambda _: type("Rollouts", (), {"text": texts})})()

    asked = [(Says("a"), [Problem("1", "", "x")]), (Says("b"), [Problem("2", "", "x"), Problem("1", "", "x")])]
    with GraderPool("exact") as grader:
        found = list(evaluate_module.sampled(asked, grader, batch=3, samples=2, temperature=1.0, top_p=1.0, top_k=0))
    assert [len(right) for _, _, right, _ in found] == [1, 2]
    assert found[1][3] == [[None, None], ["2", "2"]]
    assert [p.shapes for p, _ in asked] == [[3], [3]]
