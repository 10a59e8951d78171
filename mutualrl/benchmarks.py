"""Benchmarks by name: their problems, who grades them, and what had to be dropped."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mutualrl import data, rewards
from mutualrl.accuracy import spread_over_kinds
from mutualrl.cohort import Opened, fitting_problems, load_problems, unsound_golds
from mutualrl.config import ConfigError, RunConfig
from mutualrl.data import recipes
from mutualrl.data.stream import fingerprint
from mutualrl.evaluation_request import DATA
from mutualrl.rewards.workers import GraderPool
from mutualrl.settings import one_of
from mutualrl.types import Problem


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Problems with their grader.

    Attributes:
      name: as in results and file names.
      problems: those that every policy can be asked and the grader can judge; unique ids.
      grader: judges them.
      grader_options: of that grader, where they are not its defaults.
      dropped: `prompt`: too long for a policy, `gold`: the grader does not accept the gold answer, `unjudged`: there is
        nothing to judge by.
    """

    name: str
    problems: tuple[Problem, ...]
    grader: GraderPool
    grader_options: Mapping[str, Any]
    dropped: Mapping[str, int]

    def settings(self) -> dict[str, Any]:
        """What fixes the results, as far as it is the benchmark's."""
        return {
            "n": len(self.problems),
            "fingerprint": fingerprint(self.problems),
            "grader": self.grader.version,
            "grader_options": dict(self.grader_options),
        }


@contextmanager
def open_benchmarks(
    names: Sequence[str], run: RunConfig, opened: Mapping[str, Opened], *, folder: str, grader: str, limit: int
) -> Iterator[list[Benchmark]]:
    """Benchmarks whose graders work until the end of the `with` block.

    Args:
      names: recipes, `data` for the run's own test split, or paths of .jsonl files.
      run: its policies' lengths bound prompts; its data, grader options, `gold_check` and grading workers count.
      opened: the policies' models.
      folder: of the recipes' files; '' for MUTUALRL_DATA or the Hugging Face cache.
      grader: of .jsonl files.
      limit: at most so many problems of each, spread over kinds; 0 for all. They are picked first, so that they are the
        same for all models.

    Raises:
      ConfigError: a problem set cannot be read, its grader cannot work here, or no problem is left.
    """
    titles = [Path(name).stem if name.endswith(".jsonl") else name for name in names]
    for title in titles:
        if titles.count(title) > 1:
            raise ConfigError(f"benchmarks={title}: is there twice")
    with ExitStack() as stack:
        pools: dict[str, GraderPool] = {}
        found = []
        for title, name in zip(titles, names):
            problems, judge = _read(name, run, folder, grader)
            options = run.grader_options if judge == run.grader else {}
            if judge not in pools:
                try:
                    pool = GraderPool(
                        judge,
                        options=options,
                        workers=run.grader_workers,
                        timeout_s=max(
                            run.grader_timeout_s, RunConfig.grader_timeout_s
                        ),  # a run's is for its own grader
                    )
                except ValueError as error:
                    raise ConfigError(f"benchmarks={name}: {' '.join(str(error).split())}") from error
                pools[judge] = stack.enter_context(pool)
            problems = spread_over_kinds(problems, limit) if limit else problems
            kept, dropped = _usable(name, problems, dataclasses.replace(run, grader=judge), opened, pools[judge])
            found.append(Benchmark(title, tuple(kept), pools[judge], options, dropped))
        yield found


def _read(name: str, run: RunConfig, folder: str, grader: str) -> tuple[list[Problem], str]:
    """The problems of a benchmark and the name of its grader."""
    if name == DATA:
        return load_problems(run, "test"), run.grader
    try:
        if name.endswith(".jsonl"):
            one_of("grader", grader, rewards.names())
            return data.load("jsonl", "test", test=name), grader
        return data.load("recipe", "test", recipe=name, folder=folder), recipes.find(name).grader
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"benchmarks={name}: {' '.join(str(error).split())}") from error


def _usable(
    name: str, problems: Sequence[Problem], run: RunConfig, opened: Mapping[str, Opened], grader: GraderPool
) -> tuple[list[Problem], dict[str, int]]:
    """Problems that can be asked and judged, and how many were dropped by cause."""
    judged = np.isfinite(grader.grade([""] * len(problems), problems)[0])  # NaN: whatever the reply
    kept, long = fitting_problems([x for x, ok in zip(problems, judged) if ok], run, opened)
    unsound = unsound_golds(kept, run, grader)
    if run.gold_check == "drop":
        kept = [x for x in kept if x.id not in unsound]
    dropped = {"prompt": long, "gold": len(unsound), "unjudged": int((~judged).sum())}
    dropped["gold"] *= run.gold_check == "drop"
    if dropped["unjudged"]:
        logging.warning(
            "%s: %d of %d problems have nothing to judge by: dropped", name, dropped["unjudged"], len(problems)
        )
    if not kept:
        causes = ", ".join(f"{cause} {n}" for cause, n in dropped.items() if n)
        raise ConfigError(f"benchmarks={name}: none of {len(problems)} problems can be used; dropped are: {causes}")
    return kept, dropped
