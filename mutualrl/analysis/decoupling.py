"""How differently policies fail on the same problems: κ, c and w of every pair, before and after training.

    python -m mutualrl.analysis.decoupling RUN [RUN ...] [--out=decoupling]

RUN is the folder of a finished run. Policies of different runs are paired too, so that e.g. two cohorts can be told
from two independent runs; all runs must have been evaluated on the same held-out problems. A table is printed, and
`<out>.json` and `<out>.html` (the same with a plot of κ against c) are written:

    {"schema": 1, "problems": n, "runs": {name: {"folder", "label", "samples", "steps": [first, last]}},
     "pairs": {"run:policy & run:policy": {"before": A, "after": A}}}      `run:` is left out where there is one

A, what `apart` returns. Before and after are the first and the last evaluation of each run.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy import stats

from mutualrl.analysis import label_plots, pages
from mutualrl.analysis.runs import Run, parse
from mutualrl.files import replace_text
from mutualrl.settings import ConfigError

DRAWS = 2000
LIMITS = {"kappa": (-1.0, 1.0), "c": (0.0, 100.0), "w": (0.0, 100.0)}  # what has an interval, and its possible values
BOTH, ONLY_A, ONLY_B, NEITHER, SAME_WRONG = range(5)
NOTES = (
    "κ: agreement of two policies in being right, beyond that of independent ones with their accuracies; 1 for the "
    "same failures, 0 for independent ones. c: percent of problems that exactly one of the two gets right. w: percent "
    "that both get wrong with equal answers.",
    "All are expectations over one sample of each policy, drawn independently of each other. Therefore a policy that "
    "answers at random has κ below 1 even with itself.",
)
OVER_PROBLEMS = (
    "Intervals are 95 % over held-out problems, drawn anew kind by kind; they say nothing about other seeds."
)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """One policy's samples on N problems.

    Attributes:
      right: i64[N] right samples of each problem, -1 where it could not be judged. samples: of each problem.
      wrong: N lists of the wrong samples' answers, None or '' where there is none; None: not known.
    """

    right: np.ndarray
    samples: int
    wrong: Sequence[Sequence[str | None]] | None = None


def decoupling(
    both: float, only_a: float, only_b: float, neither: float, same_wrong: float = np.nan
) -> dict[str, float]:
    """Agreement statistics of two policies (our definitions; of the Co-RL paper only values are known to us).

    Args:
      both, only_a, only_b, neither: number of problems that both, one or none of the two get right.
      same_wrong: problems on which both are wrong with equal answers; NaN where that is not known.

    Returns:
      p_o observed and p_e expected agreement, kappa = (p_o - p_e)/(1 - p_e), c = percent of problems that exactly one
      gets right, w = percent both get wrong with equal answers. What is undefined or not known is absent.
    """
    found = _statistics(np.array([both, only_a, only_b, neither, same_wrong], float))
    return {k: float(v) for k, v in found.items() if not np.isnan(v)}


def counts(a: Evaluated, b: Evaluated) -> np.ndarray:
    """What two policies do on each problem, as expectations over independent pairs of samples (our definition).

    Args:
      a, b: of the same N problems.

    Returns:
      f64[N, 5]: the probabilities that both are right, a alone, b alone, neither, and both wrong with equal answers
      (equal as texts, so equivalent spellings count as different; no answer equals none). A problem not judged has NaN
      in all of them, and the last is NaN where one's wrong answers are not known.
    """
    judged = (a.right >= 0) & (b.right >= 0)
    x, y = (np.where(judged, e.right / e.samples, np.nan) for e in (a, b))
    same = np.full(len(x), np.nan)
    if a.wrong is not None and b.wrong is not None:
        for p in np.flatnonzero(judged):
            mine, theirs = (collections.Counter(filter(None, e.wrong[p])) for e in (a, b))
            same[p] = sum(n * theirs[answer] for answer, n in mine.items()) / (a.samples * b.samples)
    return np.stack([x * y, x * (1 - y), (1 - x) * y, (1 - x) * (1 - y), same], -1)


def apart(tables: Sequence[np.ndarray], kinds: Sequence[np.ndarray], *, draws: int = DRAWS, seed: int = 0) -> dict:
    """Decoupling of a pair of policies with 95 % intervals, mean over seeds.

    Intervals: problems are drawn with replacement, kind by kind since a held-out set has a fixed number of each, and
    every statistic is computed anew from each draw. With several seeds these are drawn too, their deviations stretched
    for few of them as in `intervals.hierarchical_interval` (our definition).

    Args:
      tables: for each seed f64[N, 5] of `counts`; problems not judged do not count.
      kinds: for each seed [N] the problems' kinds.

    Returns:
      {"p_o", "p_e", "kappa", "c", "w", "interval": {"kappa", "c", "w": [low, high]}, "problems": n a seed}. kappa is
      absent where no seed has it, w where no seed's wrong answers are known; an interval where the statistic is
      undefined in any seed or draw.

    Raises:
      ValueError: no seed, or one without a judged problem.
    """
    rng = np.random.default_rng(seed)
    points, drawn, problems = [], [], []
    for table, of in zip(tables, kinds):
        judged = ~np.isnan(table[:, BOTH])
        table, of = table[judged], np.asarray(of)[judged]
        if not len(table):
            raise ValueError("decoupling needs at least one judged problem in every seed")
        points.append(_statistics(table.sum(0)))
        total = np.zeros((draws, table.shape[1]))
        for kind in np.unique(of):
            part = table[of == kind]
            total += rng.multinomial(len(part), np.full(len(part), 1 / len(part)), size=draws) @ part
        drawn.append(_statistics(total))
        problems.append(len(table))
    if not points:
        raise ValueError("decoupling needs at least one seed")
    out: dict[str, Any] = {}
    for key in points[0]:
        values = np.array([p[key] for p in points])
        if not np.isnan(values).all():
            out[key] = float(np.nanmean(values))
    out["interval"] = {}
    for key, limits in LIMITS.items():
        values, noise = np.array([p[key] for p in points]), np.array([d[key] for d in drawn])
        if not np.isnan(values).any() and not np.isnan(noise).any():
            out["interval"][key] = np.clip(_interval(values, noise, rng), *limits).tolist()
    out["problems"] = min(problems)
    return out


def of_runs(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Every pair of policies of all runs, in the form described at the top of this file.

    Raises:
      ConfigError: the held-out problems differ, or there is no pair.
    """
    first = next(iter(runs.values()))
    for r in runs.values():
        if (r.ids, r.kinds.tolist()) != (first.ids, first.kinds.tolist()):
            raise ConfigError(
                f"RUN={r.folder}: has other held-out problems than {first.folder}; policies are paired on the same ones"
            )
    judged = np.all([r.judged for r in runs.values()], axis=0)
    if not judged.any():
        raise ConfigError("RUN: no held-out problem could be judged in every evaluation")
    members = {
        (f"{name}:{p}" if len(runs) > 1 else p): (r, p) for name, r in runs.items() for p in r.right[min(r.right)]
    }
    if len(members) < 2:
        raise ConfigError(f"RUN={first.folder}: has one policy, so there is no pair; give a further run")
    pairs: dict[str, Any] = {}
    for (a, (run_a, policy_a)), (b, (run_b, policy_b)) in itertools.combinations(members.items(), 2):
        pairs[f"{a} & {b}"] = {}
        for when, step in (("before", min), ("after", max)):
            pair = [evaluated(r, step(r.right), p) for r, p in ((run_a, policy_a), (run_b, policy_b))]
            pairs[f"{a} & {b}"][when] = apart([counts(*pair)[judged]], [first.kinds[judged]])
    return {
        "schema": 1,
        "problems": int(judged.sum()),
        "runs": {
            name: {
                "folder": str(r.folder),
                "label": r.label,
                "samples": r.samples,
                "steps": [min(r.right), max(r.right)],
            }
            for name, r in runs.items()
        },
        "pairs": pairs,
    }


def evaluated(run: Run, step: int, policy: str) -> Evaluated:
    """What a run noted of a policy's samples after a step."""
    return Evaluated(run.right[step][policy], run.samples, run.wrong.get(step, {}).get(policy))


def rows(found: Mapping[str, Any]) -> tuple[list[str], list[list[pages.Cell]]]:
    """Table of `{pair: {"before", "after"}}`: a pair and time a row."""
    head = ["pair", "", "κ", "c, %", "w, %", "agreement", "expected", "problems"]
    return head, [
        [(pair, ""), (when, ""), *((estimate(e, key), "") for key in LIMITS), (f"{e['p_o']:.3f}", ""),
         (f"{e['p_e']:.3f}", ""), (str(e["problems"]), "")]
        for pair, times in found.items() for when, e in times.items()
    ]  # fmt: skip


def estimate(e: Mapping[str, Any], key: str) -> str:
    """`0.42 [0.31, 0.52]` of what `apart` returns; '-' where undefined."""
    digits = 2 if key == "kappa" else 1
    if key not in e:
        return "-"
    interval = e["interval"].get(key)
    more = f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]" if interval else ""
    return f"{e[key]:.{digits}f}{more}"


def page(found: Mapping[str, Any]) -> str:
    """The HTML page of what `of_runs` returns."""
    runs = [f"{name}: {r['folder']}, labels by {r['label']}, steps {r['steps'][0]} and {r['steps'][1]}, "
            f"{r['samples']} samples a problem" for name, r in found["runs"].items()]  # fmt: skip
    return pages.document("Decoupling", [
        f"<h1>Who fails where: {len(found['pairs'])} pairs on {found['problems']} held-out problems</h1>",
        label_plots.apart(found["pairs"]), pages.table(*rows(found["pairs"])), "<h2>Runs</h2>", pages.bullets(runs),
        "<h2>How to read this</h2>", pages.bullets([*NOTES, OVER_PROBLEMS]),
    ])  # fmt: skip


def _statistics(total: np.ndarray) -> dict[str, np.ndarray]:
    """f64[...] statistics of sums [..., 5] over problems (`counts`); NaN where undefined."""
    n = total[..., : NEITHER + 1].sum(-1)
    p_o = (total[..., BOTH] + total[..., NEITHER]) / n
    a, b = ((total[..., BOTH] + total[..., only]) / n for only in (ONLY_A, ONLY_B))
    p_e = a * b + (1 - a) * (1 - b)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Sums of shares are not exact: what differs from 1 by rounding alone is 1.
        kappa = np.where(1 - p_e > 1e-12, (p_o - p_e) / (1 - p_e), np.nan)
    return {"p_o": p_o, "p_e": p_e, "c": 100 * (1 - p_o), "w": 100 * total[..., SAME_WRONG] / n, "kappa": kappa}


def _interval(points: np.ndarray, drawn: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[low, high] of the mean of points [S] whose draws are [S, D]."""
    n, draws = drawn.shape
    found = drawn[0]
    if n > 1:
        stretch = np.sqrt(n / (n - 1)) * stats.t.ppf(0.975, n - 1) / stats.norm.ppf(0.975)
        picked, at = rng.integers(n, size=(draws, n)), rng.integers(draws, size=(draws, n))
        noise = drawn[picked, at] - points[picked]
        found = points.mean() + (stretch * (points[picked] - points.mean()) + noise).mean(1)
    return np.quantile(found, [0.025, 0.975])


def main() -> None:
    """Command line."""
    try:
        runs, out = parse(sys.argv, "decoupling")
        found = of_runs(runs)
    except ConfigError as error:
        sys.exit(str(error))
    files = [Path(f"{out}.{ending}") for ending in ("json", "html")]
    replace_text(files[0], json.dumps(found, indent=1, allow_nan=False) + "\n")
    replace_text(files[1], page(found))
    console = Console()
    console.print(pages.printable(f"{found['problems']} held-out problems", *rows(found["pairs"]), names=2))
    console.print(f"{files[1]}: with a plot. {files[0]}: all numbers.", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
