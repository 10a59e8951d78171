"""The runs of a comparison, from its config file: settings of every arm with every seed, checked before anything runs.

What a config file's ConfigDict holds is described in `mutualrl.compare`; `comparison` makes one.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from mutualrl.config import ConfigError, RunConfig, add_policy, read

FIELDS = ("base", "arms", "seeds", "jobs", "baseline", "contrasts")
MODELS = "models"  # folder of the logs of warm-ups
TAKEN = (MODELS, "compiled")  # folders beside those of the arms
SAME = ("data", "seed", "problems_per_step", "grader", "warmup", "eval_")  # must not differ between arms
HARMLESS = (
    "tensorboard",
    "grader_workers",
    "grader_timeout_s",
    "checkpoint_every",
    "checkpoint_keep",
    "mismatch_limit",
)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One arm with one seed.

    Attributes:
      run: checked settings. Models of a warm-up are still to be made.
      copies: policy -> the policy whose model it has.
      needs: arms of the same seed that must be finished first.
    """

    arm: str
    seed: int
    run: RunConfig
    copies: Mapping[str, str]
    folder: Path
    needs: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.arm}/{self.seed}"

    @property
    def rollouts_per_step(self) -> int:
        """What a step costs, roughly: for the time left over runs that are not equally long."""
        return self.run.problems_per_step * sum(p.group_size for p in self.run.policies.values())


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A checked comparison: every run it consists of, by seed and then in the order of the arms."""

    runs: tuple[PlannedRun, ...]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    jobs: int
    baseline: str
    contrasts: tuple[tuple[str, str], ...]
    workdir: Path

    @property
    def digest(self) -> str:
        """Of the settings of all runs."""
        plan = [(r.name, dataclasses.asdict(r.run), dict(r.copies)) for r in self.runs]
        return hashlib.blake2b(json.dumps(plan, sort_keys=True).encode(), digest_size=6).hexdigest()


def comparison(
    base: ml_collections.ConfigDict,
    arms: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    jobs: int = 1,
    baseline: str,
    contrasts: Sequence[str] = (),
) -> ml_collections.ConfigDict:
    """The ConfigDict that a config file of a comparison returns; see the module's docstring."""
    config = ml_collections.ConfigDict({}, convert_dict=False)  # the arms' dotted names are no keys of a ConfigDict
    config.base, config.arms, config.seeds = base, {k: dict(v) for k, v in arms.items()}, tuple(seeds)
    config.jobs, config.baseline, config.contrasts = jobs, baseline, tuple(contrasts)
    return config


def plan(config: ml_collections.ConfigDict, workdir: str | Path) -> Comparison:
    """Checks every run of a comparison; starts nothing.

    Raises:
      ConfigError: names the arm and the field.
    """
    workdir = Path(workdir)
    for name in [*config.keys(), *FIELDS]:
        if name not in FIELDS or name not in config:
            raise ConfigError(f"config.{name}: a comparison has {', '.join(FIELDS)} and nothing else")
    arms, seeds = dict(config.arms), tuple(config.seeds)
    for arm, overrides in arms.items():
        if not isinstance(arm, str) or not arm.isidentifier() or arm in TAKEN:
            raise ConfigError(
                f"arms: name {arm!r} must be a string of letters, digits and _, not of {', '.join(TAKEN)}"
            )
        if not isinstance(overrides, Mapping):
            raise ConfigError(f"arms.{arm}={overrides!r}: must be a dict of settings")
    if config.baseline not in arms:
        raise ConfigError(f"baseline={config.baseline!r}: must be one of {', '.join(arms)}")
    if not seeds or len(set(seeds)) < len(seeds) or any(type(s) is not int or s < 0 for s in seeds):
        raise ConfigError(f"seeds={seeds}: must be different whole numbers from 0, at least one")
    if config.jobs < 1:
        raise ConfigError(f"jobs={config.jobs}: must be at least 1")
    contrasts = tuple(tuple(str(c).split("/")) for c in config.contrasts)
    for given, pair in zip(config.contrasts, contrasts):
        if len(pair) != 2 or pair[0] == pair[1] or not set(pair) <= set(arms):
            raise ConfigError(f"contrasts={given!r}: must be 'arm/against', two of {', '.join(arms)}")
    needs = {arm: _needs(arm, overrides, arms) for arm, overrides in arms.items()}
    order = _ordered(needs)
    runs = []
    for seed in seeds:
        for arm in order:
            folders = {a: workdir / a / str(seed) for a in arms}
            run, copies = _arm(config.base, arm, arms[arm], seed, folders)
            runs.append(PlannedRun(arm, seed, run, copies, folders[arm], needs[arm]))
    for planned in runs:
        _check(planned, runs)
    return Comparison(tuple(runs), tuple(arms), seeds, config.jobs, config.baseline, contrasts, workdir)


def _check(planned: PlannedRun, runs: Sequence[PlannedRun]) -> None:
    """Refuses a run that a comparison cannot use, or that waits for a log which the other run will not have.

    Raises:
      ConfigError.
    """
    if not planned.run.eval_problems:
        raise ConfigError("base.eval_problems=0: arms are compared on held-out problems; must be at least 1")
    writers = {r.folder / "exchange.log": r for r in runs if r.seed == planned.seed}
    for name, log in planned.run.exchange.logs.items():
        if (other := writers.get(Path(log.folder))) is None:
            continue
        where = f"arms.{planned.arm}.exchange.logs.{name}"
        if not other.run.exchange.log:
            raise ConfigError(f"{where}.folder={log.folder!r}: arm {other.arm} keeps no log; set its exchange.log=True")
        for field, value in (("policy", log.policy), ("used_by", log.used_by)):
            if value and value not in other.run.policies:
                names = ", ".join(other.run.policies)
                raise ConfigError(f"{where}.{field}={value!r}: must be a policy of arm {other.arm}: {names}")


def _needs(arm: str, overrides: Mapping[str, Any], arms: Mapping[str, Any]) -> tuple[str, ...]:
    """Arms whose folders an arm's values name."""
    found: dict[str, None] = {}
    for field, value in overrides.items():
        for name in _names(value):
            if name not in arms or name == arm:
                others = ", ".join(a for a in arms if a != arm)
                raise ConfigError(f"arms.{arm}.{field}: {{{name}}} must name another arm: {others}")
            found[name] = None
    return tuple(found)


def _names(value: Any) -> list[str]:
    if isinstance(value, str):
        return [n for n in re.findall(r"\{(\w+)\}", value) if n != "question"]  # which a prompt template has
    if isinstance(value, Mapping):
        value = list(value.values())
    return [n for v in value for n in _names(v)] if isinstance(value, (list, tuple)) else []


def _filled(value: Any, folders: Mapping[str, Path]) -> Any:
    """A value with the folders it names."""
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda m: str(folders.get(m[1], m[0])), value)
    if isinstance(value, Mapping):
        return {k: _filled(v, folders) for k, v in value.items()}
    return type(value)(_filled(v, folders) for v in value) if isinstance(value, (list, tuple)) else value


def _ordered(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Arms in their order, but each after those it needs.

    Raises:
      ConfigError: they need each other.
    """
    order: list[str] = []
    while len(order) < len(needs):
        ready = [a for a in needs if a not in order and set(needs[a]) <= set(order)]
        if not ready:
            raise ConfigError(f"arms: {', '.join(a for a in needs if a not in order)} need each other's folders")
        order.append(ready[0])
    return order


def _arm(
    base: ml_collections.ConfigDict, arm: str, overrides: Mapping[str, Any], seed: int, folders: Mapping[str, Path]
) -> tuple[RunConfig, dict[str, str]]:
    """Settings of an arm with a seed, and whose models its added policies have."""
    config, copies = copy.deepcopy(base), {}  # a deep copy keeps `policies.*` following `policy`
    config.unlock()  # flags lock it, but policies may be added; every name is checked below
    config.seed = seed
    for field, value in overrides.items():
        where, value = f"arms.{arm}.{field}", _filled(value, folders)
        if field.split(".")[0] in SAME or field.startswith("eval_"):
            raise ConfigError(f"{where}: must be the same in all arms; set it in base")
        path = field.split(".")
        try:
            if path[0] == "policies" and len(path) == 2 and path[1] not in config.policies:
                copies[path[1]] = _add_like(config, path[1], value, where)
            else:
                _set(config, path, value, where)
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{where}={value!r}: {' '.join(str(error).split())}") from error
    try:
        return read(config), copies
    except ConfigError as error:
        raise ConfigError(f"arms.{arm}: {error}") from error


def _set(config: ml_collections.ConfigDict, path: Sequence[str], value: Any, where: str) -> None:
    node = config
    for key in path[:-1]:
        node = node[key] if isinstance(node, ml_collections.ConfigDict) and key in node else None
    if not isinstance(node, ml_collections.ConfigDict) or path[-1] not in node:
        allowed = f"; allowed are {', '.join(sorted(node))}" if isinstance(node, ml_collections.ConfigDict) else ""
        raise ConfigError(f"{where}: no such setting{allowed}")
    node[path[-1]] = value


def _add_like(config: ml_collections.ConfigDict, name: str, value: Any, where: str) -> str:
    """Adds a policy with the settings of another, and returns which."""
    like = value.get("like") if isinstance(value, Mapping) else None
    if like not in config.policies:
        raise ConfigError(f"{where}={value!r}: must be a dict with like, one of {', '.join(config.policies)}")
    policy = add_policy(config, name)
    for key in policy:
        policy[key] = config.policies[like].get_oneway_ref(key)
    for key, setting in value.items():
        if key != "like":
            _set(policy, [key], setting, f"{where}.{key}")
    return like


def comparable(run: Mapping[str, Any], planned: PlannedRun) -> dict[str, Any]:
    """The settings of a run, by dotted name, without what does not change its results: the folders of models that a
    warm-up makes (its settings stay), where a log's run is kept, and the machine."""
    made = {n for n, p in planned.run.policies.items() if p.model == "warmup"}
    out = {}

    def walk(node: Any, where: tuple[str, ...]) -> None:
        if isinstance(node, Mapping) and node:
            for key, value in node.items():
                walk(value, (*where, str(key)))
        elif where[0] in HARMLESS or where == ("warmup", "folder"):
            pass
        elif where[0] == "policies" and where[1] in made and where[2] == "model":
            pass
        elif where[:2] == ("exchange", "logs") and where[-1] == "folder":
            out[".".join(where)] = "/".join(Path(node).parts[-3:])  # arm, seed, name of the log
        else:
            out[".".join(where)] = node

    walk(json.loads(json.dumps(run)), ())
    return out


def is_finished(planned: PlannedRun) -> bool:
    """Whether a run has been done with these settings.

    Raises:
      ConfigError: its folder holds a run with other ones.
    """
    now = comparable(dataclasses.asdict(planned.run), planned)
    try:
        before = comparable(json.loads((planned.folder / "config.json").read_text()), planned)
    except (OSError, ValueError):
        return False
    changed = [
        f"{k} was {before.get(k)!r}, now {now.get(k)!r}" for k in {**before, **now} if before.get(k) != now.get(k)
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ConfigError(
            f"arms.{planned.arm}: {planned.folder} was begun with other settings: {'; '.join(changed[:3])}{more}; "
            "use another workdir, or delete that folder"
        )
    return (planned.folder / "summary.json").is_file()
