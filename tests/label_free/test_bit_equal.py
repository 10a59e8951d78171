"""Without ground truth in the rewards, gold answers may be anything: the trained policies are the same bit for bit."""

import pytest

RUNS = {
    "peer_vote": ("peer_vote", {}),
    "peer_vote by grader": ("peer_vote", dict(options=dict(vote_identity="grader"))),
    "peer_vote, sgt": ("peer_vote", dict(regime="sgt", transfer=dict(min_share=0.4), problems_per_step=4)),
    "peer_vote, graft": (
        "peer_vote",
        dict(regime="graft", transfer=dict(floor=0.0, balance=False), problems_per_step=4),
    ),
    "pooled_vote": ("pooled_vote", {}),
    "self_vote": ("self_vote", dict(options=dict(n_vote=8))),
    "self_vote, two views": ("self_vote", dict(options=dict(n_vote=0, views=2))),
    "self_certainty": ("self_certainty", {}),
    "entropy": ("entropy", dict(options=dict(penalise_unparseable=True))),
    "teacher": ("teacher", dict(options=dict(n_vote=8, start=0.3), policy=dict(kl_coef=0.1))),
}
LEARNT_FROM_PEERS = {"sgt": "transfer/certificates", "graft": "peer_rows"}


@pytest.mark.parametrize("name", RUNS)
def test_gold_answers_move_no_bit(finished, name):
    label, more = RUNS[name]
    right, wrong = (finished(label, **more, gold=gold) for gold in ("right", "wrong"))
    assert set(right.states) == {"ann", "ben"} and right.states == wrong.states
    for policy in right.states:  # both learn something, or nothing was shown
        assert sum(x[f"{policy}/grad_norm"] for x in right.lines) > 0
    if "regime" in more:
        key = LEARNT_FROM_PEERS[more["regime"]]
        assert sum(x.get(f"{policy}/{key}", 0) for x in right.lines for policy in right.states) > 0
    for a, b in zip(right.lines, wrong.lines):  # only what tells how good labels are may differ
        assert a.keys() == b.keys()
        told = {k.partition("/")[2] for k in a if a[k] != b[k]}
        assert told <= {"label/acc", "label/reward_acc", "wrong_consensus"}, told


def test_unacceptable_and_absent_gold_answers_move_no_bit(finished):
    """They drop no problem either."""
    right, mixed = (finished("peer_vote", gold=gold) for gold in ("right", "mixed"))
    assert right.states == mixed.states


def test_gold_answers_are_all_that_a_verifier_goes_by(finished):
    """The control: these wrong answers do move what they may move."""
    right, wrong = (finished("verifier", gold=gold) for gold in ("right", "wrong"))
    for policy in ("ann", "ben"):
        assert right.states[policy] != wrong.states[policy]
