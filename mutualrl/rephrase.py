"""Other wordings of a run's problems, written to a file that `config.views` takes.

    python -m mutualrl.rephrase --config=configs/demo.py --out=views.jsonl [--policy=NAME] [--config.seed=1 ...]

With `--policy` that policy of the config is asked to reword each problem, `--tries` times. A rewording is kept if it
has kept the answer: the same policy (or `--solver`) is asked to solve it, and one of `--samples` replies must be right
by the run's grader. Without `--policy` wordings come from the templates of the data source, which need no check.

    --out          file to write
    --split        `train` or `test`
    --policy       who rewords; its system text and plain template are left away, its chat template is not
    --solver       who solves, asked as in training, sampled as the run evaluates (`eval_temperature` ...)
    --prompt       what the policy is asked, with {question} in it
    --temperature  of rewording
    --tries        rewordings sampled for each problem
    --samples      replies to each rewording
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from mutualrl.cohort import Opened, build, load_problems, open_grader, open_models
from mutualrl.command_line import read_command_line
from mutualrl.config import ConfigError, RunConfig
from mutualrl.data.split import SPLITS
from mutualrl.data.views import write
from mutualrl.evaluate import evaluate
from mutualrl.meshes import make_plan
from mutualrl.policy import Policy
from mutualrl.report import Progress
from mutualrl.settings import one_of, within
from mutualrl.types import LENGTH, Problem

PROMPT = """\
Write the following problem in other words. Keep every number, name and condition, so that its answer stays exactly \
the same. Do not solve it. Reply with the new problem only.

Problem: {question}

The problem in other words:"""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for on the command line; see the module's docstring."""

    out: str = ""
    split: str = "train"
    policy: str = ""
    solver: str = ""
    prompt: str = PROMPT
    temperature: float = 1.0
    tries: int = 4
    samples: int = 4


@dataclasses.dataclass
class Reworded:
    """What came of it.

    Attributes:
      problems: number of problems.
      made: rewordings that were sampled (or could not be, as counted in `dropped`), or made from templates.
      views: kept ones by problem id, in the order in which they were made; no problem without one.
      dropped: cause -> number of rewordings.
    """

    problems: int
    made: int = 0
    views: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)

    def keep(self, problem: Problem, text: str) -> None:
        """Adds a view."""
        self.views.setdefault(problem.id, []).append(text)


def from_templates(run: RunConfig, problems: Sequence[Problem]) -> Reworded:
    """Every wording that the data source has templates for (its `wordings(problem)`).

    Raises:
      ConfigError: the source has none.
    """
    name = run.data["name"]
    wordings = getattr(importlib.import_module(f"mutualrl.data.{name}"), "wordings", None)
    if wordings is None:
        raise ConfigError(
            f"data.name={name!r}: has no templates for other wordings; give --policy, one of {', '.join(run.policies)}"
        )
    out = Reworded(len(problems))
    for problem, text in screen(problems, map(wordings, problems), out):
        out.keep(problem, text)
    return out


def from_policy(run: RunConfig, problems: Sequence[Problem], request: Request) -> Reworded:
    """Rewordings by a policy that a policy solves.

    Raises:
      ConfigError: a model does not fit, or no problem can be judged by the run's grader.
    """
    opened = open_models(run)
    plain = "{question}" if run.policies[request.policy].template else ""
    asked = dataclasses.replace(run.policies[request.policy], template=plain, system="")
    writer_run = dataclasses.replace(run, policies={request.policy: asked})
    writer = open_models(writer_run)[request.policy]
    out = Reworded(len(problems))
    step_rollouts = run.problems_per_step * min(p.group_size for p in run.policies.values())  # memory as in training

    with open_grader(run) as grader:
        judged = np.isfinite(grader.grade([""] * len(problems), problems)[0])  # NaN: whatever the reply
        able = [p for p, ok in zip(problems, judged) if ok]
        if not able:
            raise ConfigError(f"grader={run.grader!r}: can judge none of the problems; rewordings cannot be checked")
        # The request is longer than the question, which alone the run has to fit.
        room = (writer.config.max_length or sys.maxsize) - asked.max_new_tokens
        lengths = {p.id: len(writer.tokenizer.prompt(inquiry(p, request.prompt).question)) for p in able}
        fitting = [p for p in able if lengths[p.id] <= room]
        for cause, n in (("no gold answer", len(problems) - len(able)), ("no room to ask", len(able) - len(fitting))):
            out.made += n * request.tries
            if n:
                out.dropped[cause] = n * request.tries
        if not fitting:
            return out

        longest = max(lengths[p.id] for p in fitting)
        with Progress(f"{request.policy} rewords", len(fitting)) as bar:
            proposed = propose(
                load(writer_run, request.policy, {request.policy: writer}, max_prompt_tokens=longest),
                fitting,
                request,
                batch=max(1, step_rollouts // request.tries),
                advance=bar.update,
            )
        candidates = list(screen(fitting, proposed, out, lambda p: fits(p, run, opened)))
        if not candidates:
            return out
        solver = request.solver or request.policy
        with Progress(f"{solver} solves", len(candidates)) as bar:
            # An id of its own for each: random numbers go by it.
            problems = [dataclasses.replace(reword(p, t), id=f"{p.id}/{i}") for i, (p, t) in enumerate(candidates)]
            right = evaluate(
                [load(run, solver, opened)],
                problems,
                grader,
                samples=request.samples,
                temperature=run.eval_temperature,
                top_p=run.eval_top_p,
                top_k=run.eval_top_k,
                batch=max(1, step_rollouts // request.samples),
                advance=bar.update,
            )[solver]["right"]
    for (problem, text), n in zip(candidates, right):
        if n > 0:
            out.keep(problem, text)
        else:
            out.dropped["not solved"] += 1
    return out


def propose(
    writer: Policy,
    problems: Sequence[Problem],
    request: Request,
    *,
    batch: int,
    advance: Callable[[int], None] = lambda done: None,
) -> list[list[str | None]]:
    """What a policy replies to the request to reword each problem: `tries` texts, None where one was cut off.

    Args:
      batch: problems sampled at a time.
      advance: told the number of problems done.
    """
    out: list[list[str | None]] = []
    for start in range(0, len(problems), batch):
        chunk = [inquiry(p, request.prompt) for p in problems[start : start + batch]]
        padded = chunk + [chunk[0]] * (min(batch, len(problems)) - len(chunk))  # one shape, one compilation
        rollouts = writer.sample(
            padded, 0, samples=request.tries, temperature=request.temperature, purpose="rephrase"
        ).result()
        for texts, finish in zip(rollouts.text[: len(chunk)], rollouts.finish):
            out.append([None if end == LENGTH else text for text, end in zip(texts, finish)])
        advance(start + len(chunk))
    return out


def screen(
    problems: Sequence[Problem],
    proposed: Iterable[Sequence[str | None]],
    out: Reworded,
    fits: Callable[[Problem], bool] = lambda problem: True,
) -> Iterable[tuple[Problem, str]]:
    """The rewordings that may be views, as (problem, text) with the white space at the ends gone.

    Dropped, and counted in `out`, are those cut off, empty, too long, and equal to the question, to a view the problem
    has, or to an earlier rewording; case and white space make no difference.

    Args:
      proposed: rewordings of each problem.
      fits: whether a reworded problem is short enough for every policy.
    """
    for problem, texts in zip(problems, proposed):
        question, seen = _bare(problem.question), {_bare(v) for v in problem.views}
        for text in texts:
            out.made += 1
            bare = None if text is None else _bare(text)
            if bare is None:
                cause = "cut off"
            elif not bare:
                cause = "empty"
            elif bare == question:
                cause = "equal to the question"
            elif bare in seen:
                cause = "there already"
            elif not fits(reword(problem, text.strip())):
                cause = "too long"
            else:
                seen.add(bare)
                yield problem, text.strip()
                continue
            out.dropped[cause] += 1


def inquiry(problem: Problem, prompt: str) -> Problem:
    """The problem of rewording a problem."""
    question = prompt.replace("{question}", problem.question)
    return dataclasses.replace(problem, question=question, choices=(), views=(), prompt="{question}")


def reword(problem: Problem, text: str) -> Problem:
    """The problem with another question."""
    return dataclasses.replace(problem, question=text, views=())


def fits(problem: Problem, run: RunConfig, opened: Mapping[str, Opened]) -> bool:
    """Whether every policy's prompt of the problem is within its `max_prompt_tokens`."""
    return all(
        len(o.tokenizer.prompt(problem.asked)) <= run.policies[name].max_prompt_tokens for name, o in opened.items()
    )


def load(run: RunConfig, name: str, opened: Mapping[str, Opened], **changes: int) -> Policy:
    """One policy of a run, on all devices it can have, with settings changed; it cannot be trained."""
    config = dataclasses.replace(run.policies[name], frozen=True, view=0, **changes)
    alone = dataclasses.replace(run, policies={name: config})
    return build(alone, dict(opened), make_plan(alone.policies, run.plan))[0]


def _bare(text: str) -> str:
    return " ".join(text.split()).casefold()


def table(found: Reworded) -> Table:
    """What was written, and what was dropped by cause."""
    out = Table(title=f"Rewordings of {found.problems} problems")
    out.add_column("")
    out.add_column("rewordings", justify="right")
    out.add_row("made", str(found.made), end_section=True)
    for cause, n in sorted(found.dropped.items(), key=lambda x: -x[1]):
        out.add_row(f"dropped: {cause}", str(n))
    out.add_section()
    out.add_row("written", str(sum(map(len, found.views.values()))), style="bold")
    out.add_row("problems with one or more", str(len(found.views)))
    return out


def rephrase(run: RunConfig, request: Request) -> Reworded:
    """Makes other wordings of a run's problems and writes those that are kept to `request.out`, if any is.

    Raises:
      ConfigError: something cannot work.
    """
    _check(run, request)
    problems = load_problems(run, request.split)
    if request.policy:
        if run.warmup:
            from mutualrl.warmup import ensure_models

            run = ensure_models(run)
        found = from_policy(run, problems, request)
    else:
        found = from_templates(run, problems)
    if found.views:
        write(request.out, found.views)
    return found


def _check(run: RunConfig, request: Request) -> None:
    one_of("split", request.split, SPLITS)
    for field in ("policy", "solver"):
        if getattr(request, field):
            one_of(field, getattr(request, field), tuple(run.policies))
    if request.solver and not request.policy:
        raise ConfigError(f"solver={request.solver!r}: needs a policy whose rewordings it solves; give --policy")
    if "{question}" not in request.prompt:
        raise ConfigError(f"prompt={request.prompt!r}: must have {{question}} in it")
    within("temperature", request.temperature, 0)
    for field in ("tries", "samples"):
        within(field, getattr(request, field), 1)
    if not request.out:
        raise ConfigError("--out=FILE is missing, e.g. --out=views.jsonl")
    path = Path(request.out).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={request.out!r}: {error}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"out={request.out!r}: must be a file, in a folder that can be written to")


def parse(argv: Sequence[str]) -> tuple[RunConfig, Request]:
    """The run and the request of a command line.

    Raises:
      ConfigError: a flag, file, setting or value is wrong; the message is one line.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # the config's flags, unknown here, may stand anywhere
    define = {str: flags.DEFINE_string, int: flags.DEFINE_integer, float: flags.DEFINE_float}
    for field in dataclasses.fields(Request):
        define[type(field.default)](field.name, field.default, "see the module's docstring", flag_values=values)
    try:
        rest = values(list(argv), known_only=True)
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from error
    run, _ = read_command_line(rest)
    return run, Request(**{f.name: values[f.name].value for f in dataclasses.fields(Request)})


def main() -> None:
    """Command line."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        run, request = parse(sys.argv)
        found = rephrase(run, request)
    except ConfigError as error:
        sys.exit(f"config: {error}")
    Console().print(table(found))
    if not found.views:
        sys.exit(f"no rewording was kept; {request.out} is not written")
    print(f"{request.out} is written; train with --config.views={request.out}")


if __name__ == "__main__":
    main()
