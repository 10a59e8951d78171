"""One cohort step for all policies, in one folder, written atomically by orbax.

A step holds every policy's state (parameters, optimiser, counters) and one JSON record of the run: place in the data,
results so far, token counts. Random streams need no saving: they derive from (seed, policy, step, problem, sample).
A step that lacks a policy, or was cut off in writing, is set aside and the newest complete one is taken.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Mapping, Sequence

import jax
import orbax.checkpoint as ocp

from mutualrl.policy import Policy

_RUN = "run"
_INCOMPLETE = ".incomplete"


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
            item_names=(_RUN, *map(_item, self.policies)),
        )

    def _set_aside_incomplete(self) -> None:
        """Renames step folders without every policy's finished record, so that they neither load nor block a save."""
        for step in self.folder.iterdir():
            if not step.name.isdigit():
                continue
            missing = [n for n in map(_item, self.policies) if not (step / n / "_METADATA").is_file()]
            if not any((step / _RUN).glob("*")):
                missing.append(_RUN)
            if missing:
                target = step.with_name(step.name + _INCOMPLETE)
                for n in range(1, 1000):
                    if not target.exists():
                        break
                    target = step.with_name(f"{step.name}{_INCOMPLETE}{n}")
                step.rename(target)
                logging.warning("checkpoint %s lacks %s: set aside as %s", step, ", ".join(missing), target.name)

    def save(self, step: int, run: Mapping[str, Any]) -> None:
        """Writes all policies after `step` finished steps, with the JSON-able record `run`. Returns when it is on disk."""
        states = {_item(p): ocp.args.StandardSave(p.state) for p in self.policies}
        self._manager.save(step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonSave(dict(run))}, **states), force=True)

    def restore(self) -> tuple[int, dict[str, Any]] | None:
        """Puts the newest readable step into the policies, under their own shardings.

        Returns:
          (finished steps, record of the run), or None where there is no checkpoint.

        Raises:
          ValueError: there are checkpoints, but none that fits these policies.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        failure: Exception | None = None
        for step in steps:
            wanted = {
                _item(p): ocp.args.StandardRestore(jax.tree.map(_abstract, p.state, p.state_shardings))
                for p in self.policies
            }
            try:
                found = self._manager.restore(
                    step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()}, **wanted)
                )
            except Exception as error:  # whatever a damaged file makes orbax raise: an older step may be whole
                failure = error
                logging.warning("checkpoint %s/%s cannot be read: %s", self.folder, step, str(error).splitlines()[0])
                continue
            for p in self.policies:
                p.state = found[_item(p)]
            return step, found[_RUN]
        if failure:
            raise ValueError(f"none of the checkpoints in {self.folder} fits this run: {str(failure).splitlines()[0]}")
        return None

    def close(self) -> None:
        """Ends orbax's threads."""
        self._manager.close()


def _item(policy: Policy) -> str:
    return f"policy_{policy.name}"


def _abstract(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
