"""Votes and labels: what they may depend on and what not, counted against one-line references."""

import collections
import dataclasses
import pathlib
import sys

import numpy as np
import pytest

from mutualrl import votes
from mutualrl.labels import peer_vote, pooled_vote, self_vote, teacher

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "transfer"))
from material import material  # noqa: E402

P, G = 7, 6
NAMES = ("a", "b", "c")
SOURCES = {
    "peer_vote": (peer_vote, {}),
    "peer_vote, min_share": (peer_vote, {"min_share": 0.4}),
    "pooled_vote": (pooled_vote, {}),
    "pooled_vote, others": (pooled_vote, {"exclude_self": True}),
    "pooled_vote, uniform": (pooled_vote, {"uniform": True}),
    "pooled_vote, grader": (pooled_vote, {"vote_identity": "grader"}),
    "self_vote": (self_vote, {"n_vote": 0}),
    "teacher": (teacher, {}),
}


class ByValue:
    """A grader to which numbers of equal value are equal; a text without one has no answer."""

    def grade(self, replies, problems):
        right = [bool(r) and x.answer is not None and float(r) == float(x.answer) for r, x in zip(replies, problems)]
        return np.array(right, float), [r or None for r in replies]


@pytest.fixture
def said():
    """Answers of each policy, P lists of G: few different ones with other spellings, some missing, one problem of which
    nothing can be read."""
    rng = np.random.default_rng(4)
    values = np.array(["1", "1.0", "2", "3", "", None], object)
    out = {
        name: [list(row) for row in rng.choice(values, (P, G), p=[0.3, 0.1, 0.25, 0.15, 0.1, 0.1])] for name in NAMES
    }
    for name in NAMES:
        out[name][3] = [None, ""] * (G // 2)
    return out


def label(source, options, said, me, names=NAMES):
    """Verdicts of `me`, whose rollouts have their answers as texts; a policy hears all votes."""
    o, grader = source.Options(**options), ByValue()
    own = material(np.zeros((len(said[me]), len(said[me][0]))), name=me).own
    own = dataclasses.replace(own, text=tuple(tuple(a or "" for a in group) for group in said[me]))
    same = votes.same_by(grader, own.problems) if o.vote_identity == "grader" else None
    heard = {name: votes.count(said[name], same) for name in names}
    return source.label(votes.Hearing(own, said[me], heard, names, o, grader))


def assert_same(a, b):
    assert a.labels == b.labels and a.answers == b.answers
    for x, y in ((a.reward, b.reward), (a.success, b.success), (a.share, b.share)):
        np.testing.assert_array_equal(x, y)


def picked(said, order):
    return {name: [given[p] for p in order] for name, given in said.items()}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("me", NAMES)
def test_labels_do_not_depend_on_the_order_of_problems_or_on_other_problems(name, me, said):
    source, options = SOURCES[name]
    whole = label(source, options, said, me)
    assert len(set(whole.labels)) > 2 and None in whole.labels and 0 < whole.reward.mean() < 1
    for order in ([6, 2, 0, 3, 5, 1, 4], [3], [5, 1]):
        part = label(source, options, picked(said, order), me)
        assert part.labels == tuple(whole.labels[p] for p in order)
        np.testing.assert_array_equal(part.reward, whole.reward[order])
        np.testing.assert_array_equal(part.success, whole.success[order])
        np.testing.assert_array_equal(part.share, whole.share[order])


@pytest.mark.parametrize("name", SOURCES)
def test_labels_depend_on_places_and_not_on_names(name, said):
    source, options = SOURCES[name]
    other = dict(zip(NAMES, ("zebra", "yak", "x")))  # another order of the alphabet
    for me in NAMES:
        renamed = label(source, options, {other[n]: a for n, a in said.items()}, other[me], tuple(other.values()))
        assert_same(renamed, label(source, options, said, me))


@pytest.mark.parametrize("me", NAMES)
def test_a_ring_may_be_turned(me, said):
    turned = ("b", "c", "a")
    assert_same(label(peer_vote, {}, said, me, turned), label(peer_vote, {}, said, me))
    reversed_ = label(peer_vote, {}, said, me, NAMES[::-1])
    assert reversed_.labels != label(peer_vote, {}, said, me).labels  # another ring


@pytest.mark.parametrize("options", [{}, {"uniform": True}])
def test_a_pooled_vote_is_the_same_for_all_and_its_order_decides_ties_alone(options, said):
    found = [label(pooled_vote, options, said, me) for me in NAMES]
    assert found[0].labels == found[1].labels == found[2].labels
    other = label(pooled_vote, options, said, "a", ("c", "a", "b"))
    np.testing.assert_allclose(other.share, found[0].share)
    differ = [p for p in range(P) if other.labels[p] != found[0].labels[p]]
    for p in differ:
        scores = collections.Counter()
        for name in NAMES:
            count = collections.Counter(filter(None, said[name][p]))
            weight = 1 if options else max(count.values(), default=0) / max(1, count.total())
            for a, n in count.items():
                scores[a] += weight * n / count.total()
        assert scores[other.labels[p]] == pytest.approx(scores[found[0].labels[p]])


def test_which_policy_votes_on_whose_labels(said):
    changed = lambda who: {**said, who: [["3"] * G for _ in range(P)]}
    moves = lambda source, options, me, who: (
        label(source, options, changed(who), me).labels != label(source, options, said, me).labels
    )
    for i, me in enumerate(NAMES):
        for who in NAMES:
            assert moves(peer_vote, {}, me, who) == (who == NAMES[i - 1])
            assert moves(self_vote, {"n_vote": 0}, me, who) == (who == me)
            assert moves(pooled_vote, {}, me, who)
            assert moves(pooled_vote, {"exclude_self": True}, me, who) == (who != me)


def test_winners_are_those_of_a_counter(said):
    for given in said.values():
        labels = votes.elect(votes.count(given))
        for answers, winner, share in zip(given, labels.answers, labels.share):
            count = collections.Counter(a for a in answers if a)  # keeps the order first seen, as most_common does
            assert winner == (count.most_common(1)[0][0] if count else None)
            assert share == pytest.approx(count[winner] / count.total()) if count else np.isnan(share)


@pytest.mark.parametrize(
    "answers, winner",
    [
        (["2", "1", "1", "2"], "2"),
        (["1", "2", "1", "2"], "1"),
        ([None, "3", "", "1", "2"], "3"),
        (["3", "1", "2", "2", "1"], "1"),  # the first of those with most, not the first of all
    ],
)
def test_of_equals_the_first_seen_wins(answers, winner):
    assert votes.elect(votes.count([answers])).answers == (winner,)
    assert votes.pool([votes.count([answers])]).answers == (winner,)


def test_policies_decide_ties_before_samples():
    first, second = votes.count([["2", "1"]]), votes.count([["1", "2"]])
    assert votes.pool([first, second]).answers == ("2",) and votes.pool([second, first]).answers == ("1",)


def test_missing_answers_change_no_vote(said):
    for given in said.values():
        without = votes.elect(votes.count([[a for a in group if a] for group in given]))
        found = votes.elect(votes.count(given))
        assert found.answers == without.answers
        np.testing.assert_array_equal(found.share, without.share)


def test_where_there_is_no_label_nothing_is_rewarded_or_known(said):
    for source, options in SOURCES.values():
        v = label(source, options, said, "a")
        assert v.labels[3] is None and np.isnan(v.share[3])
        assert (v.reward[3] == 0).all() and (v.success[3] == -1).all()
    # Not even a rollout that has an answer, where the votes did not come or nobody could be read.
    answers = {"a": [["1", "2"]], "b": [["1", "1"]], "c": [[None, ""]]}
    v = label(peer_vote, {}, answers, "a")
    assert v.labels == (None,) and (v.reward == 0).all() and (v.success == -1).all()
    o, own = peer_vote.Options(), material([[0.0, 0.0]], name="a").own
    own = dataclasses.replace(own, text=(("1", "2"),))
    v = peer_vote.label(votes.Hearing(own, answers["a"], {"a": votes.count([["1", "2"]])}, NAMES, o, ByValue()))
    assert v.labels == (None,) and (v.reward == 0).all() and (v.success == -1).all()


@pytest.mark.parametrize("min_share, winner", [(0.0, "1"), (0.59, "1"), (0.6, None), (0.99, None), (1.0, None)])
def test_a_share_must_exceed_min_share(min_share, winner):
    vote = votes.count([["1", "2", "1", "1", "2", None, ""]])  # 3 of 5 that can be read
    assert votes.elect(vote, min_share).answers == (winner,)
    assert votes.pool([vote], min_share=min_share).answers == (winner,)


def test_rewards_are_by_the_grader_whatever_the_vote_is_counted_by():
    answers = {"a": [["1", "1.0", "2", None]], "b": [["1.0", "1", "3", "3"]], "c": [["1.0", "2", "2", "2"]]}
    by_string, by_grader = (
        label(pooled_vote, {"vote_identity": identity, "uniform": True}, answers, "a") for identity in votes.IDENTITIES
    )
    # Strings: 2 has 1/3 + 3/4, 1 and 1.0 each less. By value 1 and 1.0 share a bucket of 2/3 + 1/2 + 1/4.
    assert by_string.labels == ("2",) and by_string.share[0] == pytest.approx((1 / 3 + 3 / 4) / 3)
    assert by_grader.labels == ("1",) and by_grader.share[0] == pytest.approx((2 / 3 + 1 / 2 + 1 / 4) / 3)
    np.testing.assert_array_equal(by_string.reward, [[0, 0, 1, 0]])
    np.testing.assert_array_equal(by_grader.reward, [[1, 1, 0, 0]])  # though 1.0 is another string


def test_two_views_label_each_other_and_not_themselves():
    said = {
        "a": [["1", "1", "2"], ["3", "3", "1"], ["2", "2", "1"], [None, None, ""]]
    }  # two problems, then their views
    v = label(self_vote, {"n_vote": 0, "views": 2}, said, "a", ("a",))
    assert v.labels == ("2", None, "1", "3")
    np.testing.assert_array_equal(v.reward, [[0, 0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 0]])


def test_long_answers_do_not_vote():
    vote = votes.count([["ä" * 3, "ä" * 3, "1"]], longest=5)  # six bytes each
    assert vote.answers == (("1",),) and vote.n == (3,) and votes.elect(vote).share[0] == 1.0
