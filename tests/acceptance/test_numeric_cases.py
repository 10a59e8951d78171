"""Faults that other trainers had (the numeric ones of the shared cases), through the product's own functions."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl import advantages, batches, losses, metrics, sampling, types
from mutualrl.config import ConfigError, PolicyConfig, add_policy, base_config, read
from mutualrl.learner import schedule
from mutualrl.losses import LossSettings
from mutualrl.types import Problem, Rollouts, Verdicts

PATH = pathlib.Path(__file__).parents[3] / "shared" / "cases" / "numeric.json"
if not PATH.is_file():
    pytest.skip(f"no numeric cases at {PATH}", allow_module_level=True)
CASES = {c["id"]: c for c in json.loads(PATH.read_text())}
MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "dr_grpo",
}


def case(name):
    c = CASES[name]
    tolerance = c["tolerance"]
    near = lambda x: pytest.approx(np.asarray(x, float), abs=tolerance, rel=1e-6 if tolerance else 0)
    return c["inputs"], c["expected"], near


def rollouts(lengths, finish=None, prompt=None, prompt_positions=None, tokens=None):
    """One problem, a group of the given lengths."""
    lengths = np.array([lengths])
    g, t = lengths.size, lengths.max() if tokens is None else np.shape(tokens)[-1]
    prompt = np.array([[5, 6]] if prompt is None else prompt, np.int32)
    return Rollouts(
        policy="a", version=0, step=0, problems=(Problem(id="q", question=""),), prompt=prompt,
        prompt_positions=np.arange(prompt.shape[1])[None] if prompt_positions is None else np.array(prompt_positions),
        tokens=np.ones((1, g, t), np.int32) if tokens is None else np.array(tokens),
        mask=np.arange(t) < lengths[..., None], logprobs=np.full((1, g, t), -0.5, np.float32),
        finish=np.zeros((1, g), np.int8) if finish is None else np.array([finish], np.int8),
        text=(("",) * g,), temperature=1.0,
    )  # fmt: skip


def rows_with(mask, advantage, weight):
    """Own rows with ratio 1, an advantage a token or row, and a weight a row."""
    mask = np.array(mask, bool)
    rows = batches.own_rows(rollouts(np.maximum(mask.sum(1), 1).tolist(), tokens=np.ones((1, *mask.shape))), 0)
    rows.mask[:], rows.surr_mask[:] = mask, mask
    rows.adv[:] = advantage
    rows.surr_weight[:] = weight
    return rows


@jax.jit
def differentiate(logp, rows):
    return jax.value_and_grad(lambda x: losses.loss(x, jnp.zeros_like(x), rows, LossSettings()), has_aux=True)(logp)


def loss_and_grad(rows):
    (value, _), grad = differentiate(jnp.full(rows.mask.shape, -0.5), rows)
    return float(value), np.asarray(grad)


@pytest.mark.parametrize("name", ("A1", "A2"))
@pytest.mark.parametrize("theirs, ours", MODES.items())
def test_normalisation_does_not_depend_on_the_cut(name, theirs, ours):
    x, expected, near = case(name)
    mask = np.array(x["mask"])
    weight = advantages.row_weights(ours, mask.sum(1), np.ones(len(mask), bool), x["L"])
    rows = rows_with(mask, np.array(x["advantages"])[:, None], weight)
    for split in x.get("splits", [[list(range(len(mask)))]]):
        parts = [loss_and_grad(batches.take(rows, np.array(part))) for part in split]
        assert sum(p[0] for p in parts) == near(expected["loss"][theirs])
        assert np.concatenate([p[1] for p in parts]) == near(expected["grad"][theirs])


def test_shards_share_one_denominator():
    x, expected, near = case("A4")
    lengths = np.array([len(s) for s in x["shard_token_losses"]])
    weight = advantages.row_weights("token_mean", lengths, np.ones(2, bool), 1)
    token_loss = np.zeros((2, 3))
    for i, shard in enumerate(x["shard_token_losses"]):
        token_loss[i, : len(shard)] = shard
    rows = rows_with(np.arange(3) < lengths[:, None], -token_loss, weight)
    whole = loss_and_grad(rows)[0]
    apart = sum(loss_and_grad(batches.take(rows, np.array([i])))[0] for i in range(2))
    assert whole == near(expected["loss"]) and apart == near(expected["loss"])


def test_guarded_denominators():
    x, expected, near = case("A5")
    weight = advantages.row_weights("token_mean", np.array(x["token_counts"]), np.ones(1, bool), 1)
    assert weight * x["token_loss_sum"] == near(expected["loss"])

    x, expected, near = case("A6")
    mask = np.array(x["mask"])
    for mode in advantages.AGGREGATIONS:
        weight = advantages.row_weights(mode, mask.sum(1), np.ones(2, bool), 8)
        value, grad = loss_and_grad(rows_with(mask, -np.array(x["token_loss"]), weight))
        assert value == near(expected["loss"]) and grad == near(expected["grad"])


def test_cut_off_rows_leave_numerator_and_denominator():
    x, expected, near = case("A7")
    keep = np.array(x["mask"]).any(1)
    weight = advantages.row_weights("token_mean", np.full(2, 4), keep, 8)
    value, grad = loss_and_grad(rows_with(np.ones((2, 4)), -np.array(x["token_loss"]), weight))
    assert value == near(expected["loss"]) and not grad[1].any()


def test_lengths_are_those_of_the_record():
    x, expected, near = case("A8")
    finish = [types.LENGTH if cut else types.STOP for cut in x["cut_off"]]
    m = metrics.of_rollouts(rollouts(x["lengths"], finish), Verdicts(np.ones((1, 2)), np.ones((1, 2), np.int8)))
    assert m["length/mean"] == near(expected["mean_length"]) and m["length/max"] == expected["max_length"]
    assert m["truncated_frac"] == near(expected["clipped_ratio"])


def test_equal_single_and_invalid_rewards():
    for name in ("B10", "B11", "B12"):
        x, expected, near = case(name)
        rewards = np.array([np.nan if r is None else r for r in x["rewards"]])
        for estimator in advantages.ESTIMATORS:
            adv, valid = advantages.group_advantages(rewards, x["group_ids"], estimator)
            assert adv == near(expected["advantages"])
        if name == "B11":
            weight = advantages.row_weights("token_mean", np.ones(8), valid, 8)
            assert (weight > 0).astype(int).tolist() == expected["row_weight"]
            own = rollouts([1] * 8)
            m = metrics.of_rollouts(own, Verdicts(rewards[None], np.zeros((1, 8), np.int8)))
            assert m["reward/invalid"] == expected["nan_rows"] and m["reward/mean"] == 1.0


def test_a_group_of_one_is_refused():
    config = base_config()
    add_policy(config, "a", model="m", group_size=1)
    with pytest.raises(ConfigError, match=r"^policies\.a\.group_size=1: .*$"):
        read(config)


def test_small_spread():
    x, expected, near = case("B13")
    for ddof in (0, 1):
        adv, _ = advantages.group_advantages(
            np.array(x["rewards"], x["dtype"]), x["group_ids"], "grpo", ddof=ddof, eps=x["eps"]
        )
        assert adv == near(expected[f"ddof{ddof}"])


def test_groups_are_keyed():
    for name in ("B15", "B17"):
        x, expected, near = case(name)
        adv, _ = advantages.group_advantages(np.array(x["rewards"]), x["group_ids"], "dr_grpo")
        assert adv == near(expected["advantages"])


def test_group_against_batch_scale():
    x, expected, near = case("B18")
    for estimator, key in (
        ("grpo", "group"),
        ("batch_std", "batch_std_of_raw_rewards"),
        ("reinforce_pp_baseline", "batch_std_of_centred_rewards"),
    ):
        for ddof in (0, 1):
            adv, _ = advantages.group_advantages(
                np.array(x["rewards"]), x["group_ids"], estimator, ddof=ddof, eps=x["eps"]
            )
            assert adv == near(expected[key][f"ddof{ddof}"])


def test_overlong_buffer_of_zero_is_refused():  # B20
    config = base_config()
    add_policy(config, "a", model="m", overlong_factor=1.0)
    with pytest.raises(ConfigError, match=r"^policies\.a\.overlong_buffer=0: .*$"):
        read(config)


def test_kl():
    x, expected, near = case("C22")
    for k in ("k2", "k3"):
        value, grad = jax.value_and_grad(losses.kl_estimate)(x["logp"], x["ref"], k)
        assert float(value) == near(expected["value"][k]) and float(grad) == near(expected["grad"][k])
    config = base_config()
    add_policy(config, "a", model="m", kl_estimator="k1")
    with pytest.raises(ConfigError, match="kl_estimator='k1': allowed are k2, k3, k3_k2"):
        read(config)

    x, expected, near = case("C23")
    value, grad = jax.value_and_grad(losses.kl_estimate)(x["logp"], x["ref"], "k3_k2")
    assert float(value) == near(expected["value"]) and float(grad) == near(expected["grad"])

    x, _, _ = case("C24")
    for k in types.KL_ESTIMATORS:
        logp, ref = jnp.float32(x["logp"]), jnp.float32(x["ref"])
        value, grad = jax.value_and_grad(losses.kl_estimate)(logp, ref, k)
        assert np.isfinite(value) and np.isfinite(grad)


def test_the_clamp_of_k3_is_counted():  # C24
    rows = batches.own_rows(rollouts([2]), 0)
    rows.kl_weight[:], rows.ref_logp[:] = 0.1, [[-0.4, 99.0]]
    (_, sums), _ = differentiate(jnp.full((1, 2), -0.5), rows)
    assert float(sums["kl/clamped"]) == 1


def sampler_settings(**options):
    return sampling.SamplerSettings(samples=1, max_new_tokens=1, slots=1, real_vocab=2, **options)


def test_temperature_on_both_sides():
    x, expected, near = case("D25")
    logits, keys = jnp.asarray([x["logits"]] * 64, jnp.float32), jax.random.split(jax.random.key(0), 64)
    tokens, behaviour = sampling.draw(logits, keys, jnp.float32(x["temperature"]), sampler_settings())
    trainer, _ = losses.token_logprobs(
        lambda h: h, logits[None], tokens[None], temperature=x["temperature"], real_vocab=2, chunk_tokens=7
    )
    np.testing.assert_allclose(behaviour, trainer[0], atol=1e-6)
    assert np.asarray(behaviour)[np.asarray(tokens) == x["token"]][0] == near(expected["logp"])
    np.testing.assert_allclose(np.exp(trainer[0] - behaviour), expected["ratio"], atol=1e-6)


def test_truncated_sampling_keeps_full_vocabulary_log_probs():
    x, expected, near = case("D26")
    logits, keys = jnp.asarray([x["logits"]] * 64, jnp.float32), jax.random.split(jax.random.key(0), 64)
    tokens, logp = sampling.draw(logits, keys, jnp.float32(1), sampler_settings(top_k=x["top_k"]))
    assert (np.asarray(tokens) == x["token"]).all()
    assert np.asarray(logp) == near(np.full(64, expected["full_vocabulary"]))


def test_the_log_prob_is_of_the_sampled_id():
    x, expected, near = case("D27")
    table = np.full(1000, -30.0, np.float32)
    table[x["ids"]] = x["logps"]
    logp, _ = losses.token_logprobs(
        lambda h: h,
        jnp.asarray(table)[None, None],
        jnp.asarray([[x["sampled"]]]),
        temperature=1.0,
        real_vocab=1000,
        chunk_tokens=1,
    )
    normaliser = np.log(np.exp(table.astype(float)).sum())
    assert float(logp[0, 0]) == pytest.approx(expected["logp"] - normaliser, abs=1e-6)


def test_masks():
    x, expected, near = case("E36")
    values = np.array([np.nan if v is None else v for v in x["values"]])
    assert metrics.masked_mean(values, x["values_mask"]) == near(expected["mean"])
    assert np.isnan(metrics.masked_mean(values, [0, 0, 1, 0]))
    rows = batches.own_rows(rollouts([3, 1]), 0)
    assert rows.positions.dtype == np.int32

    x, expected, _ = case("F38")
    own = rollouts(
        [x["completion_length"]],
        tokens=[[x["completion"]]],
        prompt=[x["prompt"]],
        prompt_positions=[np.where(x["prompt_mask"], np.cumsum(x["prompt_mask"]) - 1, -1)],
    )
    rows = batches.own_rows(own, 0)
    assert rows.mask[0].astype(int).tolist() == expected["completion_mask"]
    assert (rows.positions[0, :4] >= 0).astype(int).tolist() == expected["prompt_mask"]
    assert rows.positions[0].tolist() == [-1, 0, 1, 2, 3, 4, 5, -1, -1]


def test_warm_up_is_sized_from_the_run():
    x, expected, near = case("J84")
    config = PolicyConfig(lr=3e-4, warmup_fraction=x["warmup_fraction"])
    for kind in ("constant", "linear", "cosine"):
        lr = schedule(dataclasses.replace(config, schedule=kind), x["total_steps"])
        assert [float(lr(s)) / config.lr for s in x["steps"]] == near(expected["lr_over_peak"])
