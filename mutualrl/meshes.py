"""MWRA inside one process: devices to one mesh slice per policy.

Slices are disjoint where there are enough devices, so that policies compute at the same time; otherwise every policy
gets the same slice and they take turns. No method depends on which: only the wall clock does (our definition).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mutualrl.config import ConfigError, PolicyConfig

AXES = ("fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which devices each policy computes on.

    Attributes:
      meshes: policy name to its mesh, axes `fsdp` (rows and parameters) and `tensor` (inside a layer).
      concurrent: the slices are disjoint.
    """

    meshes: Mapping[str, Mesh]
    concurrent: bool


def slice_sizes(available: int, policies: Mapping[str, PolicyConfig]) -> dict[str, int]:
    """Devices for each policy: explicit sizes first, the rest by share (largest remainder, at least one `tensor` each).

    Args:
      available: number of devices.
      policies: their `devices`, `share` and `tensor`.

    Returns:
      sizes, in total at most `available`, each a multiple of the policy's `tensor`.

    Raises:
      ConfigError: the sizes do not fit.
    """
    sizes = {name: p.devices for name, p in policies.items() if p.devices}
    rest = {name: p for name, p in policies.items() if not p.devices}
    left = available - sum(sizes.values())
    if left < sum(p.tensor for p in rest.values()):
        asked = ", ".join(
            f"policies.{n}.devices={p.devices}" if p.devices else f"policies.{n}.tensor={p.tensor}"
            for n, p in policies.items()
        )
        raise ConfigError(f"{asked}: more than the {available} devices there are; use fewer or plan='time_slice'")
    total = sum(p.share for p in rest.values())
    ideal = {name: left * p.share / total for name, p in rest.items()}
    for name, p in rest.items():
        sizes[name] = max(p.tensor, int(ideal[name]) // p.tensor * p.tensor)
    while sum(sizes.values()) > available:  # minimum sizes pushed others over: take from the best served
        name = max((n for n in rest if sizes[n] > rest[n].tensor), key=lambda n: sizes[n] - ideal[n])
        sizes[name] -= rest[name].tensor
    for name in sorted(rest, key=lambda n: sizes[n] - ideal[n]):
        if sum(sizes.values()) + rest[name].tensor <= available and sizes[name] < ideal[name]:
            sizes[name] += rest[name].tensor
    return {name: sizes[name] for name in policies}


def make_plan(policies: Mapping[str, PolicyConfig], plan: str = "auto", devices: Sequence | None = None) -> Plan:
    """One mesh per policy.

    Args:
      policies: in the order in which they take devices.
      plan: `static` (disjoint slices), `time_slice` (everybody on the same slice), or `auto`: static where there are
        at least as many devices as the policies need.
      devices: defaults to `jax.devices()`.

    Raises:
      ConfigError: sizes do not fit, or are no multiple of `tensor`.
    """
    devices = list(jax.devices() if devices is None else devices)
    for name, p in policies.items():
        if p.devices % p.tensor:
            raise ConfigError(f"policies.{name}.devices={p.devices}: must be a multiple of tensor={p.tensor}")
    if plan == "auto":
        plan = "static" if len(devices) >= sum(p.devices or p.tensor for p in policies.values()) else "time_slice"
    if plan == "static":
        sizes, start, meshes = slice_sizes(len(devices), policies), 0, {}
        for name, size in sizes.items():
            meshes[name] = _mesh(devices[start : start + size], policies[name].tensor)
            start += size
        return Plan(meshes, concurrent=True)
    meshes = {}
    for name, p in policies.items():
        size = p.devices or len(devices) // p.tensor * p.tensor
        if not 0 < size <= len(devices):
            raise ConfigError(
                f"policies.{name}.devices={p.devices}, tensor={p.tensor}: there are {len(devices)} devices"
            )
        meshes[name] = _mesh(devices[:size], p.tensor)
    return Plan(meshes, concurrent=False)


def _mesh(devices: Sequence, tensor: int) -> Mesh:
    # Auto axes, said explicitly: under the default (explicit) ones an embedding look-up needs annotations.
    return Mesh(np.array(devices).reshape(-1, tensor), AXES, axis_types=(AxisType.Auto,) * 2)
