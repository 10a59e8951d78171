"""Every setting of a run, with its default, its reason and its limits; and the one-line refusal of a bad one.

A config file builds an `ml_collections.ConfigDict` with `base_config` and `add_policy` and returns it from
`get_config()`. Settings of a policy live under `config.policies.<name>`; each follows `config.policy.<setting>` until
it is set for that policy, so `--config.policy.lr=1e-4` sets it for all and `--config.policies.llama.lr=1e-3` for one.
`read` turns the dict into the frozen dataclasses below and refuses whatever does not fit before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from mutualrl import advantages, data, rewards, types

SCHEDULES = ("constant", "linear", "cosine")
PLANS = ("auto", "static", "time_slice")


class ConfigError(ValueError):
    """A setting that cannot work: names the field, its value and what is allowed, in one line."""


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """One policy: its model, prompts, objective, optimiser and share of the machine."""

    # Model
    model: str = ""  # HF folder, hub id, GGUF file, or `warmup` if mutualrl.warmup makes it
    dtype: str = "float32"  # compute dtype; parameters and optimiser are float32 always
    remat: bool = False  # recompute layers in the backward pass: less memory, about a third more work
    unroll_layers: bool = False  # unroll the scan over layers: slower to compile, less copying of weights on a CPU

    # Prompts
    system: str = ""  # system turn; folded into the user turn where the chat template has none
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
class RunConfig:
    """One run of a cohort."""

    policies: Mapping[str, PolicyConfig]
    data: Mapping[str, Any]  # `name`: a module of mutualrl.data; the rest: keywords of its `load`
    seed: int = 0  # of everything random; data order is the same for all policies, sampling is not
    steps: int = 100  # cohort steps; every policy makes updates_per_step optimiser updates in each
    problems_per_step: int = 16  # P
    grader: str = "exact"  # a module of mutualrl.rewards
    grader_workers: int = 2
    grader_timeout_s: float = 5.0
    label: str = "verifier"  # a module of mutualrl.labels: who says what is right
    transfer: str = "none"  # a module of mutualrl.transfer: what is learnt from peers
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


def base_config() -> ml_collections.ConfigDict:
    """A ConfigDict with every setting at its default and no policies yet."""
    run = {f.name: f.default for f in dataclasses.fields(RunConfig) if f.name not in ("policies", "data", "warmup")}
    config = ml_collections.ConfigDict(run)
    use_data(config, "procedural")
    config.warmup = ml_collections.ConfigDict()
    config.policy = ml_collections.ConfigDict({f.name: f.default for f in dataclasses.fields(PolicyConfig)})
    config.policies = ml_collections.ConfigDict()
    return config


def add_policy(config: ml_collections.ConfigDict, name: str, **settings: Any) -> ml_collections.ConfigDict:
    """Adds `config.policies.<name>`: every setting follows `config.policy` but for those given.

    Raises:
      ConfigError: the name is no string, or a setting does not exist.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"policies: name {name!r} must be a string of letters, digits and _, not starting with a digit"
        )
    policy = ml_collections.ConfigDict()
    for key in config.policy:
        policy[key] = config.policy.get_oneway_ref(key)
    _known(f"policies.{name}", settings, config.policy)
    for key, value in settings.items():
        _set(policy, key, value, f"policies.{name}.{key}")
    config.policies[name] = policy
    return policy


def use_data(config: ml_collections.ConfigDict, name: str, **options: Any) -> None:
    """Sets `config.data` to a source (a module of mutualrl.data) with every option at its default but for those given.

    Raises:
      ConfigError: there is no such source or option.
    """
    _one_of("data.name", name, data.names())
    load = importlib.import_module(f"mutualrl.data.{name}").load
    check_options("data", load, options)
    defaults = {
        k: p.default for k, p in inspect.signature(load).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    config.data = ml_collections.ConfigDict({"name": name, **defaults, **options})


def _set(target: ml_collections.ConfigDict, key: str, value: Any, field: str) -> None:
    try:
        target[key] = value
    except TypeError as e:
        raise ConfigError(f"{field}={value!r}: must be of type {type(target[key]).__name__}") from e


def _known(where: str, given: typing.Iterable[str], allowed: typing.Iterable[str]) -> None:
    for key in given:
        if key not in allowed:
            raise ConfigError(f"{where}.{key}: no such setting; allowed are {', '.join(sorted(map(str, allowed)))}")


def modules(package: str) -> list[str]:
    """Names a config may give for a part that is found by its module name, e.g. `modules('mutualrl.data')`."""
    found = importlib.import_module(package)
    return sorted(m.name for m in pkgutil.iter_modules(found.__path__) if not m.ispkg)


def read(config: ml_collections.ConfigDict) -> RunConfig:
    """The run a ConfigDict describes.

    Raises:
      ConfigError: something unknown, ill-typed or out of its limits.
    """
    raw = config.to_dict()
    fields = {f.name: f for f in dataclasses.fields(RunConfig)}
    _known("config", raw, [*fields, "policy"])
    if not isinstance(raw.get("policies"), Mapping) or not raw["policies"]:
        raise ConfigError("policies: at least one is needed; add one with mutualrl.config.add_policy")
    policies = {}
    for name, settings in raw["policies"].items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"policies: name {name!r} must be a string of letters, digits and _")
        if not isinstance(settings, Mapping):
            raise ConfigError(f"policies.{name}={settings!r}: must be a dict of settings")
        policies[name] = _typed(PolicyConfig, {**raw.get("policy", {}), **settings}, f"policies.{name}")
    rest = {k: v for k, v in raw.items() if k not in ("policy", "policies")}
    run = _typed(RunConfig, {**rest, "policies": policies}, "config")
    _check_run(run)
    for name, policy in policies.items():
        _check_policy(policy, f"policies.{name}")
        if run.problems_per_step % policy.updates_per_step:
            raise ConfigError(
                f"policies.{name}.updates_per_step={policy.updates_per_step}: must divide "
                f"problems_per_step={run.problems_per_step}"
            )
    return run


def _typed(cls: type, values: Mapping[str, Any], where: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    _known(where, values, fields)
    out = {}
    for key, value in values.items():
        default = fields[key].default
        if default is not dataclasses.MISSING and not _fits(value, default):
            kind = "a finite number" if isinstance(default, float) else f"of type {type(default).__name__}"
            raise ConfigError(f"{where}.{key}={value!r}: must be {kind}")
        out[key] = float(value) if isinstance(default, float) else value
    return cls(**out)


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float)) and math.isfinite(value)
    if isinstance(default, (tuple, list)):
        return isinstance(value, (tuple, list, Mapping))  # a source may take names, or names with their settings
    return isinstance(value, type(default))


def check_options(field: str, function: typing.Callable, options: Mapping[str, Any]) -> None:
    """Refuses options that are no keywords of `function`, or not of the type of the keyword's default.

    Raises:
      ConfigError.
    """
    keywords = {
        k: p for k, p in inspect.signature(function).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    _known(field, options, keywords)
    for key, value in options.items():
        default = keywords[key].default
        if default not in (inspect.Parameter.empty, None) and not _fits(value, default):
            raise ConfigError(f"{field}.{key}={value!r}: must be of type {type(default).__name__}")


def _one_of(field: str, value: str, allowed: typing.Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{field}={value!r}: allowed are {', '.join(allowed)}")


def _within(field: str, value: float, low: float, high: float = float("inf"), open_low: bool = False) -> None:
    if not (low < value if open_low else low <= value) or value > high:
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
        raise ConfigError(
            f"{field}={value!r}: must be {bound}" + (f" and at most {high:g}" if high < float("inf") else "")
        )


def _check_run(run: RunConfig) -> None:
    for field in ("steps", "problems_per_step", "grader_workers", "eval_samples", "checkpoint_keep"):
        _within(field, getattr(run, field), 1)
    _within("seed", run.seed, 0, 2**32 - 1)
    for field in ("eval_problems", "eval_every", "checkpoint_every", "eval_top_k", "eval_temperature"):
        _within(field, getattr(run, field), 0)
    _within("grader_timeout_s", run.grader_timeout_s, 0, open_low=True)
    _within("eval_top_p", run.eval_top_p, 0, 1, open_low=True)
    _one_of("plan", run.plan, PLANS)
    _one_of("grader", run.grader, rewards.names())
    _one_of("label", run.label, modules("mutualrl.labels"))
    _one_of("transfer", run.transfer, modules("mutualrl.transfer"))
    if not isinstance(run.data, Mapping) or not isinstance(run.data.get("name"), str):
        raise ConfigError(f"data={run.data!r}: must be a dict with a name")
    _one_of("data.name", run.data["name"], data.names())
    load = importlib.import_module(f"mutualrl.data.{run.data['name']}").load
    check_options("data", load, {k: v for k, v in run.data.items() if k != "name"})


def _check_policy(p: PolicyConfig, where: str) -> None:
    if not p.model:
        raise ConfigError(f"{where}.model='': must name an HF folder, a hub id or a GGUF file")
    _one_of(f"{where}.dtype", p.dtype, ("float32", "bfloat16"))
    _one_of(f"{where}.estimator", p.estimator, advantages.ESTIMATORS)
    _one_of(f"{where}.aggregation", p.aggregation, advantages.AGGREGATIONS)
    _one_of(f"{where}.ratio_level", p.ratio_level, ("token", "sequence"))
    _one_of(f"{where}.kl_estimator", p.kl_estimator, types.KL_ESTIMATORS)
    _one_of(f"{where}.correction", p.correction, types.CORRECTIONS)
    _one_of(f"{where}.schedule", p.schedule, SCHEDULES)
    for field in (
        "max_prompt_tokens",
        "prompt_bucket",
        "max_new_tokens",
        "updates_per_step",
        "tensor",
        "correction_cap",
    ):
        _within(f"{where}.{field}", getattr(p, field), 1)
    for field in ("slots", "devices", "micro_batch", "micro_batch_tokens", "advantage_eps", "weight_decay", "clip_norm",
                  "kl_coef", "entropy_coef", "overlong_factor", "lr", "clip_high"):  # fmt: skip
        _within(f"{where}.{field}", getattr(p, field), 0)
    for field in ("warmup_fraction", "stable_fraction", "lr_end", "clip_low"):
        _within(f"{where}.{field}", getattr(p, field), 0, 1)
    for field in ("adam_b1", "adam_b2"):
        _within(f"{where}.{field}", getattr(p, field), 0, 0.9999999)
    for field in ("temperature", "share", "adam_eps"):
        _within(f"{where}.{field}", getattr(p, field), 0, open_low=True)
    _within(f"{where}.logit_chunk_tokens", p.logit_chunk_tokens, 1)
    _within(f"{where}.advantage_ddof", p.advantage_ddof, 0, 1)
    if p.group_size < 2:
        raise ConfigError(
            f"{where}.group_size={p.group_size}: estimator {p.estimator} compares rollouts of a group; "
            "must be at least 2"
        )
    if p.dual_clip and p.dual_clip <= 1:
        raise ConfigError(f"{where}.dual_clip={p.dual_clip:g}: must be 0 (off) or above 1")
    if p.warmup_fraction + p.stable_fraction > 1:
        raise ConfigError(f"{where}.stable_fraction={p.stable_fraction:g}: with warmup_fraction it must be at most 1")
    if p.overlong_factor and not 1 <= p.overlong_buffer <= p.max_new_tokens:
        raise ConfigError(
            f"{where}.overlong_buffer={p.overlong_buffer}: with an overlong_factor it must be between 1 and "
            f"max_new_tokens={p.max_new_tokens}"
        )
    if p.micro_batch and p.micro_batch_tokens:
        raise ConfigError(f"{where}.micro_batch_tokens={p.micro_batch_tokens}: set it or micro_batch, not both")
    if p.template and "{question}" not in p.template:
        raise ConfigError(f"{where}.template={p.template!r}: must contain {{question}}")
