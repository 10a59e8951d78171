"""On-policy distillation: peers score the learner's own texts, and every token is pushed towards what they say.

With one tokenizer (published: tinker-cookbook) A_t = coef (teacher's log-prob - the snapshot's) of each sampled token,
without discount or normalisation over the group. With two, the teacher's log-probs are carried to the learner's tokens
over the byte spans that both share. By the `prior` split (published: DPCA) A_t = coef (L_teacher - L_snapshot) q_t,
with q_t the token's share of the snapshot's log-prob of its group; by `even` the teacher's sum is spread evenly. Groups
of more than 6 tokens on either side have A = 0, and A is limited to ±10 (DPCA's). Before that, the advantages of a row
sum to coef times the log-ratio of teacher to snapshot.

The objective is sg(rho) A log p with rho truncated to [0, clip_high]: a score term, no clip stops it.

Our definition: several teachers are averaged over those that scored the row. Rows that none scored leave the surrogate,
unless the task's own advantages count too (`task_coef`). Tokens beyond the text (what a stop text or a character cut in
two took away) have A = 0, and so has the group of a token that lost part of its bytes. Where no row was scored the
batches are those of `none`, bit for bit.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl import assembly, types
from mutualrl.assembly import Material
from mutualrl.settings import OWN_SCALE, ConfigError, RunConfig, one_of, trained_with, within
from mutualrl.tokenizers import bridge
from mutualrl.types import Batch, Trace

ALLOWED = {"split": bridge.SPLITS, "granularity": bridge.GRANULARITIES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How the teachers' log-probs become advantages."""

    coef: float = 1.0  # of the teachers' advantages
    task_coef: float = 0.0  # of the task's own, added to them
    split: str = "prior"  # of a group's log-prob over the learner's tokens; or `even`
    granularity: str = "finest"  # of the alignment; or `word`
    max_group_tokens: int = 6  # longer groups teach nothing
    max_advantage: float = 10.0  # nats, of either sign
    clip_high: float = 2.0  # the ratio is truncated to it


def topics(options: Options) -> tuple[str, ...]:
    """Texts, and in a second round what peers make of the learner's."""
    return ("rollout", "teacher_score")


def forms(options: Options) -> dict:
    """Score terms; PPO in steps without a teacher."""
    return {"kinds": (types.PPO, types.SCORE)}


def labels(options: Options) -> tuple[int, str]:
    """Any: rewards are compared within the own group only."""
    return OWN_SCALE, ""


def check(options: Options, run: RunConfig) -> None:
    """Refuses what does not exist, options out of their limits, and ratios of whole texts.

    Raises:
      ConfigError.
    """
    for field, allowed in ALLOWED.items():
        one_of(f"transfer.distill.{field}", getattr(options, field), allowed)
    for field in ("coef", "max_advantage", "clip_high", "max_group_tokens"):
        within(f"transfer.distill.{field}", getattr(options, field), 0, open_low=True)
    within("transfer.distill.task_coef", options.task_coef, 0)
    if run.exchange.logs:
        raise ConfigError(
            f"exchange.logs={', '.join(run.exchange.logs)}: must be empty with transfer 'distill': a log cannot score"
        )
    trained_with(run, "distill", ratio_level="token")


def to_score(m: Material) -> Batch | None:
    """The own rows, where a teacher scored any."""
    return assembly.own_rows(m) if any(scored_by(m, t).any() for t in m.teachers) else None


def build(m: Material) -> tuple[list[Batch], dict[str, float]]:
    """The own rows with advantages token by token.

    Metrics: `transfer/taught` share of rows that a teacher scored; averages over teachers of `transfer/teacher_gap`,
    the mean of the teacher's minus the snapshot's log-prob a token in nats, of `transfer/long_groups`, the share of
    tokens in groups that are too long, and of those of `bridge.metrics`.
    """
    o, rows = m.options, assembly.own_rows(m)
    task, valid = assembly.group_advantages(m, rows, m.reward.ravel())
    heard = [t for t in m.teachers if scored_by(m, t).any()]
    if not heard:
        out = assembly.updates(m, rows, task, valid & assembly.trainable(m))
        return out, {"transfer/taught": 0.0} if m.teachers else {}
    taught, metrics = [], []
    adv = np.zeros(rows.mask.shape)
    for teacher in heard:
        one, found = teacher_advantages(m, teacher)
        adv += one
        taught.append(scored_by(m, teacher).ravel())
        metrics.append(found)
    count = np.sum(taught, 0)
    adv = adv / np.maximum(count, 1)[:, None] + o.task_coef * task[:, None]
    rows.kind[:] = types.SCORE
    rows.clip[:] = 0.0, o.clip_high
    surrogate = (count > 0) | (valid & (o.task_coef > 0))
    names = sorted({key for found in metrics for key in found})
    mean = {key: float(np.mean([found[key] for found in metrics if key in found])) for key in names}
    return assembly.updates(m, rows, adv, surrogate & assembly.trainable(m)), {
        "transfer/taught": float((count > 0).mean()),
        **mean,
    }


def scored_by(m: Material, teacher: Trace) -> np.ndarray:
    """bool[P, G] own rows that have a trace of their own and one by the teacher."""
    return teacher.valid & m.own_trace.valid


def teacher_advantages(m: Material, teacher: Trace) -> tuple[np.ndarray, dict[str, float]]:
    """f64[B, T] advantages of the own rows by one teacher, 0 where it says nothing, and metrics."""
    o, old = m.options, m.scored.reshape(m.own.mask.shape)
    t = m.own.mask.shape[-1]
    ends = np.pad(m.own_trace.ends, ((0, 0), (0, 0), (0, t - m.own_trace.ends.shape[-1])), mode="edge")
    n = m.own_trace.n
    teacher = dataclasses.replace(teacher, valid=scored_by(m, teacher))
    aligned = bridge.align(teacher, ends, n, granularity=o.granularity, split=o.split, prior=old)
    in_text = aligned.group >= 0
    stop = ~in_text & aligned.known & (m.own.finish == types.STOP)[..., None]
    long = (aligned.target_tokens > o.max_group_tokens) | (aligned.source_tokens > o.max_group_tokens)
    too_long = in_text & _of_tokens(long, aligned.group)
    taught = in_text | stop
    gap = np.where(taught, aligned.logp - np.where(taught, old, 0.0), 0.0)
    counts = taught & ~too_long & ~(in_text & _of_tokens(_broken(m, aligned.group, long.shape), aligned.group))
    adv = np.where(counts, np.clip(o.coef * gap, -o.max_advantage, o.max_advantage), 0.0)
    metrics = bridge.metrics(aligned, prior=old)
    if taught.any():
        metrics |= {
            "transfer/teacher_gap": float(gap[taught].mean()),
            "transfer/long_groups": float(too_long[taught].mean()),
        }
    return adv.reshape(-1, t), metrics


def _broken(m: Material, group: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """bool[P, G, W] groups with a token whose text is not all of its bytes: the last of a text that was cut."""
    broken = np.zeros(shape, bool)
    n, ends = m.own_trace.n, m.own_trace.ends
    for p, g in np.argwhere((m.own.finish != types.STOP) & (n > 0) & m.own_trace.valid):
        last = n[p, g] - 1
        start = ends[p, g, last - 1] if last else 0
        token = m.tokenizer.bytes_of([int(m.own.tokens[p, g, last])])
        if group[p, g, last] >= 0 and len(token) != ends[p, g, last] - start:
            broken[p, g, group[p, g, last]] = True
    return broken


def _of_tokens(groups: np.ndarray, group: np.ndarray) -> np.ndarray:
    """bool[..., T] what holds of each token's group, from bool[..., W]; false for tokens in none."""
    padded = np.concatenate([groups, np.zeros((*groups.shape[:-1], 1), bool)], -1)
    return np.take_along_axis(padded, group, -1)
