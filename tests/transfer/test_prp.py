"""PRP: who is in the pool, advantages and denominators of received rows, sign policies, identities."""

import dataclasses
import types as std_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from material import Peer, Text, assert_equal, build, material, row_logp, rows_of, scored

from mutualrl import losses, types
from mutualrl.losses import LossSettings
from mutualrl.settings import ConfigError, PolicyConfig
from mutualrl.transfer import none, prp

NAN = np.nan
VARIANTS = ("prp_snapshot", "prp_thl", "prp_seq")
OWN = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, NAN, 0]]
PEERS = [Peer([[1, 0], [0, 1], [1, 1]]), Peer([[0, 1, 1], [1, 1, 0], [0, NAN, 0]])]


def options(variant="prp_thl", **others):
    return prp.Options(variant=variant, **others)


def gradient(batch, logp, opts, **settings):
    loss = lambda p: losses.loss(p, jnp.zeros_like(p), batch, LossSettings(**prp.forms(opts), **settings))[0]
    return np.asarray(jax.grad(loss)(jnp.asarray(logp, jnp.float32)))


# ---- Without peers


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("updates", (1, 2))
def test_without_peers_it_is_none(variant, updates):
    nobody = [Peer([[1, 1]] * 3, heard=[[0, 0]] * 3), Peer([[1, 1]] * 3, usable=[[0, 0]] * 3), Peer([[NAN] * 2] * 3)]
    for peers in ([], nobody):
        m = material(
            OWN, peers, options(variant), longest=9, updates_per_step=updates, kl_coef=0.1, drop_zero_variance=True
        )
        assert_equal(build(m, prp)[0], none.build(m)[0])


# ---- Pool and advantages


def test_advantages_come_from_the_pool_of_valid_rows():
    peers = [dataclasses.replace(PEERS[0], usable=[[1, 1], [1, 0], [1, 1]]), PEERS[1]]
    m = material(OWN, peers, options("prp_snapshot"), advantage_ddof=0, advantage_eps=0.01)
    (batch,), metrics = build(m, prp)
    pools = [[1, 0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 1, 0], [1, 1, 0, 1, 1, 0, 0]]
    for p, pool in enumerate(pools):
        want = (np.array(pool) - np.mean(pool)) / (np.std(pool) + 0.01)
        rows = (batch.group == p) & (batch.surr_weight > 0)
        np.testing.assert_allclose(batch.adv[rows, 0], want, rtol=1e-5)
    # The unjudged own row is there without weight; the unjudged and the unusable received rows are not there.
    assert (batch.surr_weight == 0).sum() == 1 and len(batch.adv) == 12 + 13
    np.testing.assert_allclose((batch.surr_weight * batch.surr_mask.sum(1)).sum(), 1, rtol=1e-5)
    assert metrics["transfer/pooled"] == 13


def test_the_length_penalty_of_received_rows_counts():
    settings = dict(overlong_factor=1.0, overlong_buffer=4, estimator="dr_grpo", lengths=[[2, 2]], longest=8)
    (batch,), _ = build(material([[1, 0]], [Peer([[1]], lengths=[[7]])], options("prp_snapshot"), **settings), prp)
    pool = np.array([1, 0, 1 - 3 / 4])
    np.testing.assert_allclose(batch.adv[:, 0], pool - pool.mean(), rtol=1e-5)


def test_order_of_peers_and_problems_does_not_matter():
    numbered = [dataclasses.replace(x, index=i + 1) for i, x in enumerate(PEERS)]
    subset = options(peer_rows_per_prompt=1, max_peers=1, negatives="filter_kl", split="prior")
    one = build(material(OWN, numbered, options(), longest=9), prp)[0]
    other = build(material(OWN, numbered[::-1], options(), longest=9), prp)[0]
    for source in (0, 1, 2):
        assert_equal([rows_of(one, source)], [rows_of(other, source)], tolerance=1e-6)

    order = [2, 0, 1]
    moved = [dataclasses.replace(x, reward=[x.reward[i] for i in order]) for x in numbered]
    for opts in (options(), subset):
        one = build(material(OWN, numbered, opts, longest=9), prp)[0][0]
        other = build(material([OWN[i] for i in order], moved, opts, ids=["q2", "q0", "q1"], longest=9), prp)[0][0]
        for p in range(3):
            a, b = (np.flatnonzero(x.group == g) for x, g in ((one, order[p]), (other, p)))
            for name in ("tokens", "adv", "denom_logp", "surr_mask", "source"):
                np.testing.assert_allclose(getattr(one, name)[a], getattr(other, name)[b], atol=1e-6)


def test_limits_on_peers_and_rows():
    peers = [dataclasses.replace(PEERS[0], usable=[[0, 0], [1, 1], [1, 1]]), PEERS[1]]
    (batch,), _ = build(material(OWN, peers, options(max_peers=1)), prp)
    # The first peer sent nothing usable for problem 0, so there the second one is the first.
    assert [sorted(set(batch.source[batch.group == p])) for p in range(3)] == [[0, 2], [0, 1], [0, 1]]

    seen = set()
    for step in range(20):
        m = material(OWN, PEERS, options(peer_rows_per_prompt=2), step=step)
        (batch,), _ = build(m, prp)
        foreign = batch.source > 0
        assert np.bincount(batch.group[foreign]).tolist() == [2, 2, 2]
        seen |= {tuple(row) for row in batch.tokens[foreign & (batch.group == 0)].tolist()}
        use = prp.pool(m)[0]
        assert (use == prp.pool(dataclasses.replace(m, reward=1 - m.reward))[0]).all()
    assert len(seen) == 5  # of five candidates every one is drawn now and then
    alone = material(OWN[1:2], [Peer(x.reward[1:2]) for x in PEERS], options(peer_rows_per_prompt=2), ids=["q1"])
    together = material(OWN, PEERS, options(peer_rows_per_prompt=2))
    assert (prp.pool(alone)[0][0] == prp.pool(together)[0][1]).all()


def test_rows_without_a_trace():
    peers = [dataclasses.replace(PEERS[0], traced=[[1, 0], [1, 1], [0, 0]])]
    for variant, negatives, left_out in (
        ("prp_snapshot", "keep", 0), ("prp_snapshot", "filter_kl", 3), ("prp_thl", "keep", 3), ("prp_seq", "keep", 3)
    ):  # fmt: skip
        (batch,), metrics = build(material(OWN, peers, options(variant, negatives=negatives)), prp)
        assert metrics["transfer/no_trace"] == left_out and metrics["transfer/pooled"] == 6 - left_out
        assert (batch.source == 1).sum() == 6 - left_out
        if left_out:  # not in the statistics either
            adv = batch.adv[batch.group == 2, 0]
            np.testing.assert_allclose(adv[[0, 1, 3]], np.array([1, 1, -2]) / 3 / (3**-0.5), rtol=1e-4)


# ---- Denominators


def test_denominators_of_the_variants():
    peer = [Peer([[1, 0]], lengths=[[6, 4]], finish=[[types.STOP, types.STOP_TEXT]])]
    for variant in VARIANTS:
        m = material([[1, 0]], peer, options(variant), lengths=[[3, 3]], longest=8, clip_high=0.3)
        (batch,), _ = build(m, prp)
        rows = rows_of([batch], 1)
        assert rows_of([batch], 0).denom_self.all() and (rows_of([batch], 0).level == types.TOKEN).all()
        np.testing.assert_array_equal(rows.mask, m.received.mask[0])
        assert rows.denom_self.all() == (variant == "prp_snapshot")
        # A stop text has an end of turn in the row, for which there is no log-prob.
        np.testing.assert_array_equal(rows.surr_mask, m.received.surr_mask[0])
        assert rows.surr_mask.sum(1).tolist() == [6, 3]
        if variant == "prp_snapshot":
            continue
        # Source tokens are bytes 0-1, 2-3, 4 (and 0-1, 2), the learner's single bytes; all one word.
        trace = m.received.trace
        first, second = trace.logp[0, 0], trace.logp[0, 1]
        if variant == "prp_thl":
            want = np.zeros((2, 8))
            want[0, :6], want[1, :3] = [first.sum() / 5] * 5 + [-0.25], second.sum() / 3
            np.testing.assert_allclose(np.where(rows.surr_mask, rows.denom_logp, 0), want, rtol=1e-6)
            np.testing.assert_allclose(rows.clip, [[0.2, 0.3]] * 2)
            assert (rows.level == types.TOKEN).all() and np.isnan(rows.seq_denom).all()
        else:
            np.testing.assert_allclose(rows.seq_denom, [first.sum() - 0.25, second.sum()], rtol=1e-6)
            np.testing.assert_array_equal(rows.seq_norm, [6, 3])
            np.testing.assert_allclose(rows.clip, [[0.2, 0.28]] * 2)
            assert (rows.level == types.SEQUENCE).all()


@pytest.mark.parametrize("norm", ("learner", "own_each", "byte", "sum"))
def test_sequence_norms(norm):
    """Of a text in source tokens of two bytes, and of one that was cut to the learner's row in the middle."""
    n, logp = 7, (-0.5, -1.0, -0.3, -0.2)
    full = Text("abcdefg", (2, 4, 6, 7), logp, tuple(range(1, n + 1)), -0.4)
    cut = Text("abcdefg", (2, 4, 6, 7), logp, (1, 2, 3, 4, 5), -0.4)
    peer = Peer([[1, 0]], texts=[[full, cut]], finish=[[types.STOP, types.LENGTH]])
    (batch,), _ = build(material([[1, 0]], [peer], options("prp_seq", norm=norm), longest=8), prp)
    rows = rows_of([batch], 1)
    learner = np.array([-4.0, -2.0])  # of what both have: everything, the first four bytes
    source, tokens, source_tokens, size = np.array([-2.4, -1.5]), np.array([8, 4]), np.array([5, 2]), np.array([7, 4])
    assert rows.surr_mask.sum(1).tolist() == [8, 4] and rows.mask.sum(1).tolist() == [8, 5]
    want = {
        "learner": (learner - source) / tokens,
        "own_each": learner / tokens - source / source_tokens,
        "byte": (learner - source) / size,
        "sum": learner - source,
    }[norm]
    logp = np.where(rows.surr_mask, (learner / tokens)[:, None], -3.0)
    ratio = losses.log_ratios(jnp.asarray(logp, jnp.float32), rows.denom_logp, rows, (types.SEQUENCE,))
    np.testing.assert_allclose(np.log(ratio)[:, 0], want, rtol=1e-5)


def test_sequence_ratio_depends_on_no_alignment():
    one = build(material(OWN, PEERS, options("prp_seq")), prp)[0]
    for others in (dict(granularity="finest"), dict(split="prior"), dict(granularity="finest", split="prior")):
        assert_equal(build(material(OWN, PEERS, options("prp_seq", **others)), prp)[0], one)


def test_prior_split_follows_the_snapshot():
    m = scored(material([[1, 0]], [Peer([[1, 0]], lengths=[[6, 4]])], options(split="prior")), prp)
    rows = rows_of(prp.build(m)[0], 1)
    old = row_logp(m.received.tokens[0, 0, :5])
    np.testing.assert_allclose(rows.denom_logp[0, :5], m.received.trace.logp[0, 0].sum() * old / old.sum(), rtol=1e-5)
    even = build(material([[1, 0]], [Peer([[1, 0]], lengths=[[6, 4]])], options()), prp)
    np.testing.assert_allclose(rows.denom_logp.sum(1), rows_of(even[0], 1).denom_logp.sum(1), rtol=1e-5)
    assert {"thl/bound", "thl/split_gap"} <= set(prp.build(m)[1]) and "thl/bound" in even[1]


def test_what_is_scored_and_sent():
    m = material(OWN, PEERS, options(negatives="filter_kl"))
    rows = prp.to_score(m)
    assert len(rows.tokens) == 14 and (rows.source > 0).all()
    assert prp.to_score(material(OWN, [], options(negatives="filter_kl"))) is None
    assert prp.to_score(material(OWN, PEERS, options("prp_seq"))) is None
    sent = lambda **o: prp.topics(options(**o))
    assert sent(variant="prp_snapshot") == sent(variant="prp_snapshot", negatives="drop") == ("rollout",)
    assert sent(variant="prp_thl") == sent(variant="prp_seq") == ("rollout", "trace")
    assert sent(variant="prp_snapshot", negatives="filter_kl") == ("rollout", "trace")


# ---- Sign policies


def test_drop_and_weight_leave_the_statistics_alone():
    keep = build(material(OWN, PEERS, options()), prp)[0][0]
    (batch,), metrics = build(material(OWN, PEERS, options(negatives="drop", pool_weight=0.5)), prp)
    foreign = batch.source > 0
    np.testing.assert_allclose(batch.adv[~foreign], keep.adv[~foreign])
    np.testing.assert_allclose(batch.adv[foreign], 0.5 * keep.adv[foreign], rtol=1e-6)
    gone = foreign & (batch.adv[:, 0] < 0)
    invalid = np.isnan(np.ravel(OWN))
    assert metrics["transfer/filtered"] == gone.sum() > 0
    np.testing.assert_array_equal(batch.surr_weight[foreign] == 0, gone[foreign])
    tokens = batch.surr_mask.sum(1)[~gone & ~np.pad(invalid, (0, foreign.sum()))].sum()
    np.testing.assert_allclose(batch.surr_weight[~gone & (batch.surr_weight > 0)], 1 / tokens, rtol=1e-6)
    (batch,), _ = build(material([[1, 1]], [Peer([[1, 1]])], options(negatives="drop")), prp)
    assert (batch.surr_weight > 0).all()  # no advantage is not a negative one


def test_filter_kl_counts_the_stop_id_only_where_both_have_one():
    finish = [[types.STOP, types.STOP_TEXT, types.LENGTH, types.STOP]]
    peer = Peer([[0, 0, 0, 1]], lengths=[[5, 5, 4, 5]], finish=finish)
    m = material([[1, 1]], [peer], options("prp_snapshot", negatives="filter_kl", filter_kl_threshold=0.5), longest=6)
    r = m.received
    source = r.trace.logp[0].sum(1, dtype=np.float64) + np.where(r.finish[0] == types.STOP, -0.25, 0)
    kl_hat = np.array([0.49, 0.51, 0.2, 9.0])  # right rows are not filtered
    logp = np.where(r.surr_mask[0], ((source - kl_hat * [5, 4, 4, 5]) / [5, 4, 4, 5])[:, None], -7.0)
    out, metrics = prp.build(scored(m, prp, logp))
    assert (rows_of(out, 1).surr_weight > 0).tolist() == [True, False, True, True]
    assert metrics["transfer/filtered"] == 1 and metrics["transfer/pool_kl_hat"] == pytest.approx(
        kl_hat.mean(), rel=1e-5
    )


@pytest.mark.parametrize("level", ("token", "sequence"))
def test_topr(level):
    opts = options(negatives="topr", topr_level=level)
    m = material([[1, 0, 1]], [Peer([[1, 0, 0]], lengths=[[5, 5, 4]])], opts, lengths=[[3, 3, 3]], longest=6)
    (batch,), _ = build(m, prp)
    rows = rows_of([batch], 1)
    assert (rows_of([batch], 0).kind == types.PPO).all()
    source = m.received.trace.total[0]
    lengths = np.array([5, 5, 4])
    ratio = np.array([-2.0, -0.7, 0.9])  # logarithms, of whole texts
    logp = np.where(rows.mask, ((source + ratio) / lengths)[:, None], 0)
    grad = -gradient(rows, logp, opts)
    weight = 1 / batch.surr_mask.sum()
    if level == "sequence":
        want = np.array([1, np.exp(-0.7), 1])[:, None] * np.ones(6)
    else:
        want = np.minimum(np.exp(logp - rows.denom_logp), 1)
        want[0] = 1  # right answers are imitated, however foreign
    np.testing.assert_allclose(grad, np.where(rows.mask, weight * rows.adv * want, 0), rtol=1e-4, atol=1e-8)


# ---- Peer = learner


@pytest.mark.parametrize("variant, level", [(v, "sequence" if v == "prp_seq" else "token") for v in VARIANTS])
def test_a_peer_that_is_the_learner_doubles_the_group(variant, level):
    reward = [[1, 0, 0, 1], [0, 1, 1, 1]]
    peer = Peer([row[2:] for row in reward], same_tokens=True)
    m = material([row[:2] for row in reward], [peer], options(variant), longest=9, ratio_level=level)
    (batch,), _ = build(m, prp)
    order = np.argsort(batch.group, kind="stable")  # own rows of a problem, then the peer's
    r = m.received
    trace = np.where(r.mask, np.pad(r.trace.logp, ((0, 0), (0, 0), (0, 9 - r.trace.logp.shape[2]))), 0)
    p, k = np.nonzero(r.mask.any(-1))
    trace[p, k, r.n[p, k]] = r.trace.eos_logp[p, k]
    now = np.concatenate([row_logp(m.own.tokens), trace], 1).reshape(8, 9)  # the learner says what the peer says
    one = material(reward, [], longest=9, ratio_level=level)
    mask = np.concatenate([m.own.mask, r.mask], 1)
    own = dataclasses.replace(
        one.own, mask=mask, tokens=np.concatenate([m.own.tokens, r.tokens], 1), finish=np.zeros((2, 4), np.int8),
        logprobs=now.reshape(2, 4, 9).astype(np.float32),
    )  # fmt: skip
    (want,) = none.build(dataclasses.replace(one, own=own))[0]
    for name in ("tokens", "positions", "mask", "surr_mask", "adv", "surr_weight", "seq_norm", "level"):
        np.testing.assert_array_equal(getattr(batch, name)[order], getattr(want, name), err_msg=name)
    got = gradient(batch, now[np.argsort(order)], options(variant))[order]
    levels = {"levels": (types.SEQUENCE,)} if level == "sequence" else {}
    grpo = lambda p: losses.loss(p, jnp.zeros_like(p), want, LossSettings(**levels))[0]
    np.testing.assert_allclose(got, jax.grad(grpo)(jnp.asarray(now, jnp.float32)), rtol=1e-5, atol=1e-9)
    assert np.abs(got).max() > 1e-3


# ---- Several updates, settings


def test_several_updates_are_whole_problems_with_their_peers():
    single = build(material(OWN, PEERS, options()), prp)[0][0]
    out, _ = build(material(OWN, PEERS, options(), updates_per_step=3), prp)
    assert [sorted(set(b.group)) for b in out] == [[0], [1], [2]]
    for p, b in enumerate(out):
        rows = single.group == p
        np.testing.assert_array_equal(b.adv, single.adv[rows])
        np.testing.assert_array_equal(b.denom_logp, single.denom_logp[rows])
        np.testing.assert_allclose((b.surr_weight * b.surr_mask.sum(1)).sum(), 1, rtol=1e-5)


def test_cut_off_rows_leave_the_loss_if_asked():
    peer = Peer([[1, 0]], finish=[[types.LENGTH, types.STOP]])
    for masked in (False, True):
        (batch,), _ = build(material([[1, 0]], [peer], options(), mask_truncated=masked), prp)
        assert (batch.surr_weight > 0).tolist() == [True, True, not masked, True]


def run_of(**settings):
    policies = {"a": PolicyConfig(model="m", **settings), "b": PolicyConfig(model="m", frozen=True, kl_in_reward=True)}
    return std_types.SimpleNamespace(policies=policies)


@pytest.mark.parametrize(
    "others, message",
    [
        (dict(), "variant='': allowed are prp_snapshot, prp_thl, prp_seq"),
        (dict(variant="thl"), "variant='thl': allowed are"),
        (dict(variant="prp_thl", split="odd"), "split='odd': allowed are even, prior"),
        (dict(variant="prp_thl", granularity="byte"), "granularity='byte': allowed are word, finest"),
        (dict(variant="prp_seq", norm="own"), "norm='own': allowed are learner, own_each, byte, sum"),
        (dict(variant="prp_thl", negatives="no"), "negatives='no': allowed are keep, drop, filter_kl, topr"),
        (dict(variant="prp_thl", topr_level="row"), "topr_level='row': allowed are token, sequence"),
        (dict(variant="prp_thl", pool_weight=-1.0), "pool_weight=-1.0: must be at least 0"),
        (dict(variant="prp_thl", max_peers=-1), "max_peers=-1: must be at least 0"),
        (dict(variant="prp_snapshot", negatives="topr"), "negatives='topr'.*prp_thl"),
    ],
)
def test_refused_options(others, message):
    with pytest.raises(ConfigError, match=message):
        prp.check(prp.Options(**others), run_of())


def test_refused_with_the_kl_in_the_reward():
    prp.check(options(), run_of())
    with pytest.raises(ConfigError, match="policies.a.kl_in_reward=True"):
        prp.check(options(), run_of(kl_in_reward=True))
