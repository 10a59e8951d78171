"""Records are what was sampled and judged, in the run's sizes; what does not fit is not valid, never cut."""

import dataclasses

import numpy as np
import pytest
from published import ANSWERS, CUT_OFF, IDS, REWARD, SHAPE, SUCCESS, TEXTS, head, record, rollouts, run_of, spans_of

from mutualrl import experience, types, votes
from mutualrl.experience import WireShape
from mutualrl.settings import PolicyConfig
from mutualrl.types import Verdicts


def text_of(r, p, g):
    return bytes(r.text[p, g, : r.text_bytes[p, g]]).decode()


def test_sizes_are_the_largest_of_all_policies():
    run = run_of("ab")
    run = dataclasses.replace(
        run,
        policies={
            "a": PolicyConfig(model="m", group_size=8, max_new_tokens=5),
            "b": PolicyConfig(model="m", group_size=2, max_new_tokens=70),
        },
    )
    assert (lambda s: (s.P, s.G, s.U, s.T))(WireShape.of(run)) == (3, 8, 32, 70)
    free = dataclasses.replace(run, exchange=dataclasses.replace(run.exchange, max_text_bytes=0))
    assert WireShape.of(free).U == 560


def test_a_rollout_record_says_what_was_sampled():
    r, lost = record("a")
    assert lost == 0 and r.valid.all()
    assert [[text_of(r, p, g) for g in range(4)] for p in range(3)] == [list(row) for row in TEXTS]
    for p in range(3):
        for g in range(4):
            raw = TEXTS[p][g].encode()
            n = (len(raw) + 1) // 2
            assert r.n[p, g] == n
            assert r.token_bytes[p, g].tolist() == ([2] * n)[: max(n - 1, 0)] + [len(raw) - 2 * (n - 1)] * (n > 0) + [
                0
            ] * (8 - n)
            a = ANSWERS[p][g]
            assert r.answer_bytes[p, g] == (-1 if a is None else len(a.encode()))
            assert a is None or bytes(r.answer[p, g, : r.answer_bytes[p, g]]).decode() == a
    assert np.isnan(r.eos_logp[CUT_OFF]) and np.isfinite(r.eos_logp).sum() == 11
    total = r.token_logp.astype(np.float64).sum(-1) + np.nan_to_num(r.eos_logp.astype(np.float64))
    np.testing.assert_allclose(r.logp_sum, total, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(r.reward, REWARD)
    np.testing.assert_array_equal(r.success, SUCCESS)
    assert r.header.problems == IDS and r.header.step == 0 and r.header.version == 5
    assert r.logp_sum.dtype == np.float64 and r.token_logp.dtype == np.float32 and r.token_bytes.dtype == np.uint16


def test_without_a_trace_only_sums_travel():
    r, _ = record("a", traced=False)
    assert r.token_bytes is None and r.token_logp is None
    assert (r.logp_sum < 0).all()
    assert not experience.spans_of(r).valid.any()


def test_spans_come_back():
    r, _ = record("a")
    spans, sent = spans_of(TEXTS, np.zeros((3, 4), np.int8)), experience.spans_of(r)
    assert sent.valid.all() and sent.ends.dtype == np.int32
    q = spans.ends.shape[-1]
    np.testing.assert_array_equal(sent.ends[..., : q - 1], spans.ends[..., : q - 1])
    assert (sent.ends[..., q:] == sent.ends[..., -1:]).all()
    np.testing.assert_array_equal(sent.logp[..., : q - 1], spans.logp[..., : q - 1])
    np.testing.assert_allclose(sent.total, r.logp_sum)


@pytest.mark.parametrize("what", ["text", "tokens", "answer"])
def test_what_does_not_fit_is_invalid_and_counted_not_cut(what):
    shape = {
        "text": dataclasses.replace(SHAPE, U=15),
        "tokens": dataclasses.replace(SHAPE, T=7),
        "answer": dataclasses.replace(SHAPE, A=5),
    }[what]
    r, lost = record("a", shape=shape)
    assert lost == 1 and (~r.valid).sum() == 1
    assert not r.valid[(1, 1) if what == "answer" else (2, 0)]
    whole, _ = record("a")
    for p, g in np.argwhere(r.valid):
        assert text_of(r, p, g) == text_of(whole, p, g)


def test_exactly_full_is_not_too_long():
    r, lost = record("a", shape=dataclasses.replace(SHAPE, U=16, T=8, A=6))
    assert lost == 0 and r.valid.all()


def test_smaller_groups_and_fewer_problems_are_padded():
    r, lost = record("a", (("12", "3"), ("", "x")), ids=IDS[:2])
    assert lost == 0 and r.valid.shape == (3, 4)
    assert r.valid.sum() == 4 and r.valid[:2, :2].all()
    assert np.isnan(r.reward[~r.valid]).all() and (r.success[~r.valid] == -1).all()


@pytest.mark.parametrize("kind", [np.float16, np.float64])
@pytest.mark.parametrize("field", ["logp", "eos_logp"])
def test_only_float32_log_probs_are_sent(kind, field):
    spans = spans_of(TEXTS, np.zeros((3, 4), np.int8))
    spans = dataclasses.replace(spans, **{field: getattr(spans, field).astype(kind)})
    for make in (
        lambda: experience.rollout_record(
            head(),
            rollouts("a", TEXTS),
            spans,
            np.zeros((3, 4), np.int8),
            Verdicts(REWARD, SUCCESS),
            SHAPE,
            with_trace=True,
        ),  # fmt: skip
        lambda: experience.teacher_record(head("b"), "a", spans, SHAPE),
    ):
        with pytest.raises(ValueError, match=np.dtype(kind).name):
            make()


def test_bfloat16_is_refused():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    spans = spans_of(TEXTS, np.zeros((3, 4), np.int8))
    spans = dataclasses.replace(spans, logp=spans.logp.astype(bfloat16))
    with pytest.raises(ValueError, match="bfloat16"):
        experience.rollout_record(
            head(), rollouts("a", TEXTS), spans, np.zeros((3, 4), np.int8), Verdicts(REWARD, SUCCESS), SHAPE,
            with_trace=False,
        )  # fmt: skip


def test_stats_are_over_finite_rewards():
    reward = np.array([[1.0, 0, np.nan, 0.5], [np.nan] * 4, [-2, -1, np.inf, -4]])
    s = experience.stats_record(head(), reward, SUCCESS, dataclasses.replace(SHAPE, P=4)).stats
    for field, want in {
        "n": [3, 0, 3, 0],
        "sum": [1.5, 0, -7, 0],
        "sumsq": [1.25, 0, 21, 0],
        "min": [0, 0, -4, 0],
        "max": [1, 0, -1, 0],
    }.items():
        np.testing.assert_array_equal(getattr(s, field), want, err_msg=field)
    # A success whose reward says nothing is not one of the n.
    assert s.n_success.tolist() == [1, 0, 2, 0]
    assert s.n.dtype == np.int32 and s.sum.dtype == np.float64


def test_a_capability_window_is_the_newest_steps_oldest_first():
    window = experience.capability_record(head(), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]).window
    np.testing.assert_allclose(window, [0.3, 0.4, 0.5, 0.6, 0.7], rtol=1e-6)
    window = experience.capability_record(head(), [0.25]).window
    assert window[0] == 0.25 and np.isnan(window[1:]).all() and len(window) == 5 and window.dtype == np.float32
    assert np.isnan(experience.capability_record(head(), []).window).all()


def test_votes_are_buckets_in_the_order_seen():
    given = (("4", "7", "7", None), ("", None, None, None), ("a", "b", "toolong", "b"))
    v = experience.vote_record(head(), votes.count(given, longest=SHAPE.A), SHAPE)
    assert experience.vote_of(v, 3) == votes.count(given, longest=SHAPE.A)
    bucket = lambda p, b: bytes(v.answer[p, b, : v.answer_bytes[p, b]]).decode()
    assert [bucket(0, 0), bucket(0, 1)] == ["4", "7"] and v.answer_bytes[0].tolist() == [1, 1, -1, -1]
    assert v.count.tolist() == [[1, 2, 0, 0], [0] * 4, [1, 2, 0, 0]]
    assert v.first[0, :2].tolist() == [0, 1]
    assert v.winner.tolist() == [1, -1, 1]
    assert v.parseable.tolist() == [3, 0, 3] and v.n.tolist() == [4, 4, 4]
    np.testing.assert_allclose(v.share, [2 / 3, np.nan, 2 / 3])
    tie = experience.vote_record(head(), votes.count((("4", "7", "7", "4"),) * 3), SHAPE)
    assert tie.winner.tolist() == [0] * 3


def test_a_teacher_scores_the_learners_texts_in_its_own_tokens():
    texts = TEXTS
    scored = spans_of(texts, np.zeros((3, 4), np.int8), seed=9)
    r = experience.teacher_record(head("b"), "a", scored, SHAPE)
    back = experience.spans_of(r, scored.text)
    assert back.text is scored.text and back.valid.all()
    np.testing.assert_array_equal(back.n, scored.n)
    np.testing.assert_array_equal(back.ends[..., -1], scored.text_bytes)
    np.testing.assert_allclose(back.total, scored.total)
    short = experience.teacher_record(head("b"), "a", scored, dataclasses.replace(SHAPE, T=7))
    assert (~short.valid).sum() == 1 and not short.valid[2, 0]


def test_every_topic_names_its_record():
    r, _ = record("a")
    made = {
        "rollout": r,
        "stats": experience.stats_record(head(), REWARD, SUCCESS, SHAPE),
        "capability": experience.capability_record(head(), []),
        "teacher_score": experience.teacher_record(head(), "b", spans_of(TEXTS, np.zeros((3, 4), np.int8)), SHAPE),
        "vote": experience.vote_record(head(), votes.count(ANSWERS), SHAPE),
    }
    assert {experience.topic_of(x) for x in made.values()} == set(experience.TOPICS) - {"trace"}
    assert all(experience.topic_of(x) == topic for topic, x in made.items())
    assert types.STOP == 0
