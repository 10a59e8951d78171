"""The sampler: one program, to be jitted, from padded prompts to finished completions, with no host in between.

Every prompt is prefilled once and shared by its group. A fixed number of slots decodes side by side; a slot whose
completion has ended takes the next (problem, sample) by itself, copying the prompt's keys and values into its part of
the cache. The program ends when all P·G completions have.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mutualrl import types
from mutualrl.losses import confidence, mask_vocab
from mutualrl.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """What is fixed while the sampler is compiled.

    Attributes:
      samples: G, completions per problem.
      max_new_tokens: T.
      slots: completions decoded side by side; at most P·G are used.
      real_vocab: ids at or above it are never sampled.
      top_k: keep the k likeliest ids; 0 keeps all.
      top_p: keep the smallest set of likeliest ids whose probability reaches p; 1 keeps all.
      greedy: take the likeliest id; recorded log-probs are then at temperature 1.
      signal: of `types.SIGNALS`, to be computed of every completion; '' for none.
      rows: a `NamedSharding` over the leading axis of arrays with one row a slot, or None.
    """

    samples: int
    max_new_tokens: int
    slots: int
    real_vocab: int
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    signal: str = ""
    rows: Any = None


class Sampled(NamedTuple):
    """Finished completions.

    Attributes:
      tokens: i32[P, G, T], 0 after the end. logprobs: f32[P, G, T], 0 after the end.
      lengths: i32[P, G] tokens, the stopping id counted.
      signal: f32[P, G] the signal's sum over a completion's tokens, 0 where none was asked for.
    """

    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    signal: jax.Array


class _State(NamedTuple):
    k: jax.Array  # [Y, n, S+T, J, C]
    v: jax.Array
    positions: jax.Array  # i32[n, S+T], -1 on pads and empty places
    item: jax.Array  # i32[n] work item p·G + g of each slot
    count: jax.Array  # i32[n] tokens sampled so far
    last: jax.Array  # i32[n] the latest of them
    active: jax.Array  # bool[n]
    next_item: jax.Array  # i32[] first work item nobody has taken
    tokens: jax.Array  # i32[W, T] results, one row a work item
    logprobs: jax.Array  # f32[W, T]
    lengths: jax.Array  # i32[W]
    signal: jax.Array  # f32[W]


def filter_logits(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Logits f32[..., V] with everything outside top-k and top-p made impossible; ties at the edge of either stay."""
    lowest = jnp.finfo(logits.dtype).min / 2
    if top_k:
        edge = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < edge, lowest, logits)
    if top_p < 1.0:
        ordered = -jnp.sort(-logits, axis=-1)
        p = jax.nn.softmax(ordered, axis=-1)
        kept = jnp.cumsum(p, axis=-1) - p < top_p  # mass before this id; the first is always kept
        edge = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < edge, lowest, logits)
    return logits


def draw(
    logits: jax.Array, keys: jax.Array, temperature: jax.Array, settings: SamplerSettings
) -> tuple[jax.Array, jax.Array]:
    """One id per row and its behaviour log-prob.

    The log-prob is over the full real vocabulary at the sampling temperature, also where top-k or top-p is on.

    Args:
      logits: f32[n, V].
      keys: n random keys.
      temperature: f32 scalar above 0.

    Returns:
      ids i32[n] and log-probs f32[n] in nats.
    """
    logits = mask_vocab(logits if settings.greedy else logits / temperature, settings.real_vocab)
    if settings.greedy:
        token = jnp.argmax(logits, axis=-1)
    else:
        filtered = filter_logits(logits, settings.top_k, settings.top_p)
        token = jax.vmap(jax.random.categorical)(keys, filtered)
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), token[:, None], axis=-1)[:, 0]
    return token.astype(jnp.int32), logp


def sample(
    params: dict,
    prompts: jax.Array,
    positions: jax.Array,
    problem_keys: jax.Array,
    key: jax.Array,
    is_stop: jax.Array,
    temperature: jax.Array,
    *,
    decoder: Decoder,
    settings: SamplerSettings,
) -> Sampled:
    """Samples `settings.samples` completions of every prompt.

    A completion's randomness depends on (key, problem, sample, token number) alone: neither on its slot, nor on its
    batch mates, nor on the order of problems.

    Args:
      params: parameters of `decoder`.
      prompts: i32[P, S], left-padded.
      positions: i32[P, S], -1 on pads.
      problem_keys: u32[P] a number per problem that its random stream is derived from.
      key: random key of (run seed, step, policy).
      is_stop: bool[V] ids that end a completion.
      temperature: f32 scalar above 0.

    Returns:
      Sampled.
    """
    P, S = prompts.shape
    G, T = settings.samples, settings.max_new_tokens
    work, slots = P * G, min(settings.slots, P * G)
    if settings.rows is not None:
        slots = -(-slots // _ways(settings.rows)) * _ways(settings.rows)
    rows = lambda x, axis=0: _constrain(x, settings.rows, axis)  # noqa: E731
    variables = {"params": params}

    def prefill(args):
        tokens, pos = args
        hidden, (k, v) = decoder.apply(variables, tokens, pos)
        return hidden[:, -1], jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0)

    # At most as many prompts at a time as there are slots, so that prefill needs no more memory than decoding does.
    if P <= slots:
        first_hidden, prompt_k, prompt_v = prefill((prompts, positions))
    else:
        first_hidden, prompt_k, prompt_v = jax.lax.map(
            lambda x: jax.tree.map(lambda y: y[0], prefill(jax.tree.map(lambda y: y[None], x))),
            (prompts, positions),
            batch_size=slots,
        )
    prompt_length = positions.max(-1) + 1

    def emit(s: _State, hidden: jax.Array, which: jax.Array) -> _State:
        """Draws and records the next token of the slots in `which`, from the state that predicts it."""
        item_keys = jax.vmap(
            lambda item, count: jax.random.fold_in(
                jax.random.fold_in(jax.random.fold_in(key, problem_keys[item // G]), item % G), count
            )
        )(s.item, s.count)
        logits = decoder.apply(variables, hidden, method="head")
        token, logp = draw(logits, item_keys, temperature, settings)
        row = jnp.where(which, s.item, work)  # out of range: dropped
        count = s.count + which
        if settings.signal:
            sure = confidence(logits, settings.signal, temperature=temperature, real_vocab=settings.real_vocab)
            s = s._replace(signal=s.signal.at[row].add(sure, mode="drop"))
        return s._replace(
            tokens=s.tokens.at[row, s.count].set(token, mode="drop"),
            logprobs=s.logprobs.at[row, s.count].set(logp, mode="drop"),
            lengths=s.lengths.at[row].set(count, mode="drop"),
            count=count,
            last=jnp.where(which, token, s.last),
            active=jnp.where(which, ~is_stop[token] & (count < T), s.active),
        )

    def refill(s: _State) -> _State:
        """Free slots take the next work items and draw their first token from the shared prompt."""
        free = ~s.active
        item = s.next_item + jnp.cumsum(free) - 1
        taken = free & (item < work)
        item = jnp.where(taken, item, s.item)
        problem = item // G
        pick = taken[None, :, None, None, None]
        share = (
            lambda cache, prompt: rows(  # noqa: E731
                cache.at[:, :, :S].set(jnp.where(pick, jnp.moveaxis(prompt[problem], 0, 1), cache[:, :, :S])), 1
            )
        )
        fresh = jnp.pad(positions[problem], ((0, 0), (0, T)), constant_values=types.PAD_POSITION)
        s = s._replace(
            k=share(s.k, prompt_k),
            v=share(s.v, prompt_v),
            positions=jnp.where(taken[:, None], fresh, s.positions),
            item=item,
            count=jnp.where(taken, 0, s.count),
            next_item=s.next_item + taken.sum(),
        )
        return emit(s, first_hidden[problem], taken)

    def decode(s: _State) -> _State:
        """Feeds the latest token of every active slot and draws the next."""
        position = jnp.where(s.active, prompt_length[s.item // G] + s.count - 1, types.PAD_POSITION)
        cache = {"k": s.k, "v": s.v, "positions": s.positions}
        hidden, (k, v) = decoder.apply(variables, s.last[:, None], position[:, None], cache)
        slot, place = jnp.arange(slots), jnp.where(s.active, S + s.count - 1, S + T)  # out of range: dropped
        s = s._replace(
            k=rows(s.k.at[:, slot, place].set(k[:, :, 0], mode="drop"), 1),
            v=rows(s.v.at[:, slot, place].set(v[:, :, 0], mode="drop"), 1),
            positions=s.positions.at[slot, place].set(position, mode="drop"),
        )
        return emit(s, hidden[:, 0], s.active)

    def fill_and_decode(s: _State) -> _State:
        waiting = lambda s: (s.next_item < work) & (~s.active).any()  # noqa: E731
        return jax.lax.while_loop(lambda s: s.active.any() & ~waiting(s), decode, refill(s))

    config = decoder.config
    cache_shape = (config.num_layers, slots, S + T, config.num_kv_heads, config.head_dim)
    zeros = lambda *shape: rows(jnp.zeros(shape, jnp.int32))  # noqa: E731
    start = _State(
        k=rows(jnp.zeros(cache_shape, decoder.dtype), 1),
        v=rows(jnp.zeros(cache_shape, decoder.dtype), 1),
        positions=rows(jnp.full((slots, S + T), types.PAD_POSITION, jnp.int32)),
        item=zeros(slots),
        count=zeros(slots),
        last=zeros(slots),
        active=rows(jnp.zeros(slots, bool)),
        next_item=jnp.int32(0),
        tokens=jnp.zeros((work, T), jnp.int32),
        logprobs=jnp.zeros((work, T), jnp.float32),
        lengths=jnp.zeros(work, jnp.int32),
        signal=jnp.zeros(work, jnp.float32),
    )
    end = jax.lax.while_loop(lambda s: (s.next_item < work) | s.active.any(), fill_and_decode, start)
    grid = lambda x: x.reshape(P, G, *x.shape[1:])  # noqa: E731
    return Sampled(grid(end.tokens), grid(end.logprobs), grid(end.lengths), grid(end.signal))


def _ways(rows) -> int:
    """Devices over which rows are split."""
    axes = rows.spec[0]
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    size = 1
    for name in names:
        size *= rows.mesh.shape[name]
    return size


def _constrain(x, rows, axis):
    """x with its `axis` split over devices as `rows` says; x itself where there is nothing to split."""
    if rows is None:
        return x
    spec = jax.sharding.PartitionSpec(*([None] * axis), *rows.spec)
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(rows.mesh, spec))
