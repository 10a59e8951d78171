"""From a config file to the settings of a run (`mutualrl.settings`), and the one-line refusal of a bad one.

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

from mutualrl import advantages, data, rewards, sources, types
from mutualrl.settings import ConfigError, ExchangeConfig, LogSource, PolicyConfig, RunConfig, one_of, within

PARTS = {"label": "mutualrl.labels", "transfer": "mutualrl.transfer"}  # chosen by name, each with options of its own
SCHEDULES = ("constant", "linear", "cosine")
PLANS = ("auto", "static", "time_slice")


def base_config() -> ml_collections.ConfigDict:
    """A ConfigDict with every setting at its default and no policies yet."""
    parts = ("policies", "data", "warmup", "grader_options", *PARTS, "exchange")
    config = ml_collections.ConfigDict(
        {f.name: f.default for f in dataclasses.fields(RunConfig) if f.name not in parts}
    )
    use_data(config, "procedural")
    for part, package in PARTS.items():
        config[part] = ml_collections.ConfigDict({"name": getattr(RunConfig({}, {}), part)["name"]})
        for name in modules(package):
            options = importlib.import_module(f"{package}.{name}").Options()
            config[part][name] = ml_collections.ConfigDict(dataclasses.asdict(options))
    config.grader_options = ml_collections.ConfigDict(
        {name: dataclasses.asdict(cls()) for name, cls in _grader_options().items()}
    )
    config.exchange = ml_collections.ConfigDict(dataclasses.asdict(ExchangeConfig()))
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
    one_of("data.name", name, data.names())
    load = importlib.import_module(f"mutualrl.data.{name}").load
    check_options("data", load, options)
    defaults = {
        k: p.default for k, p in inspect.signature(load).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    config.data = ml_collections.ConfigDict({"name": name, **defaults, **options})


def use_transfer(config: ml_collections.ConfigDict, name: str, **options: Any) -> None:
    """Sets `config.transfer.name` and the regime's options that are given, and the objective of all policies as the
    method was published where it was published with one (the regime's PUBLISHED).

    Raises:
      ConfigError: there is no such regime or option.
    """
    _use(config, "transfer", name, options)


def use_label(config: ml_collections.ConfigDict, name: str, **options: Any) -> None:
    """Sets `config.label.name` and the source's options that are given, and the objective of all policies as the
    method was published where it was published with one (the source's PUBLISHED).

    Raises:
      ConfigError: there is no such label source or option.
    """
    _use(config, "label", name, options)


def _use(config: ml_collections.ConfigDict, part: str, name: str, options: Mapping[str, Any]) -> None:
    one_of(f"{part}.name", name, modules(PARTS[part]))
    config[part].name = name
    _known(f"{part}.{name}", options, config[part][name])
    for key, value in options.items():
        _set(config[part][name], key, value, f"{part}.{name}.{key}")
    published = getattr(importlib.import_module(f"{PARTS[part]}.{name}"), "PUBLISHED", {})
    for key, value in published.items():
        _set(config.policy, key, value, f"policy.{key}")


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
    parts = {part: _part(part, raw[part]) for part in PARTS if part in raw}
    rest = {k: v for k, v in raw.items() if k not in ("policy", "policies", "exchange", *PARTS)}
    exchange = _exchange(raw.get("exchange", {}))
    grader = rest.get("grader", RunConfig.grader)
    rest["grader_options"] = _options_of(grader, raw.get("grader_options", {}))
    run = _typed(RunConfig, {**rest, **parts, "policies": policies, "exchange": exchange}, "config")
    _check_run(run)
    _check_grader(run)
    for name, policy in policies.items():
        _check_policy(policy, f"policies.{name}")
        if run.problems_per_step % policy.updates_per_step:
            raise ConfigError(
                f"policies.{name}.updates_per_step={policy.updates_per_step}: must divide "
                f"problems_per_step={run.problems_per_step}"
            )
    if all(p.frozen for p in policies.values()):
        raise ConfigError("policies: all are frozen; at least one must be trained")
    sources.check(run)
    label_source(run).check(label_options(run), run)
    regime(run).check(transfer_options(run), run)
    needed, why = regime(run).labels(transfer_options(run))
    if needed > label_source(run).REWARDS:
        raise ConfigError(
            f"transfer.name={run.transfer['name']!r}: does not go with label {run.label['name']!r}, whose rewards only "
            f"compare rollouts of one policy: {why}"
        )
    return run


def regime(run: RunConfig) -> typing.Any:
    """The module of the run's transfer regime."""
    return importlib.import_module(f"mutualrl.transfer.{run.transfer['name']}")


def transfer_options(run: RunConfig) -> Any:
    """The `Options` of the run's transfer regime."""
    return regime(run).Options(**{k: v for k, v in run.transfer.items() if k != "name"})


def label_source(run: RunConfig) -> typing.Any:
    """The module of the run's label source."""
    return importlib.import_module(f"mutualrl.labels.{run.label['name']}")


def label_options(run: RunConfig) -> Any:
    """The `Options` of the run's label source."""
    return label_source(run).Options(**{k: v for k, v in run.label.items() if k != "name"})


def _part(part: str, raw: Any) -> dict[str, Any]:
    """{name, its options} from `config.<part>`, which holds the options of every module there is."""
    names = modules(PARTS[part])
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
        raise ConfigError(f"{part}={raw!r}: must be a dict with a name; allowed are {', '.join(names)}")
    _known(part, raw, ["name", *names])
    one_of(f"{part}.name", raw["name"], names)
    name = raw["name"]
    cls = importlib.import_module(f"{PARTS[part]}.{name}").Options
    return {"name": name, **dataclasses.asdict(_typed(cls, raw.get(name, {}), f"{part}.{name}"))}


def _grader_options() -> dict[str, type]:
    """The `Options` of the graders that have some."""
    found = {name: importlib.import_module(rewards.find(name)) for name in rewards.names()}
    return {name: module.Options for name, module in found.items() if hasattr(module, "Options")}


def _options_of(grader: str, raw: Any) -> dict[str, Any]:
    """The options of one grader from `config.grader_options`, which holds those of every grader there is."""
    known = _grader_options()
    if not isinstance(raw, Mapping) or not all(isinstance(x, Mapping) for x in raw.values()):
        raise ConfigError(f"grader_options={raw!r}: must be a dict of options by grader; there are {', '.join(known)}")
    _known("grader_options", raw, known)
    given = {name: _typed(cls, raw.get(name, {}), f"grader_options.{name}") for name, cls in known.items()}
    return next((dataclasses.asdict(options) for name, options in given.items() if name == grader), {})


def _check_grader(run: RunConfig) -> None:
    """Refuses a grader that does not exist or cannot work here, and a time limit that could not come first."""
    one_of("grader", run.grader, rewards.names())
    try:
        rewards.keywords(importlib.import_module(rewards.find(run.grader)), run.grader_options)
    except ValueError as error:
        raise ConfigError(f"grader={run.grader!r}: {error}") from error
    limit = run.grader_options.get("timeout_s", 0)
    if limit >= run.grader_timeout_s:
        raise ConfigError(
            f"grader_options.{run.grader}.timeout_s={limit:g}: must be below grader_timeout_s={run.grader_timeout_s:g}"
        )


def _exchange(raw: Any) -> ExchangeConfig:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"exchange={raw!r}: must be a dict of settings")
    out = _typed(ExchangeConfig, raw, "exchange")
    logs = {}
    for name, settings in out.logs.items():
        if not isinstance(settings, Mapping) or not {"folder", "policy"} <= set(settings):
            raise ConfigError(f"exchange.logs.{name}={settings!r}: must be a dict with folder and policy")
        logs[name] = _typed(LogSource, settings, f"exchange.logs.{name}")
    return dataclasses.replace(out, logs=logs, edges=tuple(out.edges))


def _typed(cls: type, values: Mapping[str, Any], where: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    _known(where, values, fields)
    out = {}
    for key, value in values.items():
        default = fields[key].default
        if fields[key].default_factory is not dataclasses.MISSING and key != "warmup":
            default = fields[key].default_factory()
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


def _check_run(run: RunConfig) -> None:
    for field in ("steps", "problems_per_step", "grader_workers", "eval_samples", "checkpoint_keep"):
        within(field, getattr(run, field), 1)
    within("seed", run.seed, 0, 2**32 - 1)
    for field in ("eval_problems", "eval_every", "checkpoint_every", "eval_top_k", "eval_temperature"):
        within(field, getattr(run, field), 0)
    within("grader_timeout_s", run.grader_timeout_s, 0, open_low=True)
    within("eval_top_p", run.eval_top_p, 0, 1, open_low=True)
    one_of("plan", run.plan, PLANS)
    one_of("gold_check", run.gold_check, ("drop", "keep", "off"))
    e = run.exchange
    one_of("exchange.topology", e.topology, sources.TOPOLOGIES)
    one_of("exchange.overlong", e.overlong, ("drop", "truncate"))
    for field in ("max_staleness", "max_text_bytes"):
        within(f"exchange.{field}", getattr(e, field), 0)
    within("exchange.deadline_s", e.deadline_s, 0, open_low=True)
    if not isinstance(run.data, Mapping) or not isinstance(run.data.get("name"), str):
        raise ConfigError(f"data={run.data!r}: must be a dict with a name")
    one_of("data.name", run.data["name"], data.names())
    load = importlib.import_module(f"mutualrl.data.{run.data['name']}").load
    check_options("data", load, {k: v for k, v in run.data.items() if k != "name"})


def _check_policy(p: PolicyConfig, where: str) -> None:
    if not p.model:
        raise ConfigError(f"{where}.model='': must name an HF folder, a hub id or a GGUF file")
    one_of(f"{where}.dtype", p.dtype, ("float32", "bfloat16"))
    one_of(f"{where}.estimator", p.estimator, advantages.ESTIMATORS)
    one_of(f"{where}.aggregation", p.aggregation, advantages.AGGREGATIONS)
    one_of(f"{where}.ratio_level", p.ratio_level, ("token", "sequence"))
    one_of(f"{where}.kl_rows", p.kl_rows, ("own", "all"))
    one_of(f"{where}.kl_estimator", p.kl_estimator, types.KL_ESTIMATORS)
    one_of(f"{where}.correction", p.correction, types.CORRECTIONS)
    one_of(f"{where}.schedule", p.schedule, SCHEDULES)
    for field in (
        "max_prompt_tokens",
        "prompt_bucket",
        "max_new_tokens",
        "updates_per_step",
        "tensor",
        "correction_cap",
    ):
        within(f"{where}.{field}", getattr(p, field), 1)
    for field in ("slots", "devices", "micro_batch", "micro_batch_tokens", "advantage_eps", "weight_decay", "clip_norm",
                  "kl_coef", "entropy_coef", "overlong_factor", "lr", "clip_high", "view"):  # fmt: skip
        within(f"{where}.{field}", getattr(p, field), 0)
    for field in ("warmup_fraction", "stable_fraction", "lr_end", "clip_low"):
        within(f"{where}.{field}", getattr(p, field), 0, 1)
    for field in ("adam_b1", "adam_b2"):
        within(f"{where}.{field}", getattr(p, field), 0, 0.9999999)
    for field in ("temperature", "share", "adam_eps"):
        within(f"{where}.{field}", getattr(p, field), 0, open_low=True)
    within(f"{where}.logit_chunk_tokens", p.logit_chunk_tokens, 1)
    within(f"{where}.advantage_ddof", p.advantage_ddof, 0, 1)
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
