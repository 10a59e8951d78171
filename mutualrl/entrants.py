"""Who is evaluated: the policies of a config or a run, or models by their paths, as the settings of a run."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mutualrl.checkpoint import complete_steps
from mutualrl.cohort import open_models
from mutualrl.config import ConfigError, RunConfig
from mutualrl.evaluation_request import CONFIG, PRESETS, Request
from mutualrl.settings import ExchangeConfig, PolicyConfig, one_of

NEW_TOKENS = PROMPT_TOKENS = 1024  # lengths of models where nothing else is said, as far as their positions allow

# What an evaluation needs of a run's settings beside its policies.
_KEPT = ("data", "seed", "problems_per_step", "plan", "gold_check", "grader", "grader_options", "grader_workers",
         "grader_timeout_s", "eval_samples", "eval_temperature", "eval_top_p", "eval_top_k")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Entrants:
    """Policies to evaluate.

    Attributes:
      run: settings with these policies only, frozen; nothing is exchanged.
      checkpoints, step: where their parameters are, or None for those of their models.
    """

    run: RunConfig
    checkpoints: Path | None = None
    step: int | None = None


def entrants(request: Request) -> Entrants:
    """The policies of a request; no weight is loaded, but models that a config's warm-up describes are made.

    Raises:
      ConfigError: there is no such model, run, step or policy.
    """
    if request.models:
        return Entrants(_of_models(request))
    if request.config is not None:
        run = request.config
        if run.warmup:
            from mutualrl.warmup import ensure_models

            run = ensure_models(run)
        return Entrants(_only(vars(run), run.policies, request))
    folder = Path(request.run).expanduser()
    raw = _config(folder)
    checkpoints = folder.absolute() / "checkpoints"
    steps = complete_steps(checkpoints, list(raw["policies"]))
    if not steps:
        raise ConfigError(f"run={request.run!r}: has no complete checkpoint")
    step = steps[-1] if request.step is None else request.step
    one_of("step", step, steps)
    return Entrants(_only(raw, raw["policies"], request), checkpoints, step)


def _config(folder: Path) -> dict[str, Any]:
    """A run's config.json, its policies as PolicyConfig."""
    try:
        raw = json.loads((folder / "config.json").read_text())
        return {**raw, "policies": {name: PolicyConfig(**p) for name, p in raw["policies"].items()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"run={str(folder)!r}: must be the folder of a run, with config.json ({why})") from error


def _only(raw: Mapping[str, Any], policies: Mapping[str, PolicyConfig], request: Request) -> RunConfig:
    """The settings that matter, with the policies asked for."""
    for name in request.policies:
        one_of("policies", name, tuple(policies))
    preset = PRESETS[request.preset][0].max_new_tokens if request.preset not in ("", CONFIG) else 0
    lengths = {
        "max_new_tokens": request.max_new_tokens or preset,
        "max_prompt_tokens": request.max_prompt_tokens,
    }
    changes = {"frozen": True, "view": 0, **{k: v for k, v in lengths.items() if v}}
    names = request.policies or tuple(policies)
    return RunConfig(
        {name: dataclasses.replace(policies[name], **changes) for name in policies if name in names},
        exchange=ExchangeConfig(allow_lossy=True),  # nothing is exchanged
        **{k: raw[k] for k in _KEPT if k in raw},
    )


def _of_models(request: Request) -> RunConfig:
    """A run of models with default settings, and lengths that their positions allow."""
    policies: dict[str, PolicyConfig] = {}
    for name, path in request.models:
        name = name or re.sub(r"[^\w.-]+", "_", Path(path.rstrip("/")).name.removesuffix(".gguf"))
        if name in policies:
            raise ConfigError(f"model={path}: there are two called {name}; name them with --model=NAME={path}")
        policies[name] = PolicyConfig(model=path, frozen=True, max_prompt_tokens=1, max_new_tokens=1)
    run = RunConfig(policies, {}, exchange=ExchangeConfig(allow_lossy=True))
    opened = open_models(run)
    sized = {}
    for name, policy in policies.items():
        new, prompt = _lengths(request, opened[name].config.max_length)
        sized[name] = dataclasses.replace(policy, max_new_tokens=new, max_prompt_tokens=prompt)
    return dataclasses.replace(run, policies=sized)


def _lengths(request: Request, positions: int) -> tuple[int, int]:
    """Longest reply and prompt of a model with so many positions (0: it does not say).

    What is asked for is kept, and refused by `open_models` where it does not fit; the other gives way.
    """
    preset = PRESETS[request.preset or "greedy"][0].max_new_tokens
    new, prompt = request.max_new_tokens or preset or NEW_TOKENS, request.max_prompt_tokens or PROMPT_TOKENS
    if positions and not request.max_new_tokens:
        reserved = request.max_prompt_tokens or min(prompt, positions // 4)
        new = max(1, min(new, positions - reserved))
    if positions and not request.max_prompt_tokens:
        prompt = max(1, min(prompt, positions - new))
    return new, prompt
