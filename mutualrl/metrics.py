"""Numbers of a run: what they mean, and where they are written (JSONL, and TensorBoard through clu)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mutualrl import types
from mutualrl.advantages import failed_groups
from mutualrl.batches import from_peers
from mutualrl.files import replace_text
from mutualrl.types import Batch, GroupStats, Received, Rollouts, Verdicts


def masked_mean(x: np.ndarray, mask: np.ndarray) -> float:
    """Mean of x where mask is true; entries outside may be NaN. NaN if the mask is empty."""
    mask = np.asarray(mask, bool)
    total = np.where(mask, x, 0.0).sum(dtype=np.float64)
    return float(total / mask.sum()) if mask.any() else float("nan")


def effective_sample_size(weights: np.ndarray) -> float:
    """(sum w)² / sum w² of importance weights f[n]; between 1 and n."""
    w = np.asarray(weights, np.float64)
    return float(w.sum() ** 2 / (w**2).sum())


def of_rollouts(rollouts: Rollouts, verdicts: Verdicts) -> dict[str, float]:
    """Reward, success and length of one policy's rollouts. Lengths in tokens, from the record and not from any mask."""
    reward, lengths = verdicts.reward, rollouts.lengths
    valid = np.isfinite(reward)
    known = verdicts.success >= 0
    solved = (verdicts.success == 1).sum(-1)
    out = {
        "reward/mean": masked_mean(reward, valid),
        "reward/invalid": float((~valid).sum()),
        "success/mean": masked_mean(verdicts.success == 1, known),
        "rescue/all_fail": float(failed_groups(verdicts.success).mean()),
        "success/all_right": float(np.mean(solved == reward.shape[-1])),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "truncated_frac": float(np.mean(rollouts.finish == types.LENGTH)),
        "tokens/generated": float(lengths.sum()),
    }
    if valid.all():
        out["reward/group_std"] = float(reward.std(-1).mean())
    return {k: v for k, v in out.items() if v == v}


def of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Optimisation metrics of a step from the sums of its updates (see `losses.loss`).

    Every mean is a sum over all tokens of the step over their number; a mean over nothing is left out. Entropies,
    log-prob gaps and KLs in nats a token; `clip/*` shares of the surrogate's tokens whose gradient the clip has
    stopped, own rows and received ones (`peer_*`) each among themselves.
    """
    total = {k: sum(u[k] for u in updates) for k in updates[0] if k != "row_logp"}
    ratio = {
        "entropy": ("entropy", "tokens/own"),
        "mismatch/mean_abs": ("mismatch/sum_abs", "tokens/own"),
        "mismatch/kl": ("mismatch/kl", "tokens/own"),
        "kl/ref": ("kl/ref", "tokens/kl"),
        "kl/old": ("kl/old", "tokens/surrogate"),
        "clip/low": ("clip/low", "tokens/surrogate"),
        "clip/high": ("clip/high", "tokens/surrogate"),
        "clip/dual": ("clip/dual", "tokens/surrogate"),
        "clip/peer_low": ("clip/peer_low", "tokens/surrogate_peer"),
        "clip/peer_high": ("clip/peer_high", "tokens/surrogate_peer"),
        "clip/peer_dual": ("clip/peer_dual", "tokens/surrogate_peer"),
    }
    out = {name: total[num] / total[den] for name, (num, den) in ratio.items() if total[den]}
    out["mismatch/max_abs"] = max(u["mismatch/abs/max"] for u in updates)
    out["tokens/trained"] = total["tokens/trained"]
    out["kl/clamped"] = total["kl/clamped"]
    out["skipped_updates"] = total["skipped"]
    for key in ("loss", "loss/surrogate", "loss/nll", "loss/kl", "grad_norm", "lr"):
        out[key] = total[key] / len(updates)
    return out


def of_peers(
    verdicts: Verdicts,
    received: Received,
    stats: Sequence[GroupStats],
    batches: Sequence[Batch],
    updates: Sequence[Mapping[str, np.ndarray]],
    me: int,
) -> dict[str, float]:
    """What came from peers and what of it entered the updates of one learner.

    `rescue/all_fail` of `of_rollouts` is the share of problems whose own rollouts all fail; here `rescue/available` is
    the share of those for which some peer's success was heard (as a rollout or in group sums), `rescue/used` the share
    for which a received row was trained on; both are absent where nothing was heard. `peer_rows` and `peer_tokens`
    count what was trained on.

    Ratios of received rows in the surrogate whose source sent log-probs: w = exp((S_l - S_s)/n) with S_l, S_s the
    row's log-prob under learner and source and n its tokens under the learner (norm `learner`, our definition).
    `ratio/ess_frac` is the effective sample size of w over the rows; `ratio/log_*` are of log w in nats a token,
    `ratio/own_each` is the mean of S_l/n - S_s/n_source, `kl_hat` that of -log w.

    Args:
      batches, updates: of the step, in order; `updates` with `row_logp`.
      me: the learner's index.
    """
    stuck = failed_groups(verdicts.success)
    helped = (received.heard & (received.success == 1)).any(-1)
    for one in stats:
        helped |= one.n_success > 0
    heard = received.heard.any() or any((one.n > 0).any() for one in stats)
    used = np.zeros(len(stuck), bool)
    rows = tokens = 0
    logs, own_each = [], []
    for batch, update in zip(batches, updates):
        peer = from_peers(batch, me)
        used[batch.group[peer]] = True
        rows, tokens = rows + int(peer.sum()), tokens + int(batch.mask[peer].sum())
        ratio = peer & (batch.surr_weight != 0) & np.isfinite(batch.source_logp) & (batch.source_tokens > 0)
        n = np.maximum(batch.surr_mask.sum(-1), 1)[ratio]
        logs.append((update["row_logp"][ratio] - batch.source_logp[ratio]) / n)
        own_each.append(update["row_logp"][ratio] / n - batch.source_logp[ratio] / batch.source_tokens[ratio])
    out = {"peer_rows": float(rows), "peer_tokens": float(tokens)}
    if heard and stuck.any():
        out["rescue/available"] = float(helped[stuck].mean())
        out["rescue/used"] = float(used[stuck].mean())
    log = np.concatenate(logs) if logs else np.zeros(0)
    if len(log):
        out["ratio/ess_frac"] = effective_sample_size(np.exp(np.clip(log, -20, 20))) / len(log)
        out |= {"ratio/log_mean": log.mean(), "ratio/log_std": log.std(), "ratio/log_max": log.max()}
        out |= {"ratio/own_each": np.concatenate(own_each).mean(), "kl_hat": -log.mean()}
    return {k: float(v) for k, v in out.items()}


class MetricWriter:
    """Writes scalars to `metrics.jsonl` (one object a line) and to TensorBoard event files.

    `step` counts finished cohort steps: 1 is the first step, 0 an evaluation before it.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, keep_to: int = -1):
        """Args:
        folder: the run's folder.
        tensorboard: also write event files into `folder/tensorboard`. Imports TensorFlow.
        keep_to: finished steps of the checkpoint a run goes on from; later lines of an earlier try are removed.
        """
        self._path = folder / "metrics.jsonl"
        if self._path.exists():
            kept = [x for x in self._path.read_text().splitlines() if _step_of(x) <= keep_to]
            replace_text(self._path, "".join(x + "\n" for x in kept))
        self._file = self._path.open("a")
        self._board = None
        if tensorboard:
            # TensorFlow only writes event files here; its notes on how it would compute would hide ours.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
            os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
            from clu import metric_writers  # imports TensorFlow: seconds, so only where it is asked for

            self._board = metric_writers.SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one step's scalars (slash paths to numbers); those that are not finite are left out."""
        scalars = {k: v for k, v in scalars.items() if math.isfinite(v)}
        self._file.write(json.dumps({"step": step, **scalars}) + "\n")
        self._file.flush()
        if self._board:
            self._board.write_scalars(step, scalars)

    def close(self) -> None:
        """Flushes and closes."""
        self._file.close()
        if self._board:
            self._board.close()


def _step_of(line: str) -> float:
    """Step of a metrics line; a line cut in mid-write counts as beyond every step."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")
