"""Devices to slices."""

import itertools

import jax
import pytest
from jax.sharding import AxisType

from mutualrl import sharding
from mutualrl.config import ConfigError, PolicyConfig
from mutualrl.meshes import make_plan, slice_sizes


def cohort(**policies):
    return {name: PolicyConfig(model="m", **settings) for name, settings in policies.items()}


@pytest.mark.parametrize(
    "available, policies, sizes",
    [
        (8, dict(a={}, b={}), [4, 4]),
        (8, dict(a={}), [8]),
        (8, dict(a={}, b={}, c={}), [3, 3, 2]),
        (7, dict(a={}, b={}), [4, 3]),
        (8, dict(a={"share": 3.0}, b={"share": 1.0}), [6, 2]),
        (8, dict(a={"share": 100.0}, b={}), [7, 1]),  # nobody goes without
        (8, dict(a={}, b={"share": 100.0}, c={}), [1, 6, 1]),
        (8, dict(a={"devices": 5}, b={}), [5, 3]),
        (8, dict(a={"devices": 2}, b={"devices": 3}), [2, 3]),  # what is not asked for stays free
        (8, dict(a={"devices": 2}, b={"share": 2.0}, c={}), [2, 4, 2]),
        (8, dict(a={"tensor": 4}, b={}), [4, 4]),
        (8, dict(a={"tensor": 4, "share": 0.01}, b={}), [4, 4]),  # its tensor is the least it can have
        (8, dict(a={"tensor": 2}, b={"tensor": 2}, c={"tensor": 2}), [4, 2, 2]),
        (7, dict(a={"tensor": 2}, b={"tensor": 2}), [4, 2]),
        (7, dict(a={"tensor": 2, "share": 5.0}, b={"tensor": 1}), [6, 1]),
        (2, dict(a={}, b={}), [1, 1]),
    ],
)
def test_slice_sizes(available, policies, sizes):
    assert list(slice_sizes(available, cohort(**policies)).items()) == list(zip(policies, sizes))


def test_slice_sizes_always_fit():
    for n, shares, tensors in itertools.product(
        (3, 5, 8), ((1, 1, 1), (9, 1, 1), (1, 2, 7)), ((1, 1, 1), (2, 1, 1), (1, 1, 2))
    ):
        if n < sum(tensors):
            continue
        policies = cohort(**{k: dict(share=float(s), tensor=t) for k, s, t in zip("abc", shares, tensors)})
        sizes = slice_sizes(n, policies)
        assert sum(sizes.values()) <= n and sum(sizes.values()) > n - max(tensors)
        assert all(s > 0 and s % policies[k].tensor == 0 for k, s in sizes.items())


@pytest.mark.parametrize(
    "plan, policies, named",
    [
        ("static", dict(a={"devices": 6}, b={"devices": 3}), r"policies\.a\.devices=6.*policies\.b\.devices=3.*8"),
        ("static", dict(a={"devices": 8}, b={}), r"policies\.a\.devices=8.*8.*time_slice"),
        ("static", dict(a={"tensor": 8}, b={}), r"policies\.a\.tensor=8.*8"),
        ("auto", dict(a={"devices": 3, "tensor": 2}), r"policies\.a\.devices=3.*tensor=2"),
        ("time_slice", dict(a={"devices": 9}), r"policies\.a\.devices=9.*8"),
        ("auto", dict(a={"tensor": 16}), r"policies\.a.*tensor=16.*8"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(plan, policies, named):
    with pytest.raises(ConfigError, match=named) as error:
        make_plan(cohort(**policies), plan)
    assert "\n" not in str(error.value)


def test_static_slices_are_disjoint():
    policies = cohort(a={"devices": 2}, b={"tensor": 2, "share": 2.0}, c={})
    plan = make_plan(policies)
    assert plan.concurrent and list(plan.meshes) == ["a", "b", "c"]
    ids = [{d.id for d in mesh.devices.flat} for mesh in plan.meshes.values()]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 8
    assert [dict(m.shape) for m in plan.meshes.values()] == [
        {"fsdp": 2, "tensor": 1},
        {"fsdp": 2, "tensor": 2},
        {"fsdp": 2, "tensor": 1},
    ]
    assert all(t == AxisType.Auto for m in plan.meshes.values() for t in m.axis_types)


def test_auto_takes_turns_where_devices_are_few():
    devices = jax.devices()
    shared = make_plan(cohort(a={}, b={}, c={"tensor": 2}), devices=devices[:3])
    assert not shared.concurrent
    assert [m.devices.size for m in shared.meshes.values()] == [3, 3, 2]
    assert all(m.devices.flat[0] == devices[0] for m in shared.meshes.values())
    assert make_plan(cohort(a={}, b={}, c={"tensor": 2}), devices=devices[:4]).concurrent
    one = make_plan(cohort(a={}, b={}), devices=devices[:1])
    assert not one.concurrent and one.meshes["a"] == one.meshes["b"]


def test_parameter_shardings():
    """First rule wins, a stacked layer axis is never split, and what an axis does not divide is replicated."""
    mesh = make_plan(cohort(a={"devices": 4, "tensor": 2})).meshes["a"]
    spec = lambda path, *shape: tuple(sharding.spec(path, shape, mesh))
    assert spec("params/layers/q", 2, 32, 64) == (None, "fsdp", "tensor")
    assert spec("opt_state/1/0/mu/layers/down", 2, 48, 32) == (None, "tensor", "fsdp")
    assert spec("params/layers/q_bias", 2, 64) == (None, "tensor")
    assert spec("params/embed", 101, 32) == (None, "fsdp")
    assert spec("params/head", 32, 101) == ("fsdp", None)
    assert spec("params/layers/q_norm", 2, 8) == spec("params/norm", 32) == spec("step") == ()
    tree = {"params": {"layers": {"q": jax.ShapeDtypeStruct((2, 32, 64), "float32")}}}
    found = sharding.shardings(tree, mesh)["params"]["layers"]["q"]
    assert found.spec == sharding.spec("layers/q", (2, 32, 64), mesh) and found.mesh == mesh
