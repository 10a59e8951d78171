"""The order in which problems are asked, and how a run takes it up again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mutualrl.types import Problem


def fingerprint(problems: Sequence[Problem]) -> str:
    """32 hex digits that change with the order of problems and any one's fields, `extra`, source and kind apart."""
    digest = hashlib.blake2b(digest_size=16)
    for p in problems:
        fields = (p.id, p.question, p.answer, list(p.choices), list(p.images), list(p.views), p.prompt)
        digest.update(json.dumps(fields).encode() + b"\n")
    return digest.hexdigest()


class ProblemStream:
    """An endless, shuffled stream of problems.

    The order of an epoch is a permutation that depends on (seed, epoch) alone: not on the number of processes, nor on
    how many problems were asked for at a time, save that a call that crosses into a new epoch puts off the problems it
    has already handed out (they come first in the next call). Each problem comes once an epoch.
    """

    def __init__(self, problems: Sequence[Problem], seed: int = 0):
        if not problems:
            raise ValueError("a problem stream needs at least one problem")
        self.problems = list(problems)
        self.fingerprint = fingerprint(self.problems)
        self._seek(seed, 0, 0, [])

    def __len__(self) -> int:
        """Problems an epoch."""
        return len(self.problems)

    def _seek(self, seed: int, epoch: int, index: int, put_off: list[int]) -> None:
        self.seed, self.epoch, self.index, self._put_off = seed, epoch, index, put_off
        self._order = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch)))).permutation(
            len(self.problems)
        )

    def next(self, n: int) -> list[Problem]:
        """The next n problems; none of them twice unless n exceeds the number of problems."""
        out: list[int] = []
        while len(out) < n:
            out += self._take(min(n - len(out), len(self)))
        return [self.problems[i] for i in out]

    def _take(self, n: int) -> list[int]:
        taken, self._put_off = self._put_off[:n], self._put_off[n:]
        seen = set(taken)
        while len(taken) < n:
            if self.index == len(self):
                self._seek(self.seed, self.epoch + 1, 0, self._put_off)
            i = int(self._order[self.index])
            self.index += 1
            if i in seen:
                self._put_off.append(i)
            else:
                taken.append(i)
                seen.add(i)
        return taken

    def state(self) -> dict[str, Any]:
        """Where the stream stands, fit for JSON: fingerprint, seed, epoch, index and the problems put off."""
        return {
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "epoch": self.epoch,
            "index": self.index,
            "put_off": list(self._put_off),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken, under the seed of that run; ValueError if it was taken on other data."""
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"the data set is not the one of the checkpoint (fingerprint {self.fingerprint}, "
                f"checkpoint {state['fingerprint']}): its place in the data means nothing here"
            )
        self._seek(int(state["seed"]), int(state["epoch"]), int(state["index"]), [int(i) for i in state["put_off"]])
