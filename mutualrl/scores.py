"""The log-probs that a step needs besides sampling: under the snapshot at its start, and under the KL reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mutualrl import batches
from mutualrl.assembly import shaped_reward
from mutualrl.policy import Policy
from mutualrl.types import Batch, Rollouts, Verdicts


class Scores:
    """Scoring in one step, for all policies together.

    Attributes:
      tokens: completion tokens scored so far, by policy.
    """

    def __init__(self, cohort: Sequence[Policy]):
        """Takes the policies that may have to score."""
        self._policies = {p.name: p for p in cohort}
        self.tokens = dict.fromkeys(self._policies, 0)

    def of(self, rows: Mapping[str, Batch], *, reference: bool = False) -> dict[str, np.ndarray]:
        """Log-probs f32[B, T] of rows by policy, under its present (or its reference) parameters.

        Every policy is set to work before the first result is waited for.
        """
        pending = {name: self._policies[name].score(batch, reference=reference) for name, batch in rows.items()}
        for name, batch in rows.items():
            self.tokens[name] += int(batch.mask.sum())
        return {name: work.result().logp for name, work in pending.items()}


def shaped_rewards(
    scores: Scores, cohort: Sequence[Policy], rollouts: Mapping[str, Rollouts], verdicts: Mapping[str, Verdicts]
) -> dict[str, np.ndarray]:
    """f64[P, G] rewards of every policy with its own shaping; only the KL in the reward needs scoring."""
    rows = {
        p.name: batches.own_rows(rollouts[p.name], p.index)
        for p in cohort
        if p.config.kl_in_reward and p.config.kl_coef and not p.config.frozen
    }
    old, ref = scores.of(rows), scores.of(rows, reference=True)
    return {
        p.name: shaped_reward(rollouts[p.name], verdicts[p.name], p.config, old.get(p.name), ref.get(p.name))
        for p in cohort
    }


def complete(scores: Scores, built: Mapping[str, Sequence[Batch]]) -> dict[str, list[Batch]]:
    """The batches of a step with the log-probs that only the policy can give, before any update is made.

    With one update a step the snapshot is the policy being updated, so the ratio is 1 without a forward pass. With
    several, the surrogate's rows whose ratio is to the learner itself get its log-probs as they are now. Rows of the KL
    term get those of the reference. No other row is scored.
    """
    out = {name: list(rows) for name, rows in built.items()}
    to_self = {name: [(b.surr_weight != 0) & b.denom_self for b in rows] for name, rows in out.items() if len(rows) > 1}
    anchored = {name: [b.kl_weight != 0 for b in rows] for name, rows in out.items()}
    for chosen, reference, fill in (
        (to_self, False, batches.with_snapshot),
        (anchored, True, batches.with_reference),
    ):
        asked = {
            name: batches.join(*(batches.take(b, w) for b, w in zip(out[name], rows)))
            for name, rows in chosen.items()
            if any(w.any() for w in rows)
        }
        for name, logp in scores.of(asked, reference=reference).items():
            parts = np.split(logp, np.cumsum([w.sum() for w in chosen[name]])[:-1])
            out[name] = [fill(*x) for x in zip(out[name], chosen[name], parts)]
    return out
