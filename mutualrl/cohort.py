"""From the settings of a run to its problems and policies; everything is checked before any weight is read."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from mutualrl import data, losses, sharding, types
from mutualrl.accuracy import spread_over_kinds
from mutualrl.config import ConfigError, PolicyConfig, RunConfig, label_options, label_source, regime, transfer_options
from mutualrl.data.views import attach
from mutualrl.meshes import Plan
from mutualrl.models.config import ModelConfig
from mutualrl.models.gguf import GGUFSource
from mutualrl.models.weights import load_params, resolve
from mutualrl.policy import Policy
from mutualrl.report import Progress
from mutualrl.rewards.workers import GraderPool, self_check
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.types import Problem

_GOLDS = 500  # gold answers checked at a time; of more than that progress is shown


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model whose config and tokenizer have been read, and whose weights have not."""

    weights: Any  # HF folder or GGUFSource
    config: ModelConfig
    tokenizer: Tokenizer


def open_models(run: RunConfig) -> dict[str, Opened]:
    """Config and tokenizer of every policy's model.

    Raises:
      ConfigError: a model cannot be found, or is of an unknown or unsupported family.
    """
    opened = {}
    for name, policy in run.policies.items():
        try:
            if policy.model.endswith(".gguf"):
                if not Path(policy.model).expanduser().is_file():
                    raise ValueError("no such file")
                weights = GGUFSource(Path(policy.model).expanduser())
                config, source = ModelConfig.from_hf(weights.config), Path(policy.model).expanduser()
            else:
                weights = source = resolve(policy.model)
                config = ModelConfig.from_hf(weights)
            tokenizer = Tokenizer.load(source, template=policy.template or None, system=policy.system or None)
        except Exception as error:  # a damaged file makes its reader raise anything
            raise ConfigError(f"policies.{name}.model={policy.model!r}: {' '.join(str(error).split())}") from error
        _check_model(f"policies.{name}", policy, config, tokenizer)
        if not tokenizer.lossless and not run.exchange.allow_lossy:
            raise ConfigError(
                f"policies.{name}.model={policy.model!r}: its tokenizer {tokenizer.loss_reason}, so texts do not "
                "survive it; take another model, or set exchange.allow_lossy=True and watch what is dropped"
            )
        opened[name] = Opened(weights, config, tokenizer)
    return opened


def _check_model(where: str, policy: PolicyConfig, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Refuses a model that does not go with its tokenizer or with the policy's lengths."""
    for what, ids in (("stop id", tokenizer.stop_ids), ("pad id", (tokenizer.pad_id,))):
        if max(ids) >= config.vocab_size:
            raise ConfigError(
                f"{where}.model={policy.model!r}: the tokenizer's {what} {max(ids)} is beyond the "
                f"{config.vocab_size} ids of the model"
            )
    length = policy.max_prompt_tokens + policy.max_new_tokens
    if config.max_length and length > config.max_length:
        raise ConfigError(
            f"{where}.max_prompt_tokens={policy.max_prompt_tokens}: with max_new_tokens={policy.max_new_tokens} "
            f"it exceeds the {config.max_length} positions of {policy.model!r}"
        )
    if policy.stop_text and not tokenizer.ids_containing(policy.stop_text).any():
        raise ConfigError(f"{where}.stop_text={policy.stop_text!r}: no token of the tokenizer contains it")


def load_problems(run: RunConfig, split: str) -> list[Problem]:
    """Problems of a split, those to train on with the views of `run.views`.

    Raises:
      ConfigError: an option of the source is wrong, or a file is missing or has no view of these problems.
    """
    options = {k: v for k, v in run.data.items() if k != "name"}
    try:
        problems = data.load(run.data["name"], split, **options)
        return attach(problems, run.views) if run.views and split == "train" else problems
    except (ValueError, OSError) as error:
        raise ConfigError(f"data: {' '.join(str(error).split())}") from error


def views_needed(run: RunConfig) -> dict[str, tuple[int, ...]]:
    """The wordings that each policy is trained on: 0 the question, k the k-th of a problem's views."""
    two = label_source(run).needs(label_options(run)).views == 2
    return {name: (0, 1) if two else (p.view,) for name, p in run.policies.items()}


def fitting_problems(
    problems: Sequence[Problem],
    run: RunConfig,
    opened: Mapping[str, Opened],
    views: Mapping[str, Sequence[int]] = {},
) -> tuple[list[Problem], int]:
    """Problems whose prompts fit every policy (the problem set stays common), and how many were dropped.

    Args:
      views: the wordings that each policy is asked; of a policy that is not in it the question only.
    """

    def fits(x: Problem, name: str) -> bool:
        asked = [x.wording(k).asked for k in views.get(name, (0,))]
        longest = run.policies[name].max_prompt_tokens
        return all(len(opened[name].tokenizer.prompt(text)) <= longest for text in asked)

    most = max((k for wanted in views.values() for k in wanted), default=0)
    there = [x for x in problems if len(x.views) >= most]
    if len(there) < len(problems):
        logging.warning(
            "%d of %d problems have fewer than %d views: dropped; python -m mutualrl.rephrase writes some",
            len(problems) - len(there), len(problems), most,
        )  # fmt: skip
    kept = [x for x in there if all(fits(x, name) for name in opened)]
    if len(kept) < len(there):
        logging.warning(
            "%d of %d problems have a prompt over max_prompt_tokens: dropped", len(there) - len(kept), len(problems)
        )
    return kept, len(problems) - len(kept)


def open_grader(run: RunConfig) -> GraderPool:
    """The run's grader, with its options and worker processes."""
    return GraderPool(
        run.grader, options=run.grader_options, workers=run.grader_workers, timeout_s=run.grader_timeout_s
    )


def prepare(
    run: RunConfig, grader: GraderPool
) -> tuple[list[Problem], list[Problem], dict[str, Opened], dict[str, int]]:
    """Everything a run needs but its weights.

    Args:
      grader: the run's, by which gold answers are checked.

    Returns:
      training problems, held-out problems, opened models, and how many problems were dropped: `prompt` of those to
      train on whose prompt is too long, `gold` of all whose gold answer the grader does not accept.

    Raises:
      ConfigError: data or models do not fit.
    """
    problems, held_out = load_problems(run, "train"), load_problems(run, "test") if run.eval_problems else []
    opened = open_models(run)
    problems, long = fitting_problems(problems, run, opened, views=views_needed(run))
    held_out = [x for x in fitting_problems(held_out, run, opened)[0] if x.answer is not None or x.extra]
    # Without ground truth in the rewards it must not choose what is trained on either.
    judged = [problems, held_out] if label_source(run).needs(label_options(run)).gold else [held_out]
    unsound = unsound_golds([x for some in judged for x in some], run, grader)
    if run.gold_check == "drop":
        problems, held_out = ([x for x in some if x.id not in unsound] for some in (problems, held_out))
    if len(problems) < run.problems_per_step:
        raise ConfigError(f"problems_per_step={run.problems_per_step}: the data has {len(problems)} usable problems")
    held_out = spread_over_kinds(held_out, run.eval_problems, run.seed)
    if run.eval_problems and not held_out:
        raise ConfigError(f"eval_problems={run.eval_problems}: no held-out problem has a gold answer; set it to 0")
    return problems, held_out, opened, {"prompt": long, "gold": len(unsound) if run.gold_check == "drop" else 0}


def unsound_golds(problems: Sequence[Problem], run: RunConfig, grader: GraderPool) -> set[str]:
    """Ids of problems whose gold answer the grader does not accept, with a warning that names some of them."""
    failed: list[Problem] = []
    if run.gold_check != "off":
        with Progress("Checking gold answers", len(problems)) as bar:
            for start in range(0, len(problems), _GOLDS):
                failed += self_check(grader, problems[start : start + _GOLDS])
                if len(problems) > _GOLDS:
                    bar.update(min(start + _GOLDS, len(problems)))
    if failed:
        done = "dropped (gold_check='keep' keeps them)" if run.gold_check == "drop" else "kept"
        logging.warning(
            "grader %s does not accept the gold answers of %d of %d problems, %s: %s",
            run.grader, len(failed), len(problems), done, ", ".join(x.id for x in failed[:5]),
        )  # fmt: skip
    return {x.id for x in failed}


def own_level(config: PolicyConfig) -> int:
    """Code of the ratio level of a policy's own rows."""
    return types.SEQUENCE if config.ratio_level == "sequence" else types.TOKEN


def build(run: RunConfig, opened: dict[str, Opened], plan: Plan) -> list[Policy]:
    """The policies, weights loaded shard by shard onto their slices.

    Args:
      run: the settings.
      opened: from `open_models`.
      plan: which devices each policy has.
    """
    forms = regime(run).forms(transfer_options(run))
    teacher = label_source(run).needs(label_options(run)).teacher
    policies = []
    for index, (name, config) in enumerate(run.policies.items()):
        mesh, model = plan.meshes[name], opened[name].config

        def put(path, shape, read, mesh=mesh):
            target = jax.sharding.NamedSharding(mesh, sharding.spec("/".join(path), shape, mesh))
            return jax.make_array_from_callback(shape, target, read)

        policies.append(
            Policy(
                name,
                index,
                config,
                model,
                opened[name].tokenizer,
                mesh,
                load_params(opened[name].weights, model, put),
                total_updates=run.steps * config.updates_per_step,
                seed=run.seed,
                teacher=teacher,
                loss_settings=losses.LossSettings(
                    levels=tuple(sorted({own_level(config), *forms.get("levels", ())})),
                    dual_clip=config.dual_clip,
                    kl_estimator=config.kl_estimator,
                    correction=config.correction,
                    correction_cap=config.correction_cap,
                    entropy_coef=config.entropy_coef,
                    **{k: v for k, v in forms.items() if k != "levels"},
                ),
            )
        )
    return policies
