"""The tokenizer bridge: golden numbers, cases, and every pair of the lossless real tokenizers."""

import functools
import itertools
import json
import os
import pathlib
import unicodedata

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mutualrl.tokenizers import bridge
from mutualrl.tokenizers.bridge import GRANULARITIES, SPLITS, ByteTable
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.types import LENGTH, STOP, Trace

SHARED = pathlib.Path(__file__).parents[3] / "shared"
PATH = SHARED / "design" / "methods_golden.json"
if not PATH.is_file() or not (SHARED / "tokenizers").is_dir():
    pytest.skip(f"no golden numbers at {PATH}, or no tokenizers beside them", allow_module_level=True)

CASES = {c["id"]: c for c in json.loads(PATH.read_text())["cases"] if c["id"].startswith(("thl.", "prp.token_ratio."))}
LOSSLESS = ("deepseek-v4", "gpt-neox-olmo", "gpt2", "mistral-v3", "olmo2-dolma2-cl100k", "qwen2.5", "smollm2")
TEXTS = (
    "", "a", " ", "the 17 cats", "\n", "  two  spaces   three", "\n\n\n a\n\n", "trail ", "\t\tif x:\n\t\treturn",
    "line\r\nline\r\r\n", "🙂👩\u200d👩\u200d👧🚀 ok", "👍🏽🇩🇪🏳\ufe0f\u200d🌈", "hi 😀!", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "你好，世界。こんにちは 안녕", "這是一個很長的句子沒有空格", "مرحبا بالعالم", "שלום 12 עולם", "नमस्ते",
    "e\u0301 a\u030a n\u0303o", "Z\u0351\u036f\u0342a\u0321lgo", "\u212b", "x²+y²≠①", "a\u200b\ufeff\u00a0b\u2028c",
    "def f(x: int) -> int:\n    return {k: v**2 for k, v in x.items()}  # 1e-9\n",
    "<|im_end|><s>[INST] <think>so</think>", "▁typed▁mark <0x0A>", "1234567890 3.14159 1,000,000", "\x00\x01\x7f",
    r"\[ \frac{1}{2}\sum_{k=0}^{\infty} x^{2k} \leq \mathbb{E}\left[\hat\theta\right] \] $\boxed{42}$",
    "the word 'social' , hello !", "A" * 60, " " * 40 + "x", "é à ü ñ " * 6,
)  # fmt: skip


@functools.cache
def load(name):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return Tokenizer.load(SHARED / "tokenizers" / name)


@functools.cache
def spelling(name):
    """Bytes → an id with these bytes, and the longest of them."""
    found = {b: i for i, b in enumerate(load(name).token_bytes) if b}
    return found, min(16, max(map(len, found)))


@functools.cache
def texts():
    """Texts of every sort and some of the problems and codes."""
    found = []
    for path in sorted((SHARED / "data").glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, 5, 200, 50):
                values = [v for v in json.loads(line).values() if isinstance(v, str)]
                found.append(max(values, key=len, default="")[:1500])
    assert len(found) > 30
    return [*TEXTS, *found]


def sampled(name, data, rng):
    """Ids of a text as a sampler may have drawn them: any tokens that spell it, mostly not its own encoding."""
    ids_of, longest = spelling(name)
    ids, at = [], 0
    while at < len(data):
        fits = [m for m in range(1, longest + 1) if at + m <= len(data) and data[at : at + m] in ids_of]
        m = int(rng.choice(fits))
        ids.append(ids_of[data[at : at + m]])
        at += m
    return ids


def traced(name, rows, finish, seed=0, logprobs=None):
    """The trace of sampled ids; log-probs are made up. A stop id is appended where the row stopped."""
    tokenizer = load(name)
    rows = [[*ids, tokenizer.stop_ids[0]] if f == STOP else ids for ids, f in zip(rows, finish)]
    t = max(map(len, rows))
    ids = np.array([ids + [0] * (t - len(ids)) for ids in rows], np.int32)
    mask = np.arange(t) < np.array([len(x) for x in rows])[:, None]
    if logprobs is None:
        logprobs = -np.random.default_rng(seed).exponential(1.0, ids.shape)
    logprobs = np.where(mask, logprobs, 0).astype(np.float32)
    trace, _, causes = bridge.trace(
        ids, mask, logprobs, np.array(finish, np.int8), table(name), real_vocab=tokenizer.size
    )
    return trace, causes


@functools.cache
def table(name):
    return ByteTable(load(name).token_bytes)


@functools.cache
def sources(name):
    """Canonical and sampled tokenisations of all texts as traces, every third row cut off instead of stopped."""
    rng = np.random.default_rng(0)
    canonical = [load(name).encode(x) for x in texts()]
    rows = canonical + [sampled(name, load(name).bytes_of(x), rng) for x in canonical]
    finish = [LENGTH if r % 3 == 2 and rows[r] else STOP for r in range(len(rows))]
    trace, causes = traced(name, rows, finish)
    assert trace.valid.all() and not any(causes.values())
    for r, ids in enumerate(rows):
        assert trace.text[r, : trace.text_bytes[r]].tobytes() == load(name).bytes_of(ids)
    return trace, np.array(finish) == STOP


def sums_by_group(logp, group, like):
    """f64 of the shape `like`: log-probs summed by their group."""
    found = np.zeros_like(like)
    rows, at = np.nonzero(group >= 0)
    np.add.at(found, (rows, group[rows, at]), logp[rows, at])
    return found


# ---- every pair


@pytest.mark.parametrize(("source", "target"), [p for p in itertools.permutations(LOSSLESS, 2)])
def test_every_pair(source, target):
    trace, stopped = sources(source)
    learner = load(target)
    length = 1 + int(trace.text_bytes.max())
    got = bridge.retokenise(
        trace.text, trace.text_bytes, trace.valid, learner, stopped=stopped, length=length, table=table(target)
    )
    composed = np.array(
        [unicodedata.is_normalized("NFC", row[:n].tobytes().decode()) for row, n in zip(trace.text, trace.text_bytes)]
    )
    ok = composed if "NFC" in learner.loss_reason else np.ones_like(composed)
    assert (got.ok == ok).all() and not got.cut.any()
    assert got.causes == {"utf8": 0, "control": 0, "bytes": int((~ok).sum()), "overlong": 0, "empty": 0}
    rows = np.flatnonzero(ok)
    trace = Trace(*(getattr(trace, name)[rows] for name in Trace.__dataclass_fields__))
    ends, n, stopped = got.ends[rows], got.n[rows], stopped[rows]
    assert (got.tokens[rows, n][stopped] == learner.eot_id).all()
    assert (got.mask[rows].sum(-1) == n + stopped).all()
    prior = -np.random.default_rng(1).exponential(1.0, ends.shape)
    source_in, target_in = (np.arange(e.shape[1]) < k[:, None] for e, k in ((trace.ends, trace.n), (ends, n)))
    common = [set(a[:i].tolist()) & set(b[:j].tolist()) for a, i, b, j in zip(trace.ends, trace.n, ends, n)]
    bounds = {}
    for granularity, split in itertools.product(GRANULARITIES, SPLITS):
        aligned = bridge.align(trace, ends, n, granularity=granularity, split=split, prior=prior)
        # Every token of both sides is in exactly one group, groups keep their order and cover the same bytes.
        assert ((aligned.group >= 0) == target_in).all() and ((aligned.source_group >= 0) == source_in).all()
        assert (aligned.known == got.mask[rows]).all()
        for group, e, k in ((aligned.group, ends, n), (aligned.source_group, trace.ends, trace.n)):
            for r in range(len(rows)):
                last = np.flatnonzero(np.diff(group[r, : k[r]], append=-9))
                assert group[r, last].tolist() == list(range(len(last)))
                assert common[r] >= set(e[r, last].tolist())
                if granularity == "finest":
                    assert common[r] == set(e[r, last].tolist())
        # Mass, by group and by sequence.
        by_source = sums_by_group(trace.logp.astype(np.float64), aligned.source_group, aligned.sums)
        by_target = sums_by_group(aligned.logp, aligned.group, aligned.sums)
        np.testing.assert_allclose(by_target, by_source, atol=1e-9, rtol=0)
        np.testing.assert_allclose(aligned.logp.sum(-1), trace.total, atol=1e-9, rtol=0)
        alone = np.take_along_axis(np.pad(aligned.target_tokens, ((0, 0), (0, 1))), aligned.group, -1) == 1
        assert not bridge.residual_bound(aligned)[alone].any()
        bounds[granularity] = bridge.metrics(aligned)["thl/bound"]
        # Back again: the same groups with the same sums.
        n_back = Trace(trace.text, trace.text_bytes, ends, n, aligned.logp * target_in, trace.eos_logp, trace.valid)
        back = bridge.align(n_back, trace.ends, trace.n, granularity=granularity, split=split, prior=trace.logp)
        assert (back.group == aligned.source_group).all()
        np.testing.assert_allclose(back.sums, aligned.sums, atol=1e-9, rtol=0)
    assert 0 <= bounds["finest"] <= bounds["word"] <= 1


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_same_tokens_give_the_same_trace(name):
    """Sampled or canonical, no decoding in between: each token keeps its own log-prob."""
    trace, _ = sources(name)
    ends = np.pad(trace.ends, ((0, 0), (0, 1)), mode="edge")
    want = np.pad(trace.logp.astype(np.float64), ((0, 0), (0, 1)))
    stopped = np.flatnonzero(np.isfinite(trace.eos_logp))
    want[stopped, trace.n[stopped]] = trace.eos_logp[stopped]
    for granularity, split in itertools.product(GRANULARITIES, SPLITS):
        aligned = bridge.align(trace, ends, trace.n, granularity=granularity, split=split, prior=want)
        np.testing.assert_array_equal(aligned.logp, want)


@settings(max_examples=40, deadline=None)
@given(
    text=st.text(max_size=40), pair=st.permutations(LOSSLESS), seed=st.integers(0, 99), split=st.sampled_from(SPLITS)
)
def test_any_text(text, pair, seed, split):
    source, target = pair[:2]
    data = unicodedata.normalize("NFC", text).encode()
    # A byte-level vocabulary need not have every byte: smollm2 lacks some control characters.
    spelt = [all(bytes([b]) in spelling(name)[0] for b in data) for name in (source, target)]
    assume(spelt[0])
    trace, _ = traced(source, [sampled(source, data, np.random.default_rng(seed))], [STOP], seed)
    got = bridge.retokenise(
        trace.text, trace.text_bytes, trace.valid, load(target), stopped=[True], length=200, table=table(target)
    )
    assert got.ok[0] == spelt[1] and got.causes["bytes"] == (not spelt[1])
    if not got.ok[0]:
        return
    prior = np.full(got.ends.shape, -0.5)
    for granularity in GRANULARITIES:
        aligned = bridge.align(trace, got.ends, got.n, granularity=granularity, split=split, prior=prior)
        assert aligned.logp.sum() == pytest.approx(trace.total[0], abs=1e-9)
        assert (aligned.known == got.mask).all()


def test_a_byte_that_the_vocabulary_lacks():
    """Silently dropped by the encoder, caught by the guard."""
    data = b"a\x16b"
    assert load("smollm2").bytes_of(load("smollm2").encode(data.decode())) == b"ab"
    got = bridge.retokenise(
        np.frombuffer(data, np.uint8)[None], np.array([3]), np.array([True]), load("smollm2"),
        stopped=np.array([True]), length=30, table=table("smollm2"),
    )  # fmt: skip
    assert not got.ok.any() and got.causes["bytes"] == 1


# ---- golden numbers

GOLDEN = {}


def golden(*names):
    def register(check):
        GOLDEN.update(dict.fromkeys(names, check))
        return check

    return register


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    """An id without a check fails here."""
    case = CASES[name]
    near = lambda x: pytest.approx(np.asarray(x, float), abs=case["tolerance"], rel=0)
    GOLDEN[name](name, case["inputs"], case["expected"], near)


def one(inputs, n_target=None, **options):
    """`align` of one row of golden inputs, one column more than tokens: (values, aligned)."""
    source, target = inputs["source_ends"], inputs["target_ends"]
    data = bytes.fromhex(inputs.get("text_bytes_hex", "")) or inputs.get("text", "x" * max(source, default=0)).encode()
    trace = Trace(
        text=np.frombuffer(data, np.uint8)[None],
        text_bytes=np.array([len(data)]),
        ends=np.array([source]),
        n=np.array([len(source)]),
        logp=np.array([inputs["source_logp"]], np.float64),
        eos_logp=np.array([inputs.get("source_eos_logp", np.nan)]),
        valid=np.array([True]),
    )
    if "learner_old_logp" in inputs:
        options["prior"] = np.array([[*inputs["learner_old_logp"], 0.0]])
    ends = np.array([[*target, len(data)]])
    aligned = bridge.align(trace, ends, np.array([len(target)]), **options)
    return aligned.logp[0][aligned.known[0]], aligned


def groups_of(aligned):
    pick = lambda x, w: np.flatnonzero(x[0] == w).tolist()
    return [[pick(aligned.source_group, w), pick(aligned.group, w)] for w in range(aligned.sums.shape[-1])]


@golden("thl.worked.the_17_cats")
def worked(_, inputs, expected, near):
    for granularity, split in itertools.product(GRANULARITIES, SPLITS):
        values, aligned = one(inputs, granularity=granularity, split=split)
        assert values[:-1] == near(expected[f"{granularity}_{split}"]) and values[-1] == near(expected["eos"])
        assert values[:-1].sum() == near(expected["source_sum"])
        assert groups_of(aligned) == expected[f"{granularity}_groups"]
        assert bridge.metrics(aligned)["thl/bound"] == near(expected[f"{granularity}_residual_bound_frac"])


@golden(*(f"prp.token_ratio.{granularity}_{split}" for granularity in GRANULARITIES for split in SPLITS))
def token_ratio(name, inputs, expected, near):
    granularity, split = name.split(".")[-1].split("_")
    row = CASES[inputs["see"]]["inputs"]
    values, _ = one(row, granularity=granularity, split=split)
    assert values == near(expected["aligned"])
    assert np.exp([*row["learner_old_logp"], row["learner_old_eos_logp"]] - values) == near(expected["ratio"])


@golden("thl.sequence_ratio")
def sequence_ratio(_, inputs, expected, near):
    row = CASES[inputs["see"]]["inputs"]
    learner, source = row["learner_old_logp"], row["source_logp"]
    for eos in (False, True):
        sums = (sum(learner) + eos * row["learner_old_eos_logp"], sum(source) + eos * row["source_eos_logp"])
        for norm in bridge.NORMS:
            got = bridge.sequence_log_ratio(
                *sums,
                learner_tokens=len(learner) + eos,
                source_tokens=len(source) + eos,
                text_bytes=len(row["text"].encode()),
                norm=norm,
            )
            key = f"{'learner_len' if norm == 'learner' else norm}_{'eos' if eos else 'no_eos'}"
            if key in expected:
                assert np.exp(got) == near(expected[key])
            else:
                assert eos and norm in ("byte", "sum")


@golden("thl.emoji")
def emoji(_, inputs, expected, near):
    values, aligned = one(inputs, granularity=inputs["granularity"])
    assert values == near(expected["aligned"]) and groups_of(aligned) == expected["groups"]


@golden("thl.identity", "thl.identity_two_token_word")
def identity(_, inputs, expected, near):
    for granularity, split in itertools.product(GRANULARITIES, SPLITS):
        values, _ = one(
            {**inputs, "learner_old_logp": [-0.3] * len(inputs["target_ends"])}, granularity=granularity, split=split
        )
        assert values == near(expected["aligned"])


@golden("thl.many_to_one")
def many_to_one(_, inputs, expected, near):
    for granularity in GRANULARITIES:
        values, aligned = one(inputs, granularity=granularity)
        assert values == near(expected["aligned"])
        assert bridge.residual_bound(aligned).max() == near(expected["residual_bound"])
        assert bridge.metrics(aligned)["thl/bound"] == near(expected["residual_bound"])


@golden("thl.one_to_many_worst_case")
def one_to_many(_, inputs, expected, near):
    count = inputs["target_count"]
    row = {"source_ends": [count], "source_logp": [inputs["group_logp"]], "target_ends": list(range(1, count + 1))}
    values, aligned = one(row)
    assert values == near(expected["aligned"])
    residual, bound = np.abs(values - inputs["truth"]), bridge.residual_bound(aligned)[0, :count]
    assert residual.max() == near(expected["max_abs_residual"]) and bound == near([expected["bound"]] * count)
    assert residual.sum() == near(expected["l1_residual"]) and 2 * bound[0] == near(expected["l1_bound"])


@golden("thl.prior_degenerate")
def prior_degenerate(_, inputs, expected, near):
    count = len(inputs["learner_old_logp"])
    row = {"source_ends": [count], "source_logp": [inputs["group_logp"]], "target_ends": list(range(1, count + 1))}
    values, _ = one({**row, "learner_old_logp": inputs["learner_old_logp"]}, split="prior")
    assert values == near(expected["aligned"])


@golden("thl.eos_only")
def eos_only(_, inputs, expected, near):
    logprobs = np.array([[inputs["source_eos_logp"]]])
    trace, _ = traced("gpt2", [load("gpt2").encode(inputs["text"])], [STOP], logprobs=logprobs)
    assert trace.valid.all() and trace.n[0] == len(inputs["source_logp"])
    got = bridge.retokenise(
        trace.text, trace.text_bytes, trace.valid, load("qwen2.5"), stopped=np.array([True]), length=3
    )
    assert got.ok.all() and got.mask.sum() == expected["target_tokens"] and got.tokens[0, 0] == load("qwen2.5").eot_id
    aligned = bridge.align(trace, got.ends, got.n)
    assert aligned.logp[got.mask] == near(expected["aligned"]) and (aligned.known == got.mask).all()


@golden("thl.truncated")
def truncated(_, inputs, expected, near):
    assert inputs["finish_reason"] == "length"
    values, aligned = one(inputs)
    assert values == near(expected["aligned"]) and aligned.known.sum() == len(inputs["target_ends"])
    trace, _ = traced("gpt2", [load("gpt2").encode("the")], [LENGTH])
    got = bridge.retokenise(
        trace.text, trace.text_bytes, trace.valid, load("qwen2.5"), stopped=np.array([False]), length=9
    )
    assert np.isnan(trace.eos_logp[0]) and (load("qwen2.5").eot_id in got.tokens[got.mask]) == expected["eos_appended"]


# ---- cases


def test_h48_sampled_ids_keep_their_own_spans():
    """`he` + `llo`: the trace is over the sampled tokens, not over the text's own encoding."""
    ids = [383, 75, 385]
    trace, _ = traced("qwen2.5", [ids], [LENGTH], logprobs=np.array([[-1.0, -2.0, -4.0]]))
    assert trace.text.tobytes() == b"hello" and trace.n[0] == 3
    assert trace.ends[0].tolist() == np.cumsum([len(load("qwen2.5").token_bytes[i]) for i in ids]).tolist()
    got = bridge.retokenise(
        trace.text, trace.text_bytes, trace.valid, load("qwen2.5"), stopped=np.array([False]), length=5
    )
    assert got.tokens[got.mask].tolist() == [14990]
    assert bridge.align(trace, got.ends, got.n).logp.tolist() == [[-7, 0, 0, 0, 0]]


@pytest.mark.parametrize("name", LOSSLESS)
def test_h49_no_clean_up(name):
    data = b"the word 'social' , hello !"
    got = bridge.retokenise(
        np.frombuffer(data, np.uint8)[None], np.array([len(data)]), np.array([True]), load(name),
        stopped=np.array([True]), length=30, table=table(name),
    )  # fmt: skip
    assert got.ok.all() and load(name).bytes_of(got.tokens[got.mask]) == data


def test_h51_character_in_two_tokens():
    trace, _ = traced("gpt2", [[47249, 222], [47249]], [STOP, LENGTH])
    assert trace.text[0].tobytes().decode() == "\U0001f600" and trace.ends[0, :2].tolist() == [3, 4]
    # Cut in the middle of the character nothing is left.
    assert trace.valid.tolist() == [True, False]


def test_h53_groups_of_an_emoji():
    gpt2, qwen = [5303, 30325, 222, 0], [6023, 90316, 0]
    trace, causes = traced("gpt2", [gpt2, [load("gpt2").bos_id, *gpt2]], [LENGTH, LENGTH])
    # A BOS inside a completion belongs to no text.
    assert trace.valid.tolist() == [True, False] and causes["zero_bytes"] == 1
    got = bridge.retokenise(
        trace.text, trace.text_bytes, trace.valid, load("qwen2.5"), stopped=np.array([False] * 2), length=4
    )
    assert got.tokens[got.mask].tolist() == qwen
    aligned = bridge.align(trace, got.ends, got.n, granularity="finest")
    assert list(zip(aligned.source_tokens[0].tolist(), aligned.target_tokens[0].tolist())) == [(1, 1), (2, 1), (1, 1)]
    assert aligned.group.tolist() == [[0, 1, 2, -1], [-1] * 4]
    assert aligned.source_group.tolist() == [[0, 1, 1, 2, -1], [-1] * 5]


def test_h54_chain_rule():
    ids, logits = [0, 2, 3, 1], np.array([[0, 1, 2, 0], [1, 0, 0, 3], [0, 3, 0, 1]], float)
    logp = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(3), ids[1:]]
    values, aligned = one({"source_ends": [1, 2, 3], "source_logp": logp, "target_ends": [2, 3]}, granularity="finest")
    assert groups_of(aligned) == [[[0, 1], [0]], [[2], [1]]]
    assert values == pytest.approx([-0.704809, -0.210998], abs=1e-6)


def test_h55_foreign_ids():
    """Ids beyond the table are refused, not clamped."""
    small = ByteTable([b"abcdefgh"[i : i + 1] for i in range(8)])
    ids, mask = np.array([[3, 6, 4, 8, 9, 5]], np.int32), np.ones((1, 6), bool)
    with pytest.raises(IndexError, match="8 ids"):
        small.texts(ids, mask)
    trace, _, causes = bridge.trace(ids, mask, -mask.astype(np.float32), np.array([LENGTH]), small)
    assert not trace.valid.any() and causes["id_range"] == 1
