"""What a person sees: progress with time left, warnings once, and the table at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from mutualrl import sources
from mutualrl.config import RunConfig
from mutualrl.meshes import Plan

PLAIN_EVERY_S = 10.0  # seconds between lines where there is no terminal


class Progress:
    """A progress bar on a terminal, plain lines elsewhere. Use as a context manager."""

    def __init__(self, title: str, total: int, *, done: int = 0, console: Console | None = None):
        """Args:
        title: what is going on. total: units in all. done: units already done.
        """
        self.console = console or Console(stderr=True)
        self.title, self.total, self.done = title, total, done
        self._first, self._start, self._printed = None, 0.0, 0.0
        self._bar = None
        if self.console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task(title, total=total, completed=done, note="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, note: str = "") -> None:
        """Shows that `done` units are done, with a short note."""
        self.done = done
        if self._bar:
            self._bar.update(self._task, completed=done, note=note)
            return
        now = time.monotonic()
        if self._first is None:  # the clock starts here: the first unit of work includes compiling
            self._first, self._start = done, now
        if done < self.total and now - self._printed < PLAIN_EVERY_S:
            return
        self._printed = now
        speed = (done - self._first) / max(now - self._start, 1e-9)
        left = f", {_duration((self.total - done) / speed)} left" if speed and done < self.total else ""
        self.console.print(f"{self.title} {done}/{self.total} {note}".rstrip() + left, highlight=False)


def _duration(seconds: float) -> str:
    seconds = int(seconds)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"


class Warnings:
    """Warns of a thing once a run, and counts the rest."""

    def __init__(self):
        self.counts: dict[str, int] = {}

    def __call__(self, key: str, message: str) -> None:
        """Logs `message` the first time `key` comes up."""
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.counts[key] == 1:
            logging.warning(message)


def show_start(run: RunConfig, plan: Plan, opened: Mapping[str, Any]) -> None:
    """Prints what is about to be trained, and where: one line a policy."""
    turns = "at the same time, each on its own devices" if plan.concurrent else "in turns on the same devices"
    hears = sources.edges(run) if run.transfer["name"] != "none" else {}
    console = Console(stderr=True)
    steps = f"{run.steps} steps of {run.problems_per_step} problems, labels by {run.label['name']}"
    console.print(f"{steps}; policies compute {turns}:", highlight=False)
    for name, p in run.policies.items():
        model, mesh = opened[name].config, plan.meshes[name]
        what = f"{model.model_type}, {model.num_layers} layers, width {model.hidden_size}, {model.vocab_size} ids"
        how = f"{p.estimator}, G={p.group_size}, {p.aggregation}"
        where = f"mesh {mesh.shape['fsdp']} x {mesh.shape['tensor']}"
        heard = ", ".join(s.name for s in hears.get(name, ()))
        peers = "frozen" if p.frozen else f"{run.transfer['name']} from {heard}" if heard else "learns alone"
        console.print(f"  {name}: {what}; {how}; {peers}; {where}", highlight=False, soft_wrap=True)


def results_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
    """Pass@1 on held-out problems by policy and kind, before and after, with bootstrap intervals.

    Args:
      before, after: results of `mutualrl.evaluate.evaluate`.
    """
    table = Table(title="Held-out problems, pass@1 [95 % bootstrap interval over problems]")
    for column in ("policy", "kind", "problems", "before", "after", "change"):
        table.add_column(column, justify="left" if column in ("policy", "kind") else "right")
    for name in after:
        kinds = after[name].get("kinds", {})
        rows = [*(k for k in kinds if k in before[name].get("kinds", {})), "all"]
        for i, kind in enumerate(rows):
            b, a = (x[name] if kind == "all" else x[name]["kinds"][kind] for x in (before, after))
            table.add_row(
                name if i == 0 else "",
                kind,
                str(a["n"]),
                _cell(b),
                _cell(a),
                f"{a['accuracy'] - b['accuracy']:+.2f}",
                style="bold" if kind == "all" else None,
                end_section=kind == "all",
            )
    return table


def _cell(result: Mapping[str, Any]) -> str:
    low, high = result["interval"]
    return f"{result['accuracy']:.2f} [{low:.2f}, {high:.2f}]"


def show_end(summary: Mapping[str, Any], workdir: Path) -> None:
    """Prints the table of a finished run, its folder, and where to look next."""
    console = Console()
    policies = summary["policies"]
    if all("before" in p and "after" in p for p in policies.values()):
        before, after = ({n: p[when] for n, p in policies.items()} for when in ("before", "after"))
        console.print(results_table(before, after))
    if dropped := {k: n for k, n in summary["exchange"].get("dropped", {}).items() if n}:
        most = ", ".join(f"{k} {n}" for k, n in sorted(dropped.items(), key=lambda x: -x[1])[:3])
        total = sum(dropped.values())
        console.print(f"\nDropped or missing between policies: {total} ({most}; all in summary.json)", highlight=False)
    console.print(f"\n{_duration(summary['seconds'])} in all. The run is in {workdir}:", highlight=False)
    for name, what in (
        ("summary.json", "results, settings and versions"),
        ("metrics.jsonl", "every metric of every step"),
        ("held_out.json", "right samples and wrong answers of every held-out problem"),
        ("exchange.log/", "what policies published, as Parquet"),
        ("tensorboard/", f"tensorboard --logdir {workdir}"),
        ("checkpoints/", "all policies; more --config.steps goes on from here"),
    ):
        if (workdir / name).exists():
            console.print(f"  {name:<15} {what}", highlight=False)
