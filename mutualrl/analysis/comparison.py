"""From the folders of runs to the numbers of a comparison (`compare.json`).

    {"schema": 1, "baseline", "contrasts": [[arm, against]], "steps", "samples", "policies": [name],
     "groups": {policy: {group: [kinds]}}, "rule", "missing": {run: why},
     "arms": {arm: {"seeds": [s], "transfer", "label", "seconds", "bytes_sent", "dropped": {cause: n},
       "decoupling": {pair: {"before": A, "after": A}},
       "policies": {policy: {
         "accuracy": {group: {"before": E, "after": E, "gain": E, "minus": {other arm: E}}},
         "pass@k": {group: {k: {"before": E, "after": E}}},
         "half": {kind: {seed: step or null}}, "evaluation_noise",
         "metrics": {name: {"mean", "end"}}, "tokens": {"own": {…}, "joint": {…}}, "ratio": {"own": {…}, "joint": {…}},
         "curves": {group: {"steps": [n], "seeds": {seed: [accuracy]}}},
         "collapse": {seed: {signature: {…}}}, "label_curves": {metric: {"steps": [n], "seeds": {seed: [value]}}}}}}},
     "statements": […], "rows": [{"name", "value", "unit", "ratio_to": {arm: ratio}, "machine"}]}

E, an estimate: {"value", "interval": [low, high], "seeds": {seed: value}, "problems": n a seed}. Intervals are those of
`intervals.hierarchical_interval`, 95 %, each for itself: with many of them some miss by chance. Differences are paired
by seed and problem. A: what `decoupling.apart` returns. `collapse` and `label_curves` (see `labels`) are there only if
some arm learns from labels other than the verifier's. Groups of held-out problems, for each policy: `all`; `peer_only`,
kinds that it cannot do before training (pass@1 at most CANNOT, over all seeds) and another policy can (at least CAN);
`own_only`, the reverse; `main`, the rest. `half` is the first evaluation with at least half of a `peer_only` kind
right. Metrics are means over all steps (`mean`) and over the last quarter (`end`). Keys may be added, none is renamed
or removed within a schema.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mutualrl.analysis import claims, costs, decoupling, labels
from mutualrl.analysis.intervals import hierarchical_interval
from mutualrl.analysis.runs import Run
from mutualrl.settings import ConfigError

CAN, CANNOT = 0.5, 0.05
GROUPS = ("all", "main", "peer_only", "own_only")
METRICS = (
    "entropy", "kl/old", "kl/ref", "clip/low", "clip/high", "clip/dual", "clip/peer_low", "clip/peer_high",
    "clip/peer_dual", "grad_norm", "ratio/ess_frac", "ratio/log_mean", "kl_hat", "rescue/all_fail", "rescue/available",
    "rescue/used", "rescue/stuck", "peer_rows", "peer_tokens", "thl/bound", "thl/group_tokens", "reward/mean",
    "reward/group_std", "length/mean", "label/acc", "label/missing", "label/share", "label/reward_acc",
    "agreement", "wrong_consensus",
)  # fmt: skip


def collect(
    folders: Mapping[str, Mapping[int, Path]],
    *,
    baseline: str,
    contrasts: Sequence[tuple[str, str]] = (),
    failed: Mapping[str, str] = {},
) -> dict[str, Any]:
    """The numbers of a comparison, in the form described at the top of this file.

    Args:
      folders: arm -> seed -> folder of the run.
      baseline: the arm that the others are compared to. contrasts: further (arm, against).
      failed: `arm/seed` -> reason, of runs that failed.

    Raises:
      ConfigError: not one run is finished.
    """
    runs: dict[str, list[Run]] = {arm: [] for arm in folders}
    missing = {}
    for arm, by_seed in folders.items():
        for seed, folder in by_seed.items():
            name = f"{arm}/{seed}"
            try:
                if name in failed:
                    raise ValueError(failed[name].splitlines()[0])
                runs[arm].append(Run(arm, seed, Path(folder)))
            except (OSError, ValueError, KeyError) as error:
                missing[name] = f"{type(error).__name__}: {error}" if name not in failed else str(error)
    done = [r for arm in runs for r in runs[arm]]
    if not done:
        raise ConfigError("no run of the comparison is finished, so there is nothing to report")
    groups = find_groups(runs[baseline] or done)
    against = {arm: list(dict.fromkeys([baseline, *(b for a, b in contrasts if a == arm)])) for arm in runs}
    found = {
        "schema": 1,
        "baseline": baseline,
        "contrasts": [list(c) for c in contrasts],
        "steps": max(done[0].right),
        "samples": done[0].samples,
        "policies": list(groups),
        "groups": groups,
        "rule": f"kinds that a policy cannot do: pass@1 before training at most {CANNOT:g}, mean of all seeds of "
        f"{(runs[baseline] or done)[0].arm}; can do: at least {CAN:g}",
        "missing": missing,
        "arms": {
            arm: _arm(mine, {a: runs[a] for a in against[arm] if a != arm}, groups)
            for arm, mine in runs.items()
            if mine
        },
    }
    costs.add(found, runs)
    labels.add(found, runs)
    found["statements"] = claims.statements(found)
    found["rows"] = _rows(found)
    return found


def find_groups(runs: Sequence[Run]) -> dict[str, dict[str, list[str]]]:
    """policy -> group -> kinds, from evaluations before training."""
    policies, kinds = runs[0].policies, sorted(set(runs[0].kinds.tolist()))
    before = {p: {k: float(np.mean([r.passed(0, p, [k]).mean() for r in runs])) for k in kinds} for p in policies}
    out = {}
    for p in policies:
        others = [before[q] for q in policies if q != p]
        peer = [k for k in kinds if before[p][k] <= CANNOT and any(b[k] >= CAN for b in others)]
        own = [k for k in kinds if before[p][k] >= CAN and others and all(b[k] <= CANNOT for b in others)]
        out[p] = {
            "all": kinds,
            "main": [k for k in kinds if k not in peer + own],
            "peer_only": peer,
            "own_only": own,
        }
    return out


def estimate(parts: Mapping[int, tuple[np.ndarray, np.ndarray]], low: float = 0.0) -> dict[str, Any] | None:
    """A mean over seeds with its interval; None without seeds or problems.

    Args:
      parts: seed -> (f64[n] one number a problem, [n] kinds).
      low: smallest possible value; the largest is 1.
    """
    parts = {s: p for s, p in parts.items() if len(p[0])}
    if not parts:
        return None
    interval = hierarchical_interval([v for v, _ in parts.values()], [k for _, k in parts.values()])
    means = {str(s): float(v.mean()) for s, (v, _) in parts.items()}
    return {
        "value": float(np.mean(list(means.values()))),
        "interval": [min(1.0, max(low, x)) for x in interval],
        "seeds": means,
        "problems": min(len(v) for v, _ in parts.values()),
    }


def over_seeds(runs: Sequence[Run], policy: str, kinds: Sequence[str], steps: Sequence[int], k: int = 1) -> dict | None:
    """Estimate of pass@k after a step; with two steps, of pass@k after the first minus after the second."""
    parts = {}
    for r in runs:
        values = [r.passed(s, policy, kinds, k) for s in steps]
        parts[r.seed] = values[0] - values[1] if len(steps) > 1 else values[0], r.kinds[r.use(kinds)]
    return estimate(parts, low=1.0 - len(steps))


def difference(mine: Sequence[Run], others: Sequence[Run], policy: str, kinds: Sequence[str]) -> dict | None:
    """Estimate of final pass@1 of one arm minus another's, paired by seed and problem, over the seeds that both have.

    Raises:
      ConfigError: with the same seed the held-out problems differ.
    """
    theirs, parts = {r.seed: r for r in others}, {}
    for r in mine:
        if (other := theirs.get(r.seed)) is None:
            continue
        if r.ids != other.ids:
            raise ConfigError(f"{r.folder} and {other.folder} have other held-out problems; they cannot be compared")
        use = r.use(kinds) & other.use(kinds)
        a, b = (x.passed(max(x.right), policy, kinds, use=use) for x in (r, other))
        parts[r.seed] = a - b, r.kinds[use]
    return estimate(parts, low=-1.0)


def _arm(runs: Sequence[Run], others: Mapping[str, Sequence[Run]], groups: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of an arm, but for its costs."""
    last = max(runs[0].right)
    pairs = [(a, b) for i, a in enumerate(groups) for b in list(groups)[i + 1 :]]
    return {
        "seeds": [r.seed for r in runs],
        "transfer": runs[0].config["transfer"]["name"],
        "label": runs[0].label,
        "decoupling": {f"{a}/{b}": {w: _apart(runs, s, a, b) for w, s in (("before", 0), ("after", last))}
                       for a, b in pairs},
        "policies": {p: _policy(runs, others, p, of_group) for p, of_group in groups.items()},
    }  # fmt: skip


def _policy(runs: Sequence[Run], others: Mapping[str, Sequence[Run]], p: str, of_group: Mapping[str, Any]) -> dict:
    """What is said of a policy in an arm, but for its costs."""
    last = max(runs[0].right)
    ks = [k for k in (2, 4, 8, 16, 32, 64) if k <= runs[0].samples]
    accuracy, passed, curves = {}, {}, {}
    for group, kinds in of_group.items():
        if not kinds:
            continue
        before, after, gain = (over_seeds(runs, p, kinds, steps) for steps in ([0], [last], [last, 0]))
        minus = {a: d for a, o in others.items() if (d := difference(runs, o, p, kinds))}
        accuracy[group] = {"before": before, "after": after, "gain": gain, "minus": minus}
        passed[group] = {
            str(k): {"before": over_seeds(runs, p, kinds, [0], k), "after": over_seeds(runs, p, kinds, [last], k)}
            for k in ks
        }
        curves[group] = {
            "steps": list(runs[0].right),
            "seeds": {str(r.seed): [float(r.passed(s, p, kinds).mean()) for s in r.right] for r in runs},
        }
    return {
        "accuracy": accuracy,
        "pass@k": passed,
        "half": {k: {str(r.seed): first_half(r, p, k) for r in runs} for k in of_group["peer_only"]},
        "evaluation_noise": noise(runs, p, last),
        "metrics": _metrics(runs, p),
        "curves": curves,
    }


def first_half(run: Run, policy: str, kind: str) -> int | None:
    """First evaluated step with at least half of a kind right; None: never."""
    return next((s for s in run.right if run.passed(s, policy, [kind]).mean() >= 0.5), None)


def noise(runs: Sequence[Run], policy: str, step: int) -> float | None:
    """Standard deviation of one seed's pass@1 if the same checkpoint were evaluated again on the same problems (our
    definition): sqrt(sum over problems of s²/samples)/N, s² the variance between a problem's samples; root mean square
    over seeds. None with one sample a problem."""
    found = []
    for r in runs:
        if r.samples < 2:
            return None
        p = r.right[step][policy][r.judged] / r.samples
        found.append((p * (1 - p) / (r.samples - 1)).sum() / len(p) ** 2)
    return float(np.sqrt(np.mean(found)))


def _apart(runs: Sequence[Run], step: int, a: str, b: str) -> dict[str, Any]:
    """Decoupling of two policies after a step, mean over seeds."""
    tables = [decoupling.counts(*(decoupling.evaluated(r, step, p) for p in (a, b)))[r.judged] for r in runs]
    return decoupling.apart(tables, [r.kinds[r.judged] for r in runs])


def _metrics(runs: Sequence[Run], policy: str) -> dict[str, dict[str, float]]:
    """Means over steps, then over seeds. `rescue/available` and `rescue/used` are shares of the problems without an
    own success: over all of them, not over steps."""
    out = {}
    for name in METRICS:
        found: dict[str, list[float]] = {"mean": [], "end": []}
        for r in runs:
            steps, values = r.series(f"{policy}/{name}")
            weights = np.ones(len(steps))
            if name in ("rescue/available", "rescue/used"):
                at, stuck = r.series(f"{policy}/rescue/all_fail")
                weights = np.array([dict(zip(at.tolist(), stuck.tolist())).get(int(s), 0.0) for s in steps])
            for key, use in (("mean", steps > 0), ("end", steps > 0.75 * r.config["steps"])):
                if (total := weights[use].sum()) > 0:
                    found[key].append(float((weights[use] * values[use]).sum() / total))
        if found["mean"]:
            out[name] = {k: float(np.mean(v)) for k, v in found.items() if v}
    return out


def _rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The main numbers as a flat list; `ratio_to` names what a number was divided by, and the quotient."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    base, out = found["baseline"], []

    def number(arm, policy, group, when):
        e = found["arms"].get(arm, {}).get("policies", {}).get(policy, {}).get("accuracy", {}).get(group)
        return e and e[when]["value"]

    for arm, entry in found["arms"].items():
        for policy, p in entry["policies"].items():
            for group in p["accuracy"]:
                value, other = number(arm, policy, group, "after"), number(base, policy, group, "after")
                ratio = {base: value / other} if other and arm != base else {}
                out.append((f"{arm}/{policy}/{group}/after", value, "pass@1", ratio))
            for reading in ("own", "joint"):
                for kind, value in p["tokens"][reading].items():
                    ratio = {base: p["ratio"][reading][kind]} if kind in p["ratio"][reading] and arm != base else {}
                    unit = "seconds" if kind == "seconds" else "tokens"
                    out.append((f"{arm}/{policy}/{kind}/{reading}", value, unit, ratio))
    keys = ("name", "value", "unit", "ratio_to")
    return [{**dict(zip(keys, row)), "machine": machine} for row in out]
