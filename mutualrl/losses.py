"""The one learner loss: token log-probs in chunks, ratios, clipping, KL, imitation. Pure JAX functions.

    L = sum_b sum_t [ surr_weight_b m c pg + nll_weight_b m (-l) + kl_weight_b m kl - entropy_coef surr_weight_b m H ]

(our definition of the sum; each term as published, see the functions). Row weights arrive normalised over the whole
update, so partial sums over micro-batches and devices are simply added.

At a bound exactly, every clip and clamp here passes its gradient, outside it does not; `jnp.clip` would pass half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mutualrl import types

jax.tree_util.register_dataclass(
    types.Batch, data_fields=[f.name for f in dataclasses.fields(types.Batch)], meta_fields=[]
)

LOG_CLAMP = 20.0  # nats; bounds of every log-ratio, so that exp stays finite in float32
KL_CLAMP = 10.0  # largest value of the k3 estimator (verl `low_var_kl`)


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """What is fixed while the update is compiled.

    Attributes:
      kinds, levels: the surrogate forms and ratio levels that occur in the batches (codes of `mutualrl.types`).
      dual_clip: bound c of the dual clip for negative advantages; 0 switches it off.
      kl_estimator: one of `types.KL_ESTIMATORS`.
      correction: sampler-trainer correction of own rows, one of `types.CORRECTIONS`; `correction_cap` is its C.
      entropy_coef: weight of the entropy bonus.
      cap_alpha, shape_gamma: constants of the forms `cap` and `shape`.
    """

    kinds: tuple[int, ...] = (types.PPO,)
    levels: tuple[int, ...] = (types.TOKEN,)
    dual_clip: float = 3.0
    kl_estimator: str = "k3"
    correction: str = "token_truncate"
    correction_cap: float = 2.0
    entropy_coef: float = 0.0
    cap_alpha: float = 1.0
    shape_gamma: float = 0.1


def clamp(x, low, high):
    """x limited to [low, high]; the gradient flows on the closed interval and is 0 outside."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def token_logprobs(
    head: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    *,
    temperature,
    real_vocab: int,
    chunk_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of given tokens and the entropy of the distributions they were drawn from.

    Logits exist for `chunk_tokens` tokens at a time, forwards and backwards, so [B, T, V] never does.

    Args:
      head: hidden [..., D] to float32 logits [..., V].
      hidden: [B, T, D] states that predict the targets (the position before each target).
      targets: i32[B, T]; any valid id on pads.
      temperature: log-softmax is of logits / temperature.
      real_vocab: ids at or above it do not exist in the tokenizer and have probability 0, as in the sampler.
      chunk_tokens: tokens of a chunk, over all rows.

    Returns:
      log-probs f32[B, T] and entropies f32[B, T], in nats.
    """
    b, t, _ = hidden.shape
    width = max(1, min(t, chunk_tokens // max(1, b)))
    chunks = -(-t // width)
    pad = chunks * width - t

    @jax.checkpoint
    def one(args):
        h, y = args
        logits = mask_vocab(head(h) / temperature, real_vocab)  # masked last, so that it stays finite
        logits -= jax.lax.stop_gradient(logits.max(-1, keepdims=True))  # large logits would cost digits
        logz = jnp.log(jnp.exp(logits).sum(-1))
        picked = jnp.take_along_axis(logits, y[..., None], axis=-1)[..., 0]
        p = jnp.exp(logits - logz[..., None])
        # Masked ids have p = 0 and a hugely negative logit; 0 * logit must stay 0.
        entropy = logz - jnp.sum(jnp.where(p > 0, p * logits, 0.0), axis=-1)
        return picked - logz, entropy

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, chunks, width, *x.shape[2:]), 1, 0)

    logp, entropy = jax.lax.map(one, (split(hidden), split(targets)))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(b, chunks * width)[:, :t]  # noqa: E731
    return join(logp), join(entropy)


def mask_vocab(logits: jax.Array, real_vocab: int) -> jax.Array:
    """Logits [..., V] with ids at or above `real_vocab` made impossible (finite, so that gradients stay finite)."""
    if logits.shape[-1] <= real_vocab:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < real_vocab, logits, jnp.finfo(logits.dtype).min / 2)


def confidence(logits: jax.Array, signal: str, *, temperature, real_vocab: int) -> jax.Array:
    """How sure a policy is of its next token: one of `types.SIGNALS`, in nats, over the real vocabulary.

    self_certainty: logsumexp(z) - mean_v z of raw logits z (published: Intuitor; KL(uniform || p) + log V);
    self_certainty_tempered: the same of z/temperature; entropy: of softmax(z) (published: RENT).

    Args:
      logits: f32[..., V] that predict the token.

    Returns:
      f32[...].

    Raises:
      ValueError: unknown signal.
    """
    if signal not in types.SIGNALS:
        raise ValueError(f"signal={signal!r}: allowed are {', '.join(types.SIGNALS)}")
    z = logits[..., :real_vocab]
    if signal == "self_certainty_tempered":
        z = z / temperature
    z = z - z.max(-1, keepdims=True)  # changes neither number, and keeps their digits
    if signal == "entropy":
        logp = jax.nn.log_softmax(z, axis=-1)
        return -(jnp.exp(logp) * logp).sum(-1)
    return jax.nn.logsumexp(z, axis=-1) - z.mean(-1)


def kl_estimate(logp: jax.Array, ref_logp: jax.Array, estimator: str) -> jax.Array:
    """Per-token estimate of KL(policy || reference) in nats, with e = ref - logp clamped to ±20.

    k2: e²/2 · k3: exp(e) - e - 1, at most 10 (verl `low_var_kl`) · k3_k2: value of k3, gradient of k2.
    k1 (-e) is not offered: as a loss its gradient does not depend on the reference.

    Raises:
      ValueError: unknown estimator.
    """
    if estimator not in types.KL_ESTIMATORS:
        raise ValueError(f"kl_estimator={estimator!r}: allowed are {', '.join(types.KL_ESTIMATORS)}")
    e = clamp(ref_logp - logp, -LOG_CLAMP, LOG_CLAMP)
    k2 = 0.5 * e * e
    if estimator == "k2":
        return k2
    k3 = jnp.expm1(e) - e  # expm1: the rounding of exp(e) - e - 1 would go below 0 near e = 0
    k3 = clamp(k3, -KL_CLAMP, KL_CLAMP)
    return k3 if estimator == "k3" else k2 + jax.lax.stop_gradient(k3 - k2)


def correction_weight(delta: jax.Array, mask: jax.Array, mode: str, cap: float) -> jax.Array:
    """Detached weight for the gap between trainer and sampler (published: verl rollout correction, TRL).

    Args:
      delta: f32[B, T] trainer minus sampler log-prob in nats, 0 where the sampler recorded none.
      mask: bool[B, T] tokens that count.
      mode: one of `types.CORRECTIONS`. `truncate` caps the importance weight at `cap`, `mask` sets it to 0 outside
        [1/cap, cap]; `token` looks at each token, `sequence` at the row's summed log-ratio.

    Returns:
      f32[B, T].
    """
    if mode == "none":
        return jnp.ones_like(delta)
    log_weight = jnp.where(mask, delta, 0.0)
    if mode.startswith("sequence"):
        log_weight = jnp.broadcast_to(log_weight.sum(-1, keepdims=True), delta.shape)
    weight = jnp.exp(clamp(log_weight, -LOG_CLAMP, LOG_CLAMP))
    if mode.endswith("truncate"):
        weight = jnp.minimum(weight, cap)
    else:
        weight = jnp.where((weight >= 1.0 / cap) & (weight <= cap), weight, 0.0)
    return jax.lax.stop_gradient(weight)


def log_ratios(logp: jax.Array, denom: jax.Array, batch: types.Batch, levels: tuple[int, ...]) -> jax.Array:
    """Ratio rho f32[B, T] of every token, by the row's level (token, or GSPO's stop-gradient sequence form).

    Token: exp(clamp(l - d)). Sequence: value s = exp(clamp((sum l - D)/norm)) with gradient s · grad l on every
    token (published: verl, TRL); D is `seq_denom` where finite, else the sum of d.
    """
    token = jnp.exp(clamp(logp - denom, -LOG_CLAMP, LOG_CLAMP))
    if levels == (types.TOKEN,):
        return token
    m = batch.surr_mask
    total = jnp.where(m, logp, 0.0).sum(-1)
    denom_total = jnp.where(jnp.isfinite(batch.seq_denom), batch.seq_denom, jnp.where(m, denom, 0.0).sum(-1))
    g = (total - denom_total) / jnp.maximum(batch.seq_norm, 1e-9)
    s = jax.lax.stop_gradient(jnp.exp(clamp(g, -LOG_CLAMP, LOG_CLAMP)))[:, None]
    moving = (jnp.abs(g) <= LOG_CLAMP)[:, None]
    sequence = s * jnp.where(moving, jnp.exp(logp - jax.lax.stop_gradient(logp)), 1.0)
    return jnp.where((batch.level == types.SEQUENCE)[:, None], sequence, token)


def surrogate(logp: jax.Array, rho: jax.Array, batch: types.Batch, settings: LossSettings) -> jax.Array:
    """Objective J f32[B, T] (to be maximised) by the row's kind.

    ppo: min(rho A, clip(rho, 1-low, 1+high) A), for A < 0 at least c A (GRPO; dual clip) ·
    cap: q sg(q)^alpha A with q = clip(rho, low, high) (HACPO) · score: sg(q) A l (TOPR, truncated IS) ·
    shape: p/(p + gamma) A with p = exp(l), no clip (LUFFY).
    """
    a, low, high = batch.adv, batch.clip[:, :1], batch.clip[:, 1:]
    out = jnp.zeros_like(logp)
    for kind in settings.kinds:
        if kind == types.PPO:
            j = jnp.minimum(rho * a, clamp(rho, 1.0 - low, 1.0 + high) * a)
            if settings.dual_clip:
                j = jnp.where((a < 0) & (j < settings.dual_clip * a), settings.dual_clip * a, j)
        elif kind == types.CAP:
            q = clamp(rho, low, high)
            j = q * jax.lax.stop_gradient(q) ** settings.cap_alpha * a
        elif kind == types.SCORE:
            j = jax.lax.stop_gradient(clamp(rho, low, high)) * a * logp
        elif kind == types.SHAPE:
            p = jnp.exp(logp)
            j = p / (p + settings.shape_gamma) * a
        else:
            raise ValueError(f"kind={kind}: allowed are 0 ppo, 1 cap, 2 score, 3 shape")
        out = jnp.where((batch.kind == kind)[:, None], j, out)
    return out


def loss(
    logp: jax.Array, entropy: jax.Array, batch: types.Batch, settings: LossSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Partial sum of the loss over the rows given, and sums from which metrics are made.

    Args:
      logp, entropy: f32[B, T] of the policy being updated, at the sampling temperature.
      batch: the same rows.
      settings: what is compiled in.

    Returns:
      scalar f32, and a dict of f32 sums: additive over micro-batches and devices, but for keys that end in `/max`.
    """
    m, sm = batch.mask, batch.surr_mask
    # Pads may hold anything, NaN included: 0 times NaN would still reach the gradient.
    logp = jnp.where(m, logp, 0.0)
    batch = dataclasses.replace(batch, adv=jnp.where(sm, batch.adv, 0.0))
    now = jax.lax.stop_gradient(logp)
    denom = jnp.where(batch.denom_self[:, None], now, batch.denom_logp)
    denom = jnp.where(sm, denom, now)
    rho = log_ratios(logp, denom, batch, settings.levels)
    own = m & jnp.isfinite(batch.sampler_logp)
    gap = jnp.where(own, denom - jnp.where(own, batch.sampler_logp, 0.0), 0.0)
    weight = correction_weight(gap, own, settings.correction, settings.correction_cap)
    weight = weight * jnp.where(sm, batch.is_weight, 0.0)

    pg = -surrogate(logp, rho, batch, settings)
    surr = jnp.where(sm, batch.surr_weight[:, None] * weight * pg, 0.0)
    nll = jnp.where(m, batch.nll_weight[:, None] * -logp, 0.0)
    ref = jnp.where(m & (batch.kl_weight != 0)[:, None], batch.ref_logp, now)
    kl = jnp.where(m, batch.kl_weight[:, None] * kl_estimate(logp, ref, settings.kl_estimator), 0.0)
    total = surr.sum() + nll.sum() + kl.sum()
    if settings.entropy_coef:
        total = total - settings.entropy_coef * jnp.where(sm, batch.surr_weight[:, None] * entropy, 0.0).sum()
    return total, _sums(now, entropy, batch, settings, rho, denom, ref, gap, own, surr, nll, kl)


def _sums(now, entropy, batch, settings, rho, denom, ref, gap, own, surr, nll, kl):
    """Sums behind the optimisation metrics; every mean is (sum over the whole update)/(its count)."""
    sg = jax.lax.stop_gradient
    rho, a = sg(rho), batch.adv
    live = batch.surr_mask & (batch.surr_weight != 0)[:, None]
    peer = ~own.any(-1, keepdims=True)
    ppo, cap = (live & (batch.kind == kind)[:, None] for kind in (types.PPO, types.CAP))
    low, high = batch.clip[:, :1], batch.clip[:, 1:]
    clipped = {
        "low": (ppo & (rho < 1.0 - low) & (a < 0)) | (cap & (rho < low)),
        "high": (ppo & (rho > 1.0 + high) & (a > 0)) | (cap & (rho > high)),
        "dual": ppo & (a < 0) & (rho > settings.dual_clip) if settings.dual_clip else jnp.zeros_like(ppo),
    }
    total = lambda x, where: jnp.where(where, x, 0.0).sum()  # noqa: E731
    count = lambda where: where.sum().astype(jnp.float32)  # noqa: E731
    e = clamp(denom - now, -LOG_CLAMP, LOG_CLAMP)
    return sg(
        {
            "loss/surrogate": surr.sum(),
            "loss/nll": nll.sum(),
            "loss/kl": kl.sum(),
            "tokens/own": count(own),
            "tokens/surrogate": count(live & ~peer),
            "tokens/surrogate_peer": count(live & peer),
            "tokens/trained": count(
                batch.mask & ((batch.surr_weight + batch.nll_weight + batch.kl_weight) != 0)[:, None]
            ),
            "tokens/kl": count(batch.mask & (batch.kl_weight != 0)[:, None]),
            "entropy": total(entropy, own),
            "kl/ref": total(kl_estimate(now, ref, "k3"), batch.mask),
            "kl/clamped": count(batch.mask & (jnp.exp(jnp.minimum(ref - now, LOG_CLAMP)) - (ref - now) - 1 > KL_CLAMP)),
            "kl/old": total(jnp.exp(e) - e - 1.0, live & ~peer),
            **{f"clip/{k}": count(x & ~peer) for k, x in clipped.items()},
            **{f"clip/peer_{k}": count(x & peer) for k, x in clipped.items()},
            "mismatch/sum_abs": jnp.abs(gap).sum(),
            "mismatch/kl": total(jnp.exp(gap) - gap - 1.0, own),
            "mismatch/abs/max": jnp.abs(gap).max(initial=0.0),
        }
    )
