"""`summary.json`: what a run was and what came of it, in a stable form that figures are read from.

    {"schema": 1, "config": {…}, "versions": {package: version}, "seconds": s,
     "policies": {name: {"before": {"accuracy", "interval": [low, high], "n", …}, "after": {…}, "steps": n,
                         "tokens": {"generated", "trained", "scored"}}},
     "exchange": {"topics": […], "edges": {learner: [source]}, "kinds": {source: live|frozen|log},
                  "bytes_sent": {source: n}, "dropped": {"<source or learner>/<stage>/<cause>": rows}}}

`before` and `after` are results of `mutualrl.evaluate.evaluate` and are absent where nothing was evaluated; `steps`
counts optimiser updates; `seconds` adds up over resumed tries; `tokens` leave evaluation out; `exchange` is empty
where policies exchanged nothing; `dropped_problems` had too long a prompt, the gold answer of `dropped_golds` is not
accepted by the grader itself. Keys may be added, none is renamed or removed within a schema.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mutualrl.config import RunConfig
from mutualrl.files import replace_text
from mutualrl.policy import Policy

_PACKAGES = ("mutualrl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on, where installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def write_summary(
    workdir: Path, run: RunConfig, cohort: Sequence[Policy], progress: Mapping[str, Any], exchange: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes and returns the summary.

    Args:
      progress: the run's record: `seconds`, `tokens` by policy, `evaluations` by step (as text).
      exchange: from `Sharing.summary`.
    """
    evaluations = progress["evaluations"]
    policies = {}
    for p in cohort:
        entry: dict[str, Any] = {}
        if "0" in evaluations:
            entry["before"] = evaluations["0"][p.name]
        if str(run.steps) in evaluations:
            entry["after"] = evaluations[str(run.steps)][p.name]
        entry["steps"] = int(p.state["step"])
        entry["skipped_updates"] = int(p.state["skipped"])
        entry["tokens"] = {"generated": 0, "trained": 0, "scored": 0, **progress["tokens"][p.name]}
        policies[p.name] = entry
    summary = {
        "schema": 1,
        "config": dataclasses.asdict(run),
        "versions": {**versions(), "grader": progress["grader"]},
        "seconds": progress["seconds"],
        "policies": policies,
        "exchange": dict(exchange),
        "dropped_problems": progress["dropped"]["prompt"],
        "dropped_golds": progress["dropped"]["gold"],
    }
    replace_text(workdir / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary
