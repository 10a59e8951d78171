"""Peers' records as a learner's rows: in its tokens and its view, by (source, sample); nothing that came is changed."""

import dataclasses
import types as std_types

import numpy as np
import pytest
from published import ANSWERS, CUT_OFF, IDS, REWARD, SHAPE, SUCCESS, TEXTS, fields, head, rollouts, spans_of

from mutualrl import batches, experience, types, votes, wire
from mutualrl.labels import verifier
from mutualrl.received import receive
from mutualrl.sources import FROZEN, LIVE, LOG, Source
from mutualrl.tokenizers import train
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.types import Verdicts

T = 20  # the learner's longest completion, with room for every text in bytes
FINISH = np.full((3, 4), types.STOP, np.int8)
FINISH[CUT_OFF] = types.LENGTH
FINISH[0, 1] = types.STOP_TEXT
B = Source(1, "b", LIVE)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Two learners: one token a byte, and pieces of up to a word."""
    out = []
    for kind in ("bytes", "bpe"):
        folder = tmp_path_factory.mktemp(kind)
        train.train(folder, kind, ["so: 4", "0123456789abcdef", "a b=c"] * 9, size=300)
        out.append(Tokenizer.load(folder))
    return out


def made(policy="b", texts=TEXTS, finish=FINISH, *, traced=True, label="verifier", seed=0, shape=SHAPE):
    """The validated record of these texts."""
    r, lost = experience.rollout_record(
        head(policy, label=label),
        rollouts(policy, texts, finish=finish),
        spans_of(texts, finish, seed=seed),
        np.zeros(finish.shape, np.int8),
        Verdicts(REWARD, SUCCESS),
        shape,
        with_trace=traced,
        answers=ANSWERS,
    )
    assert lost == 0
    return wire.validate(r)[0]


def own_view(r):
    return Verdicts(r.reward, r.success)


def received(heard, tokenizer, judge=own_view, *, length=T, overlong="drop", two_way=None):
    """Rows and causes of [(source, record), ...]."""
    two_way = {s.name: True for s, _ in heard} if two_way is None else two_way
    return receive(heard, 3, tokenizer, judge, length=length, overlong=overlong, two_way=two_way)


def learner_rows(r, use=None, width=T):
    """Batch rows of received ones behind a learner's prompts."""
    own = dataclasses.replace(
        rollouts("a", TEXTS), prompt=np.full((3, 1), 7, np.int32), tokens=np.zeros((3, 4, width), np.int32)
    )
    return batches.received_rows(own, r, r.usable if use is None else use)


@pytest.mark.parametrize("kind", [0, 1])
def test_every_text_comes_in_the_learners_tokens(tokenizers, kind):
    tok = tokenizers[kind]
    r, causes = received([(B, made())], tok)
    assert not any(causes.values())
    for p in range(3):
        for g in range(4):
            if not np.isfinite(REWARD[p, g]):
                continue
            raw, stops = TEXTS[p][g].encode(), int(FINISH[p, g] != types.LENGTH)
            ids, n = r.tokens[p, g][r.mask[p, g]].tolist(), r.n[p, g]
            assert tok.bytes_of(ids[:n]) == raw and ids[n:] == [tok.eot_id] * stops
            assert r.mask[p, g].tolist() == [True] * (n + stops) + [False] * (T - n - stops)
            lengths = np.diff(r.ends[p, g], prepend=0)
            assert [len(tok.token_bytes[i]) for i in ids[:n]] == lengths[:n].tolist() and not lengths[n:].any()
            assert r.ends[p, g, -1] == len(raw)
    np.testing.assert_array_equal(r.finish[r.heard], FINISH[r.heard])
    assert r.tokens.dtype == np.int32 and r.ends.dtype == np.int32 and r.finish.dtype == np.int8
    assert r.success.dtype == np.int8 and r.reward.dtype == np.float64 and r.live.dtype == bool


def test_rows_are_in_the_order_of_source_and_sample(tokenizers):
    heard = [(Source(i, name, LIVE), made(name, seed=i)) for i, name in ((1, "b"), (2, "c"), (5, "z"))]
    r, _ = received(heard, tokenizers[0])
    assert r.source.tolist() == [1] * 4 + [2] * 4 + [5] * 4
    assert r.sample.tolist() == [0, 1, 2, 3] * 3
    np.testing.assert_array_equal(r.reward, np.tile(REWARD, 3))
    for k, (_, record) in enumerate(heard):
        part = np.s_[:, 4 * k : 4 * k + 4]
        np.testing.assert_array_equal(r.trace.logp[part], record.token_logp)
        np.testing.assert_array_equal(r.trace.eos_logp[part], record.eos_logp)
        np.testing.assert_array_equal(r.trace.ends[part][..., -1], record.text_bytes)
        assert r.trace.valid[part].sum() == 11


def test_what_is_heard_and_what_can_be_used(tokenizers):
    record = made()
    valid = record.valid.copy()
    valid[1, 1] = False
    r, causes = received([(B, dataclasses.replace(record, valid=valid))], tokenizers[0])
    want = np.isfinite(REWARD)
    want[1, 1] = False
    for found in (r.heard, r.usable, r.trace.valid):
        np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(r.reward, np.where(want, REWARD, np.nan))
    np.testing.assert_array_equal(r.success, np.where(want, SUCCESS, -1))
    assert not r.mask[~want].any() and not any(causes.values())


def test_rows_without_a_reward_in_the_learners_view_are_not_heard(tokenizers):
    """The judge is asked once a record, and what it says stands for what the source said."""
    asked = []

    def judge(record):
        asked.append(record.header.policy)
        reward = np.where(record.header.policy == "b", 1.0 - REWARD, REWARD)
        reward[0] = np.nan
        return Verdicts(reward, (reward > 0.75).astype(np.int8))

    r, _ = received([(B, made()), (Source(2, "c", LIVE), made("c"))], tokenizers[0], judge)
    assert asked == ["b", "c"]
    assert not r.heard[0].any() and not r.usable[0].any() and not r.mask[0].any()
    assert np.isnan(r.reward[0]).all() and (r.success[0] == -1).all()
    assert r.reward[1].tolist() == [1] * 4 + [0] * 4 and r.success[1].tolist() == [1] * 4 + [0] * 4


def test_what_was_not_validated_is_dropped_by_the_round_trip(tokenizers):
    """A text that is no UTF-8, whatever let it through; its reward still counts in the group."""
    record = made()
    text = record.text.copy()
    text[1, 0, 0] = 0xFF
    r, causes = received([(B, dataclasses.replace(record, text=text))], tokenizers[0])
    assert {k: n for k, n in causes.items() if n} == {"utf8": 1}
    assert r.heard[1, 0] and not r.usable[1, 0] and not r.mask[1, 0].any()
    assert r.usable.sum() == 10


# Too long for the learner: "0123456789abcdef" stops after 16 tokens of one byte, "日本" and "né ö" after 6


@pytest.mark.parametrize("length,lost", [(17, 0), (16, 1), (6, 3)])
def test_a_text_that_is_too_long_is_dropped(tokenizers, length, lost):
    r, causes = received([(B, made())], tokenizers[0], length=length)
    assert causes["overlong"] == lost and r.heard.sum() == 11 and r.usable.sum() == 11 - lost
    assert r.usable[2, 0] == (lost == 0) and not r.mask[~r.usable].any()
    assert r.tokens.shape == r.mask.shape == r.ends.shape == (3, 4, length)
    rows = learner_rows(r, width=length)
    assert np.isfinite(rows.source_logp).all()


@pytest.mark.parametrize("length", [16, 7, 1])
def test_or_cut_and_then_it_is_a_row_that_did_not_stop(tokenizers, length):
    record = made()
    r, causes = received([(B, record)], tokenizers[0], length=length, overlong="truncate")
    assert not any(causes.values()) and r.usable.sum() == 11
    raw = TEXTS[2][0].encode()[:length]
    assert r.mask[2, 0].all() and tokenizers[0].bytes_of(r.tokens[2, 0].tolist()) == raw
    assert r.n[2, 0] == length and r.ends[2, 0, -1] == length and r.finish[2, 0] == types.LENGTH
    assert not (r.tokens[2, 0] == tokenizers[0].eot_id).any()
    # The source's log-prob is of the whole text and its stop id, so the row has none of its own.
    rows = learner_rows(r, width=length)
    sizes = np.array([[len(x.encode()) for x in row] for row in TEXTS])
    fits = (sizes + (FINISH != types.LENGTH) <= length)[r.usable]
    np.testing.assert_array_equal(np.isfinite(rows.source_logp), fits)
    np.testing.assert_array_equal(np.isfinite(rows.source_tokens), fits)
    np.testing.assert_allclose(rows.source_logp[fits], record.logp_sum[r.usable][fits], rtol=1e-6)


def test_a_row_that_the_source_cut_off_and_just_fits_is_whole(tokenizers):
    assert TEXTS[1][2] == "so: 4" and FINISH[1, 2] == types.LENGTH
    record = made()
    r, _ = received([(B, record)], tokenizers[0], length=5, overlong="truncate")
    only = np.zeros((3, 4), bool)
    only[1, 2] = True
    rows = learner_rows(r, only, width=5)
    assert r.mask[1, 2].all() and r.finish[1, 2] == types.LENGTH
    np.testing.assert_allclose(rows.source_logp, [record.logp_sum[1, 2]], rtol=1e-6)
    assert rows.source_tokens.tolist() == [3]


# How texts end


def test_behind_a_stop_text_the_end_of_turn_has_no_ratio(tokenizers):
    record = made()
    r, _ = received([(B, record)], tokenizers[0])
    n = len("a b=c")
    assert r.finish[0, 1] == types.STOP_TEXT and r.tokens[0, 1, n] == tokenizers[0].eot_id
    assert r.mask[0, 1].sum() == n + 1 and r.surr_mask[0, 1].tolist() == [True] * n + [False] * (T - n)
    other = np.ones((3, 4), bool)
    other[0, 1] = False
    np.testing.assert_array_equal(r.surr_mask[other], r.mask[other])
    rows = learner_rows(r)
    assert rows.surr_mask.sum() == rows.mask.sum() - 1
    at = np.flatnonzero((rows.group == 0) & (rows.sample == 1))
    np.testing.assert_allclose(rows.source_logp[at], record.token_logp[0, 1].sum(), rtol=1e-6)
    assert rows.source_tokens[at] == [3]  # the source's tokens of two bytes, no stop id


def test_an_empty_reply_is_one_end_of_turn(tokenizers):
    for tok in tokenizers:
        record = made()
        r, _ = received([(B, record)], tok)
        assert r.usable[0, 2] and r.n[0, 2] == 0
        assert r.tokens[0, 2].tolist() == [tok.eot_id] + [0] * (T - 1)
        assert r.mask[0, 2].tolist() == r.surr_mask[0, 2].tolist() == [True] + [False] * (T - 1)
        rows = learner_rows(r)
        at = np.flatnonzero((rows.group == 0) & (rows.sample == 2))
        assert rows.source_logp[at] == record.eos_logp[0, 2] and rows.source_tokens[at] == [1]


def test_an_empty_reply_that_did_not_stop_is_dropped(tokenizers):
    finish = FINISH.copy()
    finish[0, 2] = types.LENGTH
    r, causes = received([(B, made(finish=finish))], tokenizers[0])
    assert {k: n for k, n in causes.items() if n} == {"empty": 1} and not r.usable[0, 2]


# Peers


def test_no_peers_are_no_rows(tokenizers):
    r, causes = received([], tokenizers[0])
    assert causes == {}
    for f in dataclasses.fields(r):
        x = getattr(r, f.name)
        if f.name != "trace":
            assert x.shape[:2] == (3, 0) if x.ndim > 1 else x.shape == (0,)
    assert r.tokens.shape == (3, 0, T) and r.trace.valid.shape == (3, 0)
    rows = learner_rows(r)
    assert len(rows.tokens) == 0
    some, _ = received([(B, made())], tokenizers[0])
    for f in dataclasses.fields(r):
        if f.name != "trace":
            assert getattr(r, f.name).dtype == getattr(some, f.name).dtype, f.name


@pytest.mark.parametrize(
    "kind,two_way,live", [(LIVE, True, True), (LIVE, False, False), (FROZEN, False, False), (LOG, False, False)]
)
def test_live_is_who_is_trained_and_hears_the_learner(tokenizers, kind, two_way, live):
    heard = [(Source(1, "b", kind), made()), (Source(2, "c", LIVE), made("c"))]
    r, _ = received(heard, tokenizers[0], two_way={"b": two_way, "c": True})
    assert r.live.tolist() == [live] * 4 + [True] * 4


def test_peers_with_and_without_log_probs_stand_side_by_side(tokenizers):
    heard = [(B, made(traced=False)), (Source(2, "c", LIVE), made("c"))]
    r, _ = received(heard, tokenizers[0])
    assert not r.trace.valid[:, :4].any() and r.trace.valid[:, 4:].sum() == 11
    assert r.trace.ends.shape == r.trace.logp.shape == (3, 8, SHAPE.T) and r.trace.text.shape == (3, 8, SHAPE.U)
    rows = learner_rows(r)
    np.testing.assert_array_equal(np.isfinite(rows.source_logp), rows.source == 2)


def test_nothing_that_was_sent_is_changed(tokenizers):
    record = made()
    for x in fields(record).values():
        if isinstance(x, np.ndarray) and x.ndim:
            x.setflags(write=False)
    r, _ = received([(B, record)], tokenizers[0])
    rows = learner_rows(r)
    rows.surr_mask[:], rows.source_logp[:], rows.adv[:] = True, 0, 1
    again, _ = received([(B, record)], tokenizers[0])
    np.testing.assert_array_equal(r.surr_mask, again.surr_mask)
    assert r.surr_mask.sum() == r.mask.sum() - 1


# The learner's view


class Grader:
    """Counts the characters of a reply; what it was asked is kept."""

    def __init__(self):
        self.asked = []

    def grade(self, replies, problems):
        self.asked += [(x, p.id) for x, p in zip(replies, problems)]
        return np.array([len(x) if x != "x" else np.nan for x in replies], np.float64), [None] * len(replies)


def test_a_peer_that_asked_the_same_grader_is_believed():
    record, own, grader = made(), rollouts("a", TEXTS), Grader()
    v = verifier.judge(record, own, Verdicts(REWARD * 0, SUCCESS * 0), grader, True)
    assert v.reward is record.reward and v.success is record.success and grader.asked == []


@pytest.mark.parametrize("label", ["vote", ""])
def test_texts_that_were_labelled_otherwise_are_graded_again(tokenizers, label):
    record, own, grader = made(label=label), rollouts("a", TEXTS), Grader()
    verdicts = Verdicts(REWARD.copy(), SUCCESS.copy())
    v = verifier.judge(record, own, verdicts, grader, False)
    np.testing.assert_array_equal(verdicts.reward, REWARD)
    assert grader.asked == [(TEXTS[p][g], IDS[p]) for p in range(3) for g in range(4) if record.valid[p, g]]
    want = np.array([[len(x) if x != "x" else np.nan for x in row] for row in TEXTS], float)
    want[2, 3] = np.nan  # it has no reward at the source, so it is not valid
    np.testing.assert_array_equal(v.reward, want)
    np.testing.assert_array_equal(v.success, np.where(np.isnan(want), -1, want >= 1))
    assert v.success.dtype == np.int8
    r, _ = received([(B, record)], tokenizers[0], lambda x: verifier.judge(x, own, verdicts, Grader(), False))
    np.testing.assert_array_equal(r.reward, want)
    assert not r.heard[1, 3]


def test_a_record_without_a_valid_row_asks_nothing():
    record, grader = made(label="vote"), Grader()
    record = dataclasses.replace(record, valid=np.zeros((3, 4), bool))
    v = verifier.judge(record, rollouts("a", TEXTS), Verdicts(REWARD, SUCCESS), grader, False)
    assert grader.asked == [] and np.isnan(v.reward).all() and (v.success == -1).all()


def test_labels_of_own_rollouts():
    own = std_types.SimpleNamespace(
        text=TEXTS, problems=rollouts("a", TEXTS).problems, tokens=np.zeros((3, 4, 2), np.int32)
    )
    grader = Grader()
    v = verifier.label(votes.Hearing(own, None, {}, ("a",), None, grader))
    assert grader.asked == [(TEXTS[p][g], IDS[p]) for p in range(3) for g in range(4)]
    assert v.reward[0].tolist() == [2, 5, 0, 4] and v.success[0].tolist() == [1, 1, 0, 1]
    assert np.isnan(v.reward[1, 3]) and v.success[1, 3] == -1
