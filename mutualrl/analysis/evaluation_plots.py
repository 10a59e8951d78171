"""Plots of an evaluation as SVG texts: accuracy by benchmark, by subject and level, and what more samples buy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mutualrl.analysis.comparison_plots import svg
from mutualrl.analysis.label_plots import COLOURS

VOTE = "cohort's vote"
COLUMNS = 3  # panels side by side


def finite(x: Any) -> bool:
    """Whether x is a number that can be shown."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def interval(result: Mapping[str, Any]) -> tuple[float, float] | None:
    """The interval of a result; None where there is none, as for no problems."""
    found = result.get("interval")
    ok = isinstance(found, Sequence) and len(found) == 2 and all(finite(x) for x in found)
    return (found[0], found[1]) if ok else None


def names(benchmarks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Policies of all benchmarks, in their order."""
    return list(dict.fromkeys(p for b in benchmarks.values() for p in b.get("policies") or {}))


def accuracy(benchmarks: Mapping[str, Mapping[str, Any]]) -> str:
    """Accuracy with intervals, a row a benchmark and a colour a policy; '' without a number."""
    rows = {b: dict(e.get("policies") or {}) for b, e in benchmarks.items()}
    for b, e in benchmarks.items():
        if e.get("ensemble_maj"):
            rows[b][VOTE] = e["ensemble_maj"]
    policies = names(benchmarks)
    return _dots(rows, [*policies, VOTE], "accuracy", "accuracy")


def groups(benchmark: Mapping[str, Any], by: str, salt: str) -> str:
    """The same by subject or level of one benchmark; '' where no policy has any.

    Args:
      by: `subject` or `level`.
    """
    policies = benchmark.get("policies") or {}
    rows = {g: {p: r["by"][by][g] for p, r in policies.items() if g in _by(r, by)} for g in group_names(benchmark, by)}
    return _dots(rows, list(policies), f"accuracy by {by}", salt)


def group_names(benchmark: Mapping[str, Any], by: str) -> list[str]:
    """Subjects or levels that some policy has numbers for: levels in their order, subjects by name."""
    found = {g for r in (benchmark.get("policies") or {}).values() for g in _by(r, by)}
    return sorted(found, key=lambda g: (not g.isdigit(), int(g) if g.isdigit() else 0, g))


def _by(result: Mapping[str, Any], by: str) -> Mapping[str, Any]:
    return (result.get("by") or {}).get(by) or {}


def _dots(rows: Mapping[str, Mapping[str, Any]], policies: Sequence[str], title: str, salt: str) -> str:
    """Accuracies with intervals: rows from the top down, in each the policies from the top down."""
    shown = [p for p in policies if any(finite(of.get(p, {}).get("accuracy")) for of in rows.values())]
    if not shown:
        return ""

    def draw(plt):
        plt.rcParams["text.parse_math"] = False  # names may hold dollar signs
        height = len(rows) * (0.16 * len(shown) + 0.16) + 1.1
        figure, axis = plt.subplots(figsize=(9.5, max(1.8, height)), layout="constrained")
        for place, of in enumerate(rows.values()):
            for i, p in enumerate(shown):
                result = of.get(p, {})
                if not finite(result.get("accuracy")):
                    continue
                y = place + (i - (len(shown) - 1) / 2) * 0.8 / len(shown)
                x, (low, high) = result["accuracy"], interval(result) or (result["accuracy"],) * 2
                axis.errorbar(x, y, xerr=[[max(0.0, x - low)], [max(0.0, high - x)]], color=_colour(policies, p),
                              fmt="D" if p == VOTE else "o", ms=5, capsize=2.5, lw=1.4)  # fmt: skip
        handles = [plt.Line2D([], [], color=_colour(policies, p), marker="D" if p == VOTE else "o") for p in shown]
        figure.legend(handles, [_label(p) for p in shown], loc="outside upper center", ncols=4, frameon=False)
        for line in range(1, len(rows)):
            axis.axhline(line - 0.5, color="#dddddd", lw=0.8)
        axis.set_yticks(range(len(rows)), list(rows))
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlim(-0.02, 1.02)
        axis.set_xlabel(f"{title}, 95 % intervals over problems")
        axis.grid(axis="x", alpha=0.25)
        return figure

    return svg(draw, f"evaluation-{salt}")


def samples(benchmarks: Mapping[str, Mapping[str, Any]]) -> str:
    """pass@k (solid) and maj@k (dashed) against k, a panel a benchmark; '' where nobody has more than one sample."""
    policies = names(benchmarks)
    shown = {b: e["policies"] for b, e in benchmarks.items() if any(
        len(curve(r, k)) > 1 for r in (e.get("policies") or {}).values() for k in ("pass@k", "maj@k"))}  # fmt: skip
    if not shown:
        return ""
    columns = min(COLUMNS, len(shown))
    lines = -(-len(shown) // columns)

    def draw(plt):
        plt.rcParams["text.parse_math"] = False
        figure, axes = plt.subplots(
            lines, columns, figsize=(max(6.0, 3.9 * columns), 2.7 * lines + 0.7), squeeze=False, layout="constrained"
        )
        for axis, (benchmark, of) in zip(axes.flat, shown.items()):
            for p, result in of.items():
                for metric, dash in (("pass@k", "-"), ("maj@k", "--")):
                    points = curve(result, metric)
                    axis.plot(list(points), list(points.values()), color=_colour(policies, p), ls=dash, lw=1.6,
                              marker="o", ms=3.5)  # fmt: skip
            ks = sorted({k for r in of.values() for m in ("pass@k", "maj@k") for k in curve(r, m)})
            axis.set_xscale("log", base=2)
            axis.set_xticks([k for k in ks if k & (k - 1) == 0] or ks, minor=False)
            axis.set_xticks([], minor=True)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axis.set_title(benchmark, fontsize=11)
            axis.set_xlabel("k: samples a problem")
            axis.grid(alpha=0.25)
        for axis in axes.flat[len(shown) :]:
            axis.set_axis_off()
        handles = [plt.Line2D([], [], color=_colour(policies, p), lw=2) for p in policies]
        handles += [plt.Line2D([], [], color="#555555", ls=d) for d in ("-", "--")]
        figure.legend(handles, [*map(_label, policies), "pass@k", "maj@k"], loc="outside upper center",
                      ncols=min(6, len(handles)), frameon=False)  # fmt: skip
        return figure

    return svg(draw, "evaluation-samples")


def curve(result: Mapping[str, Any], metric: str) -> dict[int, float]:
    """k -> `pass@k` or `maj@k`, by rising k; without what is no number."""
    found = result.get(metric) or {}
    return {int(k): found[k] for k in sorted(found, key=int) if finite(found[k])}


def _colour(policies: Sequence[str], policy: str) -> str:
    return "#000000" if policy == VOTE else PALETTE[policies.index(policy) % len(PALETTE)]


def _label(name: str) -> str:
    return "\u200b" + name  # a legend leaves out what begins with an underscore


PALETTE = [c for c in COLOURS if c != "#000000"]  # black is the vote's
