"""What an evaluation is asked for: flags, presets of decoding, and what `--help` prints. Loads no jax.

python -m mutualrl.evaluate (--config=FILE | --run=FOLDER [--step=N] | --model=[NAME=]MODEL ...)
                            --benchmarks=NAME,... --workdir=FOLDER [flags]

Who is evaluated:
    --config          config file: its policies before training (--config.path.to.setting=value as for training)
    --run             folder of a finished or stopped run: its policies at the newest checkpoint
    --step            with --run: at this checkpoint
    --model           [NAME=]MODEL, may be repeated: HF folder, .gguf file, or hub id; together they are a cohort
    --policies        only these policies of the config or run, by commas

On what:
    --benchmarks      by commas: recipes (below), `data` for the test split of the config's or run's own data, or paths
                      of .jsonl files with problems
    --data            folder with the recipes' files; else MUTUALRL_DATA, else the Hugging Face cache
    --grader          of .jsonl files; recipes and `data` have their own
    --limit           at most so many problems of each benchmark, spread evenly over its subjects, always the same

How (presets below; a flag overrides its preset):
    --preset          `config` is the default with --config and --run, `greedy` with --model
    --samples         samples a problem
    --temperature     0 is greedy, and allows one sample only
    --top_p, --top_k  1 and 0 keep every token
    --max_new_tokens, --max_prompt_tokens
                      longest reply; longest prompt, problems with a longer one are dropped for all policies and counted
    --batch           problems at a time; more needs more memory. The numbers do not depend on it

    --workdir         folder of settings.json, samples/, evaluation.json and evaluation.html. The same command goes on
                      where it was stopped
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from absl import flags

from mutualrl.command_line import read_command_line
from mutualrl.data import recipes
from mutualrl.settings import ConfigError, RunConfig, one_of, within

DATA = "data"  # the benchmark that is the run's own test split
CONFIG = "config"  # the preset that is the run's own `eval_...` settings


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How replies are sampled; max_new_tokens 0 is the policy's own."""

    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 0


# name: decoding, where it comes from
PRESETS: Mapping[str, tuple[Decoding, str]] = {
    "greedy": (Decoding(), "ours: the likeliest reply, one a problem"),
    "papers": (Decoding(temperature=0.6, top_p=0.95, max_new_tokens=3072), "Co-RL; --samples as the benchmark has it"),
}


@dataclasses.dataclass(frozen=True)
class Request:
    """Flags as given; None, '' and () for those that are not. See the module's docstring.

    Attributes:
      config: the settings of --config.
      models: (name or '', path or id) of each --model.
    """

    workdir: str
    benchmarks: tuple[str, ...]
    config: RunConfig | None = None
    run: str = ""
    step: int | None = None
    models: tuple[tuple[str, str], ...] = ()
    policies: tuple[str, ...] = ()
    data: str = ""
    grader: str = ""
    limit: int = 0
    preset: str = ""
    samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    max_prompt_tokens: int | None = None
    batch: int | None = None

    def decoding(self, run: RunConfig) -> Decoding:
        """The preset with what the flags override.

        Args:
          run: whose settings the preset `config` is.

        Raises:
          ConfigError: several samples of a greedy policy.
        """
        own = Decoding(run.eval_samples, run.eval_temperature, run.eval_top_p, run.eval_top_k)
        name = self.preset or ("greedy" if self.models else CONFIG)
        preset = own if name == CONFIG else PRESETS[name][0]
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Decoding)}
        found = dataclasses.replace(preset, **{k: v for k, v in given.items() if v is not None})
        if found.temperature == 0 and found.samples > 1:
            raise ConfigError(
                f"samples={found.samples}: with temperature 0 all are the same; give --samples=1, --temperature or "
                "--preset=papers"
            )
        return found


def parse(argv: Sequence[str]) -> Request:
    """The request of a command line.

    Raises:
      ConfigError: a flag or value is wrong; the message is one line.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # the config's flags, unknown here, may stand anywhere
    for name in ("workdir", "benchmarks", "run", "policies", "data", "grader", "preset"):
        flags.DEFINE_string(name, "", "", flag_values=values)
    for name in ("step", "samples", "top_k", "max_new_tokens", "max_prompt_tokens", "batch"):
        flags.DEFINE_integer(name, None, "", flag_values=values)
    flags.DEFINE_integer("limit", 0, "", flag_values=values)
    for name in ("temperature", "top_p"):
        flags.DEFINE_float(name, None, "", flag_values=values)
    flags.DEFINE_multi_string("model", [], "", flag_values=values)
    try:
        rest = values(list(argv), known_only=True)
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from error
    given = {name: values[name].value for name in values if name not in ("model", "benchmarks", "policies")}
    names = {name: tuple(x.strip() for x in values[name].value.split(",") if x.strip()) for name in _LISTS}
    models = tuple(map(_model, values["model"].value or ()))

    with_config = any(x.lstrip("-").partition("=")[0] == "config" for x in rest[1:])
    if (n := with_config + bool(given["run"]) + bool(models)) != 1:
        what = "one of --config=FILE, --run=FOLDER and --model=MODEL"
        raise ConfigError(f"{what} is needed" if n == 0 else f"only {what} may be given")
    if not with_config and len(rest) > 1:
        raise ConfigError(f"{rest[1]!r}: no such flag; see --help")
    request = Request(**{**given, **names, "models": models})
    _check(request)
    return dataclasses.replace(request, config=read_command_line(rest)[0] if with_config else None)


_LISTS = ("benchmarks", "policies")


def _model(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or not name.replace("-", "_").replace(".", "_").isidentifier():  # a path may have one in it
        return "", text
    return name, path


def _check(request: Request) -> None:
    for field, example in (("workdir", "evaluations/one"), ("benchmarks", "gsm8k,math500")):
        if not getattr(request, field):
            raise ConfigError(f"--{field} is missing, e.g. --{field}={example}")
    for name in request.benchmarks:
        if not name.endswith(".jsonl"):
            one_of("benchmarks", name, (*recipes.names(), DATA, "FILE.jsonl"))
        elif not request.grader:
            raise ConfigError(f"grader: must be given for benchmarks={name}, e.g. --grader=math")
    if request.models and DATA in request.benchmarks:
        raise ConfigError(f"benchmarks={DATA}: is the data of a config or a run; models have none")
    if request.grader and not any(name.endswith(".jsonl") for name in request.benchmarks):
        raise ConfigError(f"grader={request.grader!r}: is of .jsonl files only; recipes and {DATA!r} have their own")
    if request.models and request.policies:
        raise ConfigError(f"policies={','.join(request.policies)}: are of a config or a run; leave models out instead")
    if request.step is not None and not request.run:
        raise ConfigError(f"step={request.step}: is of a run; give --run=FOLDER")
    if request.preset:
        one_of("preset", request.preset, (*PRESETS, *(() if request.models else (CONFIG,))))
    for field in ("samples", "max_new_tokens", "max_prompt_tokens", "batch"):
        if getattr(request, field) is not None:
            within(field, getattr(request, field), 1)
    for field in ("limit", "temperature", "top_k", "step"):
        within(field, getattr(request, field) or 0, 0)
    if request.top_p is not None:
        within("top_p", request.top_p, 0, 1, open_low=True)


def usage() -> str:
    """What --help prints."""
    text = (__doc__ or "").partition("\n\n")[2]
    lines = ["Held-out accuracy of policies: pass@k, maj@k, and the vote of a cohort.", "", text, "Presets:"]
    lines.append(f"    {CONFIG:<10} the eval_... settings of the config or run, and its policies' own lengths")
    for name, (d, source) in PRESETS.items():
        longest = f", max_new_tokens {d.max_new_tokens}" if d.max_new_tokens else ""
        lines.append(f"    {name:<10} temperature {d.temperature:g}, top_p {d.top_p:g}{longest} ({source})")
    lines += ["", "Recipes (grader, data set):"]
    found = map(recipes.find, recipes.names())
    lines += [f"    {r.name:<16} {r.grader:<8} {r.hub} {r.test} split, or {_files(r)}" for r in found]
    return "\n".join(lines)


def _files(recipe: recipes.Recipe) -> str:
    return " or ".join(f"{name}.jsonl" for name in recipe.test_files)
