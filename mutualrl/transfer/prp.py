"""PRP: peers' rollouts join the learner's group as rows of its surrogate (our definition of it; methods 4.1).

The pool of a problem is the own rows and all usable received rows that have a valid reward; advantages come from the
pool by the policy's estimator, before any row is filtered. Own rows keep their ratio to the snapshot. The ratio of a
received row is to, by variant (one must be named):

    prp_snapshot  the learner's snapshot: 1 at the first update, so the clip cannot see how foreign the text is
    prp_thl       the peer's log-probs, aligned to the learner's tokens; tokens without one leave the surrogate
    prp_seq       the peer's log-prob of the whole text, at sequence level, divided by `norm`; exact for every
                  alignment. The clip is wide because one of 3e-4 would stop every foreign row

Received rows with a negative advantage are the dangerous half; `negatives` says what is done with them:

    keep       nothing beyond the clip and the dual clip
    drop       they leave the surrogate and its denominators
    filter_kl  so do those with (log-prob of the source - log-prob of the snapshot)/tokens above a threshold (F-TIS)
    topr       all received rows are score terms: weight 1 with A > 0, the ratio truncated to [0, 1] with A < 0 (TOPR,
               arXiv 2503.14286)

A problem of which no own rollout could be judged is still trained on, by its received rows alone.

Expect it to help the stronger policy and to hurt the weaker one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl import assembly, batches, types
from mutualrl.assembly import Material
from mutualrl.settings import OWN_SCALE, SUCCESS, ConfigError, RunConfig, one_of, trained_with, within
from mutualrl.tokenizers import bridge
from mutualrl.types import Batch

ALLOWED = {
    "scope": ("pool", "per_policy"),
    "variant": ("prp_snapshot", "prp_thl", "prp_seq"),
    "split": bridge.SPLITS,
    "granularity": bridge.GRANULARITIES,
    "norm": bridge.NORMS,
    "negatives": ("keep", "drop", "filter_kl", "topr"),
    "topr_level": ("token", "sequence"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How received rows enter the surrogate."""

    variant: str = ""  # must be named
    scope: str = "pool"  # whose rewards are in a row's mean and deviation; `per_policy`: those of its writer
    split: str = "even"  # of a group's log-prob over the learner's tokens (prp_thl); or `prior`
    granularity: str = "word"  # of the alignment (prp_thl); or `finest`
    norm: str = "learner"  # divisor of the log-ratio (prp_seq): learner's tokens; `own_each`, `byte`, `sum` (1)
    max_peers: int = 0  # a problem: the first by source index that sent something; 0: all
    peer_rows_per_prompt: int = 0  # a random subset; 0: all
    pool_weight: float = 1.0  # of received rows in the surrogate
    negatives: str = "keep"  # or `drop`, `filter_kl`, `topr`
    filter_kl_threshold: float = 0.3  # nats a token
    topr_level: str = "token"  # level of `topr`'s ratios; or `sequence`: of whole texts, with norm `sum`
    seq_clip_low: float = 0.2  # of received rows at sequence level
    seq_clip_high: float = 0.28


def topics(options: Options) -> tuple[str, ...]:
    """Texts, and the source's log-probs where something is measured against them."""
    return ("rollout", "trace") if _needs_trace(options) else ("rollout",)


def forms(options: Options) -> dict:
    """PPO, and score terms with TOPR; the level of received rows."""
    kinds = (types.PPO, types.SCORE) if options.negatives == "topr" else (types.PPO,)
    return {"kinds": kinds, "levels": (types.SEQUENCE if _sequence(options) else types.TOKEN,)}


def labels(options: Options) -> tuple[int, str]:
    """Right or wrong where rewards are pooled; any where each source's are compared among themselves."""
    if options.scope == "per_policy":
        return OWN_SCALE, ""
    return SUCCESS, "pools rewards of several policies, whose scales differ; set transfer.prp.scope='per_policy'"


def check(options: Options, run: RunConfig) -> None:
    """Refuses a run that names no variant, what does not exist, and rewards that mean something else for every policy.

    Raises:
      ConfigError.
    """
    for field, allowed in ALLOWED.items():
        one_of(f"transfer.prp.{field}", getattr(options, field), allowed)
    for field in ("max_peers", "peer_rows_per_prompt", "pool_weight", "seq_clip_low", "seq_clip_high"):
        within(f"transfer.prp.{field}", getattr(options, field), 0)
    if options.negatives == "topr" and options.variant != "prp_thl":
        raise ConfigError(
            "transfer.prp.negatives='topr': has ratios to the peer, of the level topr_level; only with variant prp_thl"
        )
    trained_with(run, "prp", ", which pools rewards", kl_in_reward=False)


def to_score(m: Material) -> Batch | None:
    """The received rows of the pool, where the prior split or `filter_kl` compares with the learner itself."""
    if not _needs_scores(m.options):
        return None
    use, _ = pool(m)
    return assembly.received_rows(m, use) if use.any() else None


def build(m: Material) -> tuple[list[Batch], dict[str, float]]:
    """Own rows, then the received rows of the pool.

    Metrics: `transfer/pooled` received rows in the pool; `transfer/no_trace` usable rows left out for want of log-probs
    of their source; `transfer/filtered` rows of the pool that `negatives` took out; `transfer/pool_kl_hat` mean
    over the pool's received rows of what `filter_kl` looks at; with prp_thl those of `bridge.metrics`.
    """
    use, no_trace = pool(m)
    rows = batches.join(assembly.own_rows(m), assembly.received_rows(m, use))
    reward = np.concatenate([m.reward.ravel(), assembly.received_reward(m)[use]])
    adv, valid = assembly.group_advantages(m, rows, reward, by_source=m.options.scope == "per_policy")
    surrogate = valid & assembly.trainable(m, use)
    if not m.received.heard.size:
        return assembly.updates(m, rows, adv, surrogate), {}
    metrics = {"transfer/pooled": float(use.sum()), "transfer/no_trace": float(no_trace)}
    if use.any():
        peers = slice(m.reward.size, None)
        received = batches.take(rows, peers)  # a slice: views, so what is set there is set in `rows`
        metrics |= set_ratios(m, use, received, adv[peers])
        leave, found = filtered(m, use, adv[peers])
        metrics |= found
        surrogate[peers] &= ~leave
        adv[peers] *= m.options.pool_weight
    return assembly.updates(m, rows, adv, surrogate), metrics


def pool(m: Material) -> tuple[np.ndarray, int]:
    """bool[P, K] received rows of the pool, and how many usable rows with a reward lack the trace they need."""
    o, r = m.options, m.received
    use = r.usable & np.isfinite(r.reward)
    no_trace = use & ~r.trace.valid & _needs_trace(o)
    use &= ~no_trace
    if o.max_peers and use.any():
        names = np.unique(r.source)
        sends = np.stack([use[:, r.source == j].any(1) for j in names], 1)
        heard = sends & (np.cumsum(sends, 1) <= o.max_peers)
        use &= heard[:, np.searchsorted(names, r.source)]
    if o.peer_rows_per_prompt:
        for p in np.flatnonzero(use.sum(1) > o.peer_rows_per_prompt):
            rows = np.flatnonzero(use[p])
            use[p] = False
            use[p, m.random(p).choice(rows, o.peer_rows_per_prompt, replace=False)] = True
    return use, int(no_trace.sum())


def set_ratios(m: Material, use: np.ndarray, rows: Batch, adv: np.ndarray) -> dict[str, float]:
    """Gives received rows (in place) the denominators, level, form and clip of the variant; returns metrics.

    Args:
      rows: of `assembly.received_rows(m, use)`. adv: f64[R] their advantages.
    """
    o = m.options
    metrics = {}
    if o.variant != "prp_snapshot":
        thl = o.variant == "prp_thl"
        aligned = _align(m, use, o.granularity, o.split) if thl else _align(m, use)
        rows.denom_self[:] = False
        rows.denom_logp[:] = aligned.logp
        rows.surr_mask[:] &= aligned.known
        metrics = bridge.metrics(aligned, prior=m.scored) if thl else {}
    if _sequence(o):
        rows.level[:] = types.SEQUENCE
        rows.clip[:] = o.seq_clip_low, o.seq_clip_high
        rows.seq_denom[:], rows.seq_norm[:] = _whole_texts(m, use, "sum" if o.negatives == "topr" else o.norm)
    if o.negatives == "topr":
        rows.kind[:] = types.SCORE
        rows.clip[:, 0], rows.clip[:, 1] = adv > 0, 1.0
    return metrics


def filtered(m: Material, use: np.ndarray, adv: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """bool[R] received rows that `negatives` takes out, and metrics. Arguments as in `set_ratios`."""
    o, metrics, leave = m.options, {}, np.zeros(len(adv), bool)
    if o.negatives == "drop":
        leave = adv < 0
    if m.scored is not None and _needs_trace(o):
        kl_hat = excess(m, use)
        metrics = {"transfer/pool_kl_hat": float(kl_hat.mean())}
        if o.negatives == "filter_kl":
            leave = (adv < 0) & (kl_hat > o.filter_kl_threshold)
    return leave, {**metrics, "transfer/filtered": float(leave.sum())}


def excess(m: Material, use: np.ndarray) -> np.ndarray:
    """f64[R] kl_hat: (source's log-prob - the snapshot's)/tokens of each received row, in nats a token, over what both
    have a log-prob of. 0 where that is nothing."""
    both, source, _, _ = assembly.both_sides(m, use)
    return (source - np.where(both, m.scored, 0.0).sum(-1, dtype=np.float64)) / np.maximum(both.sum(-1), 1)


def _whole_texts(m: Material, use: np.ndarray, norm: str) -> tuple[np.ndarray, np.ndarray]:
    """f64[R], f64[R] `seq_denom` and `seq_norm` over what both sides have a log-prob of."""
    counted, source, source_tokens, text_bytes = assembly.both_sides(m, use)
    tokens = counted.sum(-1)
    if norm == "own_each":
        return tokens * source / np.maximum(source_tokens, 1), tokens
    divisor = {"learner": tokens, "byte": text_bytes, "sum": np.ones_like(tokens)}[norm]
    return source, np.maximum(divisor, 1)


def _align(m: Material, use: np.ndarray, granularity: str = "finest", split: str = "even") -> bridge.Aligned:
    """The traces of the chosen rows on the learner's tokens."""
    r = m.received
    return bridge.align(r.trace.at(use), r.ends[use], r.n[use], granularity=granularity, split=split, prior=m.scored)


def _sequence(o: Options) -> bool:
    return o.variant == "prp_seq" or (o.negatives == "topr" and o.topr_level == "sequence")


def _needs_trace(o: Options) -> bool:
    return o.variant != "prp_snapshot" or o.negatives == "filter_kl"


def _needs_scores(o: Options) -> bool:
    return o.negatives == "filter_kl" or (o.variant == "prp_thl" and o.split == "prior")
