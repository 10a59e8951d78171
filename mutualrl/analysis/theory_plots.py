"""Plots of the theory as SVG texts, its page and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mutualrl.analysis import pages, theory, theory_runs
from mutualrl.analysis.comparison_plots import svg

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7A5C00")  # Okabe–Ito
MARKERS = "osD^v"  # told apart where colours are used up
RIGHT, WRONG = "#DCEBF5", "#F7E3D6"  # basins: both right, both wrong
COLUMNS = 2  # panels side by side
RESCUE = (
    ("GRPO", 0.0, "#D55E00"),
    *zip(map("SGT {:g}".format, theory.LAMBDAS), theory.LAMBDAS, ("#0072B2", "#009E73")),
)
ANSWERS = {True: ("yes", ""), False: ("no", "worse"), None: ("open", "")}


def phase_plane(K: int, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Where two policies go that learn from each other's votes, with basins and separatrix; a panel a run, or one.

    Args:
      runs: name -> `theory_runs.of_run`; the path of each kind is drawn from the first evaluation (open) to the last.
    """
    panels = list(runs.items()) or [("", None)]
    kinds = sorted({k for run in runs.values() for k in run["kinds"]})
    axis_values = np.linspace(0, 1, 41)
    field = theory.co_rl(np.stack(np.meshgrid(axis_values, axis_values), -1), K)

    def draw(plt):
        columns = min(COLUMNS, len(panels))
        rows = -(-len(panels) // columns)
        figure, axes = plt.subplots(
            rows, columns, figsize=(4.9 * columns + (1.6 if kinds else 0), 4.9 * rows + 0.6), squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for axis, (name, run) in zip(axes.flat, panels):
            axis.fill([0, 1, 1], [1, 1, 0], color=RIGHT, lw=0)
            axis.fill([0, 1, 0], [1, 0, 0], color=WRONG, lw=0)
            axis.streamplot(
                axis_values, axis_values, field[..., 0], field[..., 1], color="#8A8A8A", linewidth=0.7, arrowsize=0.8,
                density=0.9, zorder=1,
            )  # fmt: skip
            axis.plot([0, 1], [1, 0], color="black", lw=1.6, ls="--", zorder=2)
            axis.plot(0.5, 0.5, "x", color="black", ms=8, mew=2, zorder=2)
            axis.plot([0, 1], [0, 1], "o", color="black", ms=8, zorder=2, clip_on=False)
            if run is None:
                said = dict(ha="center", va="center", bbox={"fc": "white", "ec": "none", "alpha": 0.85, "pad": 2})
                axis.text(0.72, 0.72, "both end right", zorder=3, **said)
                axis.text(0.28, 0.28, "both end wrong", zorder=3, **said)
                axis.text(0.78, 0.22, "$p_A + p_B = 1$", rotation=-45, fontsize=9, zorder=3, **said)
            else:
                axis.set_title(f"{name}\nlabels: {run['label']}, transfer: {run['transfer']}", fontsize=10)
                for kind, found in run["kinds"].items():
                    _path(axis, np.array(found["path"]), *_style(kinds.index(kind)))
            a, b = run["policies"] if run else ("policy A", "policy B")
            axis.set_xlabel(f"$p_A$, {a}" if run else "$p_A$")
            axis.set_ylabel(f"$p_B$, {b}" if run else "$p_B$")
            axis.set_xlim(-0.02, 1.02)
            axis.set_ylim(-0.02, 1.02)
            axis.set_aspect("equal")
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        if kinds:
            handles = [plt.Line2D([], [], color=c, marker=m, lw=2) for c, m in map(_style, range(len(kinds)))]
            handles.append(plt.Line2D([], [], color="#555555", marker="o", mfc="white", lw=0))
            figure.legend(handles, [*kinds, "first evaluation"], loc="outside right center", frameon=False)
        return figure

    return svg(draw, "phase")


def drifts(K: int) -> str:
    """dp/dt of one policy under each kind of label, and a stochastic run on complementary expertise."""
    p = np.linspace(0, 1, 401)
    lines = {
        "right labels (GRPO)": (theory.q(p, K), "#009E73", "-"),
        "own votes": (theory.self_drift(p, K), "#D55E00", "--"),
        "votes of an equal peer": (theory.co_rl(np.stack([p, p], -1), K)[:, 0], "#0072B2", "-"),
        "votes of a peer at .8": (theory.q(p, K) * theory.phi(0.8, K), "#56B4E9", ":"),
    }
    together = {
        "votes of the peer": (theory.complementary(True, K), "#0072B2", "-"),
        "own votes": (theory.complementary(False, K), "#D55E00", "--"),
    }

    def draw(plt):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.6, 4.2), layout="constrained")
        for name, (values, colour, style) in lines.items():
            left.plot(p, values, color=colour, ls=style, lw=2, label=name)
        left.axhline(0, color="black", lw=0.8)
        left.axvline(0.5, color="black", lw=0.8, ls=":")
        left.set_xlabel("p, probability of a right answer")
        left.set_ylabel("dp/dt, units of eta")
        left.set_title(f"One prompt, K = {K}", fontsize=11)
        for name, (values, colour, style) in together.items():
            right.plot(values.mean(1), color=colour, ls=style, lw=2, label=name)
        right.set_ylim(0.4, 1.02)
        right.set_xlabel("step, eta = 0.2")
        right.set_ylabel("mean p of both policies")
        right.set_title("Complementary expertise: (.9, .2) and (.2, .9)", fontsize=11)
        left.legend(frameon=False, loc="lower right", fontsize=9)
        right.legend(frameon=False, loc="center right", fontsize=9)
        for axis in (left, right):
            axis.grid(alpha=0.25)
        return figure

    return svg(draw, "drifts")


def rescue_times(K: int) -> str:
    """Time to one half against the start: 1/p0 for GRPO, log(1/p0) for SGT, solved and by the law for small p0."""
    p0 = np.logspace(-6, -1, 60)

    def draw(plt):
        figure, axes = plt.subplots(1, 2, figsize=(10.6, 4.2), layout="constrained")
        for name, lam, colour in RESCUE:
            solved = theory.time_to_half(lambda p, lam=lam: theory.sgt_speed(p, theory.PEER, K, lam), p0)
            law = theory.rescue_law(p0, theory.PEER, K, lam)
            for axis in axes if lam else axes[:1]:
                axis.plot(1 / p0, solved, color=colour, lw=2.2, label=name)
                axis.plot(1 / p0, law, color="black", lw=1, ls=":")
        for axis in axes:
            axis.set_xscale("log")
            axis.set_xlabel("1 / p0")
            axis.grid(alpha=0.25)
            handles, names = axis.get_legend_handles_labels()
            handles.append(plt.Line2D([], [], color="black", lw=1, ls=":"))
            axis.legend(handles, [*names, "law for small p0"], frameon=False, loc="upper left")
        axes[0].set_yscale("log")
        axes[0].set_ylabel("time to p = 1/2, units of 1/eta")
        axes[0].set_title(f"GRPO's time grows as 1/p0, K = {K}, peer at {theory.PEER:g}", fontsize=11)
        axes[1].set_title("SGT's time grows as log(1/p0)", fontsize=11)
        return figure

    return svg(draw, "rescue")


def run_table(run: Mapping[str, Any]) -> tuple[list[str], list[list[pages.Cell]]]:
    """A kind a row: where both policies start and end, and each law's limit with whether the run goes there."""
    names = ", ".join(run["policies"])
    laws = list(theory_runs.LAWS.values())
    head = ["kind", f"start {names}", f"end {names}"]
    head += [f"{law}{' *' * (law == run['law'])}" for law in laws]
    rows: list[list[pages.Cell]] = []
    for kind, found in run["kinds"].items():
        row: list[pages.Cell] = [(kind, ""), (_pair(found["start"]), ""), (_pair(found["end"]), "")]
        for law in laws:
            answer, mark = ANSWERS[found["agrees"][law]]
            row.append((f"{_limit(found['limits'][law])}: {answer}", mark))
        rows.append(row)
    return head, rows


def rescue_table(found: Mapping[str, Any]) -> tuple[list[str], list[list[pages.Cell]]]:
    """A start a row: time to one half solved, and by the law."""
    rescue = found["rescue"]
    names = list(rescue["time_to_half"])
    head = ["p0", *names, *(f"{n}, law" for n in names)]
    columns = [*rescue["time_to_half"].values(), *rescue["law"].values()]
    rows = [[(f"{p:g}", ""), *((f"{c[i]:,.1f}", "") for c in columns)] for i, p in enumerate(rescue["p0"])]
    return head, rows


def page(found: Mapping[str, Any]) -> str:
    """The whole HTML page."""
    K, runs = found["K"], found["runs"]
    ends = {n: np.mean(e["end"]) for n, e in found["complementary"].items()}
    parts = [
        f"<h1>What theory says, K = {K}</h1>",
        "<p>Binary answers, one parameter a prompt, gradient flow in the log-odds. Times are in units of 1/eta. The "
        "formulas are our own derivations in this model; the ideas of peer votes (Co-RL), of the rescue by a peer's "
        "success (SGT) and of pooled rollouts (PRP) are published.</p>",
        "<h2>Two policies that vote for each other</h2>",
        "<p>Blue: both end right. Orange: both end wrong. Dots: the limits. Dashed: the separatrix, with the saddle. "
        "Two policies are right together in the end if and only if their probabilities add up to more than 1.</p>",
        phase_plane(K, runs),
    ]
    for name, run in runs.items():
        parts += [f"<h3>{pages.text(name)}</h3>", pages.table(*run_table(run)), _note(run)]
    if runs:
        parts.append(pages.bullets(_reading()))
    parts += [
        "<h2>Drifts</h2>",
        f"<p>From (.9, .2) both policies are above .99 after {found['time_to_99']:.1f}. In the stochastic run, which "
        f"starts at .55, votes of the peer end at {ends['co-rl']:.3f} and own votes at {ends['self-reward']:.3f}.</p>",
        drifts(K),
        "<h2>Rescue</h2>",
        "<p>A policy that hardly ever succeeds waits for its first success with GRPO. With SGT a peer's success is "
        "imitated whenever all of its own samples fail.</p>",
        rescue_times(K),
        pages.table(*rescue_table(found)),
        f"<p class=note>The law leaves out a constant, the time spent where p is no longer small. Advantages divide by "
        f"the population standard deviation; with the sample's, all speeds are {found['sample_std_factor']:.4f} times "
        "as high.</p>",
    ]
    return pages.document("Theory", parts)


def show(found: Mapping[str, Any]) -> None:
    """Prints a table a run, and the rescue times."""
    console = Console()
    tables = [(f"{name}: labels {run['label']}", *run_table(run)) for name, run in found["runs"].items()]
    tables.append((f"Time to p = 1/2, K = {found['K']}, peer at {theory.PEER:g}, units of 1/eta", *rescue_table(found)))
    for title, head, rows in tables:
        table = Table(title=title)
        for i, name in enumerate(head):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*(f"[red]{x}[/]" if mark == "worse" else x.replace("[", r"\[") for x, mark in row))
        console.print(table)
    if found["runs"]:
        console.print(
            "Each law: the limit from this start, and whether the run goes there. *: the law of the run's own labels. "
            "?: too near the separatrix to say.",
            highlight=False,
        )
    ends = {n: np.mean(e["end"]) for n, e in found["complementary"].items()}
    console.print(
        f"Complementary expertise from .55: peer votes {ends['co-rl']:.3f}, own votes {ends['self-reward']:.3f}.",
        highlight=False,
    )


def _path(axis, path: np.ndarray, colour: str, marker: str) -> None:
    """One kind of problems over the evaluations: a line, its first point open, an arrow into the last."""
    axis.plot(path[:, 0], path[:, 1], color=colour, lw=1.4, alpha=0.8, zorder=4, clip_on=False)
    axis.plot(*path[0], marker, color=colour, mfc="white", ms=7, mew=1.8, zorder=5, clip_on=False)
    moved = np.flatnonzero(np.abs(path - path[-1]).max(1) > 0.03)
    if len(moved):  # the arrow comes from far enough to have a direction
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 2.2, "shrinkA": 0, "shrinkB": 3, "mutation_scale": 16}
        axis.annotate("", xy=path[-1], xytext=path[moved[-1]], arrowprops=arrow, zorder=5, annotation_clip=False)
    axis.plot(*path[-1], marker, color=colour, ms=6, zorder=5, clip_on=False)


def _style(i: int) -> tuple[str, str]:
    return COLOURS[i % len(COLOURS)], MARKERS[i // len(COLOURS) % len(MARKERS)]


def _note(run: Mapping[str, Any]) -> str:
    law = run["law"]
    which = f"* {law}: the law of this run's labels" if law else "this model has no law for the labels of this run"
    return (
        f"<p class=note>{run['steps'][-1]} steps, {len(run['steps'])} evaluations, {run['samples']} samples a problem; "
        f"labels: {pages.text(run['label'])}, transfer: {pages.text(run['transfer'])}; {which}.</p>"
    )


def _reading() -> list[str]:
    return [
        "A kind is taken for one problem of this model: p is the mean of its held-out problems.",
        "right labels, peer votes, self votes: where a law ends from the start of the kind, and whether the run goes "
        f"there. yes: it is within {theory_runs.THERE:g}, or has moved towards it by more than two standard errors. "
        "no: it has moved away by as much. open: neither, or the limit is not known. Each policy is judged; under peer "
        "votes the mean of both, as there one may move away at first.",
        "?: the start is within two standard errors of the separatrix.",
        "Transfer between policies is not part of these laws.",
    ]


def _pair(p: list[float]) -> str:
    return ", ".join(f"{x:.2f}" for x in p)


def _limit(limit: list[float | None]) -> str:
    return ", ".join("?" if x is None else f"{x:.0f}" for x in limit)
