"""Plots of a comparison as SVG texts. Colours are of the Okabe–Ito palette, told apart by colour-blind readers."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from mutualrl.analysis.claims import GROUP_NAMES, verdict

COLOURS = {"all": "#000000", "main": "#0072B2", "peer_only": "#D55E00", "own_only": "#009E73"}
VERDICTS = {"better": "#0072B2", "worse": "#D55E00", "open": "#999999"}
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLUMNS = 3  # panels side by side


def curves(found: Mapping[str, Any], policy: str) -> str:
    """Held-out pass@1 over training, a panel an arm, the baseline dashed in each; bands from the lowest seed to the
    highest."""
    arms = [a for a in found["arms"] if a != found["baseline"]] or list(found["arms"])
    base = found["arms"].get(found["baseline"])
    groups = [g for g in COLOURS if g != "all" and g in found["arms"][arms[0]]["policies"][policy]["curves"]] or ["all"]
    rows = -(-len(arms) // COLUMNS)

    def draw(plt):
        columns = min(COLUMNS, len(arms))
        figure, axes = plt.subplots(
            rows, columns, figsize=(3.9 * columns, 2.6 * rows + 0.7), sharex=True, sharey=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for axis, arm in zip(axes.flat, arms):
            for group in groups:
                c = found["arms"][arm]["policies"][policy]["curves"][group]
                values = np.array(list(c["seeds"].values()))
                axis.fill_between(c["steps"], values.min(0), values.max(0), color=COLOURS[group], alpha=0.18, lw=0)
                axis.plot(c["steps"], values.mean(0), color=COLOURS[group], lw=2, label=GROUP_NAMES[group])
                if base and arm != found["baseline"]:
                    c = base["policies"][policy]["curves"][group]
                    mean = np.mean(list(c["seeds"].values()), 0)
                    axis.plot(c["steps"], mean, color=COLOURS[group], lw=1.2, ls="--")
            axis.set_title(arm, fontsize=11)
            axis.set_ylim(-0.02, 1.02)
            axis.grid(alpha=0.25)
        for axis in axes.flat[len(arms) :]:
            axis.set_axis_off()
        for axis in axes[:, 0]:
            axis.set_ylabel("pass@1, held-out")
        for column in range(columns):
            last = max(r for r in range(rows) if r * columns + column < len(arms))
            axes[last, column].set_xlabel("step")
            axes[last, column].tick_params(labelbottom=True)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        handles.append(plt.Line2D([], [], color="#555555", ls="--", lw=1.2))
        figure.legend(
            handles, [*labels, found["baseline"]], loc="outside upper center", ncols=len(handles), frameon=False
        )
        return figure

    return svg(draw, f"curves-{policy}")


def bars(found: Mapping[str, Any], policy: str) -> str:
    """Final pass@1 with intervals, and its difference to the baseline, a panel a group."""
    arms, base = list(found["arms"]), found["baseline"]
    of = {a: found["arms"][a]["policies"][policy]["accuracy"] for a in arms}
    groups = [g for g in GROUP_NAMES if g in of[arms[0]]]
    places = np.arange(len(arms))[::-1]  # the first arm on top

    def spread(e):
        return [[max(0.0, e["value"] - e["interval"][0])], [max(0.0, e["interval"][1] - e["value"])]]

    def draw(plt):
        figure, axes = plt.subplots(
            2, len(groups), figsize=(2.6 * len(groups) + 1.2, 0.6 * len(arms) + 2.6), sharey=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for column, group in enumerate(groups):
            upper, lower = axes[:, column]
            for place, arm in zip(places, arms):
                after, minus = of[arm][group]["after"], of[arm][group]["minus"].get(base)
                colour = VERDICTS[verdict(minus) if minus else "open"]
                upper.barh(place, after["value"], height=0.62, color=colour, alpha=0.75)
                upper.errorbar(after["value"], place, xerr=spread(after), color="black", capsize=2.5, lw=1.2)
                before = of[arm][group]["before"]["value"]
                upper.plot([before, before], [place - 0.36, place + 0.36], color="black", lw=1.6, ls=":")
                if minus:
                    lower.errorbar(
                        minus["value"], place, xerr=spread(minus), fmt="o", ms=5, color=colour, capsize=2.5, lw=1.6
                    )
            upper.set_title(GROUP_NAMES[group].replace(" can do", "\ncan do"), fontsize=10)
            upper.set_xlim(0, 1.02)
            upper.set_xlabel("pass@1 after training")
            lower.axvline(0, color="black", lw=0.8)
            lower.set_xlabel(f"minus {base}")
            for axis in (upper, lower):
                axis.grid(axis="x", alpha=0.25)
                axis.set_axisbelow(True)
                axis.set_yticks(places, arms)
                axis.set_ylim(-0.6, len(arms) - 0.4)
        marks = [plt.Rectangle((0, 0), 1, 1, color=c, alpha=0.75) for c in VERDICTS.values()]
        marks.append(plt.Line2D([], [], color="black", lw=1.6, ls=":"))
        names = [f"better than {base}", f"worse than {base}", "interval includes 0, or the baseline", "before training"]
        figure.legend(marks, names, loc="outside lower center", ncols=4, frameon=False)
        return figure

    return svg(draw, f"bars-{policy}")


def svg(draw, salt: str) -> str:
    """The SVG element of the figure that `draw(pyplot)` returns; the same numbers give the same text."""
    import matplotlib  # here, because most of the package works without

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({**STYLE, "svg.hashsalt": salt}):  # ids of their own, as several share one page
        figure = draw(plt)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]
