"""GRAFT: where the learner always fails and a peer sometimes succeeds, train on the peer's whole group instead.

Published (GRAFT paper, sections 4, A, B) for two policies with n rollouts each and k successes; k and n are here those
of the rollouts that were judged, in the learner's view:

    candidates  C(A to B): problems with k_B = 0 and 1 <= k_A < n
    balance     m = min(|C(A to B)|, |C(B to A)|): of its candidates each keeps the m with the largest k of the source,
                and all that tie with the last of them; none if m is 0
    group       the learner's whole group leaves, the source's whole group takes its place with the advantages it has
                within itself
    rows        s = exp(learner's mean log-prob a token - source's), each over its own tokens, the terminal stop id
                included where both have it. Rows with s > floor stay, weighted with min(s, 1); the others leave the
                surrogate and its denominators. Ratios are to the learner's snapshot
    placement   updates with such problems come last

Our definition beyond that: with several peers the source of a problem is the one with the largest k among those with
1 <= k < n, the first by index on ties. Peers that do not learn from this policy (logs, frozen ones) are not balanced
and do not enter m. m is the minimum of the number of its own candidates with a live source and, for each live peer, of
the problems where that peer fails and the learner or another live peer sometimes succeeds: with all_to_all what every
one of them could take over, with other topologies what they could if they heard what the learner hears. A group of
which no row can be trained on (not usable, or sent without log-probs) is not taken over. Rows of a group that is, but
cannot be trained on, count in its statistics.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl import advantages, assembly, batches, types
from mutualrl.assembly import Material
from mutualrl.settings import SUCCESS, RunConfig, trained_with, within
from mutualrl.tokenizers import bridge
from mutualrl.types import Batch

ESTIMATORS = ("grpo", "dr_grpo", "rloo")

PUBLISHED = {
    "estimator": "grpo",
    "aggregation": "token_mean",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "kl_coef": 0.0,
    "group_size": 8,
    "updates_per_step": 4,
    "lr": 1e-6,
    "weight_decay": 0.01,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Which groups and rows are taken over."""

    floor: float = 0.8  # compatibility s that a row must exceed
    balance: bool = True  # two policies take over about as many groups from each other


def topics(options: Options) -> tuple[str, ...]:
    """Texts, to be judged by the learner, and the source's log-probs."""
    return ("rollout", "trace")


def forms(options: Options) -> dict:
    """PPO surrogates; received rows at token level."""
    return {"kinds": (types.PPO,), "levels": (types.TOKEN,)}


def labels(options: Options) -> tuple[int, str]:
    """Right or wrong."""
    return SUCCESS, "counts successes, which they do not tell"


def check(options: Options, run: RunConfig) -> None:
    """Refuses a negative floor, and objectives in which two groups of different policies do not stand side by side.

    Raises:
      ConfigError.
    """
    within("transfer.graft.floor", options.floor, 0)
    trained_with(run, "graft", ", whose advantages are those within a group", estimator=ESTIMATORS)
    trained_with(run, "graft", ratio_level="token")
    trained_with(run, "graft", ", where peers' rewards have no such part", kl_in_reward=False)


def to_score(m: Material) -> Batch | None:
    """The rows of the groups taken over."""
    _, use, _ = taken_over(m)
    return assembly.received_rows(m, use) if use.any() else None


def build(m: Material) -> tuple[list[Batch], dict[str, float]]:
    """GRPO's batches, in which the groups taken over stand for the own ones of their problems; own rows of these
    problems carry no weight.

    Metrics: `transfer/candidates` problems, `transfer/balanced` those left after balancing, `transfer/replaced` those
    with a row that can be trained on; `transfer/kept` share of such rows above the floor, `transfer/compatibility` mean
    s of all of them, `transfer/weight` mean weight of those kept.
    """
    rows = assembly.own_rows(m)
    group, use, metrics = taken_over(m)
    replaced = group.any(1)
    s = compatibility(m, use)
    above = s > m.options.floor
    kept = np.zeros(use.shape, bool)
    kept[use] = above
    weight = np.minimum(s, 1.0)[above]

    last = kept.any(1)
    adv, valid = assembly.group_advantages(m, rows, m.reward.ravel(), last)
    surrogate = valid & ~replaced[rows.group]
    peer_adv = group_advantages(m, group)[kept] * weight
    rows = batches.join(rows, assembly.received_rows(m, kept))
    surrogate = np.concatenate([surrogate, np.ones(len(weight), bool)]) & assembly.trainable(m, kept)
    out = assembly.updates(m, rows, np.concatenate([adv, peer_adv]), surrogate, last=last)
    if len(s):
        metrics |= {"transfer/kept": float(above.mean()), "transfer/compatibility": float(s.mean())}
    if len(weight):
        metrics["transfer/weight"] = float(weight.mean())
    return out, metrics


def taken_over(m: Material) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Which groups take the place of own ones.

    Returns:
      bool[P, K] the rows heard of these groups; bool[P, K] those of them that can be trained on; metrics.
    """
    r = m.received
    if not r.heard.size:
        return r.heard, r.heard, {}
    problem, source = selected(m)
    names = np.unique(r.source)
    group = problem[:, None] & (r.source == names[source][:, None]) & r.heard
    use = group & r.usable & r.trace.valid & np.isfinite(r.reward)
    group = group & use.any(1, keepdims=True)
    metrics = {
        "transfer/candidates": float(candidates(m)[0].sum()),
        "transfer/balanced": float(problem.sum()),
        "transfer/replaced": float(group.any(1).sum()),
    }
    return group, use, metrics


def candidates(m: Material) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Problems where the learner fails and a peer sometimes succeeds.

    Returns:
      bool[P] candidates; i[P] the source of each, as an index into the sorted sources heard (0 where there is none);
      i[P, J] successes k of every source, -1 where it does not both succeed and fail.
    """
    right, wrong = counts(m)
    k = np.where((right > 0) & (wrong > 0), right, -1)
    return fails(*own_counts(m)) & (k > 0).any(1), k.argmax(1), k


def selected(m: Material) -> tuple[np.ndarray, np.ndarray]:
    """bool[P] the candidates that are left after balancing, i[P] their sources as in `candidates`."""
    r = m.received
    candidate, source, k = candidates(m)
    live = np.array([r.live[r.source == j].any() for j in np.unique(r.source)])
    two_way = candidate & live[source]
    if not (m.options.balance and two_way.any()):
        return candidate, source
    own_right, own_wrong = own_counts(m)
    right, wrong = counts(m)
    mixed = (right > 0) & (wrong > 0) & live
    # For each peer: the problems where it fails, and the learner or another live peer sometimes succeeds.
    others = (mixed.sum(1, keepdims=True) - mixed > 0) | ((own_right > 0) & (own_wrong > 0))[:, None]
    to_peers = fails(right, wrong) & others
    most = min(two_way.sum(), *to_peers[:, live].sum(0))
    best = k.max(1)
    least = np.sort(best[two_way])[-most] if most else np.inf
    return candidate & (~live[source] | (best >= least)), source


def own_counts(m: Material) -> tuple[np.ndarray, np.ndarray]:
    """i[P], i[P] right and wrong rollouts of the learner's own."""
    return (m.verdicts.success == 1).sum(1), (m.verdicts.success == 0).sum(1)


def counts(m: Material) -> tuple[np.ndarray, np.ndarray]:
    """i[P, J], i[P, J] right and wrong rollouts heard of every source, sources ascending."""
    r = m.received
    of = (np.unique(r.source)[:, None] == r.source).T.astype(np.int64)
    return tuple((r.heard & (r.success == verdict)).astype(np.int64) @ of for verdict in (1, 0))


def fails(right: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Whether nothing was right. Where nothing could be judged, nothing is known to have failed."""
    return (right == 0) & (wrong > 0)


def group_advantages(m: Material, group: np.ndarray) -> np.ndarray:
    """f64[P, K] advantages of received rows within their group (bool[P, K], one source a problem); 0 elsewhere."""
    adv = np.zeros(group.shape)
    adv[group], _ = advantages.group_advantages(
        assembly.received_reward(m)[group],
        np.nonzero(group)[0].tolist(),
        m.config.estimator,
        ddof=m.config.advantage_ddof,
        eps=m.config.advantage_eps,
    )
    return adv


def compatibility(m: Material, use: np.ndarray) -> np.ndarray:
    """f64[R] s of the scored rows: exp of the learner's mean log-prob a token minus the source's."""
    if m.scored is None:
        return np.zeros(0)
    counted, source_sum, source_tokens, text_bytes = assembly.both_sides(m, use)
    log_ratio = bridge.sequence_log_ratio(
        np.where(counted, m.scored, 0.0).sum(-1, dtype=np.float64),
        source_sum,
        learner_tokens=counted.sum(-1),
        source_tokens=source_tokens,
        text_bytes=text_bytes,
        norm="own_each",
    )
    return np.where(counted.any(-1), np.exp(log_ratio), 0.0)
