"""Alignment against a slow reference written another way, and its identities."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutualrl.tokenizers import bridge
from mutualrl.tokenizers.bridge import GRANULARITIES, SPLITS
from mutualrl.types import Trace

NAN = float("nan")
TEXTS = st.text(st.sampled_from("ab   \n\t.é你🙂\u0301") | st.characters(exclude_categories=["Cs"]), max_size=25)


# ---- material


def as_trace(rows):
    """A Trace [R] of rows (text bytes, ends, logp, eos_logp), log-probs in float64; None is an invalid row."""
    rows = [(b"", [], [], NAN, False) if row is None else (*row, True) for row in rows]
    u, q = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return Trace(
        text=np.array([list(row[0].ljust(u, b"\0")) for row in rows], np.uint8).reshape(len(rows), u),
        text_bytes=np.array([len(row[0]) for row in rows], np.int32),
        ends=padded([row[1] for row in rows], q, np.int32, last=True),
        n=np.array([len(row[1]) for row in rows], np.int32),
        logp=padded([row[2] for row in rows], q, np.float64),
        eos_logp=np.array([row[3] for row in rows]),
        valid=np.array([row[4] for row in rows]),
    )


def padded(lists, width, dtype, last=False):
    fill = lambda x: x[-1] if last and x else 0
    return np.array([[*x, *[fill(x)] * (width - len(x))] for x in lists], dtype).reshape(len(lists), width)


@dataclasses.dataclass
class Pair:
    """One text under two tokenisations."""

    text: bytes
    source_ends: list
    source_logp: list
    target_ends: list
    prior: list
    eos_logp: float = NAN

    @property
    def row(self):
        return self.text, self.source_ends, self.source_logp, self.eos_logp


@st.composite
def pairs(draw, cut=False, eos=True):
    text = draw(TEXTS).encode()
    u = len(text)
    split = lambda: sorted({u, *draw(st.sets(st.integers(1, u), max_size=u))}) if u else []
    source, target = split(), split()
    if cut:
        target = target[: draw(st.integers(0, len(target)))]
    logps = lambda k: draw(st.lists(st.sampled_from((0.0, -1e-9)) | st.floats(-20, 0), min_size=k, max_size=k))
    eos_logp = draw(st.just(NAN) | st.floats(-9, 0)) if eos else NAN
    return Pair(text, source, logps(len(source)), target, logps(len(target)), eos_logp)


def aligned(batch, room=1, **options):
    """`align` of the pairs, and their prior as a padded array."""
    width = max(len(p.target_ends) for p in batch) + room
    ends = padded([p.target_ends for p in batch], width, np.int32, last=True)
    prior = padded([p.prior for p in batch], width, np.float64)
    n = np.array([len(p.target_ends) for p in batch], np.int32)
    return bridge.align(as_trace([p.row for p in batch]), ends, n, prior=prior, **options), prior


def slow_groups(text, source_ends, target_ends, granularity):
    """Groups ([source tokens], [target tokens]) by a merge with two pointers."""
    smallest, i, j, group = [], 0, 0, ([], [])
    while i < len(source_ends) and j < len(target_ends):
        a, b = source_ends[i], target_ends[j]
        if a <= b:
            group[0].append(i)
            i += 1
        if b <= a:
            group[1].append(j)
            j += 1
        if a == b:
            smallest.append((group, a))
            group = ([], [])
    if granularity == "finest":
        return [g for g, _ in smallest]
    words = {m.start() for m in re.finditer(rb"(?<=[^ \t\n\r])[ \t\n\r]", text)}
    found, members = [], []
    for k, (group, end) in enumerate(smallest):
        members.append(group)
        if end in words or k == len(smallest) - 1:
            if all(len(s) == len(t) == 1 for s, t in members):
                found += members
            else:
                found.append((sum((s for s, _ in members), []), sum((t for _, t in members), [])))
            members = []
    return found


def slow_split(groups, logp, prior):
    """Token → share of its group, evenly or by `prior`."""
    found = {}
    for source, target in groups:
        total = sum(logp[s] for s in source)
        weight = {t: 1 / len(target) for t in target}
        if prior is not None and sum(prior[t] for t in target) <= -1e-8:
            weight = {t: prior[t] / sum(prior[u] for u in target) for t in target}
        found |= {t: total * weight[t] for t in target}
    return found


# ---- align


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(max_examples=150, deadline=None)
@given(batch=st.lists(pairs() | pairs(cut=True), min_size=1, max_size=4))
def test_align_is_the_two_pointer_merge(batch, granularity, split):
    got, _ = aligned(batch, granularity=granularity, split=split)
    for r, p in enumerate(batch):
        groups = slow_groups(p.text, p.source_ends, p.target_ends, granularity)
        values = slow_split(groups, p.source_logp, p.prior if split == "prior" else None)
        n, t = len(p.target_ends), got.logp.shape[-1]
        stop = np.isfinite(p.eos_logp) and p.target_ends[-1:] in ([len(p.text)], [])[: 1 + (not p.text)]
        want = np.array([values.get(k, 0.0) for k in range(t)])
        want[n] = p.eos_logp if stop else 0.0
        np.testing.assert_allclose(got.logp[r], want, atol=1e-9, rtol=0)
        assert got.known[r].tolist() == [k in values or (k == n and stop) for k in range(t)]
        for group, side in ((got.group, 1), (got.source_group, 0)):
            place = {k: g for g, both in enumerate(groups) for k in both[side]}
            assert group[r].tolist() == [place.get(k, -1) for k in range(group.shape[-1])]
        w = len(groups)
        np.testing.assert_allclose(got.sums[r, :w], [sum(p.source_logp[s] for s in g[0]) for g in groups], atol=1e-9)
        assert got.source_tokens[r, :w].tolist() == [len(g[0]) for g in groups]
        assert got.target_tokens[r, :w].tolist() == [len(g[1]) for g in groups]
        assert not got.sums[r, w:].any() and not got.source_tokens[r, w:].any() and not got.target_tokens[r, w:].any()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(max_examples=60, deadline=None)
@given(batch=st.lists(pairs(), min_size=1, max_size=4))
def test_mass_and_membership(batch, granularity, split):
    got, _ = aligned(batch, granularity=granularity, split=split)
    trace = as_trace([p.row for p in batch])
    np.testing.assert_allclose(got.logp.sum(-1), trace.total, atol=1e-9, rtol=0)
    for r, p in enumerate(batch):
        groups = int((got.target_tokens[r] > 0).sum())
        for group, ends in ((got.group[r], p.target_ends), (got.source_group[r], p.source_ends)):
            assert (group[len(ends) :] == -1).all()
            assert np.unique(group[: len(ends)]).tolist() == list(range(groups))
        for w in range(groups):
            logp, source_logp = got.logp[r][got.group[r] == w], trace.logp[r][got.source_group[r] == w]
            assert logp.sum() == pytest.approx(source_logp.sum(), abs=1e-9)
            if len(logp) == 1:
                assert logp[0] == got.sums[r, w]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(max_examples=60, deadline=None)
@given(batch=st.lists(pairs(), min_size=1, max_size=4))
def test_equal_tables_give_the_own_trace(batch, granularity, split):
    for p in batch:
        p.target_ends, p.prior = p.source_ends, p.source_logp
    got, _ = aligned(batch, granularity=granularity, split=split)
    for r, p in enumerate(batch):
        stop = [p.eos_logp] if np.isfinite(p.eos_logp) else []
        want = [*p.source_logp, *stop]
        assert got.logp[r, : len(want)].tolist() == want
        assert not got.logp[r, len(want) :].any()
        assert got.group[r, : len(p.source_ends)].tolist() == list(range(len(p.source_ends)))
    assert not bridge.residual_bound(got).any()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(max_examples=60, deadline=None)
@given(p=pairs())
def test_there_and_back_returns_every_group_sum(p, granularity, split):
    there, _ = aligned([p], granularity=granularity, split=split)
    n = len(p.target_ends)
    back, _ = aligned(
        [Pair(p.text, p.target_ends, there.logp[0, :n].tolist(), p.source_ends, p.source_logp)],
        granularity=granularity,
        split=split,
    )
    assert back.group[0, : len(p.source_ends)].tolist() == there.source_group[0].tolist()
    np.testing.assert_allclose(back.sums, there.sums, atol=1e-9, rtol=0)


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(pairs(), min_size=1, max_size=3))
def test_finest_refines_word(batch):
    (word, _), (finest, _) = (aligned(batch, granularity=g) for g in ("word", "finest"))
    for r, p in enumerate(batch):
        parent = {}
        for fine, coarse in zip(finest.group[r, : len(p.target_ends)], word.group[r]):
            assert parent.setdefault(fine, coarse) == coarse
        regained = np.zeros_like(word.sums[r])
        for fine, coarse in parent.items():
            regained[coarse] += finest.sums[r, fine]
        np.testing.assert_allclose(regained, word.sums[r], atol=1e-9, rtol=0)
    bound = lambda x: bridge.metrics(x).get("thl/bound", 0.0)
    assert bound(finest) <= bound(word) + 1e-12


@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=80, deadline=None)
@given(p=pairs(eos=False), data=st.data())
def test_bound_holds_and_is_attained(p, split, data):
    got, _ = aligned([p], granularity="finest", split=split)
    bound = bridge.residual_bound(got)[0]
    for w, total in enumerate(got.sums[0]):
        tokens = np.flatnonzero(got.group[0] == w)
        share = np.array(data.draw(st.lists(st.floats(0, 1), min_size=len(tokens), max_size=len(tokens))))
        truths = [total * share / share.sum()] if share.sum() > 1e-3 else []
        truths += list(total * np.eye(len(tokens)))
        errors = np.abs(np.array(truths) - got.logp[0, tokens])
        assert (errors <= bound[tokens] + 1e-9).all()
        np.testing.assert_allclose(errors.max(0) if len(tokens) > 1 else [0], bound[tokens], atol=1e-9, rtol=0)
        if split == "even":
            most = abs(total) * (1 - 1 / len(tokens))
            np.testing.assert_allclose(bound[tokens], most, atol=1e-9, rtol=0)
            assert errors.sum(-1).max() == pytest.approx(2 * most, abs=1e-9)
    assert not bound[got.group[0] < 0].any()


def test_leading_dimensions_and_invalid_rows():
    row = (b"ab cd", [2, 5], [-1.0, -2.0], -0.5)
    flat = as_trace([row, None, row, (b"", [], [], -0.25)])
    trace = Trace(
        *(getattr(flat, f.name).reshape(2, 2, *getattr(flat, f.name).shape[1:]) for f in dataclasses.fields(Trace))
    )
    ends = np.tile(np.array([1, 2, 5, 5], np.int32), (2, 2, 1))
    n = np.array([[3, 3], [3, 0]])
    got = bridge.align(trace, ends, n)
    assert got.logp.tolist() == [[[-0.5, -0.5, -2, -0.5], [0] * 4], [[-0.5, -0.5, -2, -0.5], [-0.25, 0, 0, 0]]]
    assert got.known.sum(-1).tolist() == [[4, 0], [4, 1]]
    assert got.group.tolist() == [[[0, 0, 1, -1], [-1] * 4], [[0, 0, 1, -1], [-1] * 4]]
    assert got.source_group.shape == (2, 2, 2) and got.sums.tolist() == [[[-1, -2], [0, 0]], [[-1, -2], [0, 0]]]


def test_a_word_owns_its_leading_white_space():
    """A common boundary inside a run of white space, or behind it, ends no word; one in front of it does."""
    row = (b"ab \n\tc d", [2, 3, 5, 6, 8], [-1.0, -2.0, -4.0, -8.0, -16.0], NAN)
    target = np.arange(1, 9)[None]
    got = bridge.align(as_trace([row]), target, np.array([8]), granularity="finest")
    assert got.group[0].tolist() == [0, 0, 1, 2, 2, 3, 4, 4]
    got = bridge.align(as_trace([row]), target, np.array([8]))
    assert got.group[0].tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert got.sums.tolist() == [[-1, -14, -16]] and got.source_tokens.tolist() == [[1, 3, 1]]


def test_cut_row_knows_a_prefix_and_no_stop():
    trace = as_trace([(b"abcdef", [2, 4, 6], [-1.0, -2.0, -4.0], -0.5)])
    got = bridge.align(trace, np.array([[1, 2, 3, 3, 3]], np.int32), np.array([3]))
    assert got.known.tolist() == [[True, True, False, False, False]]
    assert got.logp.tolist() == [[-0.5, -0.5, 0, 0, 0]]
    assert got.source_group.tolist() == [[0, -1, -1]]


def test_no_rows_and_nothing_but_stops():
    got = bridge.align(as_trace([(b"", [], [], -1.25)]), np.zeros((1, 3), np.int32), np.array([0]))
    assert got.logp.tolist() == [[-1.25, 0, 0]] and bridge.metrics(got) == {}
    none = Trace(*(getattr(as_trace([None]), f.name)[:0] for f in dataclasses.fields(Trace)))
    assert bridge.align(none, np.zeros((0, 3), np.int32), np.zeros(0, int)).logp.shape == (0, 3)


def test_unknown_names_are_refused():
    trace, ends, n = as_trace([(b"a", [1], [-1.0], NAN)]), np.array([[1]]), np.array([1])
    for options in ({"granularity": "line"}, {"split": "odd"}, {"split": "prior"}):
        with pytest.raises(ValueError, match=str(next(iter(options.values())))):
            bridge.align(trace, ends, n, **options)
    with pytest.raises(ValueError, match="norm='mean'"):
        bridge.sequence_log_ratio(1, 1, learner_tokens=1, source_tokens=1, text_bytes=1, norm="mean")


@settings(max_examples=80, deadline=None)
@given(batch=st.lists(pairs(), min_size=1, max_size=4))
def test_metrics_by_hand(batch):
    got, prior = aligned(batch)
    groups, gaps = [], []
    for p in batch:
        found = slow_groups(p.text, p.source_ends, p.target_ends, "word")
        groups += [(abs(sum(p.source_logp[s] for s in source)), len(source), len(target)) for source, target in found]
        even, shared = slow_split(found, p.source_logp, None), slow_split(found, p.source_logp, p.prior)
        gaps += [abs(even[t] - shared[t]) for t in even]
    want = {}
    if groups:
        mass, sources, targets = (np.array(x) for x in zip(*groups))
        want = {
            "thl/group_tokens": targets.mean(),
            "thl/one_to_one": np.mean((sources == 1) & (targets == 1)),
            "thl/split_gap": np.mean(gaps),
        }
        if mass.sum() > 0:
            want["thl/bound"] = (mass * (1 - 1 / targets)).sum() / mass.sum()
    assert bridge.metrics(got, prior=prior) == pytest.approx(want, abs=1e-9)
    assert "thl/split_gap" not in bridge.metrics(got)


def test_sequence_ratio_of_nothing_is_finite():
    for norm in bridge.NORMS:
        got = bridge.sequence_log_ratio(-1.0, -3.0, learner_tokens=0, source_tokens=0, text_bytes=0, norm=norm)
        assert got == 2.0
