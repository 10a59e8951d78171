"""SGT: gate, choice of certificates, weights of the NLL term, where it must be GRPO; settings."""

import dataclasses
import types as std_types

import numpy as np
import pytest
from material import EOT, Peer, S, assert_equal, build, material, rows_of, scored

from mutualrl import types
from mutualrl.settings import ConfigError
from mutualrl.transfer import none, sgt

NAN = np.nan
OWN = [[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
PEERS = [Peer([[1, 0], [1, 1], [0, 0], [0, 0]]), Peer([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]])]


def options(**others):
    return sgt.Options(**others)


def picks(m):
    """(problem, source, sample) of the certificates."""
    p, k = np.nonzero(sgt.chosen(m))
    return list(zip(p.tolist(), m.received.source[k].tolist(), m.received.sample[k].tolist()))


# ---- Where it is GRPO


@pytest.mark.parametrize(
    "peers, others",
    [
        ([], {}),
        (PEERS, dict(nll_coef=0.0)),
        (PEERS, dict(start_step=1)),
        ([Peer([[0, 0], [1, 1], [0, 0], [0, 0]])], {}),  # right only where the learner is
        ([Peer([[1, 1]] * 4, heard=[[0, 0]] * 4)], {}),
        ([Peer([[1, 1]] * 4, usable=[[0, 0]] * 4)], {}),
        ([Peer([[NAN, NAN]] * 4)], {}),
        ([Peer([[1, 1]] * 4, finish=[[types.LENGTH] * 2] * 4)], {}),
    ],
)
def test_without_certificates_it_is_none(peers, others):
    for selection in ("uniform", "likelihood"):
        m = material(
            OWN, peers, options(selection=selection, **others), longest=9, updates_per_step=2, kl_coef=0.1,
            drop_zero_variance=True,
        )  # fmt: skip
        assert sgt.to_score(m) is None
        assert_equal(build(m, sgt)[0], none.build(m)[0])


def test_own_rows_are_those_of_grpo():
    for settings in ({}, dict(drop_zero_variance=True), dict(kl_coef=0.2, kl_rows="all")):
        m = material(OWN, PEERS, options(), longest=9, updates_per_step=2, **settings)
        out, _ = build(m, sgt)
        assert_equal([rows_of(out, 0)], [rows_of(none.build(m)[0], 0)])
        certificates = rows_of(out, 1), rows_of(out, 2)
        for rows in certificates:
            assert not rows.surr_weight.any() and not rows.kl_weight.any() and not rows.adv.any()
        assert sum(len(rows.mask) for rows in certificates) == 2


# ---- Gate


def test_gate():
    assert sgt.gate(material(OWN, PEERS, options())).tolist() == [True, False, False, True]
    # Verdicts count, not rewards: shaping may make a right answer negative.
    m = material([[-0.5, 0]], [Peer([[-0.2, 1]], success=[[1, 0]])], options(), success=[[1, 0]])
    assert not sgt.gate(m).any()
    m = material([[0.7, 0.2]], [Peer([[-0.2, 1]], success=[[1, 0]])], options(), success=[[0, 0]])
    assert sgt.gate(m).all() and picks(m) == [(0, 1, 0)]
    # What cannot be judged is no failure; one known failure is enough.
    for own, gated in (([NAN, NAN], False), ([0, NAN], True)):
        assert sgt.gate(material([own], [Peer([[1]])], options())).tolist() == [gated]
    # A success that cannot be used opens the gate, and there is no transfer.
    m = material([[0, 0]], [Peer([[1, 0]], usable=[[0, 1]])], options())
    assert sgt.gate(m).all() and picks(m) == []
    _, metrics = build(m, sgt)
    assert metrics == {"transfer/gated": 1.0, "transfer/certificates": 0.0, "transfer/nll_coef": 0.1}


# ---- Choice


def test_a_certificate_is_right_usable_and_whole():
    peers = [
        Peer([[1, 1, 1, 0, NAN]], finish=[[types.LENGTH, 0, types.STOP_TEXT, 0, 0]], usable=[[1, 0, 1, 1, 1]]),
    ]
    for selection in sgt.ALLOWED["selection"]:
        for step in range(6):
            m = scored(material([[0, 0]], peers, options(selection=selection), step=step), sgt)
            assert picks(m) == [(0, 1, 2)]
            (row,) = [rows_of(sgt.build(m)[0], 1)]
            # An end of turn is imitated even where the source has no log-prob for it.
            assert row.tokens[0, S:][row.mask[0]][-1] == EOT and (row.nll_weight > 0).all()
            assert row.nll_weight[0] * row.mask.sum() == pytest.approx(0.1)


def frequencies(peers, **others):
    """How often each (source, sample) is chosen for one problem, over 2000 steps."""
    m = material([[0, 0]], peers, options(**others))
    found = [picks(dataclasses.replace(m, step=step))[0][1:] for step in range(2000)]
    return {x: found.count(x) / len(found) for x in set(found)}


def test_uniform_choices():
    """Over all usable successes; or over the peers that have one, then over its own."""
    peers = [Peer([[1, 0]]), Peer([[1, 1, 0, 1]])]
    got = frequencies(peers)
    assert got.keys() == {(1, 0), (2, 0), (2, 1), (2, 3)}
    assert all(f == pytest.approx(0.25, abs=0.04) for f in got.values())
    got = frequencies(peers, selection="uniform_peer")
    assert got[1, 0] == pytest.approx(0.5, abs=0.05)
    assert all(got[2, k] == pytest.approx(1 / 6, abs=0.04) for k in (0, 1, 3))


def test_an_unusable_choice_is_followed_by_the_next_of_the_same_list():
    peers = [Peer([[1, 1]]), Peer([[1, 1, 1, 0]])]
    for selection in ("uniform", "uniform_peer"):
        for step in range(30):
            everything = material([[0, 0]], peers, options(selection=selection), step=step)
            order = sgt.shuffled(everything, 0, np.arange(5))
            assert sorted(order) == list(range(5))
            bad = order[:2]  # the choice, and the next one
            unusable = [~np.isin(np.arange(2), bad), ~np.isin(np.arange(2, 6), bad)]
            fewer = [dataclasses.replace(x, usable=[u]) for x, u in zip(peers, unusable)]
            m = material([[0, 0]], fewer, options(selection=selection), step=step)
            assert np.flatnonzero(sgt.chosen(m)[0]).tolist() == [order[2]]
            if selection == "uniform_peer":
                source = m.received.source[order]
                assert (np.diff(source) != 0).sum() == 1  # one peer, then the other


def test_a_choice_depends_on_its_own_problem_only():
    for selection in ("uniform", "uniform_peer"):
        opts = options(selection=selection)
        whole = picks(material(OWN, PEERS, opts, step=5))
        order = [3, 2, 1, 0]
        moved = material(
            [OWN[i] for i in order], [dataclasses.replace(x, reward=[x.reward[i] for i in order]) for x in PEERS],
            opts, ids=[f"q{i}" for i in order], step=5,
        )  # fmt: skip
        assert sorted((order[p], *rest) for p, *rest in picks(moved)) == whole
        alone = material(OWN[3:], [Peer(x.reward[3:]) for x in PEERS], opts, ids=["q3"], step=5)
        assert [(3, *rest) for _, *rest in picks(alone)] == [x for x in whole if x[0] == 3]
        # Nor on the learner's rows.
        assert picks(material(OWN, PEERS, opts, step=5, lengths=np.full((4, 3), 2))) == whole


def test_shortest_and_likelihood():
    """Ties go to the lowest (source, sample)."""
    peers = [Peer([[1, 1]], lengths=[[7, 5]]), Peer([[0, 1, 1]], lengths=[[2, 5, 6]])]
    assert picks(material([[0, 0]], peers, options(selection="shortest"))) == [(0, 1, 1)]
    m = material([[0, 0], [1, 0]], [Peer([*x.reward, *x.reward]) for x in peers], options(selection="likelihood"))
    rows = sgt.to_score(m)
    assert len(rows.mask) == 4 and (rows.group == 0).all()  # successes of the gated problem
    lengths = rows.mask.sum(1)
    for mean, want in (([-1, -2, -0.5, -3], (2, 1)), ([-1, -2, -1, -1], (1, 0)), ([-9, -9, -9, -8], (2, 2))):
        got = picks(scored(m, sgt, np.repeat(np.array(mean, float)[:, None], rows.mask.shape[1], 1)))
        assert got == [(0, *want)]
    # The mean, not the sum: the longest may win.
    logp = np.where(rows.mask, np.where(lengths == lengths.max(), -0.9, -1.0)[:, None], 0)
    assert lengths.max() > lengths.min()
    assert picks(scored(m, sgt, logp)) == [(0, *[(1, 0), (1, 1), (2, 1), (2, 2)][lengths.argmax()])]


# ---- Weights


def test_certificates_ride_with_their_problem():
    m = material(OWN, PEERS, options(nll_norm="rescued"), longest=9, updates_per_step=2)
    out, metrics = build(m, sgt)
    assert [sorted(set(b.group[b.source > 0])) for b in out] == [[0], [3]]
    for b in out:
        assert b.nll_weight.sum() * b.mask[b.source > 0].sum() == pytest.approx(0.1)
        assert (b.nll_weight[b.source == 0] == 0).all()
    assert metrics["transfer/gated"] == 0.5 and metrics["transfer/certificates"] == 2


def test_norms_in_several_updates():
    """Each update has its own problems, rescued problems and surrogate tokens."""
    own = [[0, 0], [0, 0], [1, 0], [0, 0]]
    peer = Peer([[1], [1], [1], [1]], lengths=[[5], [4], [6], [8]])
    lengths = [[2, 3], [4, 5], [6, 7], [1, 2]]
    for norm, want in {
        "prompt": [0.1 / 5 / 2, 0.1 / 4 / 2, 0.1 / 8 / 2],
        "rescued": [0.1 / 5 / 2, 0.1 / 4 / 2, 0.1 / 8],
        "token": [0.1 / 14, 0.1 / 14, 0.1 / 16],
    }.items():
        m = material(own, [peer], options(nll_norm=norm), lengths=lengths, updates_per_step=2)
        np.testing.assert_allclose(rows_of(build(m, sgt)[0], 1).nll_weight, want, rtol=1e-6)
    m = material(own, [peer], options(length_norm="sum"), lengths=lengths)
    np.testing.assert_allclose(rows_of(build(m, sgt)[0], 1).nll_weight, 0.1 / 4, rtol=1e-6)
    # Tokens of the surrogate, not of all rows: what filters removed does not count.
    opts = options(nll_norm="token")
    m = material(own, [peer], opts, lengths=lengths, updates_per_step=2, drop_zero_variance=True)
    want = [0.1 / 9, 0.1 / 9, 0.1 / 13]
    np.testing.assert_allclose(rows_of(build(m, sgt)[0], 1).nll_weight, want, rtol=1e-6)
    # An empty surrogate is no division by zero, and no flood either.
    m = material([[0, 0], [0, 0]], [Peer([[1], [1]], lengths=[[5], [4]])], opts, drop_zero_variance=True)
    np.testing.assert_allclose(rows_of(build(m, sgt)[0], 1).nll_weight, 0.1 / 9, rtol=1e-6)


def run_of():
    return std_types.SimpleNamespace(policies={})


def test_settings():
    sgt.check(options(), run_of())
    for others, message in (
        (dict(selection="best"), "selection='best': allowed are uniform, uniform_peer, shortest, likelihood"),
        (dict(nll_norm="row"), "nll_norm='row': allowed are prompt, rescued, token"),
        (dict(length_norm="max"), "length_norm='max': allowed are mean, sum"),
        (dict(nll_coef=-0.1), "nll_coef=-0.1: must be at least 0"),
        (dict(warmup_steps=-1), "warmup_steps=-1: must be at least 0"),
        (dict(start_step=-1), "start_step=-1: must be at least 0"),
        (dict(nll_norm="token", length_norm="sum"), "length_norm='sum'.*must be mean"),
    ):
        with pytest.raises(ConfigError, match=message):
            sgt.check(options(**others), run_of())
    assert sgt.topics(options()) == ("rollout",)
