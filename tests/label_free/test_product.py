"""Every label source with every transfer regime: it takes steps, or is refused before anything is loaded."""

import itertools
import pkgutil

import numpy as np
import pytest

from mutualrl import labels, transfer
from mutualrl.cohort import build, prepare
from mutualrl.config import ConfigError, read, regime, transfer_options
from mutualrl.exchange import Exchange
from mutualrl.labelling import Labelling
from mutualrl.meshes import make_plan
from mutualrl.rewards.workers import GraderPool
from mutualrl.sharing import Sharing
from mutualrl.train import train_step

VOTES = ("peer_vote", "pooled_vote", "self_vote", "teacher")
REAL = ("self_certainty", "entropy")  # real numbers, on a scale of its own in every vocabulary
LABELS = ("verifier", *VOTES, *REAL)
# What rewards that are neither right nor wrong go with: own groups alone (none, distill), and PRP where each policy is
# normalised alone, which is not its default. Pooled rewards have no common scale, and successes are not told.
REAL_GOES_WITH = {
    "none": True, "distill": True,
    "xgrpo": False, "prp": False, "hacpo": False, "luffy": False,  # pool or compare rewards of several policies
    "sgt": False, "graft": False, "ampo": False, "sft": False,  # take over what is right
}  # fmt: skip
PAIRS = [pair for pair in itertools.product(LABELS, REAL_GOES_WITH) if pair[0] not in REAL or REAL_GOES_WITH[pair[1]]]
REFUSED = [pair for pair in itertools.product(REAL, REAL_GOES_WITH) if not REAL_GOES_WITH[pair[1]]]
OPTIONS = {"self_vote": dict(n_vote=4), "teacher": dict(n_vote=4, start=0.3)}
TRANSFER = {"prp": dict(variant="prp_thl"), "sgt": dict(min_share=0.4), "graft": dict(floor=0.0, balance=False)}
OF_VOTES = ("label/missing", "label/share", "label/acc", "label/reward_acc")


@pytest.fixture
def pair(settings):
    """Settings of a pair."""
    return lambda label, name, **more: settings(
        label, name, **{"options": OPTIONS.get(label), "transfer": TRANSFER.get(name), **more}
    )


def check_metrics(label, name, found):
    """Metrics of a policy that has learnt a step."""
    assert np.isfinite(found["loss"]) and found["skipped_updates"] == 0
    assert found["tokens/trained"] > 0 or name == "sft"  # which has nothing to imitate in some steps
    assert all(np.isfinite(v) for v in found.values())
    if label in VOTES:
        assert set(OF_VOTES[:2]) <= found.keys()
    else:
        assert not set(OF_VOTES) & found.keys()
    if name == "xgrpo":  # the sums that peers send are of what their own labels say
        assert (found.get("transfer/sender_verdicts") == 1) == (label in VOTES)


def test_the_table_has_every_source_and_every_regime():
    assert {m.name for m in pkgutil.iter_modules(labels.__path__)} == set(LABELS)
    assert {m.name for m in pkgutil.iter_modules(transfer.__path__)} == set(REAL_GOES_WITH)


@pytest.mark.parametrize("label, name", REFUSED)
def test_a_pair_that_cannot_work_is_refused_by_both_names(pair, label, name):
    with pytest.raises(ConfigError) as error:
        read(pair(label, name))
    says = str(error.value)
    assert repr(label) in says and repr(name) in says and "\n" not in says
    assert ("scales differ" if name in ("xgrpo", "prp", "hacpo", "luffy") else "counts successes") in says


@pytest.mark.parametrize("name", REAL_GOES_WITH)
def test_every_other_pair_takes_a_step(pair, name):
    """One cohort for all sources: only what belongs to the labels is made anew."""
    policy = dict(kl_coef=0.0)
    scoped = dict(TRANSFER, prp=dict(variant="prp_thl", scope="per_policy")).get(name)
    first = read(pair("teacher", name, policy=policy))
    plan = make_plan(first.policies, first.plan)
    with GraderPool("exact") as grader:
        problems, _, opened, _ = prepare(first, grader)
        cohort = build(first, opened, plan)
        done = []
        for label in LABELS:
            if (label, name) in REFUSED and name != "prp":
                continue
            run = read(pair(label, name, policy=policy, transfer=scoped if label in REAL else TRANSFER.get(name)))
            exchange = Exchange(run, regime(run).topics(transfer_options(run)), run_id=label, folder=None)
            labelling = Labelling(run, cohort, exchange, grader)
            found = train_step(
                0, cohort, problems[:2], labelling, regime(run), Sharing(run, cohort, labelling, exchange)
            )
            for who in ("ann", "ben"):
                check_metrics(label, name, found[who])
            done.append(label)
    assert done == [x for x in LABELS if x in ("verifier", *VOTES) or name in ("none", "distill", "prp")]


QUICK = [("peer_vote", "prp"), ("entropy", "none")]


@pytest.mark.parametrize("label, name", [pytest.param(*x, marks=() if x in QUICK else pytest.mark.slow) for x in PAIRS])
def test_every_other_pair_runs_five_steps(pair, finish, tmp_path, label, name):
    policy = dict(kl_coef=0.01 if label == "teacher" and name != "sft" else 0.0)
    found = finish(pair(label, name, policy=policy, steps=5), tmp_path)
    assert [x["step"] for x in found.lines] == [1, 2, 3, 4, 5]
    assert sum(x["ann/tokens/trained"] + x["ben/tokens/trained"] for x in found.lines) > 0
    for line in found.lines:
        for who in ("ann", "ben"):
            check_metrics(label, name, {k.removeprefix(f"{who}/"): v for k, v in line.items() if k.startswith(who)})


@pytest.mark.slow
@pytest.mark.parametrize("label", REAL)
def test_real_rewards_run_with_prp_where_each_policy_is_normalised_alone(pair, finish, tmp_path, label):
    found = finish(pair(label, "prp", transfer=dict(variant="prp_thl", scope="per_policy"), steps=5), tmp_path)
    assert sum(x["ann/peer_rows"] + x["ben/peer_rows"] for x in found.lines) > 0
