"""Who hears whom: the sources of a cohort and the edges of its topology. Host-side; no records here."""

from __future__ import annotations

import dataclasses

from mutualrl.settings import ConfigError, RunConfig

TOPOLOGIES = ("all_to_all", "ring", "pairs", "star", "explicit")
LIVE, FROZEN, LOG = "live", "frozen", "log"


@dataclasses.dataclass(frozen=True)
class Source:
    """Somebody whose records can be heard.

    Attributes:
      index: policies of the run first, in their order, then logs by name.
      name: of the policy, or of the log.
      kind: LIVE (trained in this run), FROZEN (samples, never updated; its records never age) or LOG (read from disk).
    """

    index: int
    name: str
    kind: str


def sources(run: RunConfig) -> tuple[Source, ...]:
    """All sources of a run, by index."""
    kinds = [(name, FROZEN if p.frozen else LIVE) for name, p in run.policies.items()]
    kinds += [(name, LOG) for name in sorted(run.exchange.logs)]
    return tuple(Source(i, name, kind) for i, (name, kind) in enumerate(kinds))


def edges(run: RunConfig) -> dict[str, tuple[Source, ...]]:
    """The sources that each trained policy hears, by index.

    With every topology but `explicit`, a log is heard by all trained policies.

      all_to_all: every other policy · ring: the predecessor, cyclic · pairs: 1st and 2nd, 3rd and 4th, … of the
      policies hear each other · star: the first hears all, the others hear the first · explicit: `exchange.edges`

    Raises:
      ConfigError: an edge names no source or no trained policy.
    """
    found = sources(run)
    names = list(run.policies)
    n, topology = len(names), run.exchange.topology
    pairs: list[tuple[str, str]] = []
    if topology == "explicit":
        pairs = [_edge(e, {s.name for s in found}, run) for e in run.exchange.edges]
    else:
        for i, name in enumerate(names):
            for j, other in enumerate(names):
                hears = {
                    "all_to_all": i != j,
                    "ring": n > 1 and j == (i - 1) % n,
                    "pairs": j == i ^ 1,
                    "star": i != j and 0 in (i, j),
                }[topology]
                pairs += [(other, name)] if hears else []
            pairs += [(log, name) for log in run.exchange.logs]
    trained = [name for name, p in run.policies.items() if not p.frozen]
    return {name: tuple(s for s in found if (s.name, name) in pairs) for name in trained}


def voters(run: RunConfig, votes: str) -> dict[str, tuple[Source, ...]]:
    """The other policies whose votes each policy needs for its labels, by index; empty where nobody's cross.

    Args:
      votes: as `labels.Needs` has it. `predecessor`: the policy before it in the order of the config, cyclic.
    """
    found, n = sources(run)[: len(run.policies)], len(run.policies)
    if votes == "predecessor":
        return {s.name: (found[(s.index - 1) % n],) for s in found}
    if votes == "all":
        return {s.name: tuple(x for x in found if x is not s) for s in found}
    return {}


def _edge(edge: str, names: set[str], run: RunConfig) -> tuple[str, str]:
    source, arrow, learner = (x.strip() for x in str(edge).partition("->"))
    if not arrow or source not in names:
        raise ConfigError(
            f"exchange.edges={edge!r}: must be source->learner, the source one of {', '.join(sorted(names))}"
        )
    if learner not in run.policies or run.policies[learner].frozen or source == learner:
        trained = [name for name, p in run.policies.items() if not p.frozen and name != source]
        raise ConfigError(f"exchange.edges={edge!r}: the learner must be one of {', '.join(trained)}")
    return source, learner


def check(run: RunConfig) -> None:
    """Refuses a topology that does not go with the run's policies.

    Raises:
      ConfigError.
    """
    for name in run.exchange.logs:
        if name in run.policies or not name.isidentifier():
            raise ConfigError(f"exchange.logs.{name}: must be a name of its own, of letters, digits and _")
    if run.exchange.topology == "explicit" and not run.exchange.edges:
        raise ConfigError("exchange.edges=(): the explicit topology needs some, as 'source->learner'")
    if run.exchange.edges and run.exchange.topology != "explicit":
        raise ConfigError(f"exchange.edges={run.exchange.edges}: only with topology 'explicit'")
    if run.exchange.topology == "pairs" and len(run.policies) % 2:
        raise ConfigError(f"exchange.topology='pairs': needs an even number of policies, not {len(run.policies)}")
    heard = {s.name for found in edges(run).values() for s in found}
    if unheard := sorted(set(run.exchange.logs) - heard):
        raise ConfigError(f"exchange.logs.{unheard[0]}: no edge starts at it; add '{unheard[0]}->learner' to edges")
