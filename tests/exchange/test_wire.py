"""The wire form is exact; nothing that a peer sends raises, and what cannot be right is dropped and counted."""

import dataclasses
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import ANSWERS, CUT_OFF, IDS, REWARD, SHAPE, SUCCESS, TEXTS, assert_same, fields, head, record, spans_of

from mutualrl import experience, types, votes, wire

R, _ = record("a")
UNTRACED, _ = record("a", traced=False)
ALL = {
    "rollout": R,
    "stats": experience.stats_record(head(), REWARD, SUCCESS, SHAPE),
    "capability": experience.capability_record(head(), [0.5, 0.25]),
    "teacher_score": experience.teacher_record(
        head("b"), "a", spans_of(TEXTS, np.zeros((3, 4), np.int8), seed=4), SHAPE
    ),
    "vote": experience.vote_record(head(), votes.count(ANSWERS), SHAPE),
}
ROW = (0, 1)  # "a b=c", three tokens


def changed(r, name, value, at=ROW):
    """The record with one entry (or slice) of an array set."""
    x = np.array(getattr(r, name))
    x[at] = value
    return dataclasses.replace(r, **{name: x})


def checked(r):
    """(valid of the record after validation, causes); the record that came in is left as it was."""
    before = {k: np.array(v) for k, v in fields(r).items()}
    out, causes = wire.validate(r, SHAPE.G)
    for name, x in fields(r).items():
        np.testing.assert_array_equal(x, before[name], err_msg=name)
    return out, causes


@pytest.mark.parametrize("topic", ALL)
def test_round_trip_is_bit_exact(topic):
    sent = wire.to_wire(ALL[topic], SHAPE)
    layout = wire.layout(topic, SHAPE, True)
    assert {k: (x.shape, x.dtype) for k, x in sent.items()} == layout
    got, cause = wire.from_wire(topic, sent, SHAPE, True)
    assert cause == ""
    assert_same(got, ALL[topic])
    # Through bytes, as a transport between processes would carry it.
    again = {k: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape) for k, x in sent.items()}
    assert_same(wire.from_wire(topic, again, SHAPE, True)[0], ALL[topic])
    assert checked(got)[1] == ({"reward": 1} if topic == "rollout" else {})


@pytest.mark.parametrize("traced", [True, False])
def test_arrays_of_policies_with_other_group_sizes_and_lengths_are_alike(traced):
    """What a transport relies on: one layout for the run."""
    small = record("b", (("1", "22"), ("", "x"), ("y", "z")), traced=traced)[0]  # G 2, texts of 2 bytes, 2 tokens
    large = record("a", traced=traced)[0]
    layout = wire.layout("rollout", SHAPE, traced)
    for r in (small, large):
        assert {k: (x.shape, x.dtype) for k, x in wire.to_wire(r, SHAPE).items()} == layout
    got, _ = wire.from_wire("rollout", wire.to_wire(small, SHAPE), SHAPE, traced)
    assert_same(got, small)
    out, causes = checked(got)
    assert out.valid.sum() == 6 and not out.valid[:, 2:].any() and causes == {}


def test_without_a_trace_nothing_of_it_is_sent():
    sent = wire.to_wire(UNTRACED, SHAPE)
    assert {k: (x.shape, x.dtype) for k, x in sent.items()} == wire.layout("rollout", SHAPE, False)
    assert not any(k.startswith("token_") for k in sent)
    assert_same(wire.from_wire("rollout", sent, SHAPE, False)[0], UNTRACED)


def test_names_of_any_script_cross():
    h = dataclasses.replace(head(run="läuft/日本"), problems=("ä" * 80, "b", "c"))
    got, cause = wire.from_wire("stats", wire.to_wire(dataclasses.replace(ALL["stats"], header=h), SHAPE), SHAPE, True)
    assert cause == "" and got.header == h


def test_a_name_that_is_too_long_is_refused_when_sent():
    h = dataclasses.replace(head(), problems=("ä" * 81, "b", "c"))
    with pytest.raises(ValueError, match="162 bytes"):
        wire.to_wire(dataclasses.replace(ALL["stats"], header=h), SHAPE)


def test_another_schema_is_told():
    sent = wire.to_wire(R, SHAPE) | {"header/schema": np.int32(experience.SCHEMA + 1)}
    assert wire.from_wire("rollout", sent, SHAPE, True) == (None, "schema")
    del sent["text"]  # another schema may have other arrays
    assert wire.from_wire("rollout", sent, SHAPE, True) == (None, "schema")


@pytest.mark.parametrize("topic", ALL)
def test_other_arrays_are_dropped_whole(topic):
    sent = wire.to_wire(ALL[topic], SHAPE)
    for name, x in sent.items():
        if name == "header/schema":
            continue
        x = np.asarray(x)
        other = np.float16 if x.dtype != np.float16 else np.float32
        for bad in (x.astype(other), np.zeros((*x.shape, 2), x.dtype), None, x.tolist(), "text"):
            assert wire.from_wire(topic, {**sent, name: bad}, SHAPE, True) == (None, "shape"), (name, bad)
        assert wire.from_wire(topic, {k: v for k, v in sent.items() if k != name}, SHAPE, True) == (None, "shape")


@pytest.mark.parametrize("schema", [None, "one", np.zeros(0, np.int32), np.float32("nan"), [], np.array(["x"])])
def test_a_schema_that_is_no_number_is_told(schema):
    got, cause = wire.from_wire("rollout", wire.to_wire(R, SHAPE) | {"header/schema": schema}, SHAPE, True)
    assert got is None and cause in ("schema", "shape")


@pytest.mark.parametrize("count", [-1, -(2**31), 4, 2**31 - 1])
def test_a_count_of_problems_that_cannot_be(count):
    sent = wire.to_wire(R, SHAPE) | {"header/count": np.int32(count)}
    assert wire.from_wire("rollout", sent, SHAPE, True) == (None, "shape")


def test_names_that_are_no_text_are_dropped():
    sent = wire.to_wire(R, SHAPE)
    for name in ("header/run", "header/policy", "header/label_source", "header/problems"):
        bad = np.array(sent[name])
        bad[..., 0] = 0xFF
        assert wire.from_wire("rollout", {**sent, name: bad}, SHAPE, True) == (None, "shape")


@pytest.mark.parametrize(
    "cause,bad",
    [
        ("reward", lambda: changed(R, "reward", np.nan)),
        ("reward", lambda: changed(R, "reward", np.inf)),
        ("utf8", lambda: changed(R, "text", 0xFF, (*ROW, 1))),
        ("utf8", lambda: changed(R, "text", [0xE6, 0x97], (*ROW, slice(3, 5)))),  # the beginning of a character
        ("lengths", lambda: changed(R, "token_bytes", [2, 0, 3], (*ROW, slice(0, 3)))),
        ("lengths", lambda: changed(R, "token_bytes", [2, 2, 2], (*ROW, slice(0, 3)))),
        ("lengths", lambda: changed(R, "token_bytes", 1, (*ROW, 7))),
        ("lengths", lambda: changed(R, "n", 2)),
        ("lengths", lambda: changed(R, "n", -1)),
        ("lengths", lambda: changed(R, "n", 9)),
        ("logp", lambda: changed(R, "token_logp", np.nan, (*ROW, 0))),
        ("logp", lambda: changed(R, "token_logp", -np.inf, (*ROW, 0))),
        ("logp", lambda: changed(R, "token_logp", 2e-4, (*ROW, 0))),
        ("logp", lambda: changed(R, "eos_logp", np.inf)),
        ("logp", lambda: changed(R, "eos_logp", 2e-4)),
        ("logp", lambda: changed(R, "eos_logp", np.nan)),  # it stopped by itself, so there is one
        ("logp", lambda: changed(R, "eos_logp", -1.0, CUT_OFF)),  # it did not
        ("logp", lambda: changed(R, "logp_sum", -1e3)),
        ("logp", lambda: changed(R, "logp_sum", np.nan)),
        ("logp", lambda: changed(UNTRACED, "logp_sum", np.nan)),
        ("logp", lambda: changed(UNTRACED, "logp_sum", 1.0)),
        ("logp", lambda: changed(UNTRACED, "logp_sum", -np.inf)),
        ("range", lambda: changed(R, "success", 2)),
        ("range", lambda: changed(R, "success", -2)),
        ("range", lambda: changed(R, "finish", 3)),
        ("range", lambda: changed(R, "finish", -1)),
        ("range", lambda: changed(R, "text_bytes", -1)),
        ("range", lambda: changed(R, "text_bytes", 33)),
        ("range", lambda: changed(R, "answer_bytes", 7)),
        ("range", lambda: changed(R, "answer_bytes", -2)),
        ("range", lambda: changed(UNTRACED, "n", -1)),
        ("range", lambda: changed(UNTRACED, "n", 6)),
    ],
)
def test_a_row_that_cannot_be_right_is_dropped(cause, bad):
    bad = bad()
    row = CUT_OFF if bad.eos_logp[CUT_OFF] == -1.0 else ROW
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, causes = checked(bad)
    # One row of the made-up record has no reward to begin with.
    assert causes == ({"reward": 2} if cause == "reward" else {cause: 1, "reward": 1})
    want = np.isfinite(REWARD)
    want[row] = False
    np.testing.assert_array_equal(out.valid, want)


def test_rows_that_are_not_valid_are_not_counted():
    out, causes = checked(changed(changed(R, "success", 9), "valid", False))
    assert causes == {"reward": 1} and not out.valid[ROW]


def test_roundings_of_a_certain_token_are_log_probs():
    r = changed(changed(R, "token_logp", 9e-5, (*ROW, 0)), "logp_sum", 0.0)
    total = r.token_logp[ROW].astype(np.float64).sum() + float(r.eos_logp[ROW])
    assert checked(changed(r, "logp_sum", total))[1] == {"reward": 1}


def test_log_probs_over_a_filtered_vocabulary_are_no_trace():
    out, causes = checked(dataclasses.replace(R, renormalised=np.bool_(True)))
    assert causes["renormalised"] == 11 and not out.valid.any()
    out, causes = checked(dataclasses.replace(UNTRACED, renormalised=np.bool_(True)))
    assert "renormalised" not in causes and out.valid.sum() == 11


def test_an_empty_reply_survives():
    at = (0, 2)
    assert TEXTS[0][2] == "" and R.n[at] == 0 and R.text_bytes[at] == 0
    out, _ = checked(R)
    assert out.valid[at]
    spans = experience.spans_of(out)
    assert spans.valid[at] and spans.total[at] == float(R.eos_logp[at]) and spans.tokens[at] == 1


def test_rows_of_problems_without_a_name_are_dropped():
    r = dataclasses.replace(R, header=dataclasses.replace(R.header, problems=R.header.problems[:2]))
    out, causes = checked(r)
    assert causes == {"range": 4} and not out.valid[2].any() and out.valid[:2].all()
    two = dataclasses.replace(head("b"), problems=IDS[:2])
    out, causes = checked(dataclasses.replace(ALL["teacher_score"], header=two))
    assert causes == {"range": 4} and not out.valid[2].any() and out.valid[:2].all()
    out, causes = checked(dataclasses.replace(ALL["stats"], header=two))
    assert causes == {"range": 1} and out.stats.n.tolist() == [4, 4, 0]
    out, causes = checked(dataclasses.replace(ALL["vote"], header=two))
    assert causes == {"range": 1} and out.winner[2] == -1 and out.n.tolist() == [4, 4, 0]


def test_booleans_are_what_their_byte_says():
    """A transport carries bytes; numpy's operators disagree on a boolean of neither 0 nor 1."""
    raw = np.zeros((3, 4), np.uint8)
    raw[0], raw[1, 2] = 2, 255
    sent = wire.to_wire(R, SHAPE) | {"valid": raw.view(bool), "renormalised": np.array(2, np.uint8).view(bool)}
    got, _ = wire.from_wire("rollout", sent, SHAPE, True)
    np.testing.assert_array_equal(got.valid.view(np.uint8), raw != 0)
    out, causes = checked(got)
    assert causes == {"renormalised": 5} and not out.valid.any()


def test_a_learner_whose_name_is_no_text_is_told():
    name = np.full(experience.NAME_BYTES, 0xFF, np.uint8)
    sent = wire.to_wire(ALL["teacher_score"], SHAPE) | {"learner": name}
    assert wire.from_wire("teacher_score", sent, SHAPE, True) == (None, "shape")


@pytest.mark.parametrize(
    "cause,name,value,at",
    [
        ("lengths", "token_bytes", 3, (*ROW, 0)),
        ("lengths", "token_bytes", 0, (*ROW, 0)),
        ("lengths", "n", 9, ROW),
        ("lengths", "text_bytes", -5, ROW),
        ("logp", "token_logp", np.nan, (*ROW, 0)),
        ("logp", "token_logp", 1.0, (*ROW, 0)),
        ("logp", "token_logp", -1.0, (*ROW, 7)),
        ("logp", "eos_logp", np.inf, ROW),
    ],
)
def test_a_teachers_row_that_cannot_be_right_is_dropped(cause, name, value, at):
    out, causes = checked(changed(ALL["teacher_score"], name, value, at))
    assert causes == {cause: 1}
    assert not out.valid[ROW] and out.valid.sum() == 11


@pytest.mark.parametrize(
    "name,value",
    [
        ("n", -1), ("sum", np.nan), ("sum", np.inf), ("sumsq", -1.0), ("sumsq", 1e-3), ("min", np.nan),
        ("max", -np.inf), ("min", 2.0), ("max", 0.1), ("n_success", 5), ("n_success", -1), ("sum", 9.0),
        ("n", 2**31 - 1), ("n", 5), ("sumsq", 1e9),
    ],
)  # fmt: skip
def test_sums_that_cannot_be_right_count_for_nothing(name, value):
    s = ALL["stats"].stats
    bad = dataclasses.replace(ALL["stats"], stats=changed(s, name, value, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, causes = checked(bad)
    assert causes == {"range": 1}
    assert out.stats.n.tolist() == [0, *s.n[1:].tolist()]
    assert all(getattr(out.stats, f.name)[0] == 0 for f in dataclasses.fields(out.stats))


def test_a_mean_above_the_largest_reward_cannot_be_right():
    """Negative rewards, where the sum of squares does not show it."""
    s = experience.stats_record(head(), -REWARD - 4, SUCCESS, SHAPE).stats
    mean = float(s.max[0] + 0.1)
    for name, value in {"sum": 4 * mean, "sumsq": 4 * mean**2 + 1}.items():
        s = changed(s, name, value, 0)
    assert checked(dataclasses.replace(ALL["stats"], stats=s))[1] == {"range": 1}


def test_a_group_without_rewards_has_no_sums():
    s = experience.stats_record(head(), np.full((3, 4), np.nan), np.full((3, 4), -1, np.int8), SHAPE)
    assert checked(s)[1] == {}
    for x in ("min", "max", "sum", "sumsq"):  # as of one reward of 1
        s = dataclasses.replace(s, stats=changed(s.stats, x, 1.0, 1))
    out, causes = checked(s)
    assert causes == {"range": 1} and all((x == 0).all() for x in fields(out).values())


def test_sums_of_large_and_negative_rewards_are_right():
    for scale in (1e-6, 1.0, 1e6):
        for shift in (-3.0, 0.0, 1e4):
            reward = np.random.default_rng(1).normal(size=(3, 4)) * scale + shift
            assert checked(experience.stats_record(head(), reward, np.zeros((3, 4), np.int8), SHAPE))[1] == {}
            same = np.full((3, 4), shift * 0.1 + scale * 0.3)
            assert checked(experience.stats_record(head(), same, np.zeros((3, 4), np.int8), SHAPE))[1] == {}


@pytest.mark.parametrize("rate", [-0.1, 1.1, np.inf, -np.inf])
def test_a_capability_is_a_share(rate):
    out, causes = checked(changed(ALL["capability"], "window", rate, 1))
    assert causes == {"range": 1} and np.isnan(out.window).all()


@pytest.mark.parametrize(
    "name,value,at",
    [
        ("count", -1, (0, 0)), ("parseable", 1, 0), ("n", 0, 0), ("winner", 9, 0), ("winner", -2, 0), ("winner", -1, 0),
        ("winner", 3, 0), ("answer_bytes", 7, (0, 0)), ("answer_bytes", -1, (0, 0)), ("answer", 0xFF, (0, 0, 0)),
        ("first", 4, (0, 0)), ("first", -1, (0, 0)),
    ],
)  # fmt: skip
def test_votes_that_cannot_be_right_count_for_nothing(name, value, at):
    out, causes = checked(changed(ALL["vote"], name, value, at))
    assert causes == {"range": 1}
    assert out.winner.tolist() == [-1, *ALL["vote"].winner[1:].tolist()]


def assert_usable(topic, sent):
    """No error, a known cause or none; what stays valid can be turned into spans and texts."""
    with np.errstate(all="ignore"):
        got, cause = wire.from_wire(topic, sent, SHAPE, True)
        if got is None:
            assert cause in ("schema", "shape")
            return
        out, causes = wire.validate(got, SHAPE.G)
        again, more = wire.validate(out, SHAPE.G)
    assert all(n > 0 for n in causes.values()) and more == {}  # what is kept is right
    assert_same(again, out)
    if topic in ("rollout", "teacher_score"):
        v = out.valid
        spans = experience.spans_of(out, R.text)
        with np.errstate(all="ignore"):
            assert np.isfinite(spans.total[v]).all()
        assert (spans.ends[..., -1][v] == spans.text_bytes[v]).all()
        assert (np.diff(spans.ends, axis=-1)[v] >= 0).all() and (spans.n[v] >= 0).all()
    if topic == "rollout":
        assert np.isfinite(out.reward[v]).all()
        for t, n in zip(out.text[v], out.text_bytes[v]):
            bytes(t[:n]).decode()
        assert np.isin(out.finish[v], (types.STOP, types.LENGTH, types.STOP_TEXT)).all()


def test_more_votes_than_rollouts():
    v = experience.vote_record(head(), votes.count((("1", "1", "1"),) * 3), SHAPE)
    assert checked(v)[1] == {}
    out, causes = checked(changed(v, "n", 2, 1))
    assert causes == {"range": 1} and out.winner.tolist() == [0, -1, 0] and out.n.tolist() == [3, 0, 3]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(ALL)), st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_noise_never_raises(topic, seed, changes):
    """Random bytes at a few places of random arrays."""
    rng = np.random.default_rng(seed)
    sent = {k: np.array(v) for k, v in wire.to_wire(ALL[topic], SHAPE).items()}
    for name in rng.choice(sorted(sent), changes):
        raw = bytearray(sent[name].tobytes())
        for at in rng.integers(0, len(raw), rng.integers(1, 9)):
            raw[at] = rng.integers(0, 256)
        sent[name] = np.frombuffer(bytes(raw), sent[name].dtype).reshape(sent[name].shape)
    assert_usable(topic, sent)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(ALL)), st.integers(0, 2**32 - 1), st.booleans())
def test_nothing_but_noise_never_raises(topic, seed, with_head):
    """Random bytes in every array, behind a header that is right or as random."""
    rng = np.random.default_rng(seed)
    sent = dict(wire.to_wire(ALL[topic], SHAPE))
    for name, (size, kind) in wire.layout(topic, SHAPE, True).items():
        if not (with_head and name.startswith("header/")):
            sent[name] = np.frombuffer(rng.bytes(int(np.prod(size)) * kind.itemsize), kind).reshape(size)
    assert_usable(topic, sent)
