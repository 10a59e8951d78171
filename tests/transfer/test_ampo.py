"""AMPO: gate, candidates and their ranking, replacement, where it must be GRPO; settings."""

import dataclasses
import types as std_types

import numpy as np
import pytest
from material import EOT, Peer, S, assert_equal, build, material, scored

from mutualrl import types
from mutualrl.settings import ConfigError, PolicyConfig
from mutualrl.transfer import ampo, none

NAN = np.nan
OWN = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
PEERS = [Peer([[1, 0], [1, 1], [0, 0]]), Peer([[1, 1, 0], [1, 1, 1], [0, 0, 1]])]


def tokenizer(width=1, spell=str):
    """Ids below 256 are characters, those above them pairs, which are used with `width` 2."""
    single = [chr(i).encode() for i in range(256)]

    def encode(text):
        text = spell(text)
        parts = [text[i : i + width] for i in range(0, len(text), width)]
        return [ord(x) if len(x) == 1 else 256 * (1 + ord(x[0])) + ord(x[1]) for x in parts]

    token_bytes = [*single, *(a + b for a in single for b in single)]
    return std_types.SimpleNamespace(eot_id=EOT, stop_ids=(EOT,), encode=encode, token_bytes=token_bytes)


def make(own=OWN, peers=PEERS, texts=None, answer="7", written=None, **others):
    """texts: what each received row of the only problem says, in single characters."""
    options = ampo.Options(**{k: others.pop(k) for k in ("replace", "gamma") if k in others})
    lengths = [[len(t) + 1 for t in texts]] if texts else None
    if texts:
        peers = [dataclasses.replace(peers[0], lengths=lengths)]
    m = material(own, peers, options, **others)
    problems = tuple(dataclasses.replace(x, answer=answer) for x in m.own.problems)
    m = dataclasses.replace(m, own=dataclasses.replace(m.own, problems=problems), tokenizer=written or tokenizer())
    if texts:
        tokens = m.received.tokens.copy()
        for k, text in enumerate(texts):
            tokens[0, k, : len(text)] = [ord(c) for c in text]
        m = dataclasses.replace(m, received=dataclasses.replace(m.received, tokens=tokens))
    return m


def picks(m):
    p, k = np.nonzero(ampo.chosen(m))
    return list(zip(p.tolist(), m.received.source[k].tolist(), m.received.sample[k].tolist()))


# ---- Where it is GRPO


@pytest.mark.parametrize(
    "peers",
    [
        [],
        [Peer([[0, 0], [1, 1], [0, 0]])],  # right only where the learner is
        [Peer([[1, 1]] * 3, heard=[[0, 0]] * 3)],
        [Peer([[1, 1]] * 3, usable=[[0, 0]] * 3)],
        [Peer([[1, 1]] * 3, finish=[[types.LENGTH] * 2] * 3)],
        [Peer([[NAN, NAN]] * 3)],
    ],
)
def test_without_candidates_it_is_none(peers):
    m = make(peers=peers, longest=9, updates_per_step=2, kl_coef=0.1, drop_zero_variance=True)
    assert ampo.to_score(m) is None
    assert_equal(build(m, ampo)[0], none.build(m)[0])


def test_gate():
    for own, success, found in (
        ([0, 0, 0], None, True),
        ([0, 1, 0], None, False),
        ([NAN] * 3, None, False),
        ([0, NAN, NAN], None, True),
        ([-0.5, 0, 0], [1, 0, 0], False),
        ([0.5, 0, 0], [0, 0, 0], True),
    ):
        m = make([own], [Peer([[1]])], success=success and [success])
        assert bool(ampo.candidates(m).any()) == found


# ---- Replacement


def test_the_last_rows_are_replaced():
    m = make(longest=12, estimator="grpo")
    (batch,), metrics = build(m, ampo)
    assert metrics == {"transfer/gated": pytest.approx(2 / 3), "transfer/replaced": 3.0}
    peers = batch.source > 0
    assert np.bincount(batch.group[peers], minlength=3).tolist() == [2, 0, 1]
    assert (batch.kind == np.where(peers, types.SHAPE, types.PPO)).all()
    own = ~peers & (batch.surr_weight == 0)
    assert sorted(zip(batch.group[own].tolist(), batch.sample[own].tolist())) == [(0, 2), (0, 3), (2, 3)]
    live = batch.surr_weight > 0
    np.testing.assert_allclose(batch.surr_weight[live], 1 / batch.surr_mask[live].sum(), rtol=1e-6)
    for p, after in ((0, [0, 0, 1, 1]), (1, [0, 1, 0, 0]), (2, [0, 0, 0, 1])):
        want = (np.array(after) - np.mean(after)) / (np.std(after, ddof=1) + 1e-6)
        np.testing.assert_allclose(batch.adv[live & (batch.group == p), 0], want, rtol=1e-5)


def test_whole_groups_of_updates():
    m = make(longest=12, updates_per_step=3, mask_truncated=True)
    for p, batch in enumerate(build(m, ampo)[0]):
        assert (batch.group == p).all()
        np.testing.assert_allclose((batch.surr_weight * batch.surr_mask.sum(1)).sum(), 1, rtol=1e-6)


# ---- Ranking


def test_what_is_scored():
    """The text up to the last place where the answer stands alone, the answer behind it; else all of the text."""
    texts = ["a=7, b=17", "no7 7, so 7.", "nothing", "=7"]
    m = make([[0, 0, 0]], [Peer([[1, 1, 1, 1]])], texts, longest=14)
    rows = ampo.to_score(m)
    said = [bytes(row[mask].tolist()).decode() for row, mask in zip(rows.tokens[:, S:], rows.mask)]
    assert said == ["a=7", "no7 7, so 7", "nothing7", "=7"]
    assert (rows.tokens[:, :S] == 9).all() and not rows.surr_weight.any()
    _, _, mask, answer = ampo.answers(m)
    assert (mask == rows.mask).all() and answer.sum(1).tolist() == [1] * 4
    assert (answer == mask & ~np.roll(mask, -1, 1)).all()  # the last token each


def test_tokens_with_a_byte_of_the_answer():
    """Encoded together; a token with the last byte of the reasoning and the first of the answer counts."""
    m = make([[0, 0, 0]], [Peer([[1, 1, 1]])], ["ab=42", "abc=42", "=42"], answer="42", written=tokenizer(2), longest=8)
    _, tokens, mask, answer = ampo.answers(m)
    assert mask.sum(1).tolist() == [3, 3, 2] and answer.sum(1).tolist() == [2, 1, 2]
    assert [bytes(b"".join(m.tokenizer.token_bytes[i] for i in t[k])) for t, k in zip(tokens, mask)] == [
        b"ab=42", b"abc=42", b"=42"
    ]  # fmt: skip


def test_an_altering_tokenizer_gives_no_row():
    for spell, rows in ((str, 3), (lambda text: text.replace("é", "e"), 0), (lambda text: text.replace("x", "y"), 2)):
        written = tokenizer(spell=spell)
        m = make([[0, 0, 0]], [Peer([[1, 1, 1]])], ["x", "é=x", "a"], answer="é", written=written, longest=8)
        assert ampo.answers(m)[0].sum() == rows


def test_the_best_are_taken():
    texts = ["aa7", "b7", "ccc7", "7"]
    m = make([[0, 0, 0]], [Peer([[1, 1, 1, 1]])], texts, longest=6)
    for last, want in (
        ([-1.2, -0.4, -0.9, -0.6], [1, 3]),
        ([-0.4, -0.4, -0.4, -0.4], [0, 1]),  # ties: the first
        ([NAN, NAN, -9.0, NAN], [0, 2]),
    ):
        logp = np.where(ampo.answers(m)[3], np.array(last)[:, None], -50.0)
        assert picks(scored(m, ampo, logp)) == [(0, 1, k) for k in want]


def test_the_mean_decides_not_the_sum():
    texts = ["ab=42", "abc=42", "=42"]
    m = make([[0, 0, 0]], [Peer([[1, 1, 1]])], texts, answer="42", written=tokenizer(2), longest=8, replace=1)
    assert picks(scored(m, ampo, np.array([[-0.5], [-0.9], [-0.7]]) * np.ones(8))) == [(0, 1, 0)]


def test_rows_that_cannot_be_ranked_come_last():
    texts = ["a much longer text", "b7", "no answer in here", "c7"]
    m = make([[0, 0, 0]], [Peer([[1, 1, 1, 1]])], texts, longest=18, answer="77")
    assert ampo.answers(m)[0].tolist() == [[False, True, False, True]]
    assert picks(scored(m, ampo)) == [(0, 1, 1), (0, 1, 3)]
    m = make([[0, 0, 0]], [Peer([[1, 1, 1, 1]])], texts, longest=18, answer=None)
    assert ampo.to_score(m) is None and picks(m) == [(0, 1, 0), (0, 1, 1)]


def test_only_right_whole_usable_rows_and_no_scoring_without_a_choice():
    peer = Peer(
        [[1, 0, 1, 1, 1, NAN]], finish=[[0, 0, types.LENGTH, 0, types.STOP_TEXT, 0]], usable=[[1, 1, 1, 0, 1, 1]]
    )
    m = make([[0, 0, 0]], [peer])
    assert ampo.to_score(m) is None and picks(m) == [(0, 1, 0), (0, 1, 4)]
    assert ampo.to_score(make([[0, 0, 0]], [peer], replace=1, longest=20)) is not None


def test_order_of_problems_does_not_matter():
    order = [2, 0, 1]
    moved = [dataclasses.replace(x, reward=[x.reward[i] for i in order]) for x in PEERS]
    (one,), _ = build(make(longest=12), ampo)
    (other,), _ = build(make([OWN[i] for i in order], moved, ids=["q2", "q0", "q1"], longest=12), ampo)
    assert ampo.to_score(make(longest=12)) is not None
    for p in range(3):
        a, b = (x.group == g for x, g in ((one, order[p]), (other, p)))
        for name in ("tokens", "adv", "surr_weight", "source", "kind"):
            np.testing.assert_allclose(getattr(one, name)[a], getattr(other, name)[b], rtol=1e-6)


# ---- Settings


def run_of(**settings):
    policies = {"a": PolicyConfig(model="m", **settings), "b": PolicyConfig(model="m", frozen=True, group_size=2)}
    return std_types.SimpleNamespace(policies=policies)


@pytest.mark.parametrize(
    "others, settings, message",
    [
        (dict(gamma=0.0), {}, "transfer.ampo.gamma=0"),
        (dict(replace=0), {}, "transfer.ampo.replace=0"),
        (dict(replace=8), {}, "transfer.ampo.replace=8"),
        ({}, dict(kl_in_reward=True), "policies.a.kl_in_reward=True"),
    ],
)
def test_refused(others, settings, message):
    ampo.check(ampo.Options(), run_of())
    with pytest.raises(ConfigError, match=message):
        ampo.check(ampo.Options(**others), run_of(**settings))
