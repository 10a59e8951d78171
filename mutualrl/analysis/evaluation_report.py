"""The page of an evaluation: numbers with intervals, plots, and problems with samples to browse; it needs nothing else.

`python -m mutualrl.analysis.evaluation_report FOLDER` writes `evaluation.html` again from `evaluation.json` and
`samples/<benchmark>/<policy>.jsonl` of an evaluation's folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mutualrl.analysis import evaluation_browser, evaluation_plots, pages
from mutualrl.analysis.evaluation_plots import VOTE, curve, finite, interval
from mutualrl.analysis.pages import Cell
from mutualrl.config import ConfigError
from mutualrl.files import replace_text

SCHEMA = 1
CSS = ".summary th:nth-child(2), .summary td:nth-child(2) { text-align: left }"
DROPPED = {"prompt": "longer than the context", "gold": "without a gold answer", "unjudged": "could not be judged"}
NOTES = [
    "accuracy: share of right samples over all samples of a problem, mean over problems (pass@1, avg@k); in brackets "
    "95 % bootstrap intervals over problems. The largest of a benchmark is coloured only if its interval lies above "
    "all others; overlapping intervals do not show that two policies are equal.",
    "pass@k: chance that at least one of k samples is right, unbiased. maj@k: whether the vote of the first k samples "
    "is right. The number in brackets is k.",
    f"{VOTE}: one vote over all samples of all policies, so it has more samples than any of them.",
    "truncated: share of samples that hit the length limit. no answer: share of samples without one.",
    "A problem is right for a policy if at least one of its samples is, and wrong if none is.",
]


def write(workdir: Path) -> Path:
    """Writes `evaluation.html` into an evaluation's folder, from its other files; returns its path.

    Raises:
      ConfigError: the folder is none of an evaluation, or `evaluation.json` cannot be read; one line.
    """
    workdir = Path(workdir)
    found = read(workdir)
    path = workdir / "evaluation.html"
    replace_text(path, page(found, workdir))
    return path


def read(folder: Path) -> dict[str, Any]:
    """What `evaluation.json` says.

    Raises:
      ConfigError: as for `write`.
    """
    path = folder / "evaluation.json"
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the folder of an evaluation")
    if not path.is_file():
        raise ConfigError(f"{folder}: no evaluation.json in it; give the folder of an evaluation that has ended")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not isinstance(found.get("benchmarks"), dict):
        raise ConfigError(f"{path}: not of an evaluation, or of another version; `schema` must be {SCHEMA}")
    # Halves of surrogate pairs cannot be written.
    return json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))


def page(found: Mapping[str, Any], folder: Path) -> str:
    """The whole HTML page of what `read` returns, with samples from the folder."""
    benchmarks = found["benchmarks"]
    policies = evaluation_plots.names(benchmarks)
    parts = [
        f"<style>{CSS}</style><h1>Evaluation: {_count(len(policies), 'policy', 'policies')}, "
        f"{_count(len(benchmarks), 'benchmark', 'benchmarks')}</h1>",
        f"<div class=summary>{pages.table(*summary(benchmarks))}</div>",
        evaluation_plots.accuracy(benchmarks),
    ]
    if plot := evaluation_plots.samples(benchmarks):
        parts += ["<h2>More samples</h2>", plot, pages.table(*more_samples(benchmarks))]
    browsed = []
    for i, (name, b) in enumerate(benchmarks.items()):
        parts += [f"<h2>{pages.text(name)}</h2>", f"<p class=note>{pages.text(about(b))}</p>"]
        for by in ("level", "subject"):
            if evaluation_plots.group_names(b, by):
                parts += [f"<h3>By {by}</h3>", evaluation_plots.groups(b, by, f"{i}-{by}"), pages.table(*groups(b, by))]
        share = evaluation_browser.PAGE_CHARACTERS // len(benchmarks)
        browsed.append(evaluation_browser.read(folder, name, _listed(folder, name, b), share))
        parts += ["<h3>Problems</h3>", evaluation_browser.section(i, browsed[-1])]
    settings = {k: found[k] for k in ("settings", "versions", "seconds") if k in found}
    parts += [
        "<h2>How to read this</h2>",
        pages.bullets(NOTES),
        f"<details><summary>Settings and versions</summary><pre>{pages.text(json.dumps(settings, indent=1))}</pre>"
        "</details>",
        evaluation_browser.embedded(browsed),
    ]
    return pages.document("Evaluation", parts)


def _listed(folder: Path, benchmark: str, entry: Mapping[str, Any]) -> list[str]:
    """Policies of a benchmark: those with results, then those with sample files only."""
    files = sorted(p.stem for p in (folder / "samples" / benchmark).glob("*.jsonl"))
    return list(dict.fromkeys([*(entry.get("policies") or {}), *files]))


def summary(benchmarks: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Cell]]]:
    """The main table: a benchmark and policy a row, then its cohort's vote."""
    results = [r for b in benchmarks.values() for r in (b.get("policies") or {}).values()]
    metrics = [m for m in ("pass@k", "maj@k") if any(max(curve(r, m), default=1) > 1 for r in results)]
    head = ["benchmark", "policy", "problems", "accuracy", *metrics, "truncated", "no answer", "tokens a sample"]
    rows: list[list[Cell]] = []
    for name, b in benchmarks.items():
        of = dict(b.get("policies") or {})
        if b.get("ensemble_maj"):
            of[VOTE] = b["ensemble_maj"]
        best = leader(of)
        for i, (p, r) in enumerate(of.items()):
            tokens = (r.get("tokens") or {}).get("mean")
            rows.append([
                ("" if i else name, ""), (p, ""), (_whole(r.get("n")), ""), (value(r), "better" if p == best else ""),
                *((_last(curve(r, m)), "") for m in metrics), (_percent(r.get("truncated")), ""),
                (_percent(r.get("unanswered")), ""), (f"{tokens:,.0f}" if finite(tokens) else "", ""),
            ])  # fmt: skip
    return head, rows


def leader(of: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The name whose interval of accuracy lies above all others; None where there is none, or nobody to compare."""
    spans = {name: interval(r) for name, r in of.items() if finite(r.get("accuracy"))}
    if len(spans) < 2 or None in spans.values():
        return None
    best = max(spans, key=lambda name: of[name]["accuracy"])
    return best if all(spans[best][0] > high for name, (_, high) in spans.items() if name != best) else None


def more_samples(benchmarks: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Cell]]]:
    """pass@k and maj@k for every k: a benchmark, policy and metric a row."""
    each = [(f"{b}, {p}, {m}", curve(r, m)) for b, e in benchmarks.items() for p, r in (e.get("policies") or {}).items()
            for m in ("pass@k", "maj@k")]  # fmt: skip
    each = [(name, points) for name, points in each if points]
    ks = sorted({k for _, points in each for k in points})
    rows = [[(name, ""), *((_share(points.get(k)), "") for k in ks)] for name, points in each]
    return ["", *(f"k = {k}" for k in ks)], rows


def groups(benchmark: Mapping[str, Any], by: str) -> tuple[list[str], list[list[Cell]]]:
    """Accuracy by subject or level: one a row, a policy a column."""
    policies = benchmark.get("policies") or {}
    rows: list[list[Cell]] = []
    for g in evaluation_plots.group_names(benchmark, by):
        of = {p: ((r.get("by") or {}).get(by) or {}).get(g) or {} for p, r in policies.items()}
        best, n = leader(of), max((r["n"] for r in of.values() if finite(r.get("n"))), default=None)
        rows.append([(g, ""), (_whole(n), ""), *((value(r), "better" if p == best else "") for p, r in of.items())])
    return [by, "problems", *policies], rows


def about(benchmark: Mapping[str, Any]) -> str:
    """A benchmark in a sentence: problems, samples, grader, and what was left out."""
    k = benchmark.get("samples")
    said = [f"{_whole(benchmark.get('n')) or 'no'} problems", f"{_whole(k) or '?'} sample{'s' * (k != 1)} a problem"]
    if benchmark.get("grader"):
        said.append(f"graded by {benchmark['grader']}")
    dropped = benchmark.get("dropped") or {}
    said += [f"{n} left out: {DROPPED.get(cause, cause)}" for cause, n in dropped.items() if n]
    return "; ".join(said) + "."


def value(result: Mapping[str, Any]) -> str:
    """Accuracy with its interval, e.g. `0.512 [0.480, 0.543]`."""
    if not finite(result.get("accuracy")):
        return ""
    span = interval(result)
    return f"{result['accuracy']:.3f}" + (f" [{span[0]:.3f}, {span[1]:.3f}]" if span else "")


def _last(points: Mapping[int, float]) -> str:
    return f"{points[max(points)]:.3f} ({max(points)})" if points else ""


def _share(x: Any) -> str:
    return f"{x:.3f}" if finite(x) else ""


def _percent(x: Any) -> str:
    return f"{100 * x:.1f} %" if finite(x) else ""


def _whole(x: Any) -> str:
    return f"{x:,.0f}" if finite(x) else ""


def _count(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    try:
        if len(argv) != 2:
            raise ConfigError("one folder is needed: python -m mutualrl.analysis.evaluation_report FOLDER")
        path = write(Path(argv[1]))
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
