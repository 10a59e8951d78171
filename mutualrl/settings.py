"""The settings of a run as frozen dataclasses: every one with its default and its reason. `mutualrl.config` makes and
checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot work: names the field, its value and what is allowed, in one line."""


# What a label source's verdicts are good for, and what a transfer regime asks of them; each includes those before it.
OWN_SCALE = 0  # real numbers that only compare rollouts of one policy
SUCCESS = 1  # right or wrong, the same thing for every policy


def one_of(field: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuses a value that is not among those allowed; ConfigError."""
    if value not in allowed:
        raise ConfigError(f"{field}={value!r}: allowed are {', '.join(map(str, allowed))}")


def within(field: str, value: float, low: float, high: float = float("inf"), *, open_low: bool = False) -> None:
    """Refuses a number outside [low, high], or outside (low, high] with `open_low`; ConfigError."""
    if not (low < value if open_low else low <= value) or value > high:
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
        raise ConfigError(
            f"{field}={value!r}: must be {bound}" + (f" and at most {high:g}" if high < float("inf") else "")
        )


def trained_with(run: RunConfig, regime: str, why: str = "", **only: Any) -> None:
    """Refuses policies in training whose settings do not go with a transfer regime; ConfigError.

    Args:
      why: appended to the message.
      only: setting -> the value, or a tuple of values, that it must have.
    """
    for name, policy in run.policies.items():
        for field, wanted in only.items():
            allowed = wanted if isinstance(wanted, tuple) else (wanted,)
            if not policy.frozen and getattr(policy, field) not in allowed:
                must = " or ".join(map(str, allowed))
                raise ConfigError(
                    f"policies.{name}.{field}={getattr(policy, field)!r}: must be {must} with transfer {regime!r}{why}"
                )


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """What has changed from settings `a` to `b`, by dotted path: `x.y was 1, now 2`."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in {**a, **b} for d in differences(a.get(k), b.get(k), f"{where}.{k}" if where else k)]
    return [] if a == b else [f"{where} was {a!r}, now {b!r}"]


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """One policy: its model, prompts, objective, optimiser and share of the machine."""

    # Model
    model: str = ""  # HF folder, hub id, GGUF file, or `warmup` if mutualrl.warmup makes it
    frozen: bool = False  # samples and is heard by its peers, but is never updated
    dtype: str = "float32"  # compute dtype; parameters and optimiser are float32 always
    remat: bool = False  # recompute layers in the backward pass: less memory, about a third more work
    unroll_layers: bool = False  # unroll the scan over layers: slower to compile, less copying of weights on a CPU

    # Prompts
    system: str = ""  # system turn; folded into the user turn where the chat template has none
    view: int = 0  # wording of a problem that this policy is trained on: 0 the question, k the k-th of its views
    template: str = ""  # plain prompt with {question}, instead of the model's chat template
    stop_text: str = ""  # a token that contains this text ends a completion, beside the model's stop ids; e.g. "\n"
    max_prompt_tokens: int = 512  # problems with a longer prompt for any policy are dropped and counted
    prompt_bucket: int = 32  # smallest padded prompt length; buckets double from here, one compilation each

    # Rollouts
    group_size: int = 8  # G, rollouts a problem
    max_new_tokens: int = 256  # T
    temperature: float = 1.0  # of sampling, and of every log-prob in training
    slots: int = 0  # completions decoded side by side; 0: all of a step

    # Objective
    estimator: str = "grpo"  # advantage estimator
    advantage_eps: float = 1e-6  # added to the standard deviation (verl; TRL has 1e-4)
    advantage_ddof: int = 1  # sample standard deviation
    aggregation: str = "token_mean"  # every token equal (DAPO, verl)
    ratio_level: str = "token"  # or `sequence` (GSPO; then set the clips to about 3e-4 and 4e-4)
    clip_low: float = 0.2
    clip_high: float = 0.2  # DAPO: 0.28
    dual_clip: float = 3.0  # bound for negative advantages; 0 switches it off
    kl_coef: float = 0.0  # weight of the KL to the initial policy; above 0 a frozen copy is kept
    kl_estimator: str = "k3"
    kl_rows: str = "own"  # or `all`: the KL term counts rows received from peers too
    kl_in_reward: bool = False  # subtract kl_coef times the summed k1 from the reward instead of adding a loss
    entropy_coef: float = 0.0
    correction: str = "token_truncate"  # weight for the gap between sampler and trainer
    correction_cap: float = 2.0
    drop_zero_variance: bool = False  # groups without spread leave the loss, KL term and denominators included
    mask_truncated: bool = False  # cut-off rollouts leave the loss; they stay in the group statistics
    overlong_factor: float = 0.0  # largest length penalty (DAPO: 1), taken off the reward; 0: none
    overlong_buffer: int = 0  # tokens before the limit over which the penalty grows
    updates_per_step: int = 1  # optimiser updates on the rollouts of one step, whole problems each

    # Optimiser (AdamW)
    lr: float = 1e-6
    schedule: str = "constant"  # after warm-up; `linear` and `cosine` decay to lr * lr_end
    warmup_fraction: float = 0.0  # of all optimiser updates, linear from 0
    stable_fraction: float = 0.0  # of all optimiser updates, at the peak before decay begins
    lr_end: float = 0.0  # final learning rate as a fraction of lr
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # of the global gradient; 0 switches it off

    # Machine
    devices: int = 0  # size of the mesh slice; 0: by share
    share: float = 1.0  # of the devices left over by explicit sizes, relative to the other policies
    tensor: int = 1  # ways to split a layer; the rest of the slice splits rows and parameters (fsdp)
    micro_batch: int = 0  # rows of one forward/backward pass; 0: all, or as micro_batch_tokens says
    micro_batch_tokens: int = 0  # most tokens (rows times padded length) of one pass; 0: no limit
    logit_chunk_tokens: int = 1024  # tokens whose logits exist at one time in training


@dataclasses.dataclass(frozen=True)
class LogSource:
    """A peer that is not there: what a policy published in an earlier run, read from that run's `exchange.log`."""

    folder: str = ""  # the earlier run's exchange.log
    policy: str = ""  # whose records
    used_by: str = ""  # only rows that this policy trained on in that run; empty: all


@dataclasses.dataclass(frozen=True)
class ExchangeConfig:
    """Who hears whom, and how (mutualrl.exchange)."""

    topology: str = "all_to_all"  # or `ring` (from the predecessor), `pairs`, `star` (all and the first), `explicit`
    edges: tuple[str, ...] = ()  # with `explicit`: "source->learner"
    logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # name of a source: settings of a LogSource
    overlong: str = "drop"  # a text longer than the learner's row is dropped, or `truncate`: cut, never a certificate
    allow_lossy: bool = False  # let policies with a lossy tokenizer exchange texts; failures are counted
    max_staleness: int = 0  # steps; older records of a policy in training are dropped. Frozen ones and logs are exempt
    deadline_s: float = 600.0  # a source that is later than this counts as absent in that step, for every policy
    max_text_bytes: int = 0  # longest text on the wire; 0: 8 for each token of the longest completion
    log: bool = False  # keep every published record in <workdir>/exchange.log


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run of a cohort."""

    policies: Mapping[str, PolicyConfig]
    data: Mapping[str, Any]  # `name`: a module of mutualrl.data; the rest: keywords of its `load`
    seed: int = 0  # of everything random; data order is the same for all policies, sampling is not
    steps: int = 100  # cohort steps; every policy makes updates_per_step optimiser updates in each
    problems_per_step: int = 16  # P
    grader: str = "exact"  # a module of mutualrl.rewards
    grader_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of that grader; in a config file
    # `grader_options.<grader>.<option>`
    grader_workers: int = 2
    grader_timeout_s: float = 5.0
    gold_check: str = "drop"  # problems whose own gold answer the grader does not accept: `drop`, `keep`, or do not
    # look (`off`). Without ground truth in the rewards only held-out problems are looked at
    views: str = ""  # a file with other wordings of the problems, by id (mutualrl.data.views)
    label: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"name": "verifier"})  # `name`: a module of
    # mutualrl.labels, who says what is right; the rest: its options
    transfer: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"name": "none"})  # `name`: a module of
    # mutualrl.transfer, what is learnt from peers; the rest: its options
    exchange: ExchangeConfig = dataclasses.field(default_factory=lambda: ExchangeConfig())
    plan: str = "auto"  # disjoint mesh slices (static), turns on one slice (time_slice), or what the devices allow
    eval_problems: int = 256  # held-out problems, spread over kinds; 0: no evaluation
    eval_samples: int = 1  # rollouts a problem in evaluation
    eval_temperature: float = 1.0  # 0: greedy
    eval_top_p: float = 1.0
    eval_top_k: int = 0
    eval_every: int = 0  # steps; 0: only before and after
    checkpoint_every: int = 50  # steps; 0: only at the end
    checkpoint_keep: int = 2
    mismatch_limit: float = 0.05  # nats; a larger mean gap between sampler and trainer is warned of (0.1 in bfloat16)
    tensorboard: bool = True  # needs TensorFlow, which takes about 4 seconds to import
    warmup: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings of mutualrl.warmup, if it is used
