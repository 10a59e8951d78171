"""LUFFY: the external row, its advantage and form, where it must be GRPO; settings."""

import dataclasses
import types as std_types

import numpy as np
import pytest
from material import Peer, assert_equal, build, material, rows_of

from mutualrl import types
from mutualrl.settings import ConfigError, PolicyConfig
from mutualrl.transfer import luffy, none

NAN = np.nan
OWN = [[1, 0, 0], [0, 0, 0], [1, 1, NAN]]
PEERS = [Peer([[1, 0], [0, 1], [1, 1]]), Peer([[0, 1, 1], [1, 1, 0], [0, NAN, 0]])]


def make(own=OWN, peers=PEERS, **others):
    return material(own, peers, luffy.Options(), **{"estimator": "dr_grpo", "aggregation": "dr_grpo", **others})


@pytest.mark.parametrize(
    "peers",
    [
        [],
        [Peer([[0, 0]] * 3)],
        [Peer([[1, 1]] * 3, heard=[[0, 0]] * 3)],
        [Peer([[1, 1]] * 3, usable=[[0, 0]] * 3)],
        [Peer([[1, 1]] * 3, finish=[[types.LENGTH] * 2] * 3)],
        [Peer([[NAN, NAN]] * 3)],
    ],
)
def test_without_a_right_answer_it_is_none(peers):
    m = make(peers=peers, longest=9, updates_per_step=2, kl_coef=0.1, drop_zero_variance=True)
    assert luffy.to_score(m) is None
    assert_equal(build(m, luffy)[0], none.build(m)[0])


def test_one_external_row_a_problem():
    m = make(longest=9)
    (batch,), metrics = build(m, luffy)
    external = batch.source > 0
    assert np.bincount(batch.group[external]).tolist() == [1, 1, 1] and metrics == {"transfer/external": 1.0}
    assert (batch.kind == np.where(external, types.SHAPE, types.PPO)).all() and batch.denom_self.all()
    # Against the mean of the own rewards, also where they are all the same; own rows are those of Dr. GRPO.
    np.testing.assert_allclose(batch.adv[external, 0], [2 / 3, 1, 0], rtol=1e-6)
    assert_equal([rows_of([batch], 0)], [rows_of(none.build(m)[0], 0)], but=("surr_weight",))
    live = batch.surr_weight > 0
    assert live.sum() == 11  # the unjudged own row leaves
    np.testing.assert_allclose(batch.surr_weight[live], 1 / (11 * 9), rtol=1e-6)


def test_every_right_answer_is_drawn_equally_often():
    m = make([[0, 0]], [Peer([[1, 0, 1]]), Peer([[1, 1]], usable=[[1, 0]])])
    found = [tuple(np.argwhere(luffy.chosen(dataclasses.replace(m, step=step)))[0]) for step in range(1500)]
    assert set(found) == {(0, 0), (0, 2), (0, 3)}
    assert all(found.count(x) / 1500 == pytest.approx(1 / 3, abs=0.05) for x in set(found))


def test_verdicts_count_and_rewards_are_shaped():
    m = make(
        [[0.5, 0.1]], [Peer([[-0.2, 0.9]], success=[[1, 0]], lengths=[[7, 7]])], lengths=[[2, 2]], success=[[0, 0]],
        longest=8, overlong_factor=1.0, overlong_buffer=4,
    )  # fmt: skip
    rows = rows_of(build(m, luffy)[0], 1)
    np.testing.assert_allclose(rows.adv[:, 0], [-0.2 - 0.75 - 0.3], rtol=1e-5)


def test_an_unjudged_own_group_has_no_baseline():
    m = make([[NAN, NAN], [0, 1]], [Peer([[1], [1]])])
    (batch,), _ = build(m, luffy)
    assert batch.group[batch.source > 0].tolist() == [1] and np.isfinite(batch.adv).all()


def test_updates_and_order():
    m = make(longest=9, updates_per_step=3)
    out, _ = build(m, luffy)
    assert [b.group.tolist() for b in out] == [[p] * 4 for p in range(3)]
    order = [2, 0, 1]
    moved = [dataclasses.replace(x, reward=[x.reward[i] for i in order]) for x in PEERS]
    other, _ = build(make([OWN[i] for i in order], moved, ids=["q2", "q0", "q1"], longest=9, updates_per_step=3), luffy)
    for p in range(3):
        assert_equal([out[order[p]]], [other[p]], tolerance=1e-6, but=("group",))


def run_of(**settings):
    policies = {"a": PolicyConfig(model="m", **settings), "b": PolicyConfig(model="m", frozen=True)}
    return std_types.SimpleNamespace(policies=policies)


@pytest.mark.parametrize(
    "others, settings, message",
    [
        (dict(gamma=0.0), {}, "transfer.luffy.gamma=0"),
        ({}, dict(estimator="grpo"), "policies.a.estimator='grpo'"),
        ({}, dict(kl_in_reward=True), "policies.a.kl_in_reward=True"),
    ],
)
def test_refused(others, settings, message):
    with pytest.raises(ConfigError, match=message):
        luffy.check(luffy.Options(**others), run_of(**{"estimator": "dr_grpo", **settings}))


def test_published_settings_pass():
    luffy.check(luffy.Options(), run_of(**luffy.PUBLISHED))
    assert luffy.forms(luffy.Options(gamma=0.2)) == {"kinds": (types.PPO, types.SHAPE), "shape_gamma": 0.2}
