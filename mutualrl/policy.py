"""A policy: config + tokenizer + mesh slice + state, and its three device verbs. The only place that jits in a run.

`sample`, `score` and `update` return at once with a handle whose `result()` waits, so that one Python thread keeps
several policies busy on their slices at the same time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from mutualrl import batches, losses, sharding, types
from mutualrl.config import PolicyConfig
from mutualrl.learner import apply_update, logprobs, make_optimizer, schedule
from mutualrl.models.config import ModelConfig
from mutualrl.models.decoder import Decoder
from mutualrl.sampling import SamplerSettings, sample
from mutualrl.seeds import hashed
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.types import Batch, Problem, Rollouts


@dataclasses.dataclass(frozen=True)
class Pending:
    """Work given to a device. `result()` waits for it and returns host values."""

    finish: Callable[[], Any]

    def result(self) -> Any:
        return self.finish()


@dataclasses.dataclass(frozen=True)
class Scored:
    """Log-probs of given completions: `logp` and `entropy`, f32[B, T] in nats, meaningless on pads."""

    logp: np.ndarray
    entropy: np.ndarray


class Policy:
    """One member of the cohort.

    Attributes:
      name, index: its key in the config, and its place in the cohort.
      config: its settings.
      model: its ModelConfig.
      tokenizer: its tokenizer.
      mesh: its mesh slice.
      state: `params`, `opt_state`, `step`, `skipped`, and `teacher` where it has one; arrays on the slice, float32.
      prompt_lengths: padded prompt lengths that may occur, ascending; one compilation each.
    """

    def __init__(
        self,
        name: str,
        index: int,
        config: PolicyConfig,
        model: ModelConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
        params: dict,
        *,
        total_updates: int,
        seed: int,
        loss_settings: losses.LossSettings,
        teacher: bool = False,
    ):
        """Args:
        params: float32 parameter tree of `model`, host or device arrays.
        total_updates: optimiser updates of the whole run (sizes the schedule).
        seed: of the run.
        loss_settings: what the transfer regime's batches contain.
        teacher: keep a slowly following copy of the parameters (`follow`), which is the KL reference then.

        """
        self.name, self.index, self.config, self.tokenizer, self.mesh = name, index, config, tokenizer, mesh
        self.prompt_lengths = _buckets(config.prompt_bucket, config.max_prompt_tokens)
        self.model = model.for_length(self.prompt_lengths[-1] + config.max_new_tokens)
        self.decoder = Decoder(
            self.model,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
            unroll=self.model.num_layers if config.unroll_layers else 1,
        )
        # Ids that both the tokenizer and the model have; either may have more.
        self.real_vocab = min(tokenizer.size, model.vocab_size)
        self.is_stop = np.zeros(self.model.vocab_size, bool)
        self.is_stop[list(tokenizer.stop_ids)] = True
        self.is_stop_text = np.zeros(self.model.vocab_size, bool)
        if config.stop_text:
            self.is_stop_text[: self.real_vocab] = tokenizer.ids_containing(config.stop_text)[: self.real_vocab]
        self._key = jax.random.fold_in(jax.random.key(seed), hashed(name))
        self._rows = sharding.rows(mesh)
        self._replicated = sharding.replicated(mesh)

        forward = functools.partial(
            logprobs,
            decoder=self.decoder,
            temperature=config.temperature,
            real_vocab=self.real_vocab,
            chunk=config.logit_chunk_tokens,
        )
        # What is never updated needs no optimiser state and no reference.
        optimizer = optax.identity() if config.frozen else make_optimizer(config, total_updates)
        self.schedule = schedule(config, total_updates)
        self._place(params, optimizer, teacher and not config.frozen)
        self._sample = jax.jit(sample, static_argnames=("decoder", "settings"))
        self._score = jax.jit(
            lambda params, tokens, positions, completion: jax.lax.map(
                lambda x: forward(params, *x, completion), (tokens, positions)
            ),
            static_argnames="completion",
        )
        self._update = jax.jit(
            functools.partial(apply_update, forward=forward, settings=loss_settings, optimizer=optimizer),
            donate_argnums=0,
            out_shardings=(self.state_shardings, self._replicated),
        )

        self._follow = jax.jit(
            lambda teacher, params, a: jax.tree.map(lambda t, p: a * p + (1 - a) * t, teacher, params), donate_argnums=0
        )

    def _place(self, params: dict, optimizer: optax.GradientTransformation, teacher: bool) -> None:
        params = jax.device_put(params, sharding.shardings(params, self.mesh))
        shapes = jax.eval_shape(optimizer.init, params)
        opt_state = jax.jit(optimizer.init, out_shardings=sharding.shardings(shapes, self.mesh))(params)
        zero = lambda: jax.device_put(jnp.int32(0), self._replicated)  # noqa: E731
        self.state = {"params": params, "opt_state": opt_state, "step": zero(), "skipped": zero()}
        # The update donates the state, so the teacher and the reference need arrays of their own.
        if teacher:
            self.state["teacher"] = jax.tree.map(jnp.copy, params)
        self.state_shardings = sharding.shardings(self.state, self.mesh)
        anchored = self.config.kl_coef and not self.config.frozen and not teacher
        self._initial = jax.tree.map(jnp.copy, params) if anchored else None

    @property
    def ref_params(self) -> dict | None:
        """Parameters of the KL reference: the teacher's if there is one, else the initial ones; None where nothing
        needs them."""
        return self.state.get("teacher", self._initial)

    # Prompts

    def prompt(self, problem: Problem) -> list[int]:
        """Prompt ids of a problem, under this policy's own template."""
        return self.tokenizer.prompt(problem.asked)

    def prompts(self, problems: Sequence[Problem]) -> tuple[np.ndarray, np.ndarray]:
        """Left-padded prompt ids and positions, i32[P, S] each, S the smallest bucket that holds them all.

        Raises:
          ValueError: a prompt is too long; filter with `mutualrl.cohort.fitting_problems`.
        """
        ids = [self.prompt(p) for p in problems]
        longest = max(map(len, ids))
        if longest > self.config.max_prompt_tokens:
            raise ValueError(f"{self.name}: a prompt of {longest} tokens exceeds {self.config.max_prompt_tokens}")
        length = next(s for s in self.prompt_lengths if s >= longest)
        tokens = np.full((len(ids), length), self.tokenizer.pad_id, np.int32)
        positions = np.full((len(ids), length), types.PAD_POSITION, np.int32)
        for row, x in enumerate(ids):
            tokens[row, length - len(x) :] = x
            positions[row, length - len(x) :] = np.arange(len(x))
        return tokens, positions

    # The three verbs

    def sample(
        self,
        problems: Sequence[Problem],
        step: int,
        *,
        samples: int = 0,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        purpose: str = "train",
        signal: str = "",
        teacher: bool = False,
    ) -> Pending:
        """Starts G completions of each problem.

        Args:
          problems: the P problems.
          step: cohort step; with `purpose`, the problem and the sample number it fixes all randomness.
          samples: G; 0 takes `group_size`.
          temperature: None takes the policy's; 0 is greedy (log-probs are then at temperature 1).
          signal: of `types.SIGNALS`, to be computed of every rollout.
          teacher: sample the teacher's completions; those of the policy itself where it has none.

        Returns:
          Pending of `Rollouts`.
        """
        prompt, positions = self.prompts(problems)
        temperature = self.config.temperature if temperature is None else temperature
        samples = samples or self.config.group_size
        settings = SamplerSettings(
            samples=samples,
            max_new_tokens=self.config.max_new_tokens,
            slots=self.config.slots or len(problems) * samples,
            real_vocab=self.real_vocab,
            top_k=top_k,
            top_p=top_p,
            greedy=temperature == 0,
            signal=signal,
            rows=self._rows if self.mesh.size > 1 else None,
        )
        key = jax.random.fold_in(jax.random.fold_in(self._key, hashed(purpose)), step)
        ids = np.array([hashed(p.id) for p in problems], np.uint32)
        args = (prompt, positions, ids, key, self.is_stop | self.is_stop_text, np.float32(temperature or 1.0))
        version = self.state["step"]
        version = version + 0  # the update donates the original
        params = self.state.get("teacher", self.state["params"]) if teacher else self.state["params"]
        out = self._sample(params, *jax.device_put(args, self._replicated), decoder=self.decoder, settings=settings)

        def finish() -> Rollouts:
            tokens, logps, lengths, sums = jax.device_get(out)
            own = self._rollouts(
                int(version), step, tuple(problems), prompt, positions, tokens, logps, lengths, temperature
            )
            return dataclasses.replace(own, signal=sums.astype(np.float64) / lengths if signal else None)

        return Pending(finish)

    def _rollouts(self, version, step, problems, prompt, positions, tokens, logps, lengths, temperature) -> Rollouts:
        mask = np.arange(tokens.shape[-1]) < lengths[..., None]
        last = np.take_along_axis(tokens, lengths[..., None] - 1, -1)[..., 0]
        finish = np.select([self.is_stop[last], self.is_stop_text[last]], [types.STOP, types.STOP_TEXT], types.LENGTH)
        return Rollouts(
            policy=self.name,
            version=version,
            step=step,
            problems=problems,
            prompt=prompt,
            prompt_positions=positions,
            tokens=np.where(mask, tokens, self.tokenizer.pad_id).astype(np.int32),
            mask=mask,
            logprobs=logps,
            finish=finish.astype(np.int8),
            text=tuple(
                tuple(self._text(ids[:n], end) for ids, n, end in zip(*group)) for group in zip(tokens, lengths, finish)
            ),
            temperature=temperature,
        )

    def _text(self, ids: np.ndarray, finish: int) -> str:
        ids = ids[:-1] if finish == types.STOP else ids
        text = self.tokenizer.decode(ids.tolist())
        return text.split(self.config.stop_text)[0] if finish == types.STOP_TEXT else text

    def score(self, rows: Batch, *, reference: bool = False) -> Pending:
        """Starts log-probs of the completions of rows under the current (or the reference) parameters, at the training
        temperature.

        Returns:
          Pending of `Scored`, [B, T].
        """
        b, t = rows.mask.shape
        cut = self._cut(rows)
        tokens, positions = jax.device_put((cut.tokens, cut.positions), self._micro_sharding())
        params = self.ref_params if reference else self.state["params"]
        out = self._score(params, tokens, positions, completion=t)

        def finish() -> Scored:
            logp, entropy = jax.device_get(out)
            return Scored(logp.reshape(-1, t)[:b], entropy.reshape(-1, t)[:b])

        return Pending(finish)

    def update(self, batch: Batch) -> Pending:
        """Starts one optimiser update on a batch; the state moves on at once.

        Returns:
          Pending of a dict of float metric sums (see `losses.loss`), `loss`, `grad_norm`, `skipped` and `lr`, and
          `row_logp` f64[B]: log-prob of each row's surrogate tokens before the update.
        """
        cut = jax.device_put(self._cut(batch), self._micro_sharding())
        before = self.state["step"] + 0  # the update donates the original
        self.state, sums = self._update(self.state, cut)

        def finish() -> Mapping[str, float]:
            out = jax.device_get(sums)
            row_logp = out.pop("row_logp").ravel()[: len(batch.tokens)].astype(np.float64)
            return {
                **{k: float(v) for k, v in out.items()},
                "lr": float(self.schedule(int(before))),
                "row_logp": row_logp,
            }

        return Pending(finish)

    def follow(self, weight: float) -> None:
        """Moves the teacher towards the policy: weight · policy + (1 - weight) · teacher, float32, at once."""
        self.state = {**self.state, "teacher": self._follow(self.state["teacher"], self.state["params"], weight)}

    # Micro-batches

    def micro_rows(self, rows: int, length: int) -> int:
        """Rows of one forward/backward pass: at most the configured number or token budget, a multiple of the row split
        (and at least one row a device)."""
        ways = self.mesh.shape["fsdp"]
        each = -(-rows // ways)
        if self.config.micro_batch:
            each = min(each, self.config.micro_batch // ways)
        if self.config.micro_batch_tokens:
            each = min(each, self.config.micro_batch_tokens // length // ways)
        return max(1, each) * ways

    def _cut(self, batch: Batch) -> Batch:
        rows, length = batch.tokens.shape
        batch = batches.pad_rows(batch, _row_step(rows))
        size = self.micro_rows(len(batch.tokens), length)
        return batches.cut(batches.pad_rows(batch, size), size)

    def _micro_sharding(self):
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(None, *self._rows.spec))


def _row_step(rows: int) -> int:
    """Numbers of rows are rounded up to a multiple of this, an eighth of them or less: what peers send differs from
    step to step, and every number is a compilation."""
    return 1 << max(0, rows.bit_length() - 4)


def _buckets(smallest: int, longest: int) -> tuple[int, ...]:
    """Padded lengths from `smallest`, doubling, up to and including `longest`."""
    sizes = []
    while smallest < longest:
        sizes.append(smallest)
        smallest *= 2
    return (*sizes, longest)
