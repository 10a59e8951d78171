"""Plots of label-free learning as SVG texts: how differently policies fail, and what labels do over training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mutualrl.analysis.comparison_plots import svg

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#999999")  # Okabe–Ito
LINES = ("-", "--", ":")
PANELS = {  # metric: what the axis says
    "label/acc": "label accuracy",
    "agreement": "agreement with others",
    "wrong_consensus": "wrong consensus",
    "held_out/accuracy": "held-out pass@1",
    "reward/group_std": "reward std in groups",
    "length/mean": "length, tokens",
    "entropy": "entropy, nats a token",
}
SHARES = ("label/acc", "agreement", "wrong_consensus", "held_out/accuracy")


def apart(pairs: Mapping[str, Mapping[str, Mapping[str, Any]]], salt: str = "apart") -> str:
    """κ against c of pairs, before (open) and after training, each with 95 % intervals; '' where κ is undefined.

    Args:
      pairs: name -> {"before", "after"} of `decoupling.apart`.
    """
    shown = {n: {w: e for w, e in times.items() if "kappa" in e} for n, times in pairs.items()}
    shown = {name: times for name, times in shown.items() if times}
    if not shown:
        return ""

    def draw(plt):
        figure, axis = plt.subplots(figsize=(9.5, max(4.6, 0.24 * len(shown) + 1.4)), layout="constrained")
        handles = []
        for i, times in enumerate(shown.values()):
            colour, marker = COLOURS[i % len(COLOURS)], "osD^v"[i // len(COLOURS) % 5]
            for when, e in times.items():
                bars = [
                    [[max(0.0, e[k] - e["interval"][k][0])], [max(0.0, e["interval"][k][1] - e[k])]]
                    if k in e["interval"] else None for k in ("c", "kappa")
                ]  # fmt: skip
                fill, text = ("white", colour) if when == "before" else (colour, "white")
                axis.errorbar(e["c"], e["kappa"], *bars[::-1], color=colour, lw=1, alpha=0.55, capsize=2, zorder=2)
                axis.plot(e["c"], e["kappa"], marker, ms=13, color=colour, mfc=fill, mew=1.6, zorder=4)
                axis.annotate(str(i + 1), (e["c"], e["kappa"]), color=text, fontsize=8, fontweight="bold", ha="center",
                              va="center_baseline", zorder=5)  # fmt: skip
            if len(times) == 2:
                ends = [(times[w]["c"], times[w]["kappa"]) for w in ("before", "after")]
                arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 7, "shrinkB": 7}
                axis.annotate("", xy=ends[1], xytext=ends[0], arrowprops=arrow, zorder=3)
            handles.append(plt.Line2D([], [], color=colour, marker=marker, lw=1.8))
        names = [f"{i + 1}  {name}" for i, name in enumerate(shown)]
        handles += [plt.Line2D([], [], color="#555555", marker="o", mfc=c, lw=0) for c in ("white", "#555555")]
        figure.legend(handles, [*names, "before training", "after"], loc="outside right center", frameon=False)
        axis.set_xlabel("c: percent of problems that exactly one gets right")
        axis.set_ylabel("κ: agreement beyond chance")
        axis.axhline(0, color="black", lw=0.8)
        axis.grid(alpha=0.25)
        return figure

    return svg(draw, salt)


def curves(of: Mapping[str, Mapping[str, Mapping[str, Any]]], salt: str) -> str:
    """Metrics over training, a panel a metric and a line a run or arm; bands from the lowest seed to the highest.

    Args:
      of: name of the line -> metric -> {"steps": [n], "seeds": {seed: [n]}} as from `labels.curves`.
    """
    metrics = [m for m in PANELS if any(m in c for c in of.values())]
    if not metrics:
        return ""
    columns = min(4, len(metrics))
    rows = -(-len(metrics) // columns)

    def draw(plt):
        figure, axes = plt.subplots(
            rows, columns, figsize=(3.2 * columns, 2.5 * rows + 0.5), sharex=True, squeeze=False, layout="constrained"
        )
        for axis, metric in zip(axes.flat, metrics):
            for i, by_metric in enumerate(of.values()):
                if metric not in by_metric:
                    continue
                c, colour = by_metric[metric], COLOURS[i % len(COLOURS)]
                values = np.array(list(c["seeds"].values()))
                axis.fill_between(c["steps"], values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)
                axis.plot(c["steps"], values.mean(0), color=colour, lw=1.6, ls=LINES[i // len(COLOURS) % len(LINES)])
            axis.set_title(PANELS[metric], fontsize=10)
            axis.grid(alpha=0.25)
            axis.set_ylim(*((-0.02, 1.02) if metric in SHARES else (0, None)))
        for axis in axes.flat[len(metrics) :]:
            axis.set_axis_off()
        for column in range(columns):
            last = axes[max(r for r in range(rows) if r * columns + column < len(metrics)), column]
            last.set_xlabel("step")
            last.tick_params(labelbottom=True)
        handles = [plt.Line2D([], [], color=COLOURS[i % len(COLOURS)], ls=LINES[i // len(COLOURS) % len(LINES)], lw=2)
                   for i in range(len(of))]  # fmt: skip
        figure.legend(handles, list(of), loc="outside upper center", ncols=min(4, len(of)), frameon=False)
        return figure

    return svg(draw, salt)
