"""Traces of sampled ids and retokenised texts, against slow references and by hand; then the whole way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutualrl.tokenizers import bridge
from mutualrl.tokenizers.bridge import GRANULARITIES, ByteTable
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.tokenizers.train import train
from mutualrl.types import LENGTH, STOP, STOP_TEXT

NAN = float("nan")
TEXTS = st.text(st.sampled_from("ab   \n\t.é你🙂\u0301") | st.characters(exclude_categories=["Cs"]), max_size=25)


def padded(lists, width, dtype):
    return np.array([[*x, *[0] * (width - len(x))] for x in lists], dtype).reshape(len(lists), width)


# ---- trace

TABLE = (
    b"",
    b"a",
    b" b",
    b"\xf0\x9f",
    b"\x98\x80",
    b"x\xf0\x9f\x98",
    b"\x80",
    b"a#",
    b"#b",
    b"#",
    b"\xe4\xbd",
    b"\xff",
)


def slow_trace(ids, logp, finish, stop_text=b"##"):
    """(text, ends, logp, eos_logp, tail bytes) of one row, or the cause why it is invalid."""
    if any(not 0 <= i < len(TABLE) for i in ids):
        return "id_range"
    stop = finish == STOP
    eos_logp = logp[-1] if stop else NAN
    spans = [(TABLE[i], x) for i, x in zip(ids, logp)][: len(ids) - stop]
    if any(not b for b, _ in spans):
        return "zero_bytes"
    text, tail = b"".join(b for b, _ in spans), 0
    if finish == STOP_TEXT:
        if stop_text not in text:
            return "stop_text"
        text = text.split(stop_text)[0]
    if finish == LENGTH:
        for k in (1, 2, 3):
            end = text[-k:]
            if len(text) >= k and (end in (b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe4", b"\xe4\xbd")):
                text, tail = text[:-k], k
                break
    if text.decode(errors="ignore").encode() != text:
        return "utf8"
    if not ids or not text and finish == LENGTH:
        return "empty"
    ends, kept, at = [], [], 0
    for b, x in spans:
        if at < len(text):
            ends.append(min(at + len(b), len(text)))
            kept.append(x)
        at += len(b)
    return text, ends, kept, eos_logp, tail


@settings(max_examples=400, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(1, 11) | st.sampled_from((1, 2, 3, 5, 7, 8, 9)) | st.integers(-1, 12), max_size=6),
            st.sampled_from((STOP, LENGTH, STOP_TEXT)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_trace_is_the_slow_one(rows):
    t, rng = max(len(ids) for ids, _ in rows) + 1, np.random.default_rng(0)
    ids = padded([[*ids, 0] if finish == STOP else ids for ids, finish in rows], t, np.int32)
    lengths = np.array([len(ids) + (finish == STOP) for ids, finish in rows])
    mask = np.arange(t) < lengths[:, None]
    logprobs = np.where(mask, -rng.random((len(rows), t)), 0).astype(np.float32)
    finish = np.array([finish for _, finish in rows], np.int8)
    trace, tail_bytes, causes = bridge.trace(ids, mask, logprobs, finish, ByteTable(TABLE), stop_text="##")
    want_causes = dict.fromkeys(("id_range", "zero_bytes", "stop_text", "utf8", "empty"), 0)
    for r in range(len(rows)):
        want = slow_trace(ids[r, : lengths[r]].tolist(), logprobs[r, : lengths[r]].tolist(), finish[r])
        assert trace.valid[r] == (not isinstance(want, str)), want
        if isinstance(want, str):
            want_causes[want] += 1
            continue
        text, ends, logp, eos_logp, tail = want
        assert trace.text[r, : trace.text_bytes[r]].tobytes() == text
        assert not trace.text[r, trace.text_bytes[r] :].any()
        assert trace.ends[r].tolist() == [*ends, *[len(text)] * (t - len(ends))]
        assert trace.n[r] == len(ends) and trace.logp[r].tolist() == [*logp, *[0] * (t - len(ends))]
        assert trace.eos_logp[r] == pytest.approx(eos_logp, nan_ok=True)
        assert tail_bytes[r] == tail
    assert causes == want_causes
    dtypes = dict(text="uint8", text_bytes="int32", ends="int32", n="int32", logp="float32", eos_logp="float32")
    assert {k: getattr(trace, k).dtype.name for k in dtypes} == dtypes and tail_bytes.dtype == np.int8


def one_trace(ids, finish, table=TABLE, **options):
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)[None, None]
    ids = np.array(ids, np.int32)[None, None]
    trace, tail, causes = bridge.trace(
        ids, np.ones_like(ids, bool), logprobs, np.array([[finish]], np.int8), ByteTable(table), **options
    )
    assert trace.valid.shape == tail.shape == (1, 1)
    text = trace.text[0, 0].tobytes()
    n = trace.n[0, 0]
    return trace, (text, trace.ends[0, 0, :n].tolist(), trace.logp[0, 0, :n].tolist()), int(tail[0, 0]), causes


def test_trace_by_hand():
    trace, got, _, _ = one_trace([1, 2, 0], STOP)
    assert got == (b"a b", [1, 3], [-1, -2]) and trace.eos_logp[0, 0] == -3 and trace.total[0, 0] == -6
    trace, got, _, _ = one_trace([0], STOP)
    assert got == (b"", [], []) and trace.eos_logp[0, 0] == -1 and trace.valid[0, 0] and trace.tokens[0, 0] == 1
    # The character's first bytes stand in a token of their own: it leaves; in a longer token: that one is shortened.
    trace, got, tail, _ = one_trace([1, 3], LENGTH)
    assert got == (b"a", [1], [-1]) and tail == 2 and np.isnan(trace.eos_logp[0, 0]) and trace.total[0, 0] == -1
    assert one_trace([1, 5], LENGTH)[1:3] == ((b"ax", [1, 2], [-1, -2]), 3)
    assert one_trace([3, 4], LENGTH)[1:3] == (("😀".encode(), [2, 4], [-1, -2]), 0)
    # The stop text begins inside the last token, inside an earlier one, and at the start of a token.
    words = (b"", b"so", b" Que", b"stion: ", b" Question")
    assert one_trace([1, 4], STOP_TEXT, words, stop_text="Question")[1] == (b"so ", [2, 3], [-1, -2])
    assert one_trace([1, 2, 3], STOP_TEXT, words, stop_text="Question:")[1] == (b"so ", [2, 3], [-1, -2])
    trace, got, _, _ = one_trace([1, 2, 3], STOP_TEXT, words, stop_text="stion")
    assert got == (b"so Que", [2, 6], [-1, -2]) and np.isnan(trace.eos_logp[0, 0])
    trace, got, _, _ = one_trace([4], STOP_TEXT, words, stop_text=" Q")
    assert got == (b"", [], []) and trace.valid[0, 0] and trace.tokens[0, 0] == 0


@pytest.mark.parametrize(
    ("cause", "ids", "finish", "options"),
    [
        ("id_range", [1, 12, 0], STOP, {}),
        ("id_range", [1, 9], LENGTH, {"real_vocab": 9}),
        ("id_range", [-1], LENGTH, {}),
        ("zero_bytes", [0, 1, 0], STOP, {}),
        ("zero_bytes", [1, 0], LENGTH, {}),
        ("utf8", [3, 0], STOP, {}),
        ("utf8", [3, 1], LENGTH, {}),
        ("utf8", [11], LENGTH, {}),
        ("stop_text", [1], STOP_TEXT, {"stop_text": "#"}),
        ("stop_text", [1], STOP_TEXT, {}),
        ("empty", [3], LENGTH, {}),
        ("empty", [], STOP, {}),
    ],
)
def test_trace_refuses(cause, ids, finish, options):
    trace, _, tail, causes = one_trace(ids, finish, **options)
    assert not trace.valid[0, 0] and tail == 0
    assert {k: v for k, v in causes.items() if v} == {cause: 1}


def test_ids_outside_a_table_raise():
    for bad in (-1, len(TABLE)):
        with pytest.raises(IndexError, match=str(bad)):
            ByteTable(TABLE).texts(np.array([[1, bad]]), np.ones((1, 2), bool))


# ---- retokenise


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Three lossless tokenizers: raw bytes, and two sizes of BPE."""
    corpus = ["the quick brown fox, 12 + 34 = 46", "def f(x):\n    return x ** 2\n", "Ünïcödé 你好 🙂🚀 привет"] * 20
    found = []
    for kind, size in (("bytes", 0), ("bpe", 300), ("bpe", 500)):
        folder = tmp_path_factory.mktemp(f"{kind}{size}")
        train(folder, kind, corpus, size=size)
        found.append(Tokenizer.load(folder))
    return found


def as_text(texts):
    u = max(map(len, texts))
    text = np.array([list(x.ljust(u, b"\0")) for x in texts], np.uint8).reshape(len(texts), u)
    return text, np.array([len(x) for x in texts], np.int32)


def retokenised(tokenizer, texts, stopped=True, valid=True, length=1000, **options):
    text, text_bytes = as_text(texts)
    flags = lambda x: np.broadcast_to(np.array(x, bool), len(texts))
    return bridge.retokenise(
        text, text_bytes, flags(valid), tokenizer, stopped=flags(stopped), length=length, **options
    )


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), which=st.integers(0, 2), data=st.data())
def test_round_trip(own, texts, which, data):
    tokenizer = own[which]
    stopped = data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts)))
    got = retokenised(tokenizer, [x.encode() for x in texts], stopped, length=120)
    assert got.tokens.dtype == got.ends.dtype == got.n.dtype == np.int32
    for r, text in enumerate(texts):
        ids = tokenizer.encode(text)
        assert got.ok[r] == bool(ids or stopped[r])
        if not got.ok[r]:
            assert not got.mask[r].any()
            continue
        want = [*ids, tokenizer.eot_id] if stopped[r] else ids
        assert got.tokens[r][got.mask[r]].tolist() == want and got.mask[r].sum() == len(want)
        ends = np.cumsum([len(tokenizer.token_bytes[i]) for i in ids], dtype=int).tolist()
        assert got.ends[r].tolist() == [*ends, *[len(text.encode())] * (120 - len(ids))] and got.n[r] == len(ids)
    assert got.causes == {"utf8": 0, "control": 0, "bytes": 0, "overlong": 0, "empty": int((~got.ok).sum())}
    assert not got.cut.any()


def test_never_a_row_without_tokens(own):
    got = retokenised(own[0], [b"", b"", b""], stopped=[True, False, True], valid=[True, True, False], length=4)
    assert got.ok.tolist() == [True, False, False] and got.causes["empty"] == 1
    assert got.tokens[0].tolist() == [own[0].eot_id, 0, 0, 0] and got.mask.sum(-1).tolist() == [1, 0, 0]
    assert got.n.tolist() == [0, 0, 0]


def test_overlong(own):
    texts = [b"abc", b"abcd", b"abcde", b"abcd"]
    drop = retokenised(own[0], texts, stopped=[True, True, False, False], length=4)
    assert drop.ok.tolist() == [True, False, False, True] and drop.causes["overlong"] == 2
    assert not drop.cut.any() and drop.mask.sum(-1).tolist() == [4, 0, 0, 4]
    keep = retokenised(own[0], texts, stopped=[True, True, False, False], length=4, overlong="truncate")
    assert keep.ok.all() and not any(keep.causes.values())
    assert keep.cut.tolist() == [False, True, True, False] and keep.n.tolist() == [3, 4, 4, 4]
    assert keep.mask.all() and keep.ends[1:].tolist() == [[1, 2, 3, 4]] * 3
    assert (keep.tokens == own[0].eot_id).sum(-1).tolist() == [1, 0, 0, 0]


def test_unknown_overlong_is_refused(own):
    with pytest.raises(ValueError, match="overlong='cut'"):
        retokenised(own[0], [b"a"], overlong="cut")


def test_guard_counts_by_cause(own, char_level, nfc, word_piece, chatml):
    assert retokenised(own[1], [b"a\xff", b"\xf0\x9f"]).causes["utf8"] == 2
    closed = retokenised(Tokenizer.load(char_level), [b"1+2", "1 + é".encode()])
    assert closed.ok.tolist() == [True, False] and closed.causes["control"] + closed.causes["bytes"] == 1
    composed = retokenised(Tokenizer.load(nfc), ["e\u0301".encode(), "é".encode()])
    assert composed.ok.tolist() == [False, True] and composed.causes["bytes"] == 1
    lossy = Tokenizer.load(word_piece)
    assert not lossy.lossless and not retokenised(lossy, [b"The answer", b"is 46 ."]).ok.any()
    spelt = retokenised(Tokenizer.load(chatml), [b"so<|im_end|>\n", b"<think>"])
    assert spelt.ok.all() and not any(spelt.causes.values())


# ---- the whole way


def sampled(tokenizer, text, rng, short=False):
    """Ids of a text as a sampler may have drawn them: any tokens that spell it."""
    by_bytes = {b: i for i, b in enumerate(tokenizer.token_bytes) if b}
    longest, ids, at = max(map(len, by_bytes)), [], 0
    while at < len(text):
        fits = [m for m in range(1, longest + 1) if at + m <= len(text) and text[at : at + m] in by_bytes]
        at += (m := fits[0] if short else int(rng.choice(fits)))
        ids.append(by_bytes[text[at - m : at]])
    return ids


@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), sides=st.permutations(range(3)), seed=st.integers(0, 9))
def test_sampled_ids_to_a_learners_row(own, texts, sides, seed, granularity):
    source, learner = (own[k] for k in sides[:2])
    rng = np.random.default_rng(seed)
    rows = [[*sampled(source, x.encode(), rng), source.stop_ids[0]] for x in texts]
    ids = padded(rows, max(map(len, rows)), np.int32)
    mask = np.arange(ids.shape[1]) < np.array([len(x) for x in rows])[:, None]
    logprobs = np.where(mask, -rng.random(ids.shape), 0).astype(np.float32)
    trace, _, causes = bridge.trace(
        ids, mask, logprobs, np.full(len(rows), STOP), ByteTable(source.token_bytes), real_vocab=source.size
    )
    assert trace.valid.all() and not any(causes.values())
    got = bridge.retokenise(trace.text, trace.text_bytes, trace.valid, learner, stopped=mask.any(-1), length=200)
    assert got.ok.all()
    aligned = bridge.align(trace, got.ends, got.n, granularity=granularity)
    assert (aligned.known == got.mask).all()
    np.testing.assert_allclose(aligned.logp.sum(-1), logprobs.sum(-1, dtype=np.float64), atol=1e-9, rtol=0)
    assert (aligned.logp[np.arange(len(rows)), got.n] == trace.eos_logp).all()
