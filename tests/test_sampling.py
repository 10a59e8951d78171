"""The sampler: what a completion may depend on, what it records, where it ends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mutualrl.learner import logprobs
from mutualrl.models.config import ModelConfig
from mutualrl.models.decoder import Decoder, init_params
from mutualrl.sampling import SamplerSettings, draw, filter_logits, sample

V, REAL = 64, 60  # four ids that the tokenizer does not have
P, S, G, T = 3, 6, 4, 8
LENGTHS = (6, 3, 1)
TEMPERATURE = 0.7
SETTINGS = SamplerSettings(samples=G, max_new_tokens=T, slots=P * G, real_vocab=REAL)
STOPS = np.arange(V) % 8 == 1
NO_STOPS = np.zeros(V, bool)

run = jax.jit(sample, static_argnames=("decoder", "settings"))


@functools.cache
def model(model_type="llama", seed=0, **fields):
    """A tiny model in which the ids that do not exist would win nearly every time."""
    config = ModelConfig.from_hf(
        {
            "model_type": model_type,
            "vocab_size": V,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
            **fields,
        }  # fmt: skip
    )
    params = dict(init_params(config, jax.random.key(seed)))
    params["head"] = params["head"].at[:, REAL:].multiply(20.0)
    return Decoder(config), params


def prompts(lengths=LENGTHS, width=S, seed=0):
    """Left-padded prompts; the same ids for the same row whatever the width."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, REAL, 16)[:n] for n in lengths]
    tokens = np.full((len(rows), width), 7, np.int32)
    positions = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        tokens[i, width - len(row) :] = row
        positions[i, width - len(row) :] = np.arange(len(row))
    return tokens, positions


PROMPTS = prompts()
KEYS = np.array([11, 22, 33], np.uint32)


def completions(*, prompts=PROMPTS, keys=KEYS, key=1, stops=STOPS, temperature=TEMPERATURE, settings=SETTINGS, of=None):
    decoder, params = of or model()
    out = run(
        params, *prompts, keys, jax.random.key(key), stops, np.float32(temperature), decoder=decoder, settings=settings
    )
    return tuple(np.asarray(x) for x in out[:3])


def same(a, b):
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[2], b[2])
    np.testing.assert_allclose(a[1], b[1], atol=1e-5)


@pytest.fixture(scope="module")
def base():
    return completions()


def rows_of(prompts, tokens, lengths):
    """Full rows of a forward pass: prompt and completion, one a completion."""
    g, t = tokens.shape[1:]
    mask = np.arange(t) < lengths[..., None]
    first = prompts[1].max(1)[:, None, None] + 1
    positions = np.where(mask, first + np.arange(t), -1)
    rows = [np.repeat(x[:, None], g, 1) for x in prompts]
    joined = [np.concatenate([a, b], -1).reshape(-1, a.shape[-1] + t) for a, b in zip(rows, (tokens, positions))]
    return *joined, mask.reshape(-1, t)


@functools.partial(jax.jit, static_argnames=("decoder", "t"))
def trainer(params, tokens, positions, temperature, decoder, t):
    """Log-probs of the last t tokens as the trainer computes them, and the logits that predict them, unmasked."""
    logp, _ = logprobs(
        params, tokens, positions, t, decoder=decoder, temperature=temperature, real_vocab=REAL, chunk=17
    )
    hidden, _ = decoder.apply({"params": params}, tokens, positions)
    return logp, decoder.apply({"params": params}, hidden[:, -t - 1 : -1], method="head")


def test_what_comes_out(base):
    tokens, logp, lengths = base
    mask = np.arange(T) < lengths[..., None]
    assert tokens.shape == logp.shape == (P, G, T) and lengths.shape == (P, G)
    assert ((1 <= lengths) & (lengths <= T)).all() and len(np.unique(lengths)) > 3
    assert not tokens[~mask].any() and not logp[~mask].any() and (logp[mask] < 0).all()
    for row, n in zip(tokens.reshape(-1, T), lengths.ravel()):
        assert not STOPS[row[: n - 1]].any()  # the first stop id ends a completion, and is its last token
        assert STOPS[row[n - 1]] or n == T


@pytest.mark.parametrize("slots", (1, 5))
def test_slots_do_not_matter(base, slots):
    """One slot: prompts are prefilled one at a time, and every completion reuses the same place in the cache."""
    same(completions(settings=dataclasses.replace(SETTINGS, slots=slots)), base)


def test_order_and_batch_mates_do_not_matter(base):
    order = np.array([2, 0, 1])
    moved = completions(prompts=tuple(x[order] for x in PROMPTS), keys=KEYS[order])
    same(moved, tuple(x[order] for x in base))
    others = prompts((2, 3, 5), seed=9)
    mixed = tuple(np.where(np.arange(P)[:, None] == 1, a, b) for a, b in zip(PROMPTS, others))
    got = completions(prompts=mixed, keys=np.array([5, KEYS[1], 6], np.uint32))
    same(tuple(x[1] for x in got), tuple(x[1] for x in base))
    assert (got[0][0] != base[0][0]).any()


def test_bucket_length_and_number_of_problems_do_not_matter(base):
    same(completions(prompts=prompts(width=11)), base)
    alone = completions(prompts=tuple(x[2:, -1:] for x in PROMPTS), keys=KEYS[2:])
    same(alone, tuple(x[2:] for x in base))


def test_the_length_limit_does_not_change_what_comes_before_it(base):
    short = completions(settings=dataclasses.replace(SETTINGS, max_new_tokens=3))
    np.testing.assert_array_equal(short[2], np.minimum(base[2], 3))
    np.testing.assert_array_equal(short[0], base[0][..., :3])
    np.testing.assert_allclose(short[1], base[1][..., :3], atol=1e-5)


def test_randomness():
    """Distinct between samples, problems and keys; exactly repeated otherwise."""
    same_prompt = tuple(np.repeat(x[:1], P, 0) for x in PROMPTS)
    first = completions(prompts=same_prompt, stops=NO_STOPS)
    rows = {tuple(r) for r in first[0].reshape(-1, T)}
    assert len(rows) == P * G
    other = completions(prompts=same_prompt, stops=NO_STOPS, key=2)
    assert rows.isdisjoint(tuple(r) for r in other[0].reshape(-1, T))
    again = completions(prompts=same_prompt, stops=NO_STOPS)
    for a, b in zip(first, again):
        np.testing.assert_array_equal(a, b)
    equal_keys = completions(prompts=same_prompt, stops=NO_STOPS, keys=np.repeat(KEYS[:1], P))
    np.testing.assert_array_equal(equal_keys[0][0], equal_keys[0][1])
    assert len({tuple(r) for r in equal_keys[0][0]}) == G


@pytest.mark.parametrize(
    "model_type, fields", [("llama", {}), ("gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8})]
)
def test_behaviour_log_probs_are_the_trainers(model_type, fields):
    """Over 40 tokens, past a sliding window, with slots that are refilled while others are in mid-completion."""
    decoder, params = of = model(model_type, **fields)
    settings = SamplerSettings(samples=2, max_new_tokens=40, slots=4, real_vocab=REAL)
    stops = np.arange(V) == 3
    tokens, logp, lengths = completions(of=of, stops=stops, settings=settings)
    assert len(np.unique(lengths)) > 2 and lengths.max() > 20
    rows, positions, mask = rows_of(PROMPTS, tokens, lengths)
    scored, logits = trainer(params, rows, positions, TEMPERATURE, decoder, 40)
    assert np.abs(np.where(mask, scored - logp.reshape(mask.shape), 0)).max() < 1e-4
    assert (tokens < REAL).all()  # though the other ids would win
    assert (np.asarray(logits).argmax(-1) >= REAL).mean() > 0.5


def test_greedy_is_the_argmax_of_a_full_forward():
    decoder, params = model()
    tokens, logp, lengths = completions(stops=NO_STOPS, settings=dataclasses.replace(SETTINGS, greedy=True))
    assert (lengths == T).all() and (tokens == tokens[:, :1]).all()
    rows, positions, _ = rows_of(PROMPTS, tokens, lengths)
    scored, logits = trainer(params, rows, positions, 1.0, decoder, T)
    np.testing.assert_array_equal(np.asarray(logits)[..., :REAL].argmax(-1), rows[:, S:])
    np.testing.assert_allclose(scored.reshape(P, G, T), logp, atol=1e-4)
    top = completions(stops=NO_STOPS, settings=dataclasses.replace(SETTINGS, top_k=1))
    np.testing.assert_array_equal(top[0], tokens)


def test_new_weights_are_used():
    changed = (model()[0], model(seed=5)[1])
    same(completions(of=changed, key=3), completions(of=model(seed=5), key=3))
    assert (completions(of=changed, key=3)[0] != completions(key=3)[0]).any()


def test_frequencies_of_the_first_token():
    """A limit of one token; every prompt's group follows softmax(logits / temperature) over the real ids."""
    settings = SamplerSettings(samples=1000, max_new_tokens=1, slots=3000, real_vocab=REAL)
    tokens, logp, lengths = completions(settings=settings, temperature=1.5)
    assert (lengths == 1).all()
    decoder, params = model()
    rows, positions = (np.pad(x, ((0, 0), (0, 1)), constant_values=-1) for x in PROMPTS)
    logits = np.asarray(trainer(params, rows, positions, 1.5, decoder, 1)[1])[:, 0, :REAL].astype(np.float64) / 1.5
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for i in range(P):
        np.testing.assert_allclose(logp[i, :, 0], log[i][tokens[i, :, 0]], atol=1e-4)
        assert chi_square(tokens[i, :, 0], np.exp(log[i])) > 1e-4


def chi_square(tokens, p):
    """Probability of counts as uneven as these, rare ids pooled."""
    counts, expected = np.bincount(tokens, minlength=len(p)), len(tokens) * p
    assert len(counts) == len(p) and not counts[expected == 0].any()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    return stats.chi2.sf((((observed - wanted) ** 2) / wanted).sum(), max(1, len(wanted) - 1))


LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.15, 0.05, 9.0, 9.0]))  # the last two do not exist


@pytest.mark.parametrize(
    "top_k, top_p, kept",
    [(0, 1.0, [0, 1, 2, 3, 4, 5]), (2, 1.0, [1, 3]), (1, 1.0, [1]), (99, 1.0, [0, 1, 2, 3, 4, 5]), (0, 0.6, [1, 3]),
     (0, 0.7, [1, 3, 4]), (0, 1e-6, [1]), (3, 0.6, [1, 3]), (0, 0.91, [0, 1, 2, 3, 4, 5])],
)  # fmt: skip
def test_top_k_and_top_p(top_k, top_p, kept):
    """Draws stay inside the kept set, in the right proportions; log-probs are over all real ids. Ties stay together."""
    n, temperature = 20_000, 1.0
    settings = SamplerSettings(samples=1, max_new_tokens=1, slots=1, real_vocab=6, top_k=top_k, top_p=top_p)
    keys = jax.random.split(jax.random.key(0), n)
    tokens, logp = jax.jit(draw, static_argnums=3)(jnp.tile(LOGITS, (n, 1)), keys, jnp.float32(temperature), settings)
    p = np.exp(LOGITS[:6])
    inside = np.where(np.isin(np.arange(6), kept), p, 0)
    assert set(np.unique(tokens)) == set(kept)
    assert chi_square(np.asarray(tokens), inside / inside.sum()) > 1e-4
    np.testing.assert_allclose(logp, np.log(p)[tokens], atol=1e-5)


def test_filters_look_at_the_scaled_logits():
    """Top-p of a flatter distribution keeps more."""
    flat = filter_logits(jnp.asarray(LOGITS[:6] / 4, jnp.float32), 0, 0.6)
    sharp = filter_logits(jnp.asarray(LOGITS[:6] * 4, jnp.float32), 0, 0.6)
    kept = lambda x: int((np.asarray(x) > -1e30).sum())
    assert kept(flat) == 4 and kept(sharp) == 1


@pytest.mark.parametrize("temperature", (0.05, 0.4, 5.0))
def test_extreme_temperatures_are_finite(temperature):
    settings = SamplerSettings(samples=1, max_new_tokens=1, slots=1, real_vocab=6, top_p=0.9, top_k=4)
    keys = jax.random.split(jax.random.key(0), 50)
    tokens, logp = draw(jnp.tile(LOGITS, (50, 1)), keys, jnp.float32(temperature), settings)
    assert np.isfinite(logp).all() and (np.asarray(tokens) < 6).all()
    np.testing.assert_allclose(logp, jax.nn.log_softmax(LOGITS[:6] / temperature)[tokens], atol=1e-4)


def test_stops(base):
    """Every id of the set stops; an id that stopped before goes on when it leaves the set."""
    free = completions(stops=NO_STOPS)
    assert (free[2] == T).all()
    everything = completions(stops=np.ones(V, bool))
    assert (everything[2] == 1).all()
    np.testing.assert_array_equal(everything[0][..., 0], free[0][..., 0])
    ends = np.where(STOPS[free[0]].any(-1), STOPS[free[0]].argmax(-1) + 1, T)
    np.testing.assert_array_equal(base[2], ends)
    for stop in np.unique(base[0][STOPS[base[0]]]):  # each alone
        only = np.arange(V) == stop
        ends = np.where((free[0] == stop).any(-1), (free[0] == stop).argmax(-1) + 1, T)
        np.testing.assert_array_equal(completions(stops=only)[2], ends)


def test_the_host_is_not_asked():
    decoder, params = model()
    args = (params, *PROMPTS, KEYS, jax.random.key(0), STOPS, jnp.float32(1))
    for slots in (2, 12):
        part = functools.partial(sample, decoder=decoder, settings=dataclasses.replace(SETTINGS, slots=slots))
        jaxpr = str(jax.make_jaxpr(part)(*args))
        assert "while" in jaxpr and "callback" not in jaxpr and "infeed" not in jaxpr
