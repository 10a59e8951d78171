"""The golden numbers of the methods specification for label sources, through the sources themselves: ids label.*."""

import dataclasses
import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl import losses, votes
from mutualrl.advantages import group_advantages
from mutualrl.labels import entropy, peer_vote, pooled_vote, self_certainty, self_vote, teacher
from mutualrl.rewards.workers import GraderPool
from mutualrl.transfer import sgt

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "transfer"))
from material import Peer, material  # noqa: E402

PATH = pathlib.Path(__file__).parents[3] / "shared" / "design" / "methods_golden.json"
if not PATH.is_file():
    pytest.skip(f"no golden numbers at {PATH}", allow_module_level=True)
ALL = {c["id"]: c for c in json.loads(PATH.read_text())["cases"] if c["id"].startswith("label.")}


class Same:
    """A grader to which equal texts are equal, and the given pairs."""

    def __init__(self, pairs=()):
        self.pairs = {frozenset(x) for x in pairs}

    def grade(self, replies, problems):
        right = [r == x.answer or frozenset((r, x.answer)) in self.pairs for r, x in zip(replies, problems)]
        return np.array(right, float), [r or None for r in replies]


def hearing(source, answers, heard, policies=("A", "B", "C"), me="A", signal=None, **options):
    """What `me` judges its rollouts by, whose texts are their answers: [P][G], None for no answer."""
    own = material(
        np.zeros((len(answers), len(answers[0]))), name=me, success=np.full((len(answers), len(answers[0])), -1)
    ).own
    own = dataclasses.replace(own, text=tuple(tuple(a or "" for a in group) for group in answers), signal=signal)
    return votes.Hearing(own, answers, heard, policies, source.Options(**options), Same())


@pytest.mark.parametrize("name", ALL)
def test_golden(name):
    """A case added to the file fails here until it is checked below."""
    case = ALL[name]
    near = lambda x: pytest.approx(np.asarray(x, float), abs=case["tolerance"], rel=0)
    CHECKS[name](case["inputs"], case["expected"], near)


def tie(x, expected, near):
    vote = votes.count([x["answers"]])
    labels = votes.elect(vote)
    assert labels.answers == (expected["winner"],) and labels.share == near([expected["share"]])
    assert max(vote.counts[0]) == expected["count"] and sum(vote.counts[0]) == expected["parseable"]


def none(x, expected, near):
    vote = votes.count([x["answers"]])
    assert votes.elect(vote).answers == (expected["winner"],)
    verdicts = self_vote.label(hearing(self_vote, [x["answers"]], {"A": vote}, n_vote=0))
    assert verdicts.reward == near([[expected["rewards_all"]] * 3])
    assert (verdicts.success == -1).all()
    adv, _ = group_advantages(verdicts.reward.ravel(), ["q"] * 3)
    assert adv == near([expected["advantages_all"]] * 3)


def identity(x, expected, near):
    same = votes.same_by(Same(x["equal_under_grader"]), material([[0.0]]).own.problems)
    assert votes.elect(votes.count([x["answers"]])).answers == (expected["string"],)
    assert votes.elect(votes.count([x["answers"]], same)).answers == (expected["grader"],)


def reward(x, expected, near):
    heard = {"C": votes.count([[x["label"]]])}
    assert peer_vote.label(hearing(peer_vote, [x["own_answers"]], heard)).reward == near([expected["rewards"]])
    # The same with a real grader, texts as models write them.
    own = material([[0.0] * 4]).own
    texts = [[a or "no idea" for a in x["own_answers"]]]
    with GraderPool("math", workers=1) as grader:
        labels = votes.Labels((x["label"],), np.ones(1))
        found = votes.judged(labels, texts, [x["own_answers"]], own.problems, grader)
    assert found.reward == near([expected["rewards"]])


def ring(x, expected, near):
    heard = {name: votes.count([[answer]]) for name, answer in x["winners"].items()}
    for name, answer in expected["label_for"].items():
        verdicts = peer_vote.label(hearing(peer_vote, [["1"]], heard, tuple(x["policies"]), name))
        assert verdicts.labels == (answer,)


def pooled(x, expected, near):
    cast = [votes.count([[a for a, n in x[side].items() for _ in range(n)]]) for side in ("votes_A", "votes_B")]
    assert [votes.elect(v).share[0] for v in cast] == near(expected["weights"])
    share = expected["score_y"] / (expected["score_x"] + expected["score_y"])
    heard = dict(zip("AB", cast))
    verdicts = pooled_vote.label(hearing(pooled_vote, [["x", "y"]], heard, ("A", "B")))
    assert verdicts.labels == (expected["winner"],) and verdicts.share == near([share])
    assert verdicts.reward == near([[0, 1]])


def strict(x, expected, near):
    vote = votes.count([x["answers"]])
    assert votes.elect(vote).share == near([expected["share"]])
    assert votes.elect(vote, x["min_share"]).answers == (expected["label"],)
    assert votes.elect(vote, x["min_share"] - 0.01).answers == ("a",)


def certainty(x, expected, near):
    padded = jnp.array([[*x["logits"], 50.0, 50.0]])  # ids that no token has do not count
    u = float(losses.confidence(padded, "self_certainty", temperature=0.7, real_vocab=3)[0])
    assert u == near(expected["u"]) and u - np.log(3) == near(expected["kl_uniform"])
    assert np.log(3) == near(expected["log_V"])
    assert self_certainty.label(hearing(self_certainty, [["1"]], {}, signal=np.array([[u]]))).reward == near(
        [[expected["u"]]]
    )


def negative_entropy(x, expected, near):
    padded = jnp.array([[*x["logits"], 50.0]])
    h = float(losses.confidence(padded, "entropy", temperature=0.7, real_vocab=3)[0])
    assert h == near(expected["entropy"])
    assert entropy.label(hearing(entropy, [["1"]], {}, signal=np.array([[h]]))).reward == near([[expected["reward"]]])


def schedule(x, expected, near):
    for preset, key in (("paper", "default_policy_weight"), ("script", "script_policy_weight")):
        options = teacher.Options(**teacher.PRESETS[preset])
        assert [teacher.policy_weight(options, t, x["T"]) for t in x["t"]] == near(expected[key])
    # The printed equation is another schedule, which is not ours: it ends with a teacher that stands still.
    printed = [1 - 0.0099 / 2 * (1 + np.cos(np.pi * t / x["T"])) for t in x["t"]]
    assert printed == near(expected["printed_equation_teacher_weight"])


def two_views(x, expected, near):
    both = [x["answers_original"], x["answers_rephrased"]]
    verdicts = self_vote.label(hearing(self_vote, both, {"A": votes.count(both)}, n_vote=0, views=2))
    assert verdicts.labels == (expected["label_for_original"], expected["label_for_rephrased"])
    assert verdicts.reward == near([expected["rewards_original"], expected["rewards_rephrased"]])


def with_sgt(x, expected, near):
    heard = {"B": votes.count([x["peer_answers"]])}
    own = peer_vote.label(hearing(peer_vote, [x["own_answers"]], heard, ("A", "B"), min_share=x["min_share"]))
    assert own.labels == (expected["label"],) and own.share == near([expected["share"]])
    assert (own.success == 1).sum() == expected["k_own"]
    theirs = votes.matching(
        own.labels, [x["peer_answers"]], [x["peer_answers"]], material([[0.0]]).own.problems, Same()
    )
    m = material(own.reward, [Peer(theirs)], sgt.Options(min_share=x["min_share"]), success=own.success)
    m = dataclasses.replace(m, verdicts=own)
    assert sgt.gate(m).tolist() == [expected["gate"]]
    right = sgt.successes(m)[0] & sgt.gate(m)[0]
    assert m.received.sample[right].tolist() == expected["certificate_pool"]
    assert sgt.chosen(m).sum() == 1 and sgt.chosen(m)[0][right].any()


CHECKS = {
    "label.vote.tie_first_seen": tie,
    "label.vote.none": none,
    "label.vote.identity": identity,
    "label.reward": reward,
    "label.ring": ring,
    "label.pooled_weighted": pooled,
    "label.strict_majority": strict,
    "label.self_certainty": certainty,
    "label.neg_entropy": negative_entropy,
    "label.corewarding2.schedule": schedule,
    "label.corewarding1": two_views,
    "label.corl_plus_sgt": with_sgt,
}


def test_every_check_has_its_case():
    assert set(CHECKS) == set(ALL)
