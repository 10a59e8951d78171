"""AMPO-like replacement: where the learner always fails, peers' right answers take the place of some of its own.

Published (numbers from `exp_scripts/train_ampo.sh`): on a problem where no own rollout is right, 2 of 8 are replaced by
right answers of peers, those from whose reasoning the learner itself finds the reference answer most likely: its mean
log-prob a token of the reference answer, given the answer's reasoning. Where rewards are by labels, the label is the
reference. The group's advantages are those after the replacement. Replaced rows have the shaped objective of LUFFY,
p/(p + gamma) A.

Our definition: the last own rows leave, as many as there are candidates at most. Candidates are the usable right
answers that were not cut off. Their reasoning is the text up to the last place where the reference answer stands alone,
all of it if there is none. Reasoning and reference answer are encoded together, and the tokens with a byte of the
answer are counted. Candidates that cannot be ranked (no reference answer, or a row longer than the learner's) come
last; ties go to the first by source and sample. Nothing is ranked where all candidates are taken.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from mutualrl import assembly, batches, types
from mutualrl.advantages import failed_groups
from mutualrl.assembly import Material
from mutualrl.settings import SUCCESS, ConfigError, RunConfig, trained_with, within
from mutualrl.tokenizers import bridge
from mutualrl.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How many rows are replaced, and the shape of their objective."""

    replace: int = 2  # own rows of a problem, at most
    gamma: float = 0.1  # p/(p + gamma): the smaller, the more the unlikely tokens weigh


def topics(options: Options) -> tuple[str, ...]:
    """Texts, to be judged by the learner."""
    return ("rollout",)


def forms(options: Options) -> dict:
    """PPO for own rows, the shaped form for received ones."""
    return {"kinds": (types.PPO, types.SHAPE), "shape_gamma": options.gamma}


def labels(options: Options) -> tuple[int, str]:
    """Right or wrong."""
    return SUCCESS, "counts successes, which they do not tell"


def check(options: Options, run: RunConfig) -> None:
    """Refuses options out of their limits, and rewards that mean something else for every policy.

    Raises:
      ConfigError.
    """
    within("transfer.ampo.gamma", options.gamma, 0, open_low=True)
    within("transfer.ampo.replace", options.replace, 1)
    for name, policy in run.policies.items():
        if options.replace >= policy.group_size and not policy.frozen:
            raise ConfigError(
                f"transfer.ampo.replace={options.replace}: must be below policies.{name}.group_size={policy.group_size}"
            )
    trained_with(run, "ampo", ", which pools rewards", kl_in_reward=False)


def to_score(m: Material) -> Batch | None:
    """For each candidate to be ranked: its reasoning, followed by the reference answer."""
    use, tokens, mask, _ = answers(m)
    return batches.completions(m.own, np.nonzero(use)[0], tokens, mask) if use.any() else None


def build(m: Material) -> tuple[list[Batch], dict[str, float]]:
    """Own rows, those that were replaced without weight, then what replaces them.

    Metrics: `transfer/gated` share of problems where the learner fails and a peer does not; `transfer/replaced` rows.
    """
    use = chosen(m)
    count = use.sum(1)
    leaves = np.arange(m.reward.shape[1]) >= m.reward.shape[1] - count[:, None]
    received = assembly.received_rows(m, use)
    received.kind[:] = types.SHAPE
    rows = batches.join(assembly.own_rows(m), received)
    reward = np.concatenate([np.where(leaves, np.nan, m.reward).ravel(), assembly.received_reward(m)[use]])
    adv, valid = assembly.group_advantages(m, rows, reward)
    out = assembly.updates(m, rows, adv, valid & assembly.trainable(m, use))
    if not use.size:
        return out, {}
    return out, {"transfer/gated": float(candidates(m).any(1).mean()), "transfer/replaced": float(count.sum())}


def candidates(m: Material) -> np.ndarray:
    """bool[P, K] answers that may replace own rows. A problem of which no own rollout could be judged has none."""
    return failed_groups(m.verdicts.success)[:, None] & assembly.right_rows(m)


def chosen(m: Material) -> np.ndarray:
    """bool[P, K] the answers that replace own rows."""
    possible = candidates(m)
    score = np.full(possible.shape, -np.inf)
    use, _, _, answer = answers(m)
    if use.any():
        mean = np.where(answer, m.scored, 0.0).sum(-1, dtype=np.float64) / answer.sum(-1)
        score[use] = np.where(np.isnan(mean), -np.inf, mean)
    # By candidate or not, then by score; the sort is stable, so ties stay in the order of source and sample.
    order = np.lexsort((-score, ~possible), axis=-1)
    best = np.zeros(possible.shape, bool)
    np.put_along_axis(best, order[:, : m.options.replace], True, 1)
    return best & possible


def answers(m: Material) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The rows by which candidates are ranked.

    Returns:
      bool[P, K] candidates that have one; i32[R, T] their completions; bool[R, T] true on tokens; bool[R, T] true on
      those of the reference answer.
    """
    possible = candidates(m)
    possible &= (possible.sum(1) > m.options.replace)[:, None]
    length = m.own.mask.shape[-1]
    if not possible.any():
        return possible, np.zeros((0, length), np.int32), *np.zeros((2, 0, length), bool)
    table = bridge.ByteTable(m.tokenizer.token_bytes)
    n = m.received.n[possible]
    text, text_bytes = table.texts(m.received.tokens[possible], np.arange(length) < n[:, None])
    right = m.verdicts.labels or [x.answer for x in m.own.problems]
    references = [right[p] or "" for p in np.nonzero(possible)[0]]
    parts = [
        reasoning(row[:size].tobytes().decode(errors="replace"), reference)
        for row, size, reference in zip(text, text_bytes, references)
    ]
    wanted = [part + reference for part, reference in zip(parts, references)]
    encoded = [m.tokenizer.encode(x) for x in wanted]
    lengths = np.array([len(ids) for ids in encoded])
    tokens = np.zeros((len(encoded), max(length, lengths.max())), np.int32)
    mask = np.arange(tokens.shape[1]) < lengths[:, None]
    tokens[mask] = [i for ids in encoded for i in ids]
    again, again_bytes = table.texts(tokens, mask)
    exact = [row[:size].tobytes() == x.encode() for row, size, x in zip(again, again_bytes, wanted)]
    fits = (lengths <= length) & np.array(exact) & np.array([bool(x) for x in references])
    use = possible.copy()
    use[possible] = fits
    answer = mask & (table.ends(tokens, mask) > np.array([len(x.encode()) for x in parts])[:, None])
    return use, *(x[fits, :length] for x in (tokens, mask, answer))


def reasoning(text: str, reference: str) -> str:
    """What of a text comes before the last place where the reference answer stands alone; all of it without one."""
    places = [x.start() for x in re.finditer(rf"(?<!\w){re.escape(reference)}(?!\w)", text)] if reference else []
    return text[: places[-1]] if places else text
