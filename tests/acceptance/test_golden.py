"""The golden numbers of the methods specification, through the product's own functions: ids loss.*, adv.*, diag.*."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl import advantages, losses, metrics, types
from mutualrl.accuracy import majority, pass_at_k
from mutualrl.analysis.decoupling import decoupling
from mutualrl.losses import LossSettings
from mutualrl.types import Batch

PATH = pathlib.Path(__file__).parents[3] / "shared" / "design" / "methods_golden.json"
if not PATH.is_file():
    pytest.skip(f"no golden numbers at {PATH}", allow_module_level=True)
CASES = {c["id"]: c for c in json.loads(PATH.read_text())["cases"] if c["id"].split(".")[0] in ("loss", "adv", "diag")}
CHECKED = set()


def case(name):
    """Inputs, expected values and an approx at the case's tolerance; the case counts as checked."""
    CHECKED.add(name)
    c = CASES[name]
    tolerance = c["tolerance"]
    return c["inputs"], c["expected"], lambda x: pytest.approx(np.asarray(x, float), abs=tolerance, rel=0)


def batch_of(logp, mask=None, **fields):
    """A Batch for log-probs [B, T] whose fields are those given."""
    b, t = np.shape(logp)
    mask = np.ones((b, t), bool) if mask is None else np.asarray(mask, bool)
    rows = lambda x, dtype=np.float32: np.full(b, x, dtype)
    tokens = lambda x: np.full((b, t), x, np.float32)
    values = dict(
        tokens=np.zeros((b, 1 + t), np.int32), positions=np.zeros((b, 1 + t), np.int32), mask=mask, surr_mask=mask,
        adv=tokens(1), denom_logp=tokens(0), denom_self=rows(False, bool), sampler_logp=tokens(np.nan),
        ref_logp=tokens(0), surr_weight=rows(1), nll_weight=rows(0), kl_weight=rows(0), kind=rows(0, np.int8),
        level=rows(0, np.int8), clip=np.full((b, 2), 0.2, np.float32), seq_denom=rows(np.nan),
        seq_norm=mask.sum(-1).astype(np.float32), is_weight=tokens(1), source=rows(0, np.int32),
        sample=rows(0, np.int32), group=rows(0, np.int32), source_logp=rows(np.nan), source_tokens=rows(np.nan),
    )  # fmt: skip
    for name, x in fields.items():
        values[name] = np.broadcast_to(np.asarray(x, values[name].dtype), values[name].shape)
    return Batch(**values)


@functools.partial(jax.jit, static_argnames="settings")
def differentiate(logp, batch, settings):
    return jax.value_and_grad(lambda x: losses.loss(x, jnp.zeros_like(x), batch, settings), has_aux=True)(logp)


def loss_and_grad(logp, batch, **settings):
    (value, _), grad = differentiate(jnp.asarray(logp, jnp.float32), batch, LossSettings(**settings))
    return float(value), np.asarray(grad)


def objective(logp, batch, **settings):
    """Ratios and objectives J of the surrogate, [B, T]."""
    settings, logp = LossSettings(**settings), jnp.asarray(logp, jnp.float32)
    rho = losses.log_ratios(logp, batch.denom_logp, batch, settings.levels)
    return np.asarray(rho), np.asarray(losses.surrogate(logp, rho, batch, settings))


@pytest.mark.parametrize("mode", advantages.AGGREGATIONS)
def test_unified_three_rows(mode):
    x, expected, near = case("loss.unified.three_rows")
    mask = np.array(x["mask"], bool)
    lengths, rows = mask.sum(1), np.array(x["surr_rows"], bool)
    weight = advantages.row_weights(mode, lengths, rows, x["dr_grpo_length"])
    # SGT's imitation weight with prompt normalisation: lambda / (prompts · tokens) on the certificate.
    nll = np.where(rows, 0, x["sgt_lambda"] / (x["num_prompts"] * lengths))
    batch = batch_of(
        x["logp"], mask, denom_logp=x["denom_logp"], adv=np.array(x["adv"])[:, None], surr_weight=weight,
        nll_weight=nll, clip=(x["clip_low"], x["clip_high"]),
    )  # fmt: skip
    settings = dict(dual_clip=x["dual_clip"])
    total, grad = loss_and_grad(x["logp"], batch, **settings)
    want = expected[mode]
    assert total == near(want["total"]) and grad == near(want["grad_logp"])
    (_, sums), _ = differentiate(jnp.asarray(x["logp"], jnp.float32), batch, LossSettings(**settings))
    assert float(sums["loss/surrogate"]) == near(want["surrogate"]) and float(sums["loss/nll"]) == near(want["nll"])
    rho, j = objective(x["logp"], batch, **settings)
    own = mask[:2]
    assert np.where(own, rho[:2], 0) == near(expected["ratio"])
    assert np.where(own, j[:2], 0) == near(expected["token_objective"])


@pytest.mark.parametrize("mode", advantages.AGGREGATIONS)
def test_two_rows(mode):
    x, expected, near = case("loss.aggregation.two_rows")
    lengths = np.array(x["lengths"])
    mask = np.arange(lengths.max()) < lengths[:, None]
    weight = advantages.row_weights(mode, lengths, np.ones(2, bool), x["dr_grpo_length"])
    batch = batch_of(mask, mask, adv=np.array(x["adv"])[:, None], surr_weight=weight, denom_self=True)
    value, grad = loss_and_grad(-0.5 * mask, batch)
    assert value == near(expected[mode])
    assert grad == near(np.where(mask, -(weight * x["adv"])[:, None], 0))


def test_masked_row():
    x, expected, near = case("loss.aggregation.masked_row")
    lengths = np.array(x["lengths"])
    weight = advantages.row_weights(x["aggregation"], lengths, np.array(x["surr_rows"], bool), 8)
    assert 1 / weight[0] == near(expected["denominator"]) and weight[1] == 0
    batch = batch_of(np.zeros((2, 4)), adv=-x["token_loss"], surr_weight=weight, denom_self=True)
    assert loss_and_grad(np.full((2, 4), -0.5), batch)[0] == near(expected["loss"])


def test_shards():
    x, expected, near = case("loss.aggregation.shards")
    shards = [x["shard0_token_losses"], x["shard1_token_losses"]]
    lengths = np.array([len(s) for s in shards])
    weight = advantages.row_weights(x["aggregation"], lengths, np.ones(2, bool), 8)
    parts = []
    for shard, w in zip(shards, weight):  # each shard alone, then added
        batch = batch_of([shard], adv=-np.array([shard]), surr_weight=w, denom_self=True)
        parts.append(loss_and_grad(np.full((1, len(shard)), -0.5), batch)[0])
    assert sum(parts) == near(expected["loss"])


def test_gspo():
    for name in ("loss.gspo.sequence_ratio", "loss.gspo.unclipped_grad"):
        x, expected, near = case(name)
        batch = batch_of(
            [x["logp"]], denom_logp=x["denom_logp"], adv=x["adv"], clip=(x["clip_low"], x["clip_high"]),
            level=types.SEQUENCE, surr_weight=1 / len(x["logp"]),
        )  # fmt: skip
        rho, j = objective([x["logp"]], batch, levels=(types.SEQUENCE,))
        assert rho == near([[expected["seq_ratio"]] * 3]) and j == near([[expected["objective"]] * 3])
        value, grad = loss_and_grad([x["logp"]], batch, levels=(types.SEQUENCE,))
        assert value == near(-expected["objective"])
        if "clipped" in expected:
            assert j == near([[expected["clipped"]] * 3]) and not grad.any()
        else:
            assert -grad[0] == near(expected["grad_objective_per_token"])


def test_sampler_trainer_correction():
    for name, mode in (
        ("loss.tis.token", "token_truncate"),
        ("loss.tis.sequence", "sequence_truncate"),
        ("loss.tis.sequence_uncapped", "sequence_truncate"),
    ):
        x, expected, near = case(name)
        delta = jnp.asarray([x["trainer_minus_sampler"]])
        got = np.asarray(losses.correction_weight(delta, jnp.ones(delta.shape, bool), mode, x["cap"]))[0]
        assert got == near(np.broadcast_to(expected["weight"], got.shape))
    assert sum(CASES["loss.tis.sequence"]["inputs"]["trainer_minus_sampler"]) == pytest.approx(1.5)


def test_kl():
    for name in ("loss.kl.estimators", "loss.kl.estimators_other_side"):
        x, expected, near = case(name)
        for k in ("k2", "k3", "k3_k2"):
            value, grad = jax.value_and_grad(losses.kl_estimate)(x["logp"], x["ref_logp"], k)
            assert float(value) == near(expected["values"]["k3" if k == "k3_k2" else k])
            assert float(grad) == near(expected["grad_wrt_logp"]["k2" if k == "k3_k2" else k])
        with pytest.raises(ValueError, match="k1"):
            losses.kl_estimate(jnp.zeros(1), jnp.zeros(1), "k1")
    x, expected, near = case("loss.kl.clamp")
    value, grad = jax.value_and_grad(losses.kl_estimate)(x["logp"], x["ref_logp"], "k3")
    assert float(value) == near(expected["k3"]) and float(grad) == near(expected["grad_k3"])
    assert losses.LOG_CLAMP == x["log_clamp"] and losses.KL_CLAMP == x["value_clamp"]


def test_temperature():
    x, expected, near = case("loss.logp.temperature")
    logp, _ = losses.token_logprobs(
        lambda h: h, jnp.asarray([[x["logits"]]], jnp.float32), jnp.asarray([[x["token"]]]),
        temperature=x["temperature"], real_vocab=2, chunk_tokens=1,
    )  # fmt: skip
    assert float(logp[0, 0]) == near(expected["logp"])


def test_score_and_shape():
    x, expected, near = case("loss.kind.score")
    logp = np.array([x["logp"]])
    denom = logp - np.log(x["ratio"])
    batch = batch_of(logp, denom_logp=denom, adv=x["adv"], clip=x["clip"], kind=types.SCORE)
    _, j = objective(logp, batch, kinds=(types.SCORE,))
    assert j[0] / (x["adv"] * logp[0]) == near(expected["weight"])
    assert -loss_and_grad(logp, batch, kinds=(types.SCORE,))[1][0] == near(expected["grad_objective_wrt_logp"])

    x, expected, near = case("loss.kind.shape")
    logp = np.log([x["prob"]])
    batch = batch_of(logp, adv=x["adv"], kind=types.SHAPE, denom_self=True)
    settings = dict(kinds=(types.SHAPE,), shape_gamma=x["gamma"])
    assert objective(logp, batch, **settings)[1][0] == near(expected["value"])
    assert -loss_and_grad(logp, batch, **settings)[1][0] == near(expected["grad_objective_wrt_logp"])


def test_advantages_of_eight():
    x, expected, near = case("adv.grpo.g8")
    for key, estimator, options in (
        ("grpo_ddof1_eps1e_6", "grpo", {}),
        ("grpo_ddof0_eps1e_6", "grpo", {"ddof": 0}),
        ("trl_eps1e_4", "grpo", {"eps": 1e-4}),
        ("dr_grpo", "dr_grpo", {}),
        ("rloo", "rloo", {}),
    ):
        adv, _ = advantages.group_advantages(np.array(x["rewards"]), ["p"] * 8, estimator, **options)
        right, wrong = expected[key]
        assert adv == near(np.where(x["rewards"], right, wrong))


def test_advantages_of_awkward_groups():
    x, expected, near = case("adv.small_range")
    for ddof in (0, 1):
        for dtype in (np.float64, np.float32):
            adv, _ = advantages.group_advantages(np.array(x["rewards"], dtype), ["p"] * 2, ddof=ddof)
            # In float32 the reward itself is off by 1.4e-8 in 1e-5.
            tolerance = 1e-4 if dtype == np.float64 else 1e-3
            assert adv == pytest.approx(expected[f"ddof{ddof}"], abs=tolerance)

    x, expected, near = case("adv.zero_variance")
    for estimator in advantages.ESTIMATORS:
        adv, _ = advantages.group_advantages(np.array(x["rewards"]), ["p"] * 4, estimator)
        assert adv == near(expected["adv"])

    x, expected, near = case("adv.nan_reward")
    rewards = np.array([float(r) for r in x["rewards"]])
    adv, valid = advantages.group_advantages(rewards, ["p"] * 8)
    assert valid.sum() == expected["valid_rows"] and adv == near([expected["adv_of_valid"]] * 8)

    x, expected, near = case("adv.uneven_groups")
    keys = [i for i, group in enumerate(x["groups"]) for _ in group]
    adv, _ = advantages.group_advantages(np.concatenate(x["groups"]), keys, x["estimator"])
    assert adv == near(np.concatenate(expected["adv"]))

    x, expected, near = case("adv.batch_scale")
    for estimator, key in (("grpo", "group"), ("batch_std", "batch")):
        rewards = np.concatenate(x["groups"])
        adv, _ = advantages.group_advantages(rewards, [0, 0, 1, 1], estimator, ddof=x["ddof"], eps=x["eps"])
        assert adv == near(np.concatenate(expected[key]))

    x, expected, near = case("adv.same_prompt_two_keys")
    rewards = np.array(x["group_a"] + x["group_b"])
    adv, _ = advantages.group_advantages(rewards, [("x", "a")] * 16 + [("x", "b")] * 16, x["estimator"])
    assert adv == near([expected["adv_a"]] * 16 + [expected["adv_b"]] * 16)


def test_dapo():
    x, expected, near = case("adv.overlong")
    penalty = advantages.overlong_penalty(np.array(x["lengths"]), x["max_len"], x["buffer"], x["factor"])
    assert penalty == near(expected["penalty"])
    x, expected, _ = case("adv.dynamic_sampling")
    success = np.arange(x["G"]) < np.array(x["success_counts"])[:, None]
    assert np.flatnonzero(advantages.mixed_groups(success.astype(np.int8))).tolist() == expected["kept"]


def test_diagnostics():
    x, expected, near = case("diag.ess")
    ess = metrics.effective_sample_size(np.array(x["weights"]))
    assert ess == near(expected["ess"]) and ess / len(x["weights"]) == near(expected["ess_frac"])

    x, expected, near = case("diag.decoupling")
    got = decoupling(x["both_right"], x["only_A"], x["only_B"], x["both_wrong"], x["both_wrong_same_answer"])
    assert set(got) == set(expected) and all(got[k] == near(expected[k]) for k in expected)
    assert "kappa" not in decoupling(5, 0, 0, 0)

    x, expected, near = case("diag.pass_at_k")
    assert [float(pass_at_k(x["n"], np.array(x["c"]), k)) for k in x["k"]] == near(expected["pass_at_k"])
    x, expected, near = case("diag.pass_at_k_edges")
    assert pass_at_k(x["n"], np.array(x["c"]), x["k"]) == near(expected["pass_at_k"])

    x, expected, _ = case("diag.maj_ensemble")
    gold = lambda answers: int(majority(answers) == x["gold"])
    assert gold(x["A"]) == expected["maj_A"] and gold(x["B"]) == expected["maj_B"]
    assert gold(x["A"] + x["B"]) == expected["ensemble"]

    x, expected, near = case("diag.masked_mean")
    assert metrics.masked_mean(np.array([float(v) for v in x["x"]]), x["mask"]) == near(expected["mean"])

    x, expected, near = case("diag.global_mean")
    ranks = [x["rank_a"], x["rank_b"]]
    keys = """entropy tokens/own tokens/surrogate tokens/trained mismatch/sum_abs mismatch/kl mismatch/abs/max kl/old
        kl/clamped clip/low clip/high clip/dual clip/peer_low clip/peer_high clip/peer_dual tokens/surrogate_peer
        skipped loss loss/surrogate loss/nll loss/kl grad_norm lr"""
    zeros = dict.fromkeys(keys.split(), 0)
    updates = [{**zeros, "kl/ref": r["kl"] * r["tokens"], "tokens/kl": r["tokens"]} for r in ranks]
    assert metrics.of_updates(updates)["kl/ref"] == near(expected["mean"])


def test_every_golden_case_was_checked():
    """Runs last: a case added to the file must be added here."""
    assert set(CASES) - CHECKED == set()
