"""How differently two policies fail on the same problems."""

from __future__ import annotations


def decoupling(both: int, only_a: int, only_b: int, neither: int, same_wrong: int = 0) -> dict[str, float]:
    """Agreement statistics of two policies (our definitions; the Co-RL paper gives values only).

    Args:
      both, only_a, only_b, neither: number of problems that both, one or none of the two get right.
      same_wrong: problems on which both are wrong with equal answers.

    Returns:
      p_o observed and p_e expected agreement, kappa = (p_o - p_e)/(1 - p_e) (absent where undefined),
      c = percent of problems that exactly one gets right, w = percent both get wrong with equal answers.
    """
    n = both + only_a + only_b + neither
    p_o = (both + neither) / n
    a, b = (both + only_a) / n, (both + only_b) / n
    p_e = a * b + (1 - a) * (1 - b)
    out = {"p_o": p_o, "p_e": p_e, "c": 100 * (1 - p_o), "w": 100 * same_wrong / n}
    if p_e < 1:
        out["kappa"] = (p_o - p_e) / (1 - p_e)
    return out
