"""SGT: where the learner has no success of its own and a peer has one, imitate one of the peer's (methods 4.3).

Gate and the NLL term as in the published accounts (GRAFT paper; the original text was not available to us), the rest
our definition. Own rows are those of GRPO; on a gated problem their advantages are 0, so that its whole gradient is
that of lambda times the certificate's NLL. A certificate is a peer's right answer that fits the learner's row and was
not cut off; one for each gated problem, in the update of its problem, in the NLL term only. Its row weight, for n_c
tokens (divided out with `length_norm="mean"` only):

    prompt: lambda/(n_c · problems of the update)     rescued: lambda/(n_c · rescued problems of the update)
    token: lambda/(tokens of the update's surrogate)

Without certificates, and while lambda is 0, the batches are those of `none`, bit for bit.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mutualrl import assembly, batches, types
from mutualrl.advantages import failed_groups
from mutualrl.assembly import Material
from mutualrl.settings import SUCCESS, ConfigError, RunConfig, one_of, within
from mutualrl.types import Batch

ALLOWED = {
    "selection": ("uniform", "uniform_peer", "shortest", "likelihood"),
    "nll_norm": ("prompt", "rescued", "token"),
    "length_norm": ("mean", "sum"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Which success is imitated, and how strongly."""

    nll_coef: float = 0.1  # lambda
    selection: str = "uniform"  # over all successes; `uniform_peer`: over peers first; `shortest`; `likelihood`
    nll_norm: str = "prompt"  # pressure fades with the rescues; `rescued`: it does not; `token`: as a surrogate token
    length_norm: str = "mean"  # over the certificate's tokens, or `sum`
    start_step: int = 0  # lambda is 0 before it
    warmup_steps: int = 0  # steps over which lambda grows linearly from there
    min_share: float = 0.5  # where rewards are by labels, the label must have won more than this share of its vote


def topics(options: Options) -> tuple[str, ...]:
    """Texts, to be judged by the learner."""
    return ("rollout",)


def forms(options: Options) -> dict:
    """PPO surrogates; certificates are in the NLL term."""
    return {"kinds": (types.PPO,)}


def labels(options: Options) -> tuple[int, str]:
    """Right or wrong."""
    return SUCCESS, "counts successes, which they do not tell"


def check(options: Options, run: RunConfig) -> None:
    """Refuses what does not exist.

    Raises:
      ConfigError.
    """
    for field, allowed in ALLOWED.items():
        one_of(f"transfer.sgt.{field}", getattr(options, field), allowed)
    for field in ("nll_coef", "start_step", "warmup_steps"):
        within(f"transfer.sgt.{field}", getattr(options, field), 0)
    within("transfer.sgt.min_share", options.min_share, 0, 1)
    if options.nll_norm == "token" and options.length_norm == "sum":
        raise ConfigError(
            "transfer.sgt.length_norm='sum': with nll_norm 'token' there is no length to leave out; must be mean"
        )


def to_score(m: Material) -> Batch | None:
    """With `likelihood`: the rows of which certificates are chosen."""
    if m.options.selection != "likelihood" or not strength(m.options, m.step):
        return None
    use = assembly.right_rows(m) & gate(m)[:, None]
    return assembly.received_rows(m, use) if use.any() else None


def build(m: Material) -> tuple[list[Batch], dict[str, float]]:
    """GRPO's batches, with the certificates behind the own rows of their update.

    Metrics: `transfer/gated` share of problems that pass the gate; `transfer/certificates` certificates of the step;
    `transfer/nll_coef` lambda at this step.
    """
    rows = assembly.own_rows(m)
    adv, valid = assembly.group_advantages(m, rows, m.reward.ravel())
    surrogate = valid & assembly.trainable(m)
    coef, use = strength(m.options, m.step), chosen(m)
    extra = int(use.sum())
    if extra:
        rows = batches.join(rows, assembly.received_rows(m, use))
        adv, surrogate = np.pad(adv, (0, extra)), np.pad(surrogate, (0, extra))
    out = assembly.updates(m, rows, adv, surrogate)
    for batch, problems in zip(out, assembly.problems_of_updates(m)):
        certificates = batch.source != m.index
        batch.nll_weight[certificates] = nll_weights(
            m.options,
            coef,
            batch.mask[certificates].sum(-1),
            problems=len(problems),
            surrogate_tokens=int(batch.surr_mask[batch.surr_weight > 0].sum()),
        )
    metrics = {}
    if m.received.heard.size:
        gated = float(gate(m).mean())
        metrics = {"transfer/gated": gated, "transfer/certificates": float(extra), "transfer/nll_coef": coef}
    return out, metrics


def strength(options: Options, step: int) -> float:
    """lambda at a cohort step (from 0): 0 before `start_step`, then growing to `nll_coef` over `warmup_steps`."""
    if step < options.start_step:
        return 0.0
    return options.nll_coef * min(1.0, (step - options.start_step + 1) / max(1, options.warmup_steps))


def gate(m: Material) -> np.ndarray:
    """bool[P]: no success of the learner's own, and at least one heard from a peer (usable or not).

    A problem of which none of the learner's own rollouts could be judged is not gated: that is no failure. Where
    rewards are by labels, the label must have won more than `min_share` of its vote: a certificate is then an answer
    that most of the voters agree on.
    """
    gated = failed_groups(m.verdicts.success) & successes(m).any(1)
    return gated if m.verdicts.share is None else gated & (m.verdicts.share > m.options.min_share)


def successes(m: Material) -> np.ndarray:
    """bool[P, K] rollouts heard that are right by the learner's labels."""
    return m.received.heard & (m.received.success == 1)


def chosen(m: Material) -> np.ndarray:
    """bool[P, K] the certificates: at most one a problem, none while lambda is 0."""
    use = np.zeros(m.received.heard.shape, bool)
    if not strength(m.options, m.step):
        return use
    right, fit = successes(m), assembly.right_rows(m)
    score = preference(m, fit)
    for p in np.flatnonzero(gate(m) & fit.any(1)):
        if score is not None:
            k = int(np.argmax(np.where(fit[p], score[p], -np.inf)))  # ties: the first, by source and sample
        else:
            order = shuffled(m, p, np.flatnonzero(right[p]))
            k = order[fit[p, order]][0]
        use[p, k] = True
    return use


def shuffled(m: Material, problem: int, candidates: np.ndarray) -> np.ndarray:
    """The successes of a problem in random order; the first that can be a certificate is one. With `uniform_peer`
    all of one peer come before those of the next."""
    random, source = m.random(problem), m.received.source[candidates]
    if m.options.selection == "uniform_peer":
        peers = random.permutation(np.unique(source))
        return np.concatenate([random.permutation(candidates[source == j]) for j in peers])
    return random.permutation(candidates)


def preference(m: Material, fit: np.ndarray) -> np.ndarray | None:
    """f64[P, K], the largest is chosen, ties to the lowest (source, sample); None where chance decides.

    shortest: minus the learner's tokens. likelihood: the learner's mean log-prob a token; rows that were not scored
    are -inf.
    """
    if m.options.selection == "shortest":
        return -m.received.mask.sum(-1).astype(np.float64)
    if m.options.selection != "likelihood":
        return None
    out = np.full(fit.shape, -np.inf)
    if m.scored is not None:
        use = fit & gate(m)[:, None]
        mask = m.received.mask[use]
        out[use] = np.where(mask, m.scored, 0.0).sum(-1, dtype=np.float64) / mask.sum(-1)
    return out


def nll_weights(
    options: Options, coef: float, lengths: np.ndarray, *, problems: int, surrogate_tokens: int
) -> np.ndarray:
    """f64[C] NLL weights of an update's certificates.

    Args:
      coef: lambda. lengths: i[C] tokens of each certificate, its end of turn included.
      problems: problems of the update. surrogate_tokens: tokens of its surrogate.
    """
    if options.nll_norm == "token":
        # An update whose surrogate is empty (dropped groups) has the mean over its certificates' tokens.
        return np.full(len(lengths), coef / (surrogate_tokens or max(1, lengths.sum())))
    count = problems if options.nll_norm == "prompt" else len(lengths)
    tokens = lengths if options.length_norm == "mean" else 1
    return np.full(len(lengths), coef / max(1, count)) / tokens
