"""Who labels whom in a cohort, two wordings of a problem, more votes than rollouts, metrics of labels, resume."""

import collections
import importlib

import numpy as np
import pytest

from mutualrl import train as train_module
from mutualrl.config import read
from mutualrl.train import train

RING = ("ann", "ben", "cas")


@pytest.fixture
def judged(monkeypatch):
    """What a label source was given and what it said, in order: `judged('peer_vote')` -> [(Hearing, Verdicts)]."""

    def watch(source):
        module, seen = importlib.import_module(f"mutualrl.labels.{source}"), []
        original = module.label

        def label(hearing):
            seen.append((hearing, original(hearing)))
            return seen[-1][1]

        monkeypatch.setattr(module, "label", label)
        return seen

    return watch


def majority(answers):
    """The most frequent answer, of equals the one seen first; None without any. And its share."""
    given = [a for a in answers if a]
    if not given:
        return None, np.nan
    top, n = collections.Counter(given).most_common(1)[0]  # equals stay in the order first met
    return top, n / len(given)


def test_a_ring_of_three_is_labelled_by_the_predecessor(settings, finish, judged, tmp_path):
    seen = judged("peer_vote")
    finish(settings("peer_vote", names=RING), tmp_path)
    steps = [{h.own.policy: (h, v) for h, v in seen[i : i + 3]} for i in range(0, 9, 3)]
    assert len(seen) == 9 and all(set(step) == set(RING) for step in steps)
    told_apart = 0
    for step in steps:
        winners = {name: tuple(majority(a)[0] for a in h.answers) for name, (h, _) in step.items()}
        for name, before in dict(ann="cas", ben="ann", cas="ben").items():
            hearing, verdicts = step[name]
            assert verdicts.labels == winners[before]
            right = [[float(a is not None and a == w) for a in g] for g, w in zip(hearing.answers, winners[before])]
            np.testing.assert_array_equal(verdicts.reward, right)
            told_apart += winners[name] != winners[before]
    assert told_apart > 0


def test_the_order_of_policies_does_not_matter(settings, finish, tmp_path):
    first, turned = (
        finish(settings("peer_vote", names=names), tmp_path / names[0]) for names in (RING, ("cas", "ann", "ben"))
    )
    assert first.states == turned.states and first.lines == turned.lines


def test_a_third_policy_changes_only_whom_the_first_hears(finished):
    """After one step: ben still hears ann, who has not moved before; ann now hears cas."""
    two, three = (finished("peer_vote", names=names, steps=1, problems_per_step=4) for names in (RING[:2], RING))
    assert two.states["ben"] == three.states["ben"]
    assert two.states["ann"] != three.states["ann"]


def test_two_views_label_each_other(settings, finish, judged, tmp_path):
    seen = judged("self_vote")
    found = finish(settings("self_vote", options=dict(n_vote=0, views=2)), tmp_path)
    crossed = 0
    for hearing, verdicts in seen:
        problems = hearing.own.problems
        assert [x.id for x in problems[2:]] == [f"{x.id}#2" for x in problems[:2]]
        assert [x.question for x in problems[2:]] == [x.views[0] for x in problems[:2]]
        winners = [majority(a)[0] for a in hearing.answers]
        assert verdicts.labels == (*winners[2:], *winners[:2])
        assert verdicts.reward.shape == (4, 4)
        crossed += winners[2:] != winners[:2]
    assert len(seen) == 6 and crossed > 0
    for name in ("ann", "ben"):  # both wordings are trained on
        assert all(x[f"{name}/tokens/trained"] == x[f"{name}/tokens/generated"] > 0 for x in found.lines)


def test_each_policy_may_see_a_wording_of_its_own(settings, finish, judged, tmp_path):
    """Labels cross by the problem's name; ann, whose peer reads other words, ends elsewhere too."""
    seen = judged("peer_vote")
    config = settings("peer_vote")
    config.policies.ben.view = 1
    finish(config, tmp_path)
    for (ann, _), (ben, _) in zip(seen[::2], seen[1::2]):
        assert (ann.own.policy, ben.own.policy) == ("ann", "ben")
        assert [x.id for x in ann.own.problems] == [x.id for x in ben.own.problems]
        assert [x.question for x in ben.own.problems] == [x.views[0] for x in ann.own.problems]
        assert all(x.question not in x.views for x in ann.own.problems)
    for i in range(0, len(seen), 2):
        (ann, verdicts_of_ann), (ben, verdicts_of_ben) = seen[i : i + 2]
        assert verdicts_of_ann.labels == tuple(majority(a)[0] for a in ben.answers)
        assert verdicts_of_ben.labels == tuple(majority(a)[0] for a in ann.answers)


def test_eight_vote_and_four_are_trained_on(settings, finish, judged, tmp_path):
    seen = judged("self_vote")
    found = finish(settings("self_vote", options=dict(n_vote=8)), tmp_path / "eight")
    more = 0
    for hearing, _ in seen:
        assert hearing.own.tokens.shape[:2] == (2, 4)
        vote = hearing.votes[hearing.own.policy]
        assert vote.n == (8, 8)
        for group, buckets, counts in zip(hearing.answers, vote.answers, vote.counts):
            own, all_ = collections.Counter(a for a in group if a), dict(zip(buckets, counts))
            assert all(all_[a] >= n for a, n in own.items()) and sum(counts) <= 8
            more += sum(counts) > 4
    assert more > 0
    for line in found.lines:
        for name in ("ann", "ben"):
            assert line[f"{name}/tokens/generated"] > line[f"{name}/tokens/trained"] > 0
    eight = {h.own.policy: h.own.tokens for h, _ in seen[:2]}
    seen.clear()
    finish(settings("self_vote", options=dict(n_vote=0), steps=1), tmp_path / "four")
    for hearing, _ in seen:  # the first four of the eight are the four of a run in which only they vote
        np.testing.assert_array_equal(hearing.own.tokens, eight[hearing.own.policy])


def test_metrics_tell_what_labels_are_worth(settings, finish, judged, tmp_path):
    seen = judged("peer_vote")
    found = finish(settings("peer_vote", gold="mixed", steps=6), tmp_path)
    keys = ("label/missing", "label/share", "label/acc", "label/reward_acc", "agreement", "wrong_consensus")
    assert all(any(f"{who}/{k}" in x for x in found.lines) for k in keys for who in ("ann", "ben"))
    for i, line in enumerate(found.lines):
        step = {h.own.policy: (h, v) for h, v in seen[2 * i : 2 * i + 2]}
        gold = [x.answer for x in step["ann"][0].own.problems]
        winners = {name: [majority(a) for a in h.answers] for name, (h, _) in step.items()}
        same = [a == b for (a, _), (b, _) in zip(winners["ann"], winners["ben"]) if a and b]
        wrong = [a == b and a != g for (a, _), (b, _), g in zip(winners["ann"], winners["ben"], gold) if a and b and g]
        for name, peer in (("ann", "ben"), ("ben", "ann")):
            hearing, verdicts = step[name]
            labels, share = zip(*winners[peer])
            judged_ = [
                ((a == g and a is not None) == (r == 1))
                for group, rewards, w, g in zip(hearing.answers, verdicts.reward, labels, gold)
                for a, r in zip(group, rewards)
                if w and g
            ]
            expected = {
                "label/missing": [sum(x is None for x in labels)],
                "label/share": [s for s in share if s == s],
                "label/acc": [w == g for w, g in zip(labels, gold) if w and g],
                "label/reward_acc": judged_,
                "agreement": same,
                "wrong_consensus": wrong,
            }
            for key, values in expected.items():
                if values:
                    assert line[f"{name}/{key}"] == pytest.approx(np.mean(values)), (i, name, key)
                else:
                    assert f"{name}/{key}" not in line


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "label, more",
    [
        ("peer_vote", {}),
        ("teacher", dict(options=dict(n_vote=8, start=0.3, end=0.1), policy=dict(kl_coef=0.1))),
    ],
)
def test_a_stopped_run_resumes_bit_for_bit(settings, finish, tmp_path, monkeypatch, label, more):
    config = settings(label, steps=4, checkpoint_every=2, **more)
    whole = finish(config, tmp_path / "whole" / "run")
    step = train_module.train_step

    def dies(number, *args):
        if number == 3:
            raise Killed
        return step(number, *args)

    monkeypatch.setattr(train_module, "train_step", dies)
    with pytest.raises(Killed):
        train(read(config), tmp_path / "stopped" / "run")
    monkeypatch.setattr(train_module, "train_step", step)
    again = finish(config, tmp_path / "stopped" / "run")
    assert again.states == whole.states and again.lines == whole.lines
    for arrays in whole.states.values():
        params, teacher = (
            {k: v for k, v in arrays.items() if k.startswith(f"['{part}']")} for part in ("params", "teacher")
        )
        assert params and bool(teacher) == (label == "teacher")
        assert label != "teacher" or list(params.values()) != list(teacher.values())
