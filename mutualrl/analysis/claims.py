"""Sentences of a comparison, made from its numbers and never saying more than their intervals do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALL = 0.02  # with a single seed no difference below this is called one

GROUP_NAMES = {
    "all": "all held-out problems",
    "main": "the main kinds",
    "peer_only": "kinds only the peer can do",
    "own_only": "kinds only this policy can do",
}


def verdict(e: Mapping[str, Any]) -> str:
    """`better`, `worse`, or `open` where the interval includes 0 or one seed is too little."""
    low, high = e["interval"]
    if low <= 0 <= high or (len(e["seeds"]) == 1 and abs(e["value"]) < SMALL):
        return "open"
    return "better" if low > 0 else "worse"


def signed(e: Mapping[str, Any]) -> str:
    """`+0.123 [+0.100, +0.150]`."""
    low, high = e["interval"]
    return f"{e['value']:+.3f} [{low:+.3f}, {high:+.3f}]"


def statements(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Every comparison in a sentence, harm first, then what helps, then what is open.

    Args:
      found: what `comparison.collect` has so far.

    Returns:
      [{"verdict", "arm", "against", "policy", "group", "text"}]
    """
    out = []
    for arm, entry in found["arms"].items():
        for policy, p in entry["policies"].items():
            for group, a in p["accuracy"].items():
                for other, e in a["minus"].items():
                    out.append((verdict(e), arm, other, policy, group, _sentence(e, arm, other, policy, group)))
                if (loss := a["gain"]) and verdict(loss) == "worse":
                    text = (
                        f"training with {arm} made {policy} worse than it was on {GROUP_NAMES[group]}: {signed(loss)}"
                    )
                    out.append(("worse", arm, "before", policy, group, text + _alone(loss)))
    rank = {"worse": 0, "better": 1, "open": 2}
    keys = ("verdict", "arm", "against", "policy", "group", "text")
    return [dict(zip(keys, s)) for s in sorted(out, key=lambda s: rank[s[0]])]  # stable: else in the order of the arms


def _sentence(e: Mapping[str, Any], arm: str, other: str, policy: str, group: str) -> str:
    where = f"on {GROUP_NAMES[group]}"
    if (found := verdict(e)) == "open":
        low, high = e["interval"]
        why = "the interval includes 0" if low <= 0 <= high else f"one seed decides nothing below {SMALL:g}"
        return f"{arm} against {other}, {policy} {where}: no difference shown, {signed(e)}; {why}"
    helps = {"better": "is better than", "worse": "is worse than"}[found]
    return f"{arm} {helps} {other} for {policy} {where}: {signed(e)}{_alone(e)}"


def _alone(e: Mapping[str, Any]) -> str:
    return "; one seed only, so this says nothing about others" if len(e["seeds"]) == 1 else ""


def harm(found: Mapping[str, Any]) -> str:
    """The first sentence of a report: who was harmed, against the baseline or against its own start."""
    base = found["baseline"]
    cases = [s for s in found["statements"] if s["verdict"] == "worse" and s["against"] in (base, "before")]
    if cases:
        return f"Harm to either side: {len(cases)} case{'s' * (len(cases) > 1)} established."
    return f"Harm to either side: none established, neither against {base} nor against the state before training."
