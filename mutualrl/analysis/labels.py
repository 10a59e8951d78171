"""What labels do over training, and whether a policy shows signatures of collapse.

    python -m mutualrl.analysis.labels RUN [RUN ...] [--out=labels]

RUN is the folder of a finished run. A table and the signatures are printed, and `<out>.json` and `<out>.html` (the same
with curves) are written:

    {"schema": 1, "rule": {signature: what it means},
     "runs": {name: {"folder", "label", "steps", "policies": {policy: {
       "metrics": {metric: {"start", "end"}},          means over the first and the last tenth of the steps
       "collapse": {signature: {"found": bool, "start", "end", "text", ...}},
       "curves": {metric: {"steps": [n], "seeds": {"0": [value or null]}}}}}}}}

Signatures of collapse are our definition (`RULE`). They are signs and no verdicts: rewards also become flat where a
policy has learnt everything, which label accuracy and held-out accuracy tell apart. One that cannot be judged, because
a metric is missing or 0 at the start, is absent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mutualrl.analysis import label_plots, pages
from mutualrl.analysis.intervals import hierarchical_interval
from mutualrl.analysis.runs import Run, parse
from mutualrl.files import replace_text
from mutualrl.settings import ConfigError

METRICS = (*label_plots.PANELS, "label/missing", "label/share", "label/reward_acc", "reward/mean")
POINTS = 100  # of a curve; further steps are averaged
GONE = 0.1  # of the start, below which a quantity counts as gone
FACTOR = 2.0  # by which a length must change
RULE = {
    "flat_rewards": f"the standard deviation of rewards within groups ends under {100 * GONE:.0f} % of its start",
    "length": f"the mean length changed by more than a factor of {FACTOR:g}",
    "entropy": f"the entropy ends under {100 * GONE:.0f} % of its start",
    "accuracy": f"held-out accuracy ends under {100 * GONE:.0f} % of its first value",
    "reward_without_accuracy": "held-out accuracy fell from the first evaluation to the last, the 95 % interval over "
    "problems of the change being below 0, while the mean reward rose",
}
RULE_NOTE = (
    "Signatures of collapse compare the last tenth of the steps with the first: " + "; ".join(RULE.values()) + ". They "
    "are signs and no verdicts: rewards also become flat where a policy has learnt everything."
)


def ends(run: Run, metric: str) -> tuple[float, float] | None:
    """Means of a metric (with its policy) over the first and the last tenth of the steps; None where one has none.

    Held-out accuracy, which few steps have: the first and the last evaluation.
    """
    steps, values = run.series(metric)
    total = run.config["steps"]
    tenth = max(1, total // 10)
    first, last = (steps > 0) & (steps <= tenth), steps > total - tenth
    if metric.endswith("/held_out/accuracy") and len(steps):
        first, last = steps == steps.min(), steps == steps.max()
    return (float(values[first].mean()), float(values[last].mean())) if first.any() and last.any() else None


def signatures(run: Run, policy: str) -> dict[str, dict[str, Any]]:
    """Signatures of collapse of a policy that was trained, by the rule at the top of this file.

    Returns:
      {signature of RULE: {"found": bool, "start", "end", "text"}}, for `reward_without_accuracy` of held-out accuracy,
      with "change" and its "interval". Those that cannot be judged are absent.
    """
    out: dict[str, dict[str, Any]] = {}

    def note(name: str, found: bool, start: float, end: float, text: str, **more: Any) -> None:
        out[name] = {"found": bool(found), "start": start, "end": end, "text": text, **more}

    if (std := ends(run, f"{policy}/reward/group_std")) and std[0] > 0:
        note("flat_rewards", std[1] < GONE * std[0], *std, f"reward std within groups {std[0]:.3g} → {std[1]:.3g}")
    if (length := ends(run, f"{policy}/length/mean")) and length[0] > 0:
        changed = length[1] > FACTOR * length[0] or length[1] < length[0] / FACTOR
        note("length", changed, *length, f"mean length {length[0]:.4g} → {length[1]:.4g} tokens")
    if (entropy := ends(run, f"{policy}/entropy")) and entropy[0] > 0:
        note("entropy", entropy[1] < GONE * entropy[0], *entropy, f"entropy {entropy[0]:.3g} → {entropy[1]:.3g} nats")
    reward, first, last = ends(run, f"{policy}/reward/mean"), min(run.right), max(run.right)
    if reward and first < last and run.judged.any():
        kinds = sorted(set(run.kinds.tolist()))
        before, after = (run.passed(s, policy, kinds) for s in (first, last))
        change, interval = after - before, hierarchical_interval([after - before], [run.kinds[run.judged]])
        text = (
            f"held-out pass@1 {before.mean():.3f} → {after.mean():.3f} ({change.mean():+.3f} [{interval[0]:+.3f}, "
            f"{interval[1]:+.3f}]), mean reward {reward[0]:.3g} → {reward[1]:.3g}"
        )
        if before.mean() > 0:
            gone = after.mean() < GONE * before.mean()
            note("accuracy", gone, float(before.mean()), float(after.mean()), text)
        found = interval[1] < 0 and reward[1] > reward[0]
        note("reward_without_accuracy", found, float(before.mean()), float(after.mean()), text,
             change=float(change.mean()), interval=interval)  # fmt: skip
    return out


def said(collapse: Mapping[str, Mapping[str, Any]]) -> str:
    """What `signatures` found, in words."""
    found = list(dict.fromkeys(s["text"] for s in collapse.values() if s["found"]))
    if found:
        accuracy = collapse.get("reward_without_accuracy")
        if accuracy and accuracy["text"] not in found:
            found.append("for comparison, " + accuracy["text"])
        return "; ".join(found)
    return "no signature of collapse" if collapse else "nothing to judge a collapse by"


def curves(runs: Sequence[Run], policy: str) -> dict[str, dict[str, Any]]:
    """Metrics over training, of runs that differ in their seed.

    Returns:
      metric of `label_plots.PANELS` -> {"steps": [n], "seeds": {seed: [n values, None where a run has none]}}; n is at
      most POINTS, a point being the mean over the steps up to its own.
    """
    out = {}
    for metric in label_plots.PANELS:
        series = {str(r.seed): r.series(f"{policy}/{metric}") for r in runs}
        steps = np.unique(np.concatenate([s for s, _ in series.values()]))
        if not len(steps):
            continue
        parts = np.array_split(steps, min(len(steps), POINTS))
        upto = [int(part[-1]) for part in parts]
        by_seed = {}
        for seed, (at, values) in series.items():
            place = np.searchsorted(upto, at)
            n, total = (np.bincount(place, weights=w, minlength=len(upto)) for w in (None, values))
            by_seed[seed] = [float(t / k) if k else None for t, k in zip(total, n)]
        out[metric] = {"steps": upto, "seeds": by_seed}
    return out


def has_labels(run: Run) -> bool:
    """Whether some policy learnt from labels other than the verifier's."""
    return any("/label/" in key for line in run.lines for key in line)


def add(found: dict[str, Any], runs: Mapping[str, Sequence[Run]]) -> None:
    """Adds `collapse` and `label_curves` to every policy of a comparison in which some arm learnt from labels.

    Args:
      found: what `comparison.collect` has so far.
      runs: arm -> its finished runs.
    """
    if not any(has_labels(r) for arm in runs for r in runs[arm]):
        return
    for arm, entry in found["arms"].items():
        for policy, p in entry["policies"].items():
            p["collapse"] = {str(r.seed): signatures(r, policy) for r in runs[arm]}
            p["label_curves"] = curves(runs[arm], policy)


def of_runs(runs: Mapping[str, Run]) -> dict[str, Any]:
    """What is said of each run, in the form described at the top of this file."""
    found: dict[str, Any] = {"schema": 1, "rule": RULE, "runs": {}}
    for name, r in runs.items():
        policies = {}
        for p in r.policies:
            metrics = {m: dict(zip(("start", "end"), e)) for m in METRICS if (e := ends(r, f"{p}/{m}"))}
            policies[p] = {"metrics": metrics, "collapse": signatures(r, p), "curves": curves([r], p)}
        entry = {"folder": str(r.folder), "label": r.label, "steps": r.config["steps"], "policies": policies}
        found["runs"][name] = entry
    return found


def rows(found: Mapping[str, Any], metrics: Sequence[str] = METRICS) -> tuple[list[str], list[list[pages.Cell]]]:
    """Table of `of_runs`: a policy of a run a row, start → end of each of the metrics that some have."""
    each = [(name, r["label"], p, e) for name, r in found["runs"].items() for p, e in r["policies"].items()]
    shown = [m for m in metrics if any(m in e["metrics"] for *_, e in each)]
    head = ["run", "labels by", "policy", *(label_plots.PANELS.get(m, m) for m in shown), "signatures"]
    out: list[list[pages.Cell]] = []
    for name, label, p, e in each:
        values = [e["metrics"].get(m) for m in shown]
        marks = sum(s["found"] for s in e["collapse"].values())
        out.append([(name, ""), (label, ""), (p, ""),
                    *((f"{_short(v['start'])} → {_short(v['end'])}" if v else "", "") for v in values),
                    (str(marks), "worse" if marks else "")])  # fmt: skip
    return head, out


def sentences(found: Mapping[str, Any]) -> list[str]:
    """The signatures of each policy of each run in words, those with some first."""
    each = [(f"{name}, {p}", e["collapse"]) for name, r in found["runs"].items() for p, e in r["policies"].items()]
    each.sort(key=lambda x: not any(s["found"] for s in x[1].values()))
    return [f"{who}: {said(collapse)}" for who, collapse in each]


def page(found: Mapping[str, Any]) -> str:
    """The HTML page of what `of_runs` returns."""
    policies = list(dict.fromkeys(p for r in found["runs"].values() for p in r["policies"]))
    parts = [f"<h1>Labels over training: {len(found['runs'])} run{'s' * (len(found['runs']) > 1)}</h1>",
             "<h2>Signatures of collapse</h2>", pages.bullets(sentences(found)),
             f"<p class=note>{pages.text(RULE_NOTE)}</p>"]  # fmt: skip
    for p in policies:
        of = {
            f"{name} ({r['label']})": r["policies"][p]["curves"]
            for name, r in found["runs"].items()
            if p in r["policies"]
        }
        parts += [f"<h2>{pages.text(p)}</h2>", label_plots.curves(of, f"labels-{p}")]
    note = "start → end: means over the first and the last tenth of the steps; pass@1: the first and last evaluation."
    parts += ["<h2>Numbers</h2>", pages.table(*rows(found)), f"<p class=note>{pages.text(note)}</p>"]
    return pages.document("Labels over training", parts)


def _short(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 10 else f"{x:.2f}"


def main() -> None:
    """Command line."""
    try:
        runs, out = parse(sys.argv, "labels")
        found = of_runs(runs)
    except ConfigError as error:
        sys.exit(str(error))
    files = [Path(f"{out}.{ending}") for ending in ("json", "html")]
    replace_text(files[0], json.dumps(found, indent=1, allow_nan=False) + "\n")
    replace_text(files[1], page(found))
    console = Console()
    table = pages.printable("Start → end", *rows(found, tuple(label_plots.PANELS)), names=3)
    wide = console.measure(table, options=console.options.update(width=1000)).maximum
    console.width = max(console.width, wide)  # rather wrapped by the terminal than cut
    console.print(table)
    for sentence in sentences(found):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{files[1]}: with curves. {files[0]}: all numbers.", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
