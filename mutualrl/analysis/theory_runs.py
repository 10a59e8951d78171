"""Real runs next to the theory of `mutualrl.analysis.theory`: where it says they end, and whether they went there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mutualrl.analysis.runs import Run
from mutualrl.settings import ConfigError

THERE = 0.05  # this near to its limit, a policy has arrived
LAWS = {"verifier": "right labels", "peer_vote": "peer votes", "self_vote": "self votes"}  # label source: law


def limits(start: Sequence[float], error: float = 0.0) -> dict[str, list[float | None]]:
    """Where two policies end under each law (our derivation), whatever K.

    Args:
      start: f[2] probabilities. error: standard error of each; a start within two of a separatrix has no known side.

    Returns:
      law -> limit of each policy, 0 or 1; None where the side is not known.
    """
    side = lambda x, noise: None if abs(x) <= 2 * noise else float(x > 0)
    together = side(sum(start) - 1, np.sqrt(2) * error)
    return {
        LAWS["verifier"]: [1.0, 1.0],
        LAWS["peer_vote"]: [together, together],
        LAWS["self_vote"]: [side(p - 0.5, error) for p in start],
    }


def agreement(
    law: str, start: Sequence[float], end: Sequence[float], limit: Sequence[float | None], error: float = 0.0
) -> bool | None:
    """Whether policies went where a law says (our definition, as runs end before limits).

    True if each is within THERE of its limit or has moved towards it by more than two standard errors, False if one has
    moved away by as much, None otherwise. Under peer votes it is the mean of both that is judged: there one may move
    away at first, but p_A + p_B always moves towards the limit.

    Args:
      law: a value of LAWS. start, end: f[2] probabilities. limit: of `limits`. error: standard error of each.
    """
    if law == LAWS["peer_vote"]:
        start, end, limit, error = [np.mean(start)], [np.mean(end)], limit[:1], error / np.sqrt(2)
    went = []
    for a, b, goal in zip(start, end, limit):
        if goal is None:
            went.append(None)
        elif abs(b - goal) <= THERE:
            went.append(True)
        else:
            gain = (b - a) * (1 if goal > a else -1)
            went.append(None if abs(gain) <= 2 * np.sqrt(2) * error else bool(gain > 0))
    return False if False in went else None if None in went else True


def of_run(run: Run) -> dict[str, Any]:
    """Evaluations of the first two policies that a run trained, a kind of problems a row.

    A kind is taken for one problem: its p is the mean over problems and samples. `error` is the largest standard error,
    over problems, of its four numbers.

    Returns:
      {policies, label, law (of LAWS, '' if none is its), transfer, steps, samples, kinds: {kind: {path: [steps][2],
      start, end, error, limits: {law: …}, agrees: {law: …}}}}.

    Raises:
      ConfigError: there are not two trained policies and two evaluations.
    """
    names = run.policies[:2]
    if len(names) < 2 or len(run.right) < 2:
        raise ConfigError(
            f"--run={run.folder}: has {len(run.policies)} trained policies and {len(run.right)} evaluations; at least "
            "2 of each are needed"
        )
    steps, kinds = list(run.right), {}
    for kind in sorted(set(run.kinds[run.judged].tolist())):
        each = [[run.passed(s, p, [kind]) for p in names] for s in steps]
        path = [[float(x.mean()) for x in pair] for pair in each]
        # At least that of one sample in all, as shares of 0 and 1 are not known to be exact either.
        n = len(each[0][0])
        error = max(1 / (n * run.samples), *(float(x.std() / np.sqrt(n)) for pair in (each[0], each[-1]) for x in pair))
        start, end = path[0], path[-1]
        of = limits(start, error)
        agrees = {law: agreement(law, start, end, limit, error) for law, limit in of.items()}
        kinds[kind] = {"path": path, "start": start, "end": end, "error": error, "limits": of, "agrees": agrees}
    return {
        "policies": names,
        "label": run.label,
        "law": LAWS.get(run.label, ""),
        "transfer": run.config["transfer"]["name"],
        "steps": steps,
        "samples": run.samples,
        "kinds": kinds,
    }
