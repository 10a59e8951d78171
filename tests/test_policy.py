"""A policy's three verbs: what an update, a score and a sample may depend on, and what they may not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl import batches, testing, types
from mutualrl.batches import with_reference, with_snapshot
from mutualrl.config import PolicyConfig
from mutualrl.learner import schedule
from mutualrl.losses import LossSettings
from mutualrl.meshes import make_plan
from mutualrl.models.config import ModelConfig
from mutualrl.models.decoder import init_params
from mutualrl.policy import Policy
from mutualrl.seeds import hashed
from mutualrl.testing import alone
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.transfer import none
from mutualrl.types import Batch, Problem, Rollouts, Verdicts

P, G, T, S = 3, 2, 6, 8
PROMPT_LENGTHS = (8, 3, 5)
LENGTHS = np.array([[6, 2], [1, 6], [4, 3]])
# Adam's first step is nearly sign(gradient), which would blow up rounding; with this eps it is nearly the gradient.
CONFIG = PolicyConfig(
    lr=1.0, adam_eps=1.0, clip_norm=0.0, kl_coef=0.05, entropy_coef=0.02, group_size=G, max_new_tokens=T,
    prompt_bucket=S, max_prompt_tokens=16, template="{question}", temperature=0.8, stop_text=":",
)  # fmt: skip


@functools.cache
def parts(folder, model_type="llama"):
    """Tokenizer, model and parameters. Digits and the stop ids are likely, and ids that do not exist likelier still."""
    testing.tiny_model(folder, model_type, bos=True, padded_vocab=5)
    tokenizer, model = Tokenizer.load(folder, template="{question}"), ModelConfig.from_hf(folder)
    params = jax.device_get(init_params(model, jax.random.key(1)))
    embed = np.array(params["embed"])
    embed[tokenizer.encode("0123456789:") + list(tokenizer.stop_ids)] *= 2.5
    embed[tokenizer.size :] *= 5
    return tokenizer, model, {**params, "embed": embed}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("policy") / "llama"


@pytest.fixture(scope="session")
def make(folder):
    """Makes a policy; equal calls share one, so leave its state as it was (`updated` does)."""

    @functools.cache
    def build(name="a", devices=1, tensor=1, correction="token_truncate", **settings):
        config = dataclasses.replace(CONFIG, **settings)
        tokenizer, model, params = parts(folder)
        slice_ = dataclasses.replace(config, devices=devices, tensor=tensor)
        return Policy(
            name, 0, config, model, tokenizer, make_plan({name: slice_}).meshes[name], jax.tree.map(jnp.array, params),
            total_updates=10, seed=0,
            loss_settings=LossSettings(
                entropy_coef=config.entropy_coef, kl_estimator=config.kl_estimator, correction=correction
            ),
        )  # fmt: skip

    return build


def rollouts(tokenizer, s=S, t=T):
    """Random rollouts whose completions have LENGTHS; more room on request."""
    rng = np.random.default_rng(0)
    ids = lambda n: rng.integers(0, tokenizer.size, n)
    prompt, positions = np.full((P, s), tokenizer.pad_id, np.int32), np.full((P, s), -1, np.int32)
    tokens, logp = np.full((P, G, t), tokenizer.pad_id, np.int32), np.zeros((P, G, t), np.float32)
    for p, n in enumerate(PROMPT_LENGTHS):
        prompt[p, s - n :], positions[p, s - n :] = ids(n), np.arange(n)
        for g in range(G):
            tokens[p, g, : LENGTHS[p, g]] = ids(LENGTHS[p, g])
            logp[p, g, : LENGTHS[p, g]] = -rng.uniform(2, 9, LENGTHS[p, g])
    finish = np.where(LENGTHS == T, types.LENGTH, types.STOP).astype(np.int8)
    problems = tuple(Problem(id=f"q{i}", question="") for i in range(P))
    mask = np.arange(t) < LENGTHS[..., None]
    return Rollouts("a", 0, 0, problems, prompt, positions, tokens, mask, logp, finish, (("",) * G,) * P, 0.8)


VERDICTS = Verdicts(np.random.default_rng(1).normal(size=(P, G)), np.zeros((P, G), np.int8))


EVERY = slice(None)


def rows_of(policy, s=S, t=T, **settings):
    """One update's batch with ratios off 1 and a KL, under fixed noise of [P·G, T]."""
    own = rollouts(policy.tokenizer, s, t)
    noise = np.random.default_rng(2).normal(0, 0.3, (2, P * G, T)).astype(np.float32)
    noise[0, ::2] *= 5  # some ratios beyond the dual clip
    noise = np.pad(noise, ((0, 0), (0, 0), (0, t - T)))
    logp = np.pad(snapshot(policy), ((0, 0), (0, t - T)))
    config = dataclasses.replace(policy.config, **settings)
    own = dataclasses.replace(own, logprobs=(logp + noise[0] / 2).reshape(P, G, t))
    return with_reference(with_snapshot(grpo(own, VERDICTS, config), EVERY, logp + noise[0]), EVERY, logp + noise[1])


def grpo(own, verdicts, config):
    """The one batch of GRPO without peers."""
    return none.build(alone(own, verdicts, config))[0][0]


_SNAPSHOT = {}


def snapshot(policy):
    """Log-probs of the random rollouts under the first parameters, f32[P·G, T]; the same for every policy here."""
    if not _SNAPSHOT:
        rows = batches.own_rows(rollouts(policy.tokenizer), 0)
        _SNAPSHOT["logp"] = np.where(rows.mask, policy.score(rows).result().logp, 0)
    return _SNAPSHOT["logp"]


def updated(policy, *updates):
    """Metrics and parameters after updates; the policy's state is put back."""
    before = jax.device_get(policy.state)
    found = [policy.update(batch).result() for batch in updates]
    after = jax.device_get(policy.state)
    policy.state = jax.device_put(before, policy.state_shardings)
    return found[-1], after


def close(a, b, rtol=1e-4, atol=1e-5):
    """The same metrics and parameters."""
    in_order = lambda x: np.sort(np.atleast_1d(x))  # rows may come in another order
    for key in b[0]:
        np.testing.assert_allclose(in_order(a[0][key]), in_order(b[0][key]), rtol=rtol, atol=1e-5, err_msg=key)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a[1]["params"]), jax.tree.leaves(b[1]["params"])):
        np.testing.assert_allclose(x, y, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="session")
def base(make):
    """The update that all others must equal: one device, all rows at once."""
    policy = make()
    out = updated(policy, rows_of(policy))
    moved = max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (out[1]["params"], policy.state["params"]))))
    assert (
        moved > 1e-2
        and out[0]["clip/high"] > 0
        and out[0]["clip/low"] > 0
        and out[0]["clip/dual"] > 0
        and out[0]["loss/kl"] > 0
    )
    return out


# ---- the update


def test_the_loss_is_that_of_a_plain_forward_pass(make, base):
    """Value and gradient against the definition, with the head over all tokens at once and no micro-batches."""
    policy = make()
    rows = rows_of(policy)

    @jax.jit
    def loss(params):
        hidden, _ = policy.decoder.apply({"params": params}, rows.tokens, rows.positions)
        logits = policy.decoder.apply({"params": params}, hidden, method="head")[:, S - 1 : -1, : policy.tokenizer.size]
        log = jax.nn.log_softmax(logits / CONFIG.temperature, -1)
        logp = jnp.take_along_axis(log, rows.tokens[:, S:, None], -1)[..., 0]
        entropy = -(jnp.exp(log) * log).sum(-1)
        rho, a = jnp.exp(logp - rows.denom_logp), rows.adv
        j = jnp.minimum(rho * a, jnp.clip(rho, 0.8, 1.2) * a)
        j = jnp.where(a < 0, jnp.maximum(j, 3 * a), j)
        c = np.minimum(np.exp(rows.denom_logp - np.nan_to_num(rows.sampler_logp)), 2)
        e = rows.ref_logp - logp
        kl = jnp.minimum(jnp.exp(e) - e - 1, 10)
        n = rows.mask.sum()
        return jnp.where(rows.mask, -j * c + 0.05 * kl - 0.02 * entropy, 0).sum() / n

    value, grads = jax.value_and_grad(loss)(policy.state["params"])
    np.testing.assert_allclose(base[0]["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(
        base[0]["grad_norm"], np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(grads))), rtol=1e-4
    )
    expected = jax.tree.map(lambda p, g: p - g / (jnp.abs(g) + 1), policy.state["params"], grads)
    close(base, (base[0], {"params": expected}))


VARIANTS = {
    "micro-batches of 1": dict(micro_batch=1),
    "micro-batches of 2, small chunks of logits, remat": dict(micro_batch=2, logit_chunk_tokens=13, remat=True),
    "micro-batches of 4, with padding rows": dict(micro_batch=4),
    "a token budget, unrolled": dict(micro_batch_tokens=3 * (S + T) + 1, unroll_layers=True),
    "4 devices, with padding rows": dict(devices=4),
    "6 devices, a row each": dict(devices=6),
    "4 devices, split layers": dict(devices=4, tensor=2, micro_batch=2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_how_an_update_is_computed_does_not_matter(make, base, variant):
    policy = make(**VARIANTS[variant])
    close(updated(policy, rows_of(policy)), base)


def test_padding_of_prompts_and_completions_does_not_matter(make, base):
    policy = make()
    close(updated(policy, rows_of(policy, s=13, t=9)), base)


def test_row_order_does_not_matter(make, base):
    policy = make()
    order = np.random.default_rng(3).permutation(P * G)
    close(updated(policy, batches.take(rows_of(policy), order)), base)


def test_garbage_in_pads_does_not_matter(make, base):
    policy = make()
    rows = rows_of(policy)
    bad = {n: np.where(rows.mask, getattr(rows, n), np.nan) for n in ("denom_logp", "ref_logp", "adv", "is_weight")}
    tokens = np.where(rows.positions >= 0, rows.tokens, 17)
    close(updated(policy, dataclasses.replace(rows, tokens=tokens, **bad)), base)


def test_rows_of_weight_zero_do_not_matter(make):
    """What stands in them changes neither loss nor gradient, and they are not counted as trained."""
    policy = make()
    rows = batches.take(rows_of(policy), np.arange(6))
    for name in ("surr_weight", "kl_weight"):
        getattr(rows, name)[4:] = 0
    other = batches.take(rows, np.arange(6))
    other.tokens[4:] = (other.tokens[4:] + 7) % policy.tokenizer.size
    (found, after), (expected, clean) = updated(policy, other), updated(policy, rows)
    same = ("loss", "grad_norm", "tokens/trained", "tokens/surrogate", "clip/high", "kl/old")
    close(({k: found[k] for k in same}, after), ({k: expected[k] for k in same}, clean))
    assert found["tokens/trained"] == LENGTHS[:2].sum() and found["tokens/own"] == LENGTHS.sum()
    assert found["entropy"] != expected["entropy"]


def test_micro_batch_sizes(make):
    policy = make()
    assert policy.micro_rows(6, S + T) == 6
    assert make(micro_batch=4).micro_rows(6, 14) == 4 and make(micro_batch=4).micro_rows(3, 14) == 3
    budget = make(micro_batch_tokens=3 * (S + T) + 1)
    assert budget.micro_rows(6, S + T) == 3 and budget.micro_rows(6, 1000) == 1
    four = make(devices=4)
    assert four.micro_rows(6, 14) == 8 and four.micro_rows(3, 14) == 4
    four = make(devices=4, micro_batch_tokens=7 * 14)
    assert four.micro_rows(100, 14) == 4  # 7 rows fit, 8 would not
    assert four.micro_rows(100, 1000) == 4  # at least one a device


def test_bfloat16_keeps_float32_parameters(make, base):
    policy = make(dtype="bfloat16")
    found, after = updated(policy, rows_of(policy))
    floats = [x for x in jax.tree.leaves(after) if np.issubdtype(x.dtype, np.floating) or x.dtype == jnp.bfloat16]
    assert {x.dtype for x in floats} == {np.dtype(np.float32)}
    assert found["grad_norm"] == pytest.approx(base[0]["grad_norm"], rel=0.2)
    assert found["loss"] == pytest.approx(base[0]["loss"], rel=0.2, abs=0.05)


@pytest.mark.parametrize("field", ("adv", "ref_logp"))
def test_a_non_finite_gradient_skips_the_update(make, field):
    policy = make()
    rows = rows_of(policy)
    bad = dataclasses.replace(rows, **{field: np.full_like(rows.adv, np.nan)})
    found, after = updated(policy, bad)
    assert found["skipped"] == 1 and after["skipped"] == 1 and after["step"] == 0
    for a, b in zip(jax.tree.leaves(after["params"]), jax.tree.leaves(policy.state["params"])):
        np.testing.assert_array_equal(a, b)
    found, after = updated(policy, bad, rows)
    expected, clean = updated(policy, rows)
    assert found["skipped"] == 0 and after["step"] == 1 and after["skipped"] == 1 and found["lr"] == expected["lr"]
    close((found, after), (expected, clean), atol=0)
    for a, b in zip(jax.tree.leaves(after["opt_state"]), jax.tree.leaves(clean["opt_state"])):
        np.testing.assert_array_equal(a, b)


def test_nothing_to_train_leaves_parameters(make):
    policy = make()
    rows = rows_of(policy)
    nothing, zeros = np.zeros_like(rows.mask), np.zeros(6, np.float32)
    empty = dataclasses.replace(rows, mask=nothing, surr_mask=nothing, surr_weight=zeros, kl_weight=zeros)
    found, after = updated(policy, empty)
    assert found["loss"] == found["grad_norm"] == found["skipped"] == 0
    for a, b in zip(jax.tree.leaves(after["params"]), jax.tree.leaves(policy.state["params"])):
        np.testing.assert_array_equal(a, b)


def test_equal_rewards_give_no_gradient_but_their_kl_does(make):
    policy = make(entropy_coef=0.0)
    own, reference = rollouts(policy.tokenizer), snapshot(policy) - 0.5
    equal = Verdicts(np.ones((P, G)), np.ones((P, G), np.int8))
    free = dataclasses.replace(policy.config, kl_coef=0.0)
    found, _ = updated(policy, grpo(own, equal, free))
    assert found["grad_norm"] == 0
    found, _ = updated(policy, with_reference(grpo(own, equal, policy.config), EVERY, reference))
    assert found["grad_norm"] > 0 and found["loss/surrogate"] == 0
    assert found["kl/ref"] / found["tokens/kl"] == pytest.approx(np.exp(-0.5) - 0.5, rel=1e-3)
    dropped = dataclasses.replace(policy.config, drop_zero_variance=True)
    found, _ = updated(policy, with_reference(grpo(own, equal, dropped), EVERY, reference))
    assert found["grad_norm"] == 0


def test_the_first_update_has_ratio_one(make):
    """A snapshot scored a moment ago and `denom_self` are the same thing, and nothing is clipped."""
    policy = make(entropy_coef=0.0)
    config = dataclasses.replace(policy.config, kl_coef=0.0)
    own = rollouts(policy.tokenizer)
    fresh = updated(policy, grpo(own, VERDICTS, config))
    given = updated(policy, with_snapshot(grpo(own, VERDICTS, config), EVERY, snapshot(policy)))
    close(given, fresh)
    assert fresh[0]["clip/low"] == fresh[0]["clip/high"] == fresh[0]["clip/dual"] == fresh[0]["kl/old"] == 0
    assert fresh[0]["grad_norm"] > 0


def test_learning_rate_clipping_and_decay(make):
    """Plain numbers of the optimiser: schedule by update, global norm, no decay of norms."""
    policy = make(lr=0.5, warmup_fraction=0.4, clip_norm=1e-3, weight_decay=0.1, adam_eps=1e-8)
    rows = rows_of(policy)
    before = jax.device_get(policy.state["params"])
    first, after = updated(policy, rows)
    assert first["lr"] == 0 and first["grad_norm"] > 1e-2  # the norm is that before clipping
    for a, b in zip(jax.tree.leaves(after["params"]), jax.tree.leaves(before)):
        np.testing.assert_array_equal(a, b)
    moments = jax.tree.leaves(after["opt_state"])
    assert max(np.abs(m).max() for m in moments if m.ndim) <= 1e-3
    second, after = updated(policy, rows, rows)
    assert second["lr"] == pytest.approx(0.5 / 4)
    none_at_all = dataclasses.replace(rows, **{f"{k}_weight": np.zeros(6, np.float32) for k in ("surr", "kl")})
    _, after = updated(policy, none_at_all, none_at_all)  # no gradient: what moves is decay
    np.testing.assert_allclose(after["params"]["embed"], before["embed"] * (1 - 0.125 * 0.1), rtol=1e-5)
    np.testing.assert_array_equal(after["params"]["norm"], before["norm"])
    np.testing.assert_array_equal(after["params"]["layers"]["mlp_norm"], before["layers"]["mlp_norm"])


def test_schedules():
    lr = lambda kind, **s: schedule(PolicyConfig(lr=2.0, schedule=kind, **s), 100)
    flat = lr("constant")
    assert [float(flat(s)) for s in (0, 50, 99, 200)] == [2.0] * 4
    linear = lr("linear", warmup_fraction=0.1, stable_fraction=0.5, lr_end=0.1)
    np.testing.assert_allclose(
        [linear(s) for s in (0, 5, 10, 60, 80, 100, 150)], [0, 1, 2, 2, 1.1, 0.2, 0.2], rtol=1e-6
    )
    cosine = lr("cosine", lr_end=0.5)
    np.testing.assert_allclose([cosine(s) for s in (0, 50, 100, 150)], [2, 1.5, 1, 1], rtol=1e-6)
    assert float(lr("cosine", warmup_fraction=1.0)(99)) == pytest.approx(1.98)


# ---- scores


def test_scores_do_not_depend_on_the_cut(make):
    expected = snapshot(make())
    rows = batches.own_rows(rollouts(make().tokenizer), 0)
    for settings in (dict(micro_batch=4), dict(devices=4, tensor=2, micro_batch=2)):
        scored = make(**settings).score(rows).result()
        assert scored.logp.shape == scored.entropy.shape == (P * G, T)
        np.testing.assert_allclose(np.where(rows.mask, scored.logp, 0), expected, atol=1e-5)
    assert (scored.entropy[rows.mask] > 0).all() and (scored.entropy < np.log(make().tokenizer.size)).all()


def test_a_frozen_policy_pays_for_no_training(make):
    trained, frozen = make(), make(frozen=True)
    assert trained.config.kl_coef and trained.ref_params is not None and jax.tree.leaves(trained.state["opt_state"])
    assert frozen.ref_params is None and not jax.tree.leaves(frozen.state["opt_state"])


def test_the_reference_stays(make):
    policy = make()
    rows = rows_of(policy)
    before = jax.device_get(policy.state)
    policy.update(rows).result()
    reference, now = policy.score(rows, reference=True).result(), policy.score(rows).result()
    policy.state = jax.device_put(before, policy.state_shardings)
    np.testing.assert_allclose(np.where(rows.mask, reference.logp, 0), snapshot(policy), atol=1e-5)
    assert np.abs(now.logp - reference.logp)[rows.mask].max() > 0.05
    assert make(kl_coef=0.0, entropy_coef=0.0).ref_params is None
    fresh = make("fresh")  # the update gives its own buffers away
    for a, b in zip(jax.tree.leaves(fresh.ref_params), jax.tree.leaves(fresh.state["params"])):
        assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()


# ---- samples

PROBLEMS = [Problem(id=f"p{i}", question=q) for i, q in enumerate(("1", "22+3=", "rev:1234=", "max:1"))]


def sampled(policy, step=0, problems=PROBLEMS, **options):
    return policy.sample(problems, step, samples=8, **options).result()


def equal(a, b):
    np.testing.assert_array_equal(np.where(a.mask, a.tokens, 0), np.where(b.mask, b.tokens, 0))
    np.testing.assert_array_equal(a.mask, b.mask)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert a.text == b.text and (a.finish == b.finish).all()


@pytest.fixture(scope="module")
def drawn(make):
    return sampled(make())


def test_rollouts(make, drawn):
    """Fields agree with each other, and with the trainer's log-probs."""
    policy, own = make(), drawn
    tokenizer = policy.tokenizer
    assert (own.policy, own.version, own.step, own.temperature) == ("a", 0, 0, 0.8)
    assert set(np.unique(own.finish)) == {types.STOP, types.LENGTH, types.STOP_TEXT}
    assert (own.tokens < tokenizer.size).all() and (own.tokens[~own.mask] == tokenizer.pad_id).all()
    for p, problem in enumerate(PROBLEMS):
        n = (own.prompt_positions[p] >= 0).sum()
        assert own.prompt[p, -n:].tolist() == tokenizer.prompt(problem.question)
        assert own.prompt_positions[p, -n:].tolist() == list(range(n))
        for g in range(8):
            ids = own.tokens[p, g][own.mask[p, g]].tolist()
            ends = [i in tokenizer.stop_ids or ":" in tokenizer.decode([i]) for i in ids]
            assert not any(ends[:-1]) and len(ids) == own.lengths[p, g] >= 1
            finish = own.finish[p, g]
            assert (finish == types.STOP) == (ids[-1] in tokenizer.stop_ids)
            assert (finish == types.STOP_TEXT) == (":" in tokenizer.decode(ids))
            assert finish != types.LENGTH or len(ids) == T
            assert own.text[p][g] == tokenizer.decode(ids).split(":")[0]
    rows = batches.own_rows(own, 0)
    gap = np.where(rows.mask, policy.score(rows).result().logp - np.nan_to_num(rows.sampler_logp), 0)
    assert np.abs(gap).max() < 1e-4


def test_samples_repeat_and_differ(make, drawn):
    """The same run seed repeats; another step, purpose, policy or problem does not."""
    policy = make()
    equal(sampled(policy), drawn)
    same = lambda a: (a.tokens == drawn.tokens).mean()
    assert same(sampled(policy, step=1)) < 0.6
    assert same(sampled(policy, purpose="evaluate")) < 0.6
    renamed = [dataclasses.replace(p, id=p.id + "x") for p in PROBLEMS]
    assert same(sampled(policy, problems=renamed)) < 0.6
    keys = {jax.random.key_data(p._key).tobytes() for p in (policy, make("b"), make("c"))}
    assert len(keys) == 3 and hashed("a") == hashed("a") != hashed("b")
    order = [2, 0, 3, 1]
    moved = sampled(policy, problems=[PROBLEMS[i] for i in order])
    np.testing.assert_array_equal(moved.tokens, drawn.tokens[order])


@pytest.mark.parametrize("settings", [dict(devices=6, slots=5), dict(devices=4, tensor=2, slots=2)], ids=str)
def test_devices_do_not_change_samples(make, drawn, settings):
    equal(sampled(make(**settings)), drawn)


def test_static_and_time_slice_plans_are_equal(make, folder, drawn):
    """Two policies on slices of their own, and taking turns on one slice, dispatched together."""
    tokenizer, model, params = parts(folder)
    a, found = make(), {}
    for plan in ("static", "time_slice"):
        meshes = make_plan({n: dataclasses.replace(CONFIG, devices=1) for n in "ab"}, plan).meshes
        assert meshes["a"] == a.mesh and (meshes["b"] == a.mesh) == (plan == "time_slice")
        b = Policy(
            "b", 1, CONFIG, model, tokenizer, meshes["b"], params, total_updates=10, seed=0,
            loss_settings=LossSettings(entropy_coef=CONFIG.entropy_coef),
        )  # fmt: skip
        own, other = (work.result() for work in [p.sample(PROBLEMS, 0, samples=8) for p in (a, b)])
        equal(own, drawn)
        assert (own.tokens != other.tokens).any()
        found[plan] = other, updated(b, rows_of(b))
    equal(found["static"][0], found["time_slice"][0])
    close(found["static"][1], found["time_slice"][1])


def test_new_weights_are_sampled_from(make, folder):
    """After an update that changes the argmax, greedy completions are those of a policy that began with its weights."""
    policy = make()
    before, cold = sampled(policy, temperature=0), jax.device_get(policy.state)
    policy.update(rows_of(policy)).result()
    warm, params = sampled(policy, temperature=0), jax.device_get(policy.state["params"])
    assert warm.version == 1 and (warm.tokens != before.tokens).any()
    assert (warm.tokens == warm.tokens[:, :1]).all()
    policy.state = jax.device_put({**cold, "params": params}, policy.state_shardings)
    equal(sampled(policy, temperature=0), dataclasses.replace(warm, version=0))
    policy.state = jax.device_put(cold, policy.state_shardings)
    equal(sampled(policy, temperature=0), before)


def test_completions_of_a_stop_id_alone(make):
    """An empty reply is one action: length 1, trained, text ''."""
    policy = make(stop_text="")
    policy.is_stop[:] = True
    own = sampled(policy)
    policy.is_stop[:] = False
    policy.is_stop[list(policy.tokenizer.stop_ids)] = True
    assert (own.lengths == 1).all() and (own.finish == types.STOP).all() and {t for g in own.text for t in g} == {""}
    rows = batches.own_rows(own, 0)
    assert (rows.mask.sum(1) == 1).all()


def test_stop_ids_are_the_tokenizers(make, folder):
    policy = make()
    assert np.flatnonzero(policy.is_stop).tolist() == list(policy.tokenizer.stop_ids)
    assert np.flatnonzero(policy.is_stop_text).tolist() == policy.tokenizer.encode(":")
    assert len(policy.is_stop) == policy.model.vocab_size == policy.tokenizer.size + 5


def test_prompts(make):
    policy = make()
    assert policy.prompt_lengths == (8, 16)
    tokens, positions = policy.prompts(PROBLEMS[:2])
    assert tokens.shape == (2, 8)
    assert policy.prompts(PROBLEMS)[0].shape == (4, 16)
    exact = Problem(id="x", question="1" * 15)  # and a BOS
    assert policy.prompts([exact])[0].shape == (1, 16)
    long = Problem(id="x", question="1" * 16)
    with pytest.raises(ValueError, match="a: a prompt of 17 tokens exceeds 16"):
        policy.prompts([long])


def test_a_tokenizer_may_have_more_ids_than_the_model(make, folder):
    """Gemma-3's text tokenizer names an image id that the text model has no row for."""
    tokenizer, model, params = parts(folder)
    rows = tokenizer.size - 3
    small = dataclasses.replace(model, vocab_size=rows)
    fewer = {**params, "embed": params["embed"][:rows]}
    policy = Policy(
        "b", 0, CONFIG, small, tokenizer, make().mesh, fewer, total_updates=1, seed=0, loss_settings=LossSettings()
    )
    own = policy.sample(PROBLEMS, 0).result()
    assert policy.real_vocab == rows and own.tokens[own.mask].max() < rows
    scored = policy.score(batches.own_rows(own, 0)).result()
    flat = own.mask.reshape(-1, T)
    np.testing.assert_allclose(scored.logp[flat], own.logprobs.reshape(-1, T)[flat], atol=1e-4)


# ---- compilation


def test_one_compilation_a_bucket(folder):
    """20 batches of prompt lengths 5 to 200: each verb compiles once a bucket, and a second pass compiles nothing."""
    tokenizer, model, params = parts(folder)
    config = dataclasses.replace(CONFIG, prompt_bucket=100, max_prompt_tokens=200, max_new_tokens=2, kl_coef=0.0)
    mesh = make_plan({"a": dataclasses.replace(config, devices=1)}).meshes["a"]
    policy = Policy(
        "a", 0, config, model, tokenizer, mesh, params, total_updates=40, seed=0, loss_settings=LossSettings()
    )
    sizes = lambda: np.array([f._cache_size() for f in (policy._sample, policy._score, policy._update)])
    before, compiled = sizes(), []
    assert policy.prompt_lengths == (100, 200)

    def heard(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        for turn in range(2):
            compiled.clear()
            for i, length in enumerate(np.linspace(5, 200, 20).astype(int)):
                problems = [Problem(id=f"{turn}/{i}/{k}", question="1" * (length - 1 - k)) for k in range(2)]
                own = policy.sample(problems, i, samples=2).result()
                batch = grpo(own, Verdicts(np.eye(2), np.eye(2, dtype=np.int8)), config)
                policy.score(batch).result()
                policy.update(batch).result()
            if turn == 0:
                assert (sizes() - before).tolist() == [2, 2, 2] and len(compiled) >= 6
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def test_a_batch_is_a_pytree_of_all_its_fields():
    assert jax.tree.leaves(Batch(*range(len(dataclasses.fields(Batch))))) == list(range(len(dataclasses.fields(Batch))))
