"""Rewards to advantages, and the weight of a row in an aggregation. Host-side float64 numpy.

Groups are keyed by whatever hashable the caller gives (step, problem id, policy), never by tokens or by position:
two equal prompts do not merge and a tiled order does not split a group.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "batch_std", "reinforce_pp_baseline")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo")

# Range of rewards at or below which a group has no spread. A range test in float64, not a test of the standard
# deviation: rounding leaves a residue in the latter even where all rewards are equal.
ZERO_RANGE = 1e-7


def group_advantages(
    rewards: np.ndarray,
    groups: Sequence[Hashable],
    estimator: str = "grpo",
    *,
    ddof: int = 1,
    eps: float = 1e-6,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages of rollouts against their own group.

    Estimators, with mu and sd over the valid rewards of a group of n (published sources in brackets):
      grpo: (r - mu)/(sd + eps) [verl; eps 1e-4 is TRL's]
      dr_grpo: r - mu [understand-r1-zero]
      rloo: r - mean of the others = n/(n-1) (r - mu)
      batch_std: (r - mu)/(sd of all raw rewards of the update + eps) [TRL `scale_rewards="batch"`]
      reinforce_pp_baseline: (r - mu)/(sd of all r - mu of the update + eps), whose mean is 0 already
        [REINFORCE++-baseline]

    Args:
      rewards: f[R]; a non-finite reward makes its row invalid.
      groups: R hashable keys.
      estimator: one of ESTIMATORS.
      ddof: 1 sample, 0 population standard deviation.
      eps: added to the standard deviation.

    Returns:
      advantages f64[R] (0 on invalid rows, in groups without spread, and in groups with one valid row) and
      valid bool[R].

    Raises:
      ValueError: unknown estimator, or lengths that differ.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator={estimator!r}: allowed are {', '.join(ESTIMATORS)}")
    r = np.asarray(rewards, np.float64)
    if r.ndim != 1 or len(groups) != len(r):
        raise ValueError(f"rewards {r.shape} and {len(groups)} group keys must be two lists of equal length")
    valid = np.isfinite(r)
    index = {key: i for i, key in enumerate(dict.fromkeys(groups))}
    g = np.array([index[key] for key in groups], np.int64)
    filled = np.where(valid, r, 0.0)

    n = np.bincount(g, valid, len(index))
    mean = np.bincount(g, filled, len(index)) / np.maximum(n, 1)
    centred = np.where(valid, r - mean[g], 0.0)
    low, high = np.full(len(index), np.inf), np.full(len(index), -np.inf)
    np.minimum.at(low, g[valid], r[valid])
    np.maximum.at(high, g[valid], r[valid])
    spread = (n >= 2) & (high - low > ZERO_RANGE)
    centred = np.where(spread[g], centred, 0.0)

    if estimator == "dr_grpo":
        scale = np.ones_like(centred)
    elif estimator == "rloo":
        scale = (n / np.maximum(n - 1, 1))[g]
    elif estimator == "grpo":
        # Two passes: E[x^2] - E[x]^2 loses small differences.
        var = np.bincount(g, centred**2, len(index)) / np.maximum(n - ddof, 1)
        scale = np.divide(1.0, np.sqrt(var) + eps, out=np.zeros_like(var), where=spread)[g]
    elif estimator == "batch_std":
        scale = _inverse_std(r[valid], ddof, eps)
    else:
        scale = _inverse_std(centred[valid], ddof, eps)
    return centred * scale, valid


def _inverse_std(values: np.ndarray, ddof: int, eps: float) -> float:
    """1/(sd + eps) over all values; 0 where they have no spread, so that advantages vanish instead of blowing up."""
    if len(values) < 2 or np.ptp(values) <= ZERO_RANGE:
        return 0.0
    return 1.0 / (values.std(ddof=ddof) + eps)


def row_weights(aggregation: str, lengths: np.ndarray, rows: np.ndarray, constant_length: int) -> np.ndarray:
    """Coefficient of each row's tokens in the loss, over the whole update.

      token_mean 1/sum n (DAPO, verl) · seq_mean_token_mean 1/(n #R) (original GRPO) ·
      seq_mean_token_sum 1/#R · dr_grpo 1/(#R constant_length) (understand-r1-zero)

    Args:
      aggregation: one of AGGREGATIONS.
      lengths: i[B] tokens of each row that the term counts.
      rows: bool[B] members of the term; rows that a filter removed leave numerator and denominator.
      constant_length: configured maximum completion length in tokens (`dr_grpo` only).

    Returns:
      f64[B], 0 outside `rows` and on rows without tokens.

    Raises:
      ValueError: unknown aggregation.
    """
    n = np.asarray(lengths, np.float64)
    rows = np.asarray(rows, bool) & (n > 0)
    count = max(1, int(rows.sum()))
    if aggregation == "token_mean":
        w = np.full(n.shape, 1.0 / max(1.0, float(n[rows].sum())))
    elif aggregation == "seq_mean_token_mean":
        w = 1.0 / (np.maximum(n, 1) * count)
    elif aggregation == "seq_mean_token_sum":
        w = np.full(n.shape, 1.0 / count)
    elif aggregation == "dr_grpo":
        w = np.full(n.shape, 1.0 / (count * constant_length))
    else:
        raise ValueError(f"aggregation={aggregation!r}: allowed are {', '.join(AGGREGATIONS)}")
    return np.where(rows, w, 0.0)


def overlong_penalty(lengths: np.ndarray, max_length: int, buffer: int, factor: float = 1.0) -> np.ndarray:
    """DAPO's soft length penalty, added to rewards before group statistics (published: verl `docs/algo/dapo.md`).

    Args:
      lengths: i[...] completion lengths in tokens.
      max_length: longest completion in tokens.
      buffer: tokens before `max_length` over which the penalty grows from 0 to `factor`.

    Returns:
      f64[...] in [-factor, 0].

    Raises:
      ValueError: `buffer` is not in 1..max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"overlong_buffer={buffer}: must be between 1 and max_new_tokens={max_length}")
    excess = np.asarray(lengths, np.float64) - (max_length - buffer)
    return np.minimum(-excess / buffer * factor, 0.0)


def mixed_groups(success: np.ndarray) -> np.ndarray:
    """Groups that carry a learning signal: some rollouts right, some not (DAPO's dynamic sampling).

    Args:
      success: i8[P, G] verdicts of the active label source, 1 right, 0 wrong, -1 unknown.

    Returns:
      bool[P].
    """
    right = (np.asarray(success) == 1).sum(-1)
    return (right > 0) & (right < np.shape(success)[-1])


def failed_groups(success: np.ndarray) -> np.ndarray:
    """Groups of which something could be judged, and nothing was right.

    Args:
      success: i8[P, G] verdicts, 1 right, 0 wrong, -1 unknown.

    Returns:
      bool[P].
    """
    success = np.asarray(success)
    return ~(success == 1).any(-1) & (success == 0).any(-1)
