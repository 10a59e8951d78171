"""Parameter names to shardings: one short ordered list, for parameters and everything shaped like them."""

from __future__ import annotations

import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# First match wins. The last two dimensions are named; a stacked layer axis in front is never split.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"layers/(q|k|v|gate|up)$", ("fsdp", "tensor")),  # [D, heads or features]: split what they produce
    (r"layers/(o|down)$", ("tensor", "fsdp")),  # [heads or features, D]: split what they consume
    (r"layers/(q|k|v)_bias$", ("tensor",)),
    (r"embed$", ("tensor", "fsdp")),  # [V, D]
    (r"head$", ("fsdp", "tensor")),  # [D, V]
)


def spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How an array is split.

    Args:
      path: slash path that ends in a parameter's name (optimiser moments carry the same endings).
      shape: of the array. A dimension that an axis does not divide is replicated.
      mesh: the policy's mesh.
    """
    for pattern, axes in RULES:
        if re.search(pattern, path) and len(shape) >= len(axes):
            named = [None] * (len(shape) - len(axes)) + list(axes)
            return PartitionSpec(*(a if a and size % mesh.shape[a] == 0 else None for a, size in zip(named, shape)))
    return PartitionSpec()


def shardings(tree, mesh: Mesh):
    """`NamedSharding` for every leaf (array or `ShapeDtypeStruct`) of a tree, by the names on its path."""
    name = lambda path: "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path)  # noqa: E731
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec(name(path), leaf.shape, mesh)), tree
    )


def rows(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays with one row a sequence: rows are split over `fsdp`."""
    return NamedSharding(mesh, PartitionSpec("fsdp"))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays that every device of the slice holds whole."""
    return NamedSharding(mesh, PartitionSpec())
