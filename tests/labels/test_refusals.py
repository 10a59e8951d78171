"""Label sources and transfer regimes that do not go together, and settings of sources that cannot work, are refused
when a config is read, in one line."""

import pytest

from mutualrl.config import ConfigError, add_policy, base_config, read, use_label, use_transfer

VOTES = ("peer_vote", "pooled_vote", "self_vote", "teacher")
OWN_SCALE = ("self_certainty", "entropy")
REGIMES = {
    "none": {}, "xgrpo": {}, "prp": {"variant": "prp_thl"}, "sgt": {}, "graft": {}, "hacpo": {}, "distill": {},
}  # fmt: skip
REFUSED = ("xgrpo", "prp", "sgt", "graft", "hacpo")  # with rewards that tell nothing of right and wrong


def config(label, regime="none", policies=("a", "b"), grader="math", **options):
    """A config with the source and regime, each with the objective that it was published with."""
    c = base_config()
    for name in policies:
        add_policy(c, name, model="x")
    use_label(c, label, **options)
    use_transfer(c, regime, **REGIMES[regime])
    c.grader = grader
    c.policy.group_size = 8
    return c


def refusal(c):
    with pytest.raises(ConfigError) as error:
        read(c)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("label", ("verifier", *VOTES, *OWN_SCALE))
def test_the_product_of_sources_and_regimes(label, regime):
    c = config(label, regime)
    if label in OWN_SCALE and regime in REFUSED:
        says = refusal(c)
        assert says.startswith(f"transfer.name={regime!r}: does not go with label {label!r}, whose rewards only")
        assert says.split(": ")[-1]  # the reason
    else:
        run = read(c)
        assert (run.label["name"], run.transfer["name"]) == (label, regime)


@pytest.mark.parametrize("label", OWN_SCALE)
def test_the_refusal_of_prp_says_what_would_work(label):
    c = config(label, "prp")
    assert refusal(c).endswith("set transfer.prp.scope='per_policy'")
    c.transfer.prp.scope = "per_policy"
    assert read(c).transfer["scope"] == "per_policy"


@pytest.mark.parametrize("label", VOTES)
@pytest.mark.parametrize("grader", ("reasoning_gym",))
def test_votes_need_a_grader_that_compares_answers(label, grader):
    says = refusal(config(label, grader=grader))
    assert says.startswith(f"grader={grader!r}: does not compare an answer with a label, as label {label!r} needs")
    assert says.endswith("allowed are choice, code, exact, math")


@pytest.mark.parametrize("label", VOTES)
def test_settings_of_votes(label):
    where = f"label.{label}"
    assert refusal(config(label, vote_identity="sound")) == f"{where}.vote_identity='sound': allowed are string, grader"
    assert refusal(config(label, min_share=1.5)) == f"{where}.min_share=1.5: must be at least 0 and at most 1"
    assert refusal(config(label, min_share=-0.1)).startswith(f"{where}.min_share=-0.1: must be at least 0")
    for min_share in (0.0, 1.0):
        read(config(label, min_share=min_share, vote_identity="grader"))


def test_a_policy_alone_has_no_peer():
    assert refusal(config("peer_vote", policies=("a",))).startswith("label.name='peer_vote': needs at least two")
    says = refusal(config("pooled_vote", policies=("a",), exclude_self=True))
    assert says.startswith("label.pooled_vote.exclude_self=True: nobody is left to vote")
    for label in ("pooled_vote", "self_vote", "teacher"):
        read(config(label, policies=("a",)))


def test_settings_of_self_vote():
    says = refusal(config("self_vote", n_vote=4))
    assert says == "label.self_vote.n_vote=4: must be 0 or at least policies.a.group_size=8"
    for n_vote in (0, 8):
        read(config("self_vote", n_vote=n_vote))
    assert refusal(config("self_vote", n_vote=-1)).startswith("label.self_vote.n_vote=-1: must be 0 or at least")
    assert refusal(config("self_vote", views=3)) == "label.self_vote.views=3: allowed are 1, 2"
    c = config("self_vote", views=2, n_vote=0)
    read(c)
    c.policies.b.view = 1
    assert refusal(c) == "policies.b.view=1: must be 0 with label.self_vote.views=2"


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("n_vote", 0, "must be at least 1"),
        ("every", 0, "must be at least 1"),
        ("start", 1.5, "must be at least 0 and at most 1"),
        ("end", -0.1, "must be at least 0 and at most 1"),
    ],
)
def test_settings_of_a_teacher(field, value, says):
    assert refusal(config("teacher", **{field: value})) == f"label.teacher.{field}={value!r}: {says}"
