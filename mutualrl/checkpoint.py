"""One cohort step for all policies, in one folder, written atomically by orbax.

A step holds every policy's state (parameters, optimiser, counters) and one JSON record of the run: place in the data,
results so far, token counts. Random streams need no saving: they derive from (seed, policy, step, problem, sample).
A step that lacks a policy, or was cut off in writing, is set aside and the newest complete one is taken.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from mutualrl.config import ConfigError
from mutualrl.policy import Policy

_RUN = "run"


def last_record(folder: Path) -> dict[str, Any] | None:
    """The record of the run in the newest step that has one, read without any policy; None where there is none."""
    steps = [x for x in folder.glob("*") if x.name.isdigit()]
    for step in sorted(steps, key=lambda x: int(x.name), reverse=True):
        try:
            return {**_record(step), "step": int(step.name)}
        except (OSError, ValueError):
            continue
    return None


def complete_steps(folder: Path, policies: Sequence[str]) -> list[int]:
    """The steps that have a record of the run and all of these policies, ascending; nothing is touched."""
    steps = [x for x in folder.glob("*") if x.name.isdigit()]
    whole = [x for x in steps if all((x / part / file).is_file() for part, file in _parts(policies))]
    return sorted(int(x.name) for x in whole)


def restore_params(folder: Path, step: int, policies: Sequence[Policy]) -> None:
    """Puts the parameters of a complete step into policies, under their own shardings; the rest is not read.

    Raises:
      ConfigError: they cannot be read, or are of another model.
    """
    for p in policies:
        wanted = {"params": jax.tree.map(_abstract, p.state["params"], p.state_shardings["params"])}
        args = ocp.args.PyTreeRestore(
            item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
        )
        path = Path(folder).absolute() / str(step) / _item(p.name)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                found = reader.restore(path, args=args)
        except Exception as error:  # whatever a damaged file makes orbax raise
            raise ConfigError(f"{path}: cannot be read into {p.name}: {str(error).splitlines()[0][:200]}") from error
        p.state = {**p.state, **found}


def _parts(policies: Sequence[str]) -> list[tuple[str, str]]:
    return [(_RUN, "metadata"), *((_item(name), "_METADATA") for name in policies)]


def _record(step: Path) -> dict[str, Any]:
    return json.loads((step / _RUN / "metadata").read_text())


class Checkpoints:
    """Saves and restores a cohort under `folder/<step>/`."""

    def __init__(self, folder: Path, policies: Sequence[Policy], *, keep: int):
        """Args:
        folder: made if it does not exist.
        policies: the cohort; their names are part of the format.
        keep: steps kept.
        """
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.policies = list(policies)
        self._set_aside_incomplete()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
            ),
            item_names=(_RUN, *(_item(p.name) for p in self.policies)),
        )

    def _set_aside_incomplete(self) -> None:
        """Renames step folders without every policy's finished record, so that they neither load nor block a save."""
        for step in sorted(x for x in self.folder.iterdir() if x.name.isdigit()):
            try:
                _record(step)
            except (OSError, ValueError):
                self._set_aside(step, "it has no record of the run")
                continue
            missing = [n for n in (_item(p.name) for p in self.policies) if not (step / n / "_METADATA").is_file()]
            if missing:
                self._set_aside(step, f"it lacks {', '.join(missing)}")

    def _set_aside(self, step: Path, reason: str) -> None:
        target = next(
            t
            for n in itertools.count(1)
            if not (t := step.with_name(f"{step.name}.incomplete{n if n > 1 else ''}")).exists()
        )
        step.rename(target)
        logging.warning("checkpoint %s set aside as %s: %s", step, target.name, reason)

    def save(self, step: int, run: Mapping[str, Any]) -> None:
        """Writes all policies after `step` finished steps, with the JSON-able record `run`, to disk."""
        states = {_item(p.name): ocp.args.StandardSave(p.state) for p in self.policies}
        self._manager.save(step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonSave(run)}, **states), force=True)

    def restore(self) -> tuple[int, dict[str, Any]] | None:
        """Puts the newest readable step into the policies, under their own shardings.

        Returns:
          (finished steps, record of the run), or None where there is no checkpoint.

        Raises:
          ConfigError: there are checkpoints, but none that can be read into these policies.
        """
        unreadable: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            wanted = {
                _item(p.name): ocp.args.StandardRestore(jax.tree.map(_abstract, p.state, p.state_shardings))
                for p in self.policies
            }
            try:
                found = self._manager.restore(step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()}, **wanted))
            except Exception as error:  # whatever a damaged file makes orbax raise: an older step may be whole
                unreadable[step] = str(error).splitlines()[0][:200]
                continue
            for newer, reason in unreadable.items():
                self._set_aside(self.folder / str(newer), reason)
            if unreadable:
                self._manager.reload()
            for p in self.policies:
                p.state = found[_item(p.name)]
            return step, found[_RUN]
        if unreadable:
            raise ConfigError(f"workdir: no checkpoint in {self.folder} fits this run: {unreadable[max(unreadable)]}")
        return None

    def close(self) -> None:
        """Ends orbax's threads."""
        self._manager.close()


def _item(name: str) -> str:
    return f"policy_{name}"


def _abstract(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
