"""GRAFT: candidates, balance, sources, groups taken over, compatibility, placement, where it must be GRPO; settings."""

import dataclasses
import types as std_types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from material import EOT, Peer, S, Text, assert_equal, build, material, rows_of, scored

from mutualrl import types
from mutualrl.settings import ConfigError, PolicyConfig
from mutualrl.transfer import graft, none

NAN = np.nan
ANY = dict(floor=0.0, balance=False)


def options(**others):
    return graft.Options(**others)


def group(right, n=4):
    return [1] * right + [0] * (n - right)


def chosen(own, *peers, live=None, balance=True, n=4):
    """{problem: source index} of problems selected, from numbers of right rollouts a problem."""
    live = [True] * len(peers) if live is None else live
    sides = [Peer([group(k, n) for k in ks], live=on) for ks, on in zip(peers, live)]
    m = material([group(k, n) for k in own], sides, options(balance=balance))
    problem, source = graft.selected(m)
    return {int(p): int(np.unique(m.received.source)[source[p]]) for p in np.flatnonzero(problem)}


def same_log_probs(m):
    """The learner's log-probs of its tokens are those of the source: every s is 1."""
    _, use, _ = graft.taken_over(m)
    n, t = m.received.n[use], m.received.trace
    logp = np.zeros((len(n), m.own.mask.shape[-1]))
    width = t.logp.shape[-1]
    logp[:, :width] = t.logp[use][:, : logp.shape[1]]
    logp[np.arange(len(n)), n] = np.nan_to_num(t.eos_logp[use])
    return scored(m, graft, logp)


# ---- Where it is GRPO


@pytest.mark.parametrize(
    "peers",
    [
        [],
        [Peer([[1, 1], [1, 0], [0, 0]])],  # all right, or mixed only where the learner is, or all wrong
        [Peer([[1, 0]] * 3, heard=[[0, 0]] * 3)],
        [Peer([[1, 0]] * 3, usable=[[0, 0]] * 3)],
        [Peer([[1, 0]] * 3, traced=[[0, 0]] * 3)],
        [Peer([[NAN, NAN]] * 3)],
        [Peer([[1, NAN]] * 3)],  # what could not be judged is no failure
    ],
)
@pytest.mark.parametrize("balance", (True, False))
@pytest.mark.parametrize("drop", (True, False))
def test_without_candidates_it_is_none(peers, balance, drop):
    own = [[0, 0, 0], [0, 1, 0], [0, 0, NAN]]
    m = material(
        own, peers, options(balance=balance), longest=9, updates_per_step=2, kl_coef=0.1, drop_zero_variance=drop
    )
    assert graft.to_score(m) is None
    assert_equal(build(m, graft)[0], none.build(m)[0])


def test_an_unjudged_own_group_is_no_candidate():
    for own, found in (([NAN, NAN], False), ([0, NAN], True), ([0, 0], True), ([0, 1], False)):
        m = material([own], [Peer([[1, 0]])], options(balance=False))
        assert bool(graft.selected(m)[0][0]) == found


# ---- Candidates, balance, sources


def test_balance_needs_both_directions():
    own, peer = [0, 0, 0, 0, 3, 2], [1, 3, 2, 4, 0, 4]
    assert chosen(own, peer, balance=False) == {0: 1, 1: 1, 2: 1}
    assert chosen(own, peer) == {1: 1}  # the learner can give one back
    assert chosen([*own, 1], [*peer, 0]) == {1: 1, 2: 1}
    assert chosen([0, 0, 4, 2], [1, 3, 0, 2]) == {}  # always right, or right where the peer is too
    assert chosen([0, 0, 0, 3], [3, 2, 3, 0]) == {0: 1, 2: 1}  # ties at the boundary stay


def test_sources_that_do_not_learn_are_not_balanced():
    own, peer = [0, 0, 0, 0], [1, 3, 2, 4]
    assert chosen(own, peer) == {}
    assert chosen(own, peer, live=[False]) == {0: 1, 1: 1, 2: 1}
    # The log does not enter m, and only what comes from the live peer is cut.
    own, live, log = [0, 0, 0, 2], [1, 3, 0, 0], [0, 0, 2, 3]
    assert chosen(own, live, log, live=[True, False]) == {1: 1, 2: 2}
    assert chosen(own, log, live, live=[False, True]) == {1: 2, 2: 1}


def test_several_peers():
    """The largest k that is not n, ties to the lowest index; m is the smallest number of candidates of any receiver."""
    own = [0, 0, 0, 0, 3, 3, 3]
    first, second = [1, 3, 3, 4, 0, 0, 0], [2, 2, 3, 1, 0, 0, 4]
    assert chosen(own, first, second, balance=False) == {0: 2, 1: 1, 2: 1, 3: 2}
    assert chosen(own, first, second) == {1: 1, 2: 1}  # 3 for the first peer, 2 for the second
    # The second peer fails only once where the learner does not.
    assert chosen(own, [1, 2, 3, 4, 0, 0, 0], [1, 2, 2, 1, 0, 4, 4]) == {2: 1}


def test_a_policy_that_helps_nobody_is_helped_where_its_peers_help_each_other():
    """The learner always fails; each peer fails three times where the other sometimes succeeds: m is 3."""
    own, first, second = [0] * 6, [1, 2, 3, 0, 0, 0], [0, 0, 0, 3, 2, 1]
    assert chosen(own, first, second) == {1: 1, 2: 1, 3: 2, 4: 2}  # three, and the fourth ties with the third
    assert chosen(own, first, [0] * 6) == {}  # the first peer gets nothing, so nobody does


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_both_sides_agree(ks):
    """Each of two policies finds the same m; up to ties it takes over as many groups as it gives."""
    a, b = zip(*ks)
    to_a, to_b = chosen(a, b, n=3), chosen(b, a, n=3)
    possible = [sum(x == 0 and 0 < y < 3 for x, y in pairs) for pairs in (zip(a, b), zip(b, a))]
    most = min(possible)
    for got, own, peer in ((to_a, a, b), (to_b, b, a)):
        ranked = sorted((y for x, y in zip(own, peer) if x == 0 and 0 < y < 3), reverse=True)
        want = [p for p, (x, y) in enumerate(zip(own, peer)) if most and x == 0 and ranked[most - 1] <= y < 3]
        assert sorted(got) == want


# ---- The group taken over


def test_a_peer_like_the_learner_gives_grpo_on_its_group():
    own, peer = [[0, 0, 0], [0, 1, 1], [0, 0, 0]], [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    m = same_log_probs(material(own, [Peer(peer, same_tokens=True)], options(balance=False), longest=9))
    (batch,), metrics = graft.build(m)
    (alone,) = none.build(material([peer[0]]))[0]
    rows = rows_of([batch], 1)
    assert (rows.group == 0).all() and rows.denom_self.all() and (rows.level == types.TOKEN).all()
    np.testing.assert_allclose(rows.adv[:, 0], alone.adv[:, 0], rtol=1e-6)
    leaves = (batch.source == 0) & (batch.group == 0)
    assert not batch.surr_weight[leaves].any() and (batch.surr_weight[~leaves] > 0).all()
    tokens = batch.surr_mask[~leaves].sum()
    np.testing.assert_allclose(batch.surr_weight[~leaves], 1 / tokens, rtol=1e-6)
    assert_equal([rows_of([batch], 0)], [rows_of(none.build(m)[0], 0)], but=("surr_weight",))
    assert metrics == {
        "transfer/candidates": 1, "transfer/balanced": 1, "transfer/replaced": 1, "transfer/kept": 1,
        "transfer/compatibility": pytest.approx(1, abs=1e-6), "transfer/weight": pytest.approx(1, abs=1e-6),
    }  # fmt: skip


def test_statistics_are_of_all_that_was_heard():
    """Rows that were not heard do not count; rows that cannot be used count and are not there."""
    peer = Peer(
        [[1, 0, 0, 1, 0, 0]], heard=[[1, 1, 1, 1, 1, 0]], usable=[[1, 1, 0, 1, 1, 1]], traced=[[1, 1, 1, 1, 0, 1]]
    )
    m = material([[0, 0]], [peer], options(**ANY), advantage_ddof=0, advantage_eps=0.01)
    (batch,), metrics = build(m, graft)
    rows = rows_of([batch], 1)
    r = np.array([1, 0, 0, 1, 0])
    assert rows.sample.tolist() == [0, 1, 3]
    s = graft.compatibility(scored(m, graft), graft.taken_over(m)[1])
    want = ((r - r.mean()) / (r.std() + 0.01))[[0, 1, 3]] * np.minimum(s, 1)
    np.testing.assert_allclose(rows.adv[:, 0], want, rtol=1e-5)
    assert metrics["transfer/kept"] == 1 and metrics["transfer/compatibility"] == pytest.approx(s.mean())


def test_verdicts_count_not_rewards():
    peer = Peer([[-0.2, 0.7, 0.1]], success=[[1, 0, 0]])
    m = material([[0.4, 0.2]], [peer], options(**ANY), success=[[0, 0]], estimator="dr_grpo")
    rows = rows_of(build(m, graft)[0], 1)
    assert (np.sign(rows.adv[:, 0]) == [-1, 1, -1]).all()
    assert not graft.selected(material([[0.4, 0.2]], [peer], options(**ANY), success=[[1, 0]]))[0].any()


@pytest.mark.parametrize("finish, with_stop", [(types.STOP, True), (types.STOP_TEXT, False), (types.LENGTH, False)])
def test_compatibility(finish, with_stop):
    """Means over each side's own tokens; the end of turn in both or in neither."""
    stop = -0.7 if finish == types.STOP else NAN
    text = Text("abcdef", (2, 4, 6), (-0.5, -0.1, -0.9), (1, 2, 3, 6), stop)
    other = Text("ab", (2,), (-0.1,), (1, 2), stop)
    peer = Peer([[1, 0]], texts=[[text, other]], finish=[[finish] * 2])
    m = material([[0, 0]], [peer], options(balance=False), longest=6)
    now = np.array([[-0.2, -0.4, -0.1, -0.5, -0.3, 0], [-3, -3, -3, 0, 0, 0]])
    m = scored(m, graft, now)
    s = np.exp(now[0, : 4 + with_stop].mean() - np.mean([-0.5, -0.1, -0.9, -0.7][: 3 + with_stop]))
    (batch,), metrics = graft.build(m)
    rows = rows_of([batch], 1)
    assert rows.sample.tolist() == [0]  # the other one is below the floor: not there, and in no denominator
    assert metrics["transfer/kept"] == 0.5
    weight = batch.surr_weight[batch.surr_weight > 0]
    np.testing.assert_allclose(weight, 1 / (4 + with_stop), rtol=1e-6)
    np.testing.assert_allclose(rows.adv, (0.5 / (np.sqrt(0.5) + 1e-6)) * min(s, 1), rtol=1e-5)
    assert rows.mask.sum() == 4 + (finish != types.LENGTH) and rows.surr_mask.sum() == 4 + with_stop


def test_the_floor_is_exceeded_strictly():
    text = Text("abc", (3,), (-0.5,), (1, 2, 3), NAN)
    peer = Peer([[1, 0]], texts=[[text] * 2], finish=[[types.LENGTH] * 2])
    m = material([[0, 0]], [peer], options(balance=False, floor=1.0), longest=3)
    m = scored(m, graft, [[-0.5] * 3, [-0.499] * 3])
    assert rows_of(graft.build(m)[0], 1).sample.tolist() == [1]


def test_all_rows_below_the_floor():
    m = material([[0, 0], [0, 1]], [Peer([[1, 0], [0, 0]])], options(floor=1e9, balance=False), updates_per_step=2)
    out, metrics = build(m, graft)
    assert not out[0].surr_weight.any() and (out[1].surr_weight > 0).all()
    assert metrics["transfer/kept"] == 0 and "transfer/weight" not in metrics
    m = dataclasses.replace(m, scored=np.full(scored(m, graft).scored.shape, NAN, np.float32))
    assert all(np.isfinite(b.adv).all() for b in graft.build(m)[0])


def test_a_cut_text_is_compared_as_far_as_it_goes():
    text = Text("abcdef", (2, 4, 6), (-0.5, -0.1, -9.0), (1, 2, 4), -0.7)
    peer = Peer([[1, 0]], texts=[[text] * 2], finish=[[types.LENGTH] * 2])
    m = scored(material([[0, 0]], [peer], options(balance=False), longest=3), graft, [[-0.2, -0.4, -0.6]] * 2)
    s = graft.compatibility(m, graft.taken_over(m)[1])
    np.testing.assert_allclose(s, np.exp(-0.4 + 0.3), rtol=1e-5)


# ---- Updates


def test_problems_of_peers_come_last():
    own = [[0, 0], [1, 0], [0, 0], [1, 0]]
    peer = Peer([[1, 0], [0, 0], [0, 1], [1, 1]])
    m = material(own, [peer], options(**ANY), longest=9, updates_per_step=2, mask_truncated=True)
    out, _ = build(m, graft)
    assert [sorted(set(b.group.tolist())) for b in out] == [[1, 3], [0, 2]]
    assert [(b.source > 0).sum() for b in out] == [0, 4]
    for b in out:
        live = b.surr_weight > 0
        np.testing.assert_allclose(b.surr_weight[live], 1 / b.surr_mask[live].sum(), rtol=1e-6)
    (one,), _ = build(dataclasses.replace(m, config=dataclasses.replace(m.config, updates_per_step=1)), graft)
    for source in (0, 1):
        a, b = rows_of(out, source), rows_of([one], source)
        order = [np.lexsort((x.sample, x.group)) for x in (a, b)]
        np.testing.assert_array_equal(a.adv[order[0]], b.adv[order[1]])


def test_truncated_rows_of_peers_leave_with_mask_truncated():
    peer = Peer([[1, 0]], finish=[[types.LENGTH, types.STOP]])
    for masked in (True, False):
        rows = rows_of(build(material([[0, 0]], [peer], options(**ANY), mask_truncated=masked), graft)[0], 1)
        assert (rows.surr_weight > 0).tolist() == [not masked, True]


def test_the_kl_term_has_the_rows_that_stay():
    for rows, of_peers in (("own", False), ("all", True)):
        m = material([[0, 0], [1, 0]], [Peer([[1, 0], [0, 0]])], options(**ANY), longest=9, kl_coef=0.1, kl_rows=rows)
        (batch,), _ = build(m, graft)
        replaced = (batch.source == 0) & (batch.group == 0)
        assert not batch.kl_weight[replaced].any() and (batch.kl_weight[batch.group == 1] > 0).all()
        assert bool(batch.kl_weight[batch.source == 1].any()) == of_peers


def test_order_of_peers_and_problems_does_not_matter():
    own = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [1, 1, 0]]
    peers = [
        Peer([[1, 0], [1, 0], [0, 0], [0, 0]], index=1),
        Peer([[1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]], index=2),
    ]
    one = build(material(own, peers, options(floor=0.0), longest=9), graft)[0]
    other = build(material(own, peers[::-1], options(floor=0.0), longest=9), graft)[0]
    assert len(rows_of(one, 1).mask) == 2 and len(rows_of(one, 2).mask) == 3
    for source in (0, 1, 2):
        assert_equal([rows_of(one, source)], [rows_of(other, source)], tolerance=1e-6)
    order = [2, 0, 3, 1]
    moved = [dataclasses.replace(x, reward=[x.reward[i] for i in order]) for x in peers]
    ids = [f"q{i}" for i in order]
    other = build(material([own[i] for i in order], moved, options(floor=0.0), longest=9, ids=ids), graft)[0][0]
    for p in range(4):
        a, b = (x.group == g for x, g in ((one[0], order[p]), (other, p)))
        for name in ("tokens", "adv", "surr_weight", "source"):
            np.testing.assert_allclose(getattr(one[0], name)[a], getattr(other, name)[b], rtol=1e-6)


def test_rows_are_behind_the_learners_prompt():
    rows = rows_of(build(material([[0, 0]], [Peer([[1, 0]])], options(**ANY)), graft)[0], 1)
    assert (rows.tokens[:, :S] == 9).all() and (rows.tokens[:, S:][rows.mask] == EOT).sum() == 2
    np.testing.assert_allclose(rows.clip, 0.2)


# ---- Settings


def run_of(**settings):
    policies = {"a": PolicyConfig(model="m", **settings), "b": PolicyConfig(model="m", frozen=True, kl_in_reward=True)}
    return std_types.SimpleNamespace(policies=policies)


@pytest.mark.parametrize(
    "others, settings, message",
    [
        (dict(floor=-0.1), {}, "transfer.graft.floor=-0.1"),
        ({}, dict(kl_in_reward=True), "policies.a.kl_in_reward=True"),
        ({}, dict(estimator="batch_std"), "policies.a.estimator='batch_std'"),
        ({}, dict(ratio_level="sequence"), "policies.a.ratio_level='sequence'"),
    ],
)
def test_refused(others, settings, message):
    with pytest.raises(ConfigError, match=message):
        graft.check(options(**others), run_of(**settings))


def test_published_settings_pass():
    graft.check(options(), run_of(**graft.PUBLISHED))
    assert graft.topics(options()) == ("rollout", "trace")
