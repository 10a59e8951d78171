"""The shape legend and the records that pass between the stages of a step. Numpy only; no JAX here.

Shape legend, used as suffixes of array names and in docstrings:

    N policies          P problems a step        G rollouts a problem (the group)
    S prompt length     T completion length      L = S + T
    B rows of a batch   V vocabulary             D width              F feed-forward width
    H query heads       J key/value heads        C head size          Y layers
    U UTF-8 bytes       K rows received from peers for a problem
    Q tokens of a text under the tokenizer of whoever wrote it

Token sequences are laid out the same way everywhere: the prompt is padded on the **left** to S, the completion
on the **right** to T, so that column S is the first completion token of every row. `positions` carries both the
position of a token and whether there is one: 0 for the first real token of a row, -1 for a pad. Masks come from
lengths and finish reasons, never from token ids: a pad id may equal a stop id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

# Why a rollout ended (`Rollouts.finish`).
STOP, LENGTH, STOP_TEXT = 0, 1, 2

# Surrogate forms (`Batch.kind`) and ratio levels (`Batch.level`); methods in `mutualrl.losses`.
PPO, CAP, SCORE, SHAPE = 0, 1, 2, 3
TOKEN, SEQUENCE = 0, 1

# Names of the KL estimators and sampler-trainer corrections that `mutualrl.losses` computes.
KL_ESTIMATORS = ("k2", "k3", "k3_k2")
CORRECTIONS = ("none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask")

# Numbers that the sampler can compute of every rollout from the logits its tokens were drawn by (`mutualrl.losses`):
# self-certainty of the logits, the same of logits divided by the temperature, and entropy.
SIGNALS = ("self_certainty", "self_certainty_tempered", "entropy")

PAD_POSITION = -1


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem with at most one gold answer.

    Attributes:
      id: unique name; the key of groups, random streams and train/held-out splits.
      question: the text every policy is asked.
      answer: gold answer as text (for a choice problem its letter), or None where there is no ground truth.
      choices: answer options of a multiple-choice problem, A first.
      source: where the problem comes from.
      kind: a short label (subject, task name) by which results are tabulated.
      images: image file paths (vision problems).
      views: other wordings of the same problem.
      prompt: what is asked around the question and its options, which stand where `{question}` is.
      extra: whatever else the source or the grader of this problem needs (e.g. tests, a generator's entry).
    """

    id: str
    question: str
    answer: str | None = None
    choices: tuple[str, ...] = ()
    source: str = ""
    kind: str = ""
    images: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    prompt: str = "{question}"
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def wording(self, view: int) -> Problem:
        """The problem in its k-th other wording; itself for 0.

        Raises:
          IndexError: there are fewer.
        """
        return dataclasses.replace(self, question=self.views[view - 1]) if view else self

    @property
    def asked(self) -> str:
        """What a policy is asked: the prompt around the question and, where there are options, their lettered lines."""
        lines = [self.question, *(f"{chr(ord('A') + i)}. {text}" for i, text in enumerate(self.choices))]
        return self.prompt.replace("{question}", "\n".join(lines))


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What one policy sampled in one step: G completions for each of P problems.

    Attributes:
      policy: name of the policy that sampled.
      version: optimiser updates that policy had applied when it sampled.
      step: the cohort step.
      problems: the P problems.
      prompt: i32[P, S] prompt ids, left-padded.
      prompt_positions: i32[P, S], -1 on pads.
      tokens: i32[P, G, T] sampled ids, right-padded; never decoded and encoded again.
      mask: bool[P, G, T] true on sampled tokens, the terminal stop id included.
      logprobs: f32[P, G, T] behaviour log-probs in nats, over the full real vocabulary at `temperature`; 0 on pads.
      finish: i8[P, G] STOP (a stop id), LENGTH (cut off) or STOP_TEXT (a token that contains the stop text).
      text: P lists of G completions as text, without the terminal stop id.
      temperature: the sampling temperature.
      signal: f64[P, G] mean over a rollout's tokens of the number in SIGNALS that was asked for, else None.
    """

    policy: str
    version: int
    step: int
    problems: tuple[Problem, ...]
    prompt: np.ndarray
    prompt_positions: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    finish: np.ndarray
    text: tuple[tuple[str, ...], ...]
    temperature: float
    signal: np.ndarray | None = None

    def first(self, samples: int) -> Rollouts:
        """The first so many rollouts of every problem."""
        if samples == self.tokens.shape[1]:
            return self
        cut = {k: getattr(self, k)[:, :samples] for k in ("tokens", "mask", "logprobs", "finish")}
        signal = None if self.signal is None else self.signal[:, :samples]
        return dataclasses.replace(self, **cut, signal=signal, text=tuple(group[:samples] for group in self.text))

    @property
    def lengths(self) -> np.ndarray:
        """i32[P, G] sampled tokens of each rollout, the terminal stop id included."""
        return self.mask.sum(-1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Verdicts:
    """What a label source says of one policy's rollouts.

    Attributes:
      reward: f64[P, G], NaN where the rollout could not be judged (it then leaves statistics and loss).
      success: i8[P, G] unshaped verdict: 1 right, 0 wrong, -1 unknown. Gates and counts use this, never `reward`.
      answers: P lists of the G answers that were found, None where none was; None if nobody looked.
      labels: P answers that count as right, None where a problem has no label; None where rewards are not by labels.
      share: f64[P] share of the vote that the label won, NaN where there is none; None as above.
    """

    reward: np.ndarray
    success: np.ndarray
    answers: tuple[tuple[str | None, ...], ...] | None = None
    labels: tuple[str | None, ...] | None = None
    share: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Vote:
    """How often each answer was given to each of P problems: buckets in the order first seen.

    Attributes:
      answers: the first answer of each bucket, counts: rollouts in it, first: sample number of its first; P tuples.
      n: rollouts of each problem, those without an answer included.
    """

    answers: tuple[tuple[str, ...], ...]
    counts: tuple[tuple[int, ...], ...]
    first: tuple[tuple[int, ...], ...]
    n: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Trace:
    """Log-probs written over the byte spans of texts: what has a meaning under every tokenizer.

    Token k of a text covers its bytes ends[k-1]..ends[k] (from 0 for the first). The leading dimensions are those of
    the rollouts, [P, G] or [P, K].

    Attributes:
      text: u8[..., U] UTF-8 bytes, 0 beyond the text.
      text_bytes: i32[...] length of the text in bytes.
      ends: i32[..., Q] byte ends of the text's tokens, strictly increasing, constant beyond the last one.
      n: i32[...] tokens of the text; the terminal stop id is not one of them.
      logp: f32[..., Q] log-prob of each token in nats, 0 beyond the last one.
      eos_logp: f32[...] log-prob of the terminal stop id; NaN where the text did not end by one.
      valid: bool[...] whether there is a trace; the other entries mean nothing where false.
    """

    text: np.ndarray
    text_bytes: np.ndarray
    ends: np.ndarray
    n: np.ndarray
    logp: np.ndarray
    eos_logp: np.ndarray
    valid: np.ndarray

    def at(self, rows: Any) -> Trace:
        """The trace of the chosen rows: an index into the leading dimensions."""
        return Trace(**{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(Trace)})

    @property
    def total(self) -> np.ndarray:
        """f64[...] log-prob of the whole completion, the terminal stop id included where there is one."""
        return self.logp.sum(-1, dtype=np.float64) + np.nan_to_num(self.eos_logp.astype(np.float64), nan=0.0)

    @property
    def tokens(self) -> np.ndarray:
        """i32[...] tokens behind `total`."""
        return self.n + np.isfinite(self.eos_logp)


@dataclasses.dataclass(frozen=True)
class Received:
    """Peers' rollouts as rows of one learner: in its own tokens, judged by its own label source.

    K rows for every problem, ordered by (source, sample); K is 0 where nobody is heard.

    Attributes:
      source: i32[K] index of the source. sample: i32[K] sample number at the source.
      live: bool[K] the source hears this learner too and is trained (neither frozen nor a log).
      heard: bool[P, K] a valid record came; `reward` and `success` count in group statistics.
      usable: bool[P, K] heard, and the text survived retokenisation: the row can be trained on.
      reward, success: f64[P, K], i8[P, K] verdicts as in `Verdicts`.
      tokens: i32[P, K, T] the learner's ids, right-padded, ended by its own end-of-turn id where the source stopped.
      mask: bool[P, K, T] true on tokens.
      surr_mask: bool[P, K, T] `mask` without an end-of-turn id for which the source has no log-prob.
      ends: i32[P, K, T] byte ends of the learner's text tokens, constant beyond the last one.
      n: i32[P, K] the learner's text tokens (the end-of-turn id is not one of them).
      finish: i8[P, K] STOP, LENGTH (cut off by the source, or here) or STOP_TEXT.
      trace: the source's log-probs over the same text [P, K, ...]; `valid` false where none was sent.
    """

    source: np.ndarray
    sample: np.ndarray
    live: np.ndarray
    heard: np.ndarray
    usable: np.ndarray
    reward: np.ndarray
    success: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    surr_mask: np.ndarray
    ends: np.ndarray
    n: np.ndarray
    finish: np.ndarray
    trace: Trace


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """Sums over the valid rewards of each group of one source, f64[P] (counts i32[P]): all that XGRPO sends."""

    n: np.ndarray
    sum: np.ndarray
    sumsq: np.ndarray
    min: np.ndarray
    max: np.ndarray
    n_success: np.ndarray


@dataclasses.dataclass(frozen=True)
class Batch:
    """Everything one optimiser update needs, as padded arrays; a padding row has every weight 0.

    Row weights are already normalised over the whole update, so a loss is a plain sum over rows and tokens and does
    not depend on how the batch is cut. T below is the completion part, columns S.. of `tokens`.

    Attributes:
      tokens: i32[B, L] prompt (left-padded to S) then completion (right-padded to T), learner's ids.
      positions: i32[B, L], -1 on pads.
      mask: bool[B, T] completion tokens, terminal stop id included: NLL, KL and statistics use it.
      surr_mask: bool[B, T] tokens of the surrogate; differs from `mask` only where no denominator exists.
      adv: f32[B, T] advantages (row-constant for group estimators); non-negative row weights are folded in.
      denom_logp: f32[B, T] denominator log-probs of the ratio; not read on rows with `denom_self`.
      denom_self: bool[B] ratio against the current parameters: exactly 1 in value, gradient flows.
      sampler_logp: f32[B, T] log-probs recorded when sampling (own rows); NaN where there is none.
      ref_logp: f32[B, T] log-probs under the KL reference; read only if `kl_weight` is not 0.
      surr_weight, nll_weight, kl_weight: f32[B] normalised coefficients of the row in each term.
      kind, level: i8[B] surrogate form and ratio level (constants above).
      clip: f32[B, 2] (low, high): distances from 1 for PPO, absolute bounds for CAP and SCORE.
      seq_denom: f32[B] replaces the sum of `denom_logp` at sequence level where finite.
      seq_norm: f32[B] divisor of the sequence log-ratio (number of surrogate tokens unless a regime says otherwise).
      is_weight: f32[B, T] extra detached factor on the surrogate.
      source: i32[B] index of the policy that wrote the row. sample: i32[B] the sample's number there.
      group: i32[B] index of the row's problem in the step.
      source_logp, source_tokens: f32[B] log-prob the source gave a received row, and over how many tokens; NaN on own
        rows. Metrics only.
    """

    tokens: np.ndarray
    positions: np.ndarray
    mask: np.ndarray
    surr_mask: np.ndarray
    adv: np.ndarray
    denom_logp: np.ndarray
    denom_self: np.ndarray
    sampler_logp: np.ndarray
    ref_logp: np.ndarray
    surr_weight: np.ndarray
    nll_weight: np.ndarray
    kl_weight: np.ndarray
    kind: np.ndarray
    level: np.ndarray
    clip: np.ndarray
    seq_denom: np.ndarray
    seq_norm: np.ndarray
    is_weight: np.ndarray
    source: np.ndarray
    sample: np.ndarray
    group: np.ndarray
    source_logp: np.ndarray
    source_tokens: np.ndarray
