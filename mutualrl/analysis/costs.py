"""What each arm of a comparison cost, charged to each policy in two readings (methods 8.5).

`own`: the policy's own share. `joint`, the strict reading: everything that was spent so that this policy could learn.
That is its whole run, peers included, wherever policies hear each other; for an arm that listens to a log, also the run
that wrote it. Where nobody hears anybody the policies of a run are independent and `joint` is `own`.

Tokens leave evaluation out. Seconds are the median step's times the number of steps: without compiling, start and
evaluation. A policy's own share of them goes by its tokens of all kinds, which is an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("generated", "trained", "scored")


def add(found: dict[str, Any], runs: Mapping[str, Sequence[Any]]) -> None:
    """Adds `tokens` and `ratio` to every policy, `seconds`, `bytes_sent` and `dropped` to every arm of a comparison.

    Args:
      found: what `comparison.collect` has so far.
      runs: arm -> its finished `comparison.Run`s.
    """
    by_name = {(r.arm, r.seed): r for arm in runs for r in runs[arm]}
    for arm, entry in found["arms"].items():
        mine = runs[arm]
        entry["seconds"] = float(np.mean([seconds(r) for r in mine]))
        entry["bytes_sent"] = float(np.mean([sum(r.summary["exchange"].get("bytes_sent", {}).values()) for r in mine]))
        entry["dropped"] = _dropped(mine)
        for policy, p in entry["policies"].items():
            p["tokens"] = {
                "own": _mean([own(r, policy) for r in mine]),
                "joint": _mean([joint(r, policy, by_name) for r in mine]),
            }
    base = found["arms"].get(found["baseline"], {"policies": {}})["policies"]
    for entry in found["arms"].values():
        for policy, p in entry["policies"].items():
            unit = base[policy]["tokens"]["own"] if policy in base else {}
            p["ratio"] = {
                reading: {k: v / unit[k] for k, v in p["tokens"][reading].items() if unit.get(k)}
                for reading in ("own", "joint")
            }


def seconds(run: Any) -> float:
    """Training seconds of a run: the median step times the steps; 0 where no times were written."""
    stages = sorted({k for x in run.lines for k in x if k.startswith("time/")})
    steps = [sum(x.get(k, 0.0) for k in stages) for x in run.lines if any(k in x for k in stages)]
    return float(np.median(steps) * run.config["steps"]) if steps else 0.0


def own(run: Any, policy: str) -> dict[str, float]:
    """A policy's tokens by kind, and its share of the run's seconds."""
    tokens = {k: float(run.summary["policies"][policy]["tokens"][k]) for k in KINDS}
    total = sum(run.summary["policies"][p]["tokens"][k] for p in run.summary["policies"] for k in KINDS)
    return {**tokens, "seconds": seconds(run) * sum(tokens.values()) / total if total else 0.0}


def joint(run: Any, policy: str, by_name: Mapping[tuple[str, int], Any]) -> dict[str, float]:
    """The strict reading; see the top of this file. A log of which the run is not at hand costs nothing."""
    if run.config["transfer"]["name"] == "none" and run.label not in ("peer_vote", "pooled_vote"):
        return own(run, policy)
    # Each run once, however many of its logs are heard.
    heard = {_run_of(log["folder"]) for log in run.config["exchange"]["logs"].values()}
    parts = [own(r, p) for r in [run, *(by_name[h] for h in heard if h in by_name)] for p in r.summary["policies"]]
    return {k: sum(part[k] for part in parts) for k in parts[0]}


def _run_of(log: str) -> tuple[str, int]:
    """(arm, seed) of a log in `<workdir>/<arm>/<seed>/exchange.log`."""
    parts = Path(log).parts
    return (parts[-3], int(parts[-2])) if len(parts) > 2 and parts[-2].isdigit() else ("", -1)


def _mean(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {k: float(np.mean([p[k] for p in parts])) for k in parts[0]}


def _dropped(runs: Sequence[Any]) -> dict[str, float]:
    """Why texts were not used, with their number: mean over seeds."""
    out: dict[str, float] = {}
    for r in runs:
        for cause, count in r.summary["exchange"].get("dropped", {}).items():
            out[cause] = out.get(cause, 0.0) + count / len(runs)
    return out
