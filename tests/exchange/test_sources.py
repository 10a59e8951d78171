"""Who hears whom: every topology for one to four policies, frozen policies, logs, explicit edges, refusals."""

import pytest

from mutualrl import sources
from mutualrl.settings import ConfigError, ExchangeConfig, LogSource, PolicyConfig, RunConfig
from mutualrl.sources import FROZEN, LIVE, LOG, Source


def run(names="ab", frozen="", logs=(), **exchange):
    return RunConfig(
        policies={n: PolicyConfig(model="m", frozen=n in frozen) for n in names},
        data={"name": "procedural"},
        exchange=ExchangeConfig(logs={n: LogSource("folder", "x") for n in logs}, **exchange),
    )


def heard(*args, **kwargs):
    """Learner -> names of what it hears, joined."""
    return {learner: "".join(s.name for s in found) for learner, found in sources.edges(run(*args, **kwargs)).items()}


# Written down by hand from the definitions of the topologies.
TABLE = {
    ("all_to_all", 1): {"a": ""},
    ("all_to_all", 2): {"a": "b", "b": "a"},
    ("all_to_all", 3): {"a": "bc", "b": "ac", "c": "ab"},
    ("all_to_all", 4): {"a": "bcd", "b": "acd", "c": "abd", "d": "abc"},
    ("ring", 1): {"a": ""},
    ("ring", 2): {"a": "b", "b": "a"},
    ("ring", 3): {"a": "c", "b": "a", "c": "b"},
    ("ring", 4): {"a": "d", "b": "a", "c": "b", "d": "c"},
    ("pairs", 2): {"a": "b", "b": "a"},
    ("pairs", 4): {"a": "b", "b": "a", "c": "d", "d": "c"},
    ("star", 1): {"a": ""},
    ("star", 2): {"a": "b", "b": "a"},
    ("star", 3): {"a": "bc", "b": "a", "c": "a"},
    ("star", 4): {"a": "bcd", "b": "a", "c": "a", "d": "a"},
}


@pytest.mark.parametrize("topology,n", TABLE)
def test_topologies(topology, n):
    assert heard("abcd"[:n], topology=topology) == TABLE[topology, n]
    sources.check(run("abcd"[:n], topology=topology))


def test_a_frozen_policy_is_heard_and_hears_nobody():
    assert heard("abc", frozen="b") == {"a": "bc", "c": "ab"}
    assert heard("abc", frozen="b", topology="ring") == {"a": "c", "c": "b"}


def test_sources_are_policies_in_their_order_then_logs_by_name():
    assert sources.sources(run("ba", frozen="a", logs=("y", "x"))) == (
        Source(0, "b", LIVE),
        Source(1, "a", FROZEN),
        Source(2, "x", LOG),
        Source(3, "y", LOG),
    )


def test_every_trained_policy_hears_the_logs():
    assert heard("abc", frozen="c", logs=("y", "x"), topology="ring") == {"a": "cxy", "b": "axy"}
    assert heard("a", logs=("x",)) == {"a": "x"}


def test_explicit_edges_are_heard_by_index():
    edges = ("x->a", "c -> a", "b->a", "a->c")
    assert heard("abc", logs=("x",), topology="explicit", edges=edges) == {"a": "bcx", "b": "", "c": "a"}


@pytest.mark.parametrize(
    "settings,field,allowed",
    [
        (dict(topology="explicit", edges=("z->a",)), "exchange.edges='z->a'", "a, b, l"),
        (dict(topology="explicit", edges=("a",)), "exchange.edges='a'", "source->learner"),
        (dict(topology="explicit", edges=("a->l",)), "exchange.edges='a->l'", "must be one of b"),
        (dict(topology="explicit", edges=("b->b",)), "exchange.edges='b->b'", "must be one of a"),
        (dict(topology="explicit"), "exchange.edges=()", "source->learner"),
        (dict(edges=("a->b",)), "exchange.edges=('a->b',)", "'explicit'"),
    ],
)
def test_refused(settings, field, allowed):
    with pytest.raises(ConfigError) as e:
        sources.check(run("ab", logs=("l",), **settings))
    assert str(e.value).startswith(field) and allowed in str(e.value) and "\n" not in str(e.value)


def test_a_frozen_learner_is_refused():
    with pytest.raises(ConfigError, match="must be one of a"):
        sources.check(run("abc", frozen="c", topology="explicit", edges=("b->c",)))


@pytest.mark.parametrize("n", [1, 3])
def test_pairs_need_an_even_number(n):
    with pytest.raises(ConfigError, match=f"'pairs'.* even number of policies, not {n}"):
        sources.check(run("abc"[:n], topology="pairs"))


@pytest.mark.parametrize("name", ["a", "not a name"])
def test_a_log_needs_a_name_of_its_own(name):
    with pytest.raises(ConfigError, match="a name of its own"):
        sources.check(run("ab", logs=(name,)))
