"""The learner loss: clips and clamps at their bounds, pads, edge cases, and chunked log-probs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl import losses, types
from mutualrl.losses import LossSettings
from mutualrl.types import Batch

F32 = np.float32


def batch_of(logp, mask=None, **fields):
    """A Batch for log-probs [B, T]; row weights 1 and advantages 1 unless given."""
    b, t = np.shape(logp)
    mask = np.ones((b, t), bool) if mask is None else np.asarray(mask, bool)
    values = dict(
        tokens=np.zeros((b, 1 + t), np.int32),
        positions=np.tile(np.arange(1 + t, dtype=np.int32), (b, 1)),
        mask=mask,
        surr_mask=mask,
        adv=np.ones((b, t), F32),
        denom_logp=np.array(logp, F32),
        denom_self=np.zeros(b, bool),
        sampler_logp=np.full((b, t), np.nan, F32),
        ref_logp=np.zeros((b, t), F32),
        surr_weight=np.ones(b, F32),
        nll_weight=np.zeros(b, F32),
        kl_weight=np.zeros(b, F32),
        kind=np.zeros(b, np.int8),
        level=np.zeros(b, np.int8),
        clip=np.full((b, 2), 0.2, F32),
        seq_denom=np.full(b, np.nan, F32),
        seq_norm=mask.sum(-1).astype(F32),
        is_weight=np.ones((b, t), F32),
        source=np.zeros(b, np.int32),
        sample=np.zeros(b, np.int32),
        group=np.zeros(b, np.int32),
        source_logp=np.full(b, np.nan, np.float32),
        source_tokens=np.full(b, np.nan, np.float32),
    )
    for name, x in fields.items():
        values[name] = np.broadcast_to(np.asarray(x, values[name].dtype), values[name].shape)
    return Batch(**values)


@functools.partial(jax.jit, static_argnames="settings")
def value_and_grad(logp, batch, settings, entropy=None):
    def f(logp, entropy):
        value, sums = losses.loss(logp, entropy, batch, settings)
        return value, sums

    entropy = jnp.zeros_like(logp) if entropy is None else entropy
    (value, sums), grads = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(logp, entropy)
    return value, grads[0], sums, grads[1]


def run(logp, batch, **settings):
    value, grad, sums, _ = value_and_grad(jnp.asarray(logp, jnp.float32), batch, LossSettings(**settings))
    return float(value), np.asarray(grad), {k: float(v) for k, v in sums.items()}


def objective_slope(rho, adv, **settings):
    """J and dJ/drho of the surrogate at a ratio, which may be a bound exactly."""
    kinds = settings.pop("kinds", (types.PPO,))
    clip = settings.pop("clip", (0.5, 0.5))
    batch = batch_of([[0.0]], adv=adv, clip=clip, kind=kinds[0])
    f = lambda r: losses.surrogate(jnp.zeros((1, 1)), r, batch, LossSettings(kinds=kinds, **settings))[0, 0]
    value, slope = jax.value_and_grad(f)(jnp.full((1, 1), rho, jnp.float32))
    return float(value), float(slope[0, 0])


def test_clamp():
    slope = jax.vmap(jax.value_and_grad(lambda x: losses.clamp(x, -1.0, 2.0)))
    value, grad = slope(jnp.array([-1.5, -1.0, 0.0, 2.0, 2.5]))
    assert value.tolist() == [-1, -1, 0, 2, 2] and grad.tolist() == [0, 1, 1, 1, 0]


# Bounds 0.5 and 1.5 and the ratios below are exact in float32.
@pytest.mark.parametrize(
    "rho, adv, value, slope",
    [
        (1.0, 2, 2, 2), (1.0, -2, -2, -2),
        (1.5, 2, 3, 2), (1.501, 2, 3, 0), (1.501, -2, -3.002, -2),
        (0.5, -2, -1, -2), (0.499, -2, -1, 0), (0.499, 2, 0.998, 2),
        (3.0, -2, -6, -2), (3.001, -2, -6, 0), (3.001, 2, 3, 0),
        (1.5, -2, -3, -2), (0.5, 2, 1, 2),
    ],
)  # fmt: skip
def test_ppo_at_and_beyond_its_bounds(rho, adv, value, slope):
    assert objective_slope(rho, adv) == (pytest.approx(value), pytest.approx(slope))


def test_dual_clip_off():
    assert objective_slope(7.0, -2, dual_clip=0.0) == (-14, -2)


@pytest.mark.parametrize(
    "rho, value, slope",
    [(0.25, 0.25**1.5, 0.5), (0.5, 0.5**1.5, 0.5**0.5), (1.0, 1, 1), (2.0, 2**1.5, 2**0.5), (2.5, 2**1.5, 0)],
)
def test_cap(rho, value, slope):
    """q sg(q)^alpha: the detached factor has no gradient; absolute bounds, not distances from 1."""
    got = objective_slope(rho, 1, kinds=(types.CAP,), clip=(0.25, 2.0), cap_alpha=0.5)
    assert got == (pytest.approx(value), pytest.approx(slope))


def test_score_and_shape_gradients():
    """Score: sg(clipped ratio) times the gradient of l, beyond the bounds too. Shape: gamma p/(p + gamma)^2."""
    logp, gap = np.array([[-2.0, -1.0, -0.5, -0.7]], F32), np.array([[-0.7, 0.3, 1.2, -3.0]], F32)
    adv = np.array([[1.0, -2.0, 1.0, 1.0]], F32)
    score = batch_of(logp, denom_logp=logp - gap, adv=adv, clip=(0.1, 2.0), kind=types.SCORE)
    value, grad, _ = run(logp, score, kinds=(types.SCORE,))
    weight = np.clip(np.exp(gap), 0.1, 2.0)
    np.testing.assert_allclose(value, -(weight * adv * logp).sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, -weight * adv, rtol=1e-5)

    shape = batch_of(logp, denom_logp=logp - gap, adv=adv, kind=types.SHAPE)
    value, grad, _ = run(logp, shape, kinds=(types.SHAPE,), shape_gamma=0.2)
    p = np.exp(logp)
    np.testing.assert_allclose(value, -(p / (p + 0.2) * adv).sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, -0.2 * p / (p + 0.2) ** 2 * adv, rtol=1e-5)


def test_unknown_kind():
    with pytest.raises(ValueError, match="kind=9"):
        objective_slope(1.0, 1, kinds=(9,))


@pytest.mark.parametrize("gap, live", [(19.9, True), (20.0, True), (20.1, False), (-20.0, True), (-20.1, False)])
@pytest.mark.parametrize("level", (types.TOKEN, types.SEQUENCE))
def test_log_ratio_clamp(gap, live, level):
    """±20 nats: the closed interval counts as unclamped."""
    logp = np.array([[0.0, 0.0]], F32)
    batch = batch_of(logp, denom_logp=-gap, level=level)
    f = lambda x: losses.log_ratios(x, batch.denom_logp, batch, (level,)).sum()
    rho = losses.log_ratios(jnp.asarray(logp), batch.denom_logp, batch, (level,))
    expected = np.exp(np.clip(gap, -20, 20))
    np.testing.assert_allclose(rho, np.full((1, 2), expected), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(f)(jnp.asarray(logp)), np.full((1, 2), expected if live else 0.0), rtol=1e-6)


def test_sequence_ratio_against_its_definition():
    """Value exp(mean log-ratio); with 1/n weights the gradient is that of the sequence ratio itself."""
    rng = np.random.default_rng(0)
    mask = np.arange(5) < np.array([[5], [2], [3]])
    logp, denom = rng.normal(-1, 0.2, (2, 3, 5)).astype(F32)
    adv = np.array([1.0, -2.0, 0.5], F32)[:, None]
    batch = batch_of(
        logp, mask, denom_logp=denom, adv=adv, level=types.SEQUENCE, clip=(9, 9), surr_weight=1 / mask.sum(-1) / 3
    )

    def plain(logp):
        s = jnp.exp((jnp.where(mask, logp - denom, 0).sum(-1)) / mask.sum(-1))
        return -(s * adv[:, 0]).sum() / 3

    value, grad, _ = run(logp, batch, levels=(types.SEQUENCE,))
    np.testing.assert_allclose(value, plain(logp), rtol=1e-6)
    np.testing.assert_allclose(grad, jax.grad(plain)(jnp.asarray(logp)), atol=1e-7)

    shifted = dataclasses.replace(
        batch, seq_denom=np.array([np.nan, -3.0, np.nan], F32), seq_norm=np.array([2, 4, 3], F32)
    )
    rho = losses.log_ratios(jnp.asarray(logp), batch.denom_logp, shifted, (types.SEQUENCE,))
    np.testing.assert_allclose(rho[0, 0], np.exp((logp - denom)[0].sum() / 2), rtol=1e-6)
    np.testing.assert_allclose(rho[1, 0], np.exp((logp[1, :2].sum() + 3) / 4), rtol=1e-6)


def test_levels_and_kinds_may_be_mixed_by_row():
    rng = np.random.default_rng(1)
    logp, denom = rng.normal(-1, 0.3, (2, 8, 3)).astype(F32)
    kind = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    level = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    clip = np.array([(0.2, 0.3), (0.5, 2), (0, 1), (0, 0)] * 2)
    batch = batch_of(logp, denom_logp=denom, kind=kind, level=level, clip=clip, adv=rng.normal(size=(8, 3)))
    settings = dict(kinds=(0, 1, 2, 3), levels=(0, 1))
    value, grad, _ = run(logp, batch, **settings)
    parts = []
    for i in range(8):
        row = Batch(**{f.name: getattr(batch, f.name)[i : i + 1] for f in dataclasses.fields(Batch)})
        parts.append(run(logp[i : i + 1], row, **settings))
        if i in (0, 2, 5):  # compiled for its own form alone
            alone = run(logp[i : i + 1], row, kinds=(int(kind[i]),), levels=(int(level[i]),))
            np.testing.assert_allclose(alone[1], parts[-1][1], rtol=1e-6)
    np.testing.assert_allclose(value, sum(p[0] for p in parts), rtol=1e-5)
    np.testing.assert_allclose(grad, np.concatenate([p[1] for p in parts]), rtol=1e-5, atol=1e-7)
    assert all(np.abs(p[1]).sum() > 0 for p in parts)


@pytest.mark.parametrize("estimator", types.KL_ESTIMATORS)
def test_kl_values_and_gradients(estimator):
    e = np.array(
        [-25, -20, -3, -0.5, -1e-3, -1e-4, 0, 1e-4, 1e-3, 0.5, 2.0, 2.6, 3.0, 20, 25], F32
    )  # k3 is 10 near 2.61
    value, grad = jax.vmap(jax.value_and_grad(lambda x: losses.kl_estimate(x, 0.0, estimator)))(-e)
    wide = np.clip(e.astype(np.float64), -20, 20)
    inside = np.abs(e) <= 20
    k2, k3 = wide**2 / 2, np.expm1(wide) - wide
    if estimator == "k2":
        expected, slope = k2, np.where(inside, -wide, 0)
    else:
        expected = np.minimum(k3, 10)
        slope = (
            np.where(inside, -wide, 0) if estimator == "k3_k2" else np.where(inside & (k3 <= 10), -np.expm1(wide), 0)
        )
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=2e-5 if estimator == "k3_k2" else 1e-9)
    np.testing.assert_allclose(grad, slope, rtol=1e-5, atol=1e-7)


def test_k3_is_never_negative_nor_dead_by_rounding():
    e = np.random.default_rng(0).uniform(-3e-3, 3e-3, 5000).astype(F32)
    value, grad = jax.vmap(jax.value_and_grad(lambda x: losses.kl_estimate(x, 0.0, "k3")))(-e)
    assert (np.asarray(value) >= 0).all()
    np.testing.assert_allclose(grad, -np.expm1(e), atol=1e-7)


def test_unknown_kl_estimator_lists_the_known():
    for name in ("k1", "k4"):
        with pytest.raises(ValueError, match=f"{name}.*k2, k3, k3_k2"):
            losses.kl_estimate(jnp.zeros(1), jnp.zeros(1), name)


def test_correction_weights():
    delta = jnp.array([[0.0, 0.7, -0.7, 1.5, 9.0], [-0.1, -0.2, -0.3, 50.0, 9.0]])
    mask = jnp.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], bool)
    weight = lambda mode, cap=2.0: np.asarray(losses.correction_weight(delta, mask, mode, cap))
    masked = lambda x: np.where(mask, x, 0)
    np.testing.assert_array_equal(weight("none"), np.ones((2, 5)))
    np.testing.assert_allclose(masked(weight("token_truncate")), masked(np.minimum(np.exp(delta), 2)), rtol=1e-6)
    np.testing.assert_allclose(weight("sequence_truncate"), [[2] * 5, [np.exp(-0.6)] * 5], rtol=1e-6)
    np.testing.assert_allclose(weight("token_mask")[0, :4], [1, 0, 0, 0])  # .4966 is below 1/2
    np.testing.assert_allclose(weight("token_mask", 3.0)[0, :4], [1, np.exp(0.7), np.exp(-0.7), 0], rtol=1e-6)
    np.testing.assert_allclose(weight("sequence_mask", 5.0), [[np.exp(1.5)] * 5, [np.exp(-0.6)] * 5], rtol=1e-6)
    np.testing.assert_array_equal(weight("sequence_mask", 4.0)[0], np.zeros(5))
    for mode in types.CORRECTIONS:
        slope = jax.grad(lambda d, mode=mode: losses.correction_weight(d, mask, mode, 20.0).sum())(delta)
        assert not np.asarray(slope).any()


@pytest.mark.parametrize("mode", types.CORRECTIONS)
def test_correction_is_detached_and_for_own_tokens_only(mode):
    """Peer rows have no sampler log-prob and weight 1; d is the snapshot, or the policy itself on self rows."""
    logp = np.array([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]], F32)
    sampler = np.array([[-1.2, -1.9], [-1.2, -1.9], [np.nan, np.nan]], F32)
    denom = np.array([[-1.1, -2.2], [0, 0], [-1.1, -2.2]], F32)
    batch = batch_of(logp, denom_logp=denom, sampler_logp=sampler, denom_self=[False, True, False], clip=(9, 9))
    value, grad, sums = run(logp, batch, correction=mode)
    gap = np.array([[0.1, -0.3], [0.2, -0.1], [0, 0]])
    total = np.repeat(gap.sum(1, keepdims=True), 2, 1)
    weight = {"none": np.ones((3, 2)), "token": np.exp(gap), "sequence": np.exp(total)}[mode.split("_")[0]]
    rho = np.exp(np.where([[0], [1], [0]], 0, logp - denom))
    np.testing.assert_allclose(value, -(weight * rho).sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, -weight * rho, rtol=1e-5)
    assert sums["mismatch/sum_abs"] == pytest.approx(np.abs(gap).sum(), rel=1e-5)
    assert sums["mismatch/abs/max"] == pytest.approx(0.3, rel=1e-5) and sums["tokens/own"] == 4


def full_batch():
    """Every field in use, three rows of lengths 3, 1, 0 out of T = 4, one row with a surrogate mask of its own."""
    rng = np.random.default_rng(2)
    mask = np.arange(4) < np.array([[3], [1], [0]])
    logp = rng.normal(-1, 0.2, (3, 4)).astype(F32)
    surr = mask.copy()
    surr[0, 2] = False
    return logp, dataclasses.replace(
        batch_of(logp, mask, denom_logp=rng.normal(-1, 0.2, (3, 4)), adv=rng.normal(size=(3, 4)), level=[0, 1, 0]),
        surr_mask=surr,
        sampler_logp=np.where(mask, rng.normal(-1, 0.2, (3, 4)), np.nan).astype(F32),
        ref_logp=rng.normal(-1, 0.2, (3, 4)).astype(F32),
        kl_weight=np.array([0.1, 0.2, 0.0], F32),
        nll_weight=np.array([0.3, 0.0, 0.0], F32),
        is_weight=rng.uniform(0.5, 1, (3, 4)).astype(F32),
    )


@pytest.mark.parametrize("poison", (np.nan, np.inf, -1e30))
@pytest.mark.parametrize("estimator", types.KL_ESTIMATORS)
def test_pads_may_hold_anything(poison, estimator):
    logp, batch = full_batch()
    settings = LossSettings(levels=(0, 1), kl_estimator=estimator, entropy_coef=0.1, correction="sequence_truncate")
    entropy = np.full_like(logp, 0.7)
    clean = value_and_grad(jnp.asarray(logp), batch, settings, jnp.asarray(entropy))
    bad = lambda x, mask: np.where(mask, x, F32(poison))
    dirty = dataclasses.replace(
        batch,
        denom_logp=bad(batch.denom_logp, batch.surr_mask),
        adv=bad(batch.adv, batch.surr_mask),
        is_weight=bad(batch.is_weight, batch.surr_mask),
        sampler_logp=bad(batch.sampler_logp, batch.mask),
        ref_logp=bad(batch.ref_logp, batch.mask),
    )
    got = value_and_grad(jnp.asarray(bad(logp, batch.mask)), dirty, settings, jnp.asarray(bad(entropy, batch.mask)))
    np.testing.assert_allclose(got[0], clean[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], clean[1], rtol=1e-6)
    np.testing.assert_allclose(got[3], clean[3], rtol=1e-6)
    assert not np.asarray(got[1])[~batch.mask].any() and np.asarray(got[1])[batch.mask].all()
    for key in clean[2]:
        np.testing.assert_allclose(got[2][key], clean[2][key], rtol=1e-5, err_msg=key)


def test_full_batch_against_a_plain_loop():
    logp, batch = full_batch()
    value, _, sums, _ = value_and_grad(
        jnp.asarray(logp), batch, LossSettings(levels=(0, 1), entropy_coef=0.1), jnp.full((3, 4), 0.7)
    )
    total = 0.0
    for b, t in np.argwhere(batch.mask):
        now, d, a = logp[b, t], batch.denom_logp[b, t], batch.adv[b, t]
        if batch.surr_mask[b, t]:  # row 1 has one token, so its sequence ratio is its token ratio
            rho = np.exp(now - d)
            j = min(rho * a, np.clip(rho, 0.8, 1.2) * a)
            c = min(np.exp(d - batch.sampler_logp[b, t]), 2) * batch.is_weight[b, t]
            total += batch.surr_weight[b] * (-j * c - 0.1 * 0.7)
        e = batch.ref_logp[b, t] - now
        total += batch.nll_weight[b] * -now + batch.kl_weight[b] * (np.exp(e) - e - 1)
    np.testing.assert_allclose(value, total, rtol=1e-5)
    assert float(sums["tokens/own"]) == float(sums["tokens/kl"]) == float(sums["tokens/trained"]) == 4
    assert float(sums["tokens/surrogate"]) == 3 and float(sums["entropy"]) == pytest.approx(2.8)
    np.testing.assert_allclose(
        sums["loss/surrogate"] + sums["loss/nll"] + sums["loss/kl"] - 0.1 * 0.7 * 3, value, rtol=1e-5
    )


@pytest.mark.parametrize("empty", ("mask", "weights", "rows"))
def test_nothing_to_train_gives_zero(empty):
    logp, batch = full_batch()
    if empty == "mask":
        none = np.zeros_like(batch.mask)
        batch = dataclasses.replace(batch, mask=none, surr_mask=none, seq_norm=np.zeros(3, F32))
    elif empty == "weights":
        batch = dataclasses.replace(batch, **{f"{k}_weight": np.zeros(3, F32) for k in ("surr", "nll", "kl")})
    else:
        batch = Batch(**{f.name: getattr(batch, f.name)[:0] for f in dataclasses.fields(Batch)})
        logp = logp[:0]
    value, grad, sums, _ = value_and_grad(jnp.asarray(logp), batch, LossSettings(levels=(0, 1), entropy_coef=0.1))
    assert value == 0 and not np.asarray(grad).any() and all(np.isfinite(v) for v in sums.values())
    assert sums["tokens/trained"] == sums["tokens/surrogate"] == 0


def test_self_rows_have_ratio_one_and_the_policy_gradient():
    logp, batch = full_batch()
    batch = dataclasses.replace(
        batch,
        denom_self=np.ones(3, bool),
        level=np.zeros(3, np.int8),
        nll_weight=np.zeros(3, F32),
        kl_weight=np.zeros(3, F32),
    )
    batch = dataclasses.replace(batch, is_weight=np.ones_like(batch.is_weight), clip=np.zeros((3, 2), F32))
    value, grad, sums = run(logp, batch, correction="none")
    np.testing.assert_allclose(value, -batch.adv[batch.surr_mask].sum(), rtol=1e-6)
    np.testing.assert_allclose(grad, np.where(batch.surr_mask, -batch.adv, 0), rtol=1e-6)
    assert sums["clip/low"] == sums["clip/high"] == sums["clip/dual"] == sums["kl/old"] == 0


def test_clip_counts():
    """A token counts where its active branch is the clipped one."""
    log = np.log
    logp = np.array([[log(1.3), log(1.3), log(0.7), log(0.7), log(3.5), log(3.5), 0.0, 0.0]], F32)
    adv = np.array([[1, -1, 1, -1, 1, -1, 1, 1]], F32)
    mask = np.array([[1] * 7 + [0]], bool)
    own = dict(denom_logp=0.0, sampler_logp=np.where(mask, 0.0, np.nan))
    batch = batch_of(logp, mask, adv=adv, **own)
    names = ("clip/high", "clip/low", "clip/dual", "tokens/surrogate")
    peer_names = ("clip/peer_high", "clip/peer_low", "clip/peer_dual", "tokens/surrogate_peer")
    _, grad, sums = run(logp, batch)
    assert [sums[n] for n in names] == [2, 1, 1, 7] and not any(sums[n] for n in peer_names)
    assert (grad[0] == 0).sum() == 2 + 1 + 1 + 1  # and the pad
    dropped = dataclasses.replace(batch, surr_weight=np.zeros(1, F32))
    _, _, sums = run(logp, dropped)
    assert sums["clip/high"] == sums["tokens/surrogate"] == 0
    received = batch_of(logp, mask, adv=adv, denom_logp=0.0)  # no sampler of its own
    _, _, sums = run(logp, received)
    assert [sums[n] for n in peer_names] == [2, 1, 1, 7] and not any(sums[n] for n in names)
    capped = dataclasses.replace(received, kind=np.full(1, types.CAP, np.int8), clip=np.array([[0.8, 1.0]], F32))
    _, grad, sums = run(logp, capped, kinds=(types.CAP,))
    assert [sums[n] for n in peer_names] == [4, 2, 0, 7] and (grad[0] == 0).sum() == 6 + 1


def test_sums_are_additive_over_any_cut():
    logp, batch = full_batch()
    settings = dict(levels=(0, 1), entropy_coef=0.1)
    value, grad, sums = run(logp, batch, **settings)
    rows = [Batch(**{f.name: getattr(batch, f.name)[i : i + 1] for f in dataclasses.fields(Batch)}) for i in range(3)]
    parts = [run(logp[i : i + 1], row, **settings) for i, row in enumerate(rows)]
    np.testing.assert_allclose(value, sum(p[0] for p in parts), rtol=1e-6)
    np.testing.assert_allclose(grad, np.concatenate([p[1] for p in parts]), rtol=1e-6)
    for key in sums:
        join = max if key.endswith("/max") else sum
        np.testing.assert_allclose(sums[key], join([p[2][key] for p in parts]), rtol=1e-5, err_msg=key)


# ---- token_logprobs

B, T, D, V, REAL = 3, 7, 5, 13, 11
HIDDEN, HEAD = (np.random.default_rng(3).normal(size=s).astype(F32) for s in ((B, T, D), (D, V)))
TARGETS = np.random.default_rng(4).integers(0, REAL, (B, T)).astype(np.int32)
WEIGHT = np.random.default_rng(5).normal(size=(2, B, T)).astype(F32)


def plain_logprobs(hidden, head, temperature, real):
    logits = (hidden @ head)[..., :real] / temperature
    log = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(log, TARGETS[..., None], -1)[..., 0], -(jnp.exp(log) * log).sum(-1)


def chunked(hidden, head, temperature, real, chunk):
    return losses.token_logprobs(
        lambda h: h @ head, hidden, TARGETS, temperature=temperature, real_vocab=real, chunk_tokens=chunk
    )


@pytest.mark.parametrize("chunk", (1, 6, 20, 10**6))  # columns of 1, 2, 6 (of 7: with padding) and 7
@pytest.mark.parametrize("temperature, real", [(1.0, V), (0.1, REAL)])
def test_chunked_logprobs_equal_the_whole(chunk, temperature, real):
    """Values and gradients, of log-probs and entropies; at temperature 0.1 a masked logit must stay finite."""

    def results(f, *extra):
        def g(hidden, head):
            out = f(hidden, head, temperature, real, *extra)
            return sum((weight * x).sum() for weight, x in zip(WEIGHT, out)), out

        (_, out), grads = jax.jit(jax.value_and_grad(g, argnums=(0, 1), has_aux=True))(HIDDEN, HEAD)
        return out, grads

    (out, grads), (expected, plain) = results(chunked, chunk), results(plain_logprobs)
    for a, b in zip(out, expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(grads, plain):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    assert not np.asarray(grads[1])[:, real:].any()


def test_ids_beyond_the_tokenizer_have_no_probability():
    masked = losses.mask_vocab(jnp.zeros((2, V)), REAL)
    p = jax.nn.softmax(masked, -1)
    assert not np.asarray(p)[:, REAL:].any() and np.isfinite(masked).all()
    np.testing.assert_allclose(np.asarray(p)[:, :REAL], 1 / REAL, rtol=1e-6)
    assert losses.mask_vocab(jnp.zeros((2, V)), V).any() == False  # noqa: E712


def peak(tokens, chunk, width=8, vocabulary=4000):
    """Bytes of temporaries of the gradient, as compiled."""
    h = jax.ShapeDtypeStruct((1, tokens, width), jnp.float32)
    w = jax.ShapeDtypeStruct((width, vocabulary), jnp.float32)
    y = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def f(h, w, y):
        logp, entropy = losses.token_logprobs(
            lambda x: x @ w, h, y, temperature=1.0, real_vocab=vocabulary, chunk_tokens=chunk
        )
        return (logp + entropy).sum()

    return jax.jit(jax.grad(f, argnums=(0, 1))).lower(h, w, y).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_chunk_and_not_with_the_length():
    one = 64 * 4000 * 4  # float32 logits of a chunk
    small, long, wide = peak(256, 64), peak(2048, 64), peak(2048, 512)
    assert long < small + one  # eight times the tokens for less than one more chunk
    assert long < 8 * one  # and far below the 32 chunks that all logits would be
    assert wide > 4 * long


def test_no_array_of_all_logits_exists():
    def sizes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
            for p in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(p, "jaxpr", p)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)

    f = lambda h, w: sum(x.sum() for x in chunked(h, w, 1.0, REAL, 6))
    largest = max(sizes(jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(HIDDEN, HEAD).jaxpr))
    assert 6 * V <= largest < B * T * V
