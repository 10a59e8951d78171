"""Evaluates the policies of a config, a run, or models on benchmarks, and can be stopped at any time.

In the work folder:

    settings.json     what fixes the results; a folder with other settings is refused
    samples/<benchmark>/<policy>.jsonl
                      a line a problem, appended batch by batch:
                      {"id", "kind", "level": of the problem, or null, "asked": before the chat template, "gold",
                       "samples": [{"text", "answer": or null, "right": true, false, or null where it cannot be judged,
                                    "tokens": n, "finish": "stop", "length" or "stop_text"}]}
    evaluation.json   {"schema": 1, "settings", "versions", "seconds": of the last command that sampled,
                       "benchmarks": {name: {"n", "dropped": {cause: n}, "samples": k, "grader",
                                             "policies": {name: as `result` gives it},
                                             "ensemble_maj": one vote of all policies, or null with one policy}}}
    evaluation.html   the same to look at

All numbers come from the sample lines, so they do not depend on the batch size or on how often a command was stopped.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mutualrl import accuracy
from mutualrl.benchmarks import Benchmark, open_benchmarks
from mutualrl.checkpoint import restore_params
from mutualrl.cohort import Opened, build, open_models
from mutualrl.config import ConfigError
from mutualrl.entrants import Entrants, entrants
from mutualrl.evaluate import sampled
from mutualrl.evaluation_request import Decoding, Request
from mutualrl.files import replace_text
from mutualrl.meshes import Plan, make_plan
from mutualrl.policy import Policy
from mutualrl.report import Progress
from mutualrl.settings import differences
from mutualrl.summary import versions
from mutualrl.types import LENGTH, STOP, STOP_TEXT, Problem, Rollouts

SCHEMA = 1
TRUNCATED = 0.2  # share of samples cut off from which a longer limit is recommended
_FINISH = {STOP: "stop", LENGTH: "length", STOP_TEXT: "stop_text"}
_ROLLOUTS = 64  # sampled at a time where no config says how many fit into memory


class Samples:
    """The sample lines of one policy on one benchmark: a prefix of the benchmark's problems, in their order."""

    def __init__(self, path: Path, problems: Sequence[Problem], samples: int):
        """Reads what is there; a last line that was cut off is removed from the file.

        Raises:
          ConfigError: the file holds other problems.
        """
        self.path = path
        self.lines: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_bytes() if path.is_file() else b""
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            with path.open("r+b") as file:
                file.truncate(whole)
        try:
            self.lines = [json.loads(line) for line in text[:whole].splitlines()]
            there = [(x["id"], len(x["samples"])) for x in self.lines]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"workdir: {path} is damaged ({error}); delete it to sample anew") from error
        if there != [(x.id, samples) for x in problems[: len(there)]]:
            raise ConfigError(f"workdir: {path} has other problems or samples than asked for; delete it to sample anew")

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Adds lines, in memory and in the file."""
        with self.path.open("ab") as file:
            file.write(b"".join(json.dumps(x).encode() + b"\n" for x in lines))
        self.lines += lines

    def right(self) -> np.ndarray:
        """f64[P, K]: 1 right, 0 wrong, NaN where it cannot be judged."""
        return np.array(
            [[np.nan if s["right"] is None else s["right"] for s in x["samples"]] for x in self.lines], float
        )

    def answers(self) -> list[list[str | None]]:
        """P lists of K answers."""
        return [[s["answer"] for s in x["samples"]] for x in self.lines]


def sample_lines(
    problems: Sequence[Problem], rollouts: Rollouts, right: np.ndarray, answers: Sequence[Sequence[str | None]]
) -> list[dict[str, Any]]:
    """A line a problem; see the module's docstring.

    Args:
      rollouts: of the problems, and maybe of others behind them. right: f64[P, K]. answers: P lists of K.
    """
    out = []
    for i, x in enumerate(problems):
        each = zip(rollouts.text[i], answers[i], right[i], rollouts.lengths[i], rollouts.finish[i])
        out.append(
            {
                "id": x.id,
                "kind": x.kind,
                "level": x.extra.get("level"),
                "asked": x.asked,
                "gold": x.answer,
                "samples": [
                    {
                        "text": text,
                        "answer": answer,
                        "right": bool(r) if np.isfinite(r) else None,
                        "tokens": int(n),
                        "finish": _FINISH[int(end)],
                    }
                    for text, answer, r, n, end in each
                ],
            }
        )
    return out


def result(lines: Sequence[Mapping[str, Any]], right: np.ndarray, answers: list[list[str | None]]) -> dict[str, Any]:
    """The numbers of one policy on one benchmark.

    Args:
      lines: of problems that could be judged. right: f64[P, K] of them. answers: P lists of K.

    Returns:
      {"accuracy": mean over all samples, "interval": 95 % bootstrap over problems, "n": problems, "samples": K,
       "pass@k": {k: …}, "maj@k": {k: …}, "truncated": share of samples cut off, "unanswered": share without an answer,
       "tokens": {"generated": n, "mean": a sample}, "by": {"subject": {name: {accuracy, interval, n}}, "level": …}},
      the two of `by` where there are at least two different ones.
    """
    every = [s for x in lines for s in x["samples"]]
    tokens = sum(s["tokens"] for s in every)
    groups = {"subject": [x["kind"] for x in lines], "level": [x["level"] for x in lines]}
    by = {what: accuracy.by(right, labels) for what, labels in groups.items()}
    return {
        **accuracy.mean(right),
        "samples": right.shape[1],
        "pass@k": accuracy.passed(right),
        "maj@k": accuracy.majorities(right, answers),
        "truncated": sum(s["finish"] == "length" for s in every) / len(every),
        "unanswered": sum(not s["answer"] for s in every) / len(every),
        "tokens": {"generated": tokens, "mean": tokens / len(every)},
        "by": {what: found for what, found in by.items() if found},
    }


def results(benchmark: Benchmark, stores: Mapping[str, Samples]) -> dict[str, Any]:
    """What stands in evaluation.json of a benchmark.

    Args:
      stores: the finished samples by policy, in the order of the cohort.

    Raises:
      ConfigError: no problem could be judged.
    """
    right = {name: s.right() for name, s in stores.items()}
    judged = np.isfinite(list(right.values())).all(axis=(0, 2))
    if not judged.any():
        raise ConfigError(f"benchmarks={benchmark.name}: the grader could judge no problem")
    keep = np.flatnonzero(judged)
    known = {name: r[judged] for name, r in right.items()}
    answers = {name: [a for a, ok in zip(s.answers(), judged) if ok] for name, s in stores.items()}
    ensemble = None
    if len(stores) > 1:
        ensemble = accuracy.mean(accuracy.voted(*accuracy.pooled(list(known.values()), list(answers.values()))))
    return {
        "n": len(keep),
        "dropped": {**benchmark.dropped, "unjudged": benchmark.dropped["unjudged"] + int((~judged).sum())},
        "samples": next(iter(right.values())).shape[1],
        "grader": benchmark.grader.version,
        "policies": {
            name: result([s.lines[i] for i in keep], known[name], answers[name]) for name, s in stores.items()
        },
        "ensemble_maj": ensemble,
    }


def evaluate_into(request: Request, workdir: Path) -> dict[str, Any]:
    """Samples what is missing in the work folder, and writes evaluation.json.

    Returns:
      its contents.

    Raises:
      ConfigError: something cannot work; raised before any weight is loaded.
    """
    started = time.monotonic()
    entered = entrants(request)
    run, decoding = entered.run, request.decoding(entered.run)
    opened = open_models(run)
    plan = make_plan(run.policies, run.plan)
    with open_benchmarks(
        request.benchmarks, run, opened, folder=request.data, grader=request.grader, limit=request.limit
    ) as benchmarks:
        settings = describe(entered, decoding, benchmarks)
        claim(workdir, settings)
        stores = {
            b.name: {
                name: Samples(workdir / "samples" / b.name / f"{name}.jsonl", b.problems, decoding.samples)
                for name in run.policies
            }
            for b in benchmarks
        }
        missing = any(len(s.lines) < len(b.problems) for b in benchmarks for s in stores[b.name].values())
        if missing:
            rollouts = run.problems_per_step * min(p.group_size for p in run.policies.values())
            rollouts = _ROLLOUTS if request.models else rollouts  # as many as in training, so that they fit
            batch = request.batch or max(1, rollouts // decoding.samples)
            _sample(load(entered, opened, plan), benchmarks, stores, decoding, batch)
        out = {
            "schema": SCHEMA,
            "settings": settings,
            "versions": versions(),
            "seconds": time.monotonic() - started,
            "benchmarks": {b.name: results(b, stores[b.name]) for b in benchmarks},
        }
    path = workdir / "evaluation.json"
    if not missing and path.is_file():
        out["seconds"] = json.loads(path.read_text())["seconds"]
    replace_text(path, json.dumps(out, indent=1) + "\n")
    return out


def load(entered: Entrants, opened: Mapping[str, Opened], plan: Plan) -> list[Policy]:
    """The policies with their weights, without optimiser state."""
    cohort = build(entered.run, dict(opened), plan)
    if entered.checkpoints is not None:
        restore_params(entered.checkpoints, entered.step, cohort)
    return cohort


def _sample(
    cohort: Sequence[Policy],
    benchmarks: Sequence[Benchmark],
    stores: Mapping[str, Mapping[str, Samples]],
    decoding: Decoding,
    batch: int,
) -> None:
    """Samples what is missing of every policy on every benchmark."""
    total = sum(len(b.problems) for b in benchmarks) * len(cohort)
    count = lambda: sum(len(s.lines) for by_policy in stores.values() for s in by_policy.values())  # noqa: E731
    lengths = {p.name: p.prompt_lengths for p in cohort}
    with Progress("Evaluating", total, done=count()) as bar:
        for b in benchmarks:
            for p in cohort:
                # One padded length for all of a benchmark: how sums are rounded must not depend on a batch's longest.
                longest = max(len(p.prompt(x)) for x in b.problems)
                p.prompt_lengths = (next(n for n in lengths[p.name] if n >= longest),)
            for start in range(0, len(b.problems), batch):
                part = slice(start, start + batch)
                todo = [(p, b.problems[part][max(0, len(stores[b.name][p.name].lines) - start) :]) for p in cohort]
                asked = dict((p.name, x) for p, x in todo if x)
                for policy, rollouts, right, answers in sampled(
                    [(p, x) for p, x in todo if x],
                    b.grader,
                    batch=min(batch, len(b.problems)),
                    samples=decoding.samples,
                    temperature=decoding.temperature,
                    top_p=decoding.top_p,
                    top_k=decoding.top_k,
                ):
                    stores[b.name][policy.name].append(sample_lines(asked[policy.name], rollouts, right, answers))
                    bar.update(count(), b.name)


def describe(entered: Entrants, decoding: Decoding, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    """What fixes the results of an evaluation, as JSON values."""
    fields = ("model", "dtype", "system", "template", "stop_text", "max_prompt_tokens", "max_new_tokens")
    found = {
        "policies": {name: {f: getattr(p, f) for f in fields} for name, p in entered.run.policies.items()},
        "checkpoints": None if entered.checkpoints is None else str(entered.checkpoints),
        "step": entered.step,
        "seed": entered.run.seed,
        "decoding": {k: v for k, v in dataclasses.asdict(decoding).items() if k != "max_new_tokens"},
        "benchmarks": {b.name: b.settings() for b in benchmarks},
    }
    return json.loads(json.dumps(found))


def claim(workdir: Path, settings: Mapping[str, Any]) -> None:
    """Makes the work folder and writes settings.json, or checks the one that is there.

    Raises:
      ConfigError: the folder cannot be made, or is that of another evaluation.
    """
    path = workdir / "settings.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"workdir={str(workdir)!r}: {' '.join(str(error).split())}") from error
    if before is None:
        replace_text(path, json.dumps(settings, indent=1) + "\n")
    elif changed := differences(before, settings):
        what = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise ConfigError(f"workdir={str(workdir)!r}: has an evaluation with other settings: {what}")


def table(found: Mapping[str, Any]) -> Table:
    """Accuracy and votes of every policy on every benchmark; of a cohort also of the vote of all its samples.

    Args:
      found: the contents of evaluation.json.
    """
    out = Table(title="Accuracy [95 % bootstrap interval over problems]")
    for column in ("benchmark", "policy", "n", "accuracy", "k", "pass@k", "maj@k", "cut off", "tokens"):
        names = column in ("benchmark", "policy")
        out.add_column(column, justify="left" if names else "right", no_wrap=column != "policy", overflow="fold")
    for name, b in found["benchmarks"].items():
        k = str(b["samples"])
        last = len(b["policies"]) - 1
        for i, (policy, r) in enumerate(b["policies"].items()):
            many = [k, *(f"{r[what][k]:.3f}" for what in ("pass@k", "maj@k"))] if b["samples"] > 1 else [k, "", ""]
            cells = [_cell(r), *many, f"{r['truncated']:.0%}", f"{r['tokens']['mean']:.0f}"]
            ends = i == last and not b["ensemble_maj"]
            out.add_row("" if i else name, policy, str(r["n"]), *cells, end_section=ends)
        if b["ensemble_maj"]:
            vote = b["ensemble_maj"]
            out.add_row("", "vote of all", str(vote["n"]), _cell(vote), k, end_section=True, style="bold")
    return out


def _cell(r: Mapping[str, Any]) -> str:
    low, high = r["interval"]
    return f"{r['accuracy']:.3f} [{low:.3f}, {high:.3f}]"


def hints(found: Mapping[str, Any]) -> list[str]:
    """What a person should know of before believing the numbers."""
    policies = found["settings"]["policies"]
    return [
        f"{policy} on {name}: {r['truncated']:.0%} of its samples were cut off at "
        f"max_new_tokens={policies[policy]['max_new_tokens']}; raise --max_new_tokens"
        for name, b in found["benchmarks"].items()
        for policy, r in b["policies"].items()
        if r["truncated"] > TRUNCATED
    ]


def main(request: Request) -> None:
    """The whole command: samples, numbers, page and table."""
    from mutualrl.analysis import evaluation_report

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    workdir = Path(request.workdir).expanduser()
    found = evaluate_into(request, workdir)
    page = evaluation_report.write(workdir)
    console = Console()
    console.print(table(found))
    for hint in hints(found):
        console.print(hint, highlight=False, soft_wrap=True)
    console.print(
        f"{page} shows it all; {workdir / 'evaluation.json'} has the numbers", highlight=False, soft_wrap=True
    )
