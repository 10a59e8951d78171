"""Finished runs, read from their folders."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags

from mutualrl.accuracy import pass_at_k
from mutualrl.settings import ConfigError


class Run:
    """What a finished run left in its folder.

    Attributes:
      arm, seed: what it is called in a comparison.
      summary: of summary.json. ids, kinds: of the N held-out problems. samples: rollouts a problem.
      right: step -> policy -> i64[N] right samples; steps ascending. judged: bool[N] problems that could be judged in
      every evaluation. wrong: step -> policy -> N lists of the wrong samples' answers, None where there is none; a step
      that was noted without them is absent. lines: of metrics.jsonl.
    """

    def __init__(self, arm: str, seed: int, folder: Path):
        """Raises OSError, ValueError or KeyError where something is missing or damaged."""
        self.arm, self.seed, self.folder = arm, seed, folder
        self.summary = json.loads((folder / "summary.json").read_text())
        self.config = self.summary["config"]
        held_out = json.loads((folder / "held_out.json").read_text())
        self.ids, self.samples = held_out["problems"], held_out["samples"]
        self.kinds = np.array(held_out["kinds"])
        steps = sorted(held_out["steps"], key=int)
        self.right = {int(s): {p: np.array(c) for p, c in held_out["steps"][s].items()} for s in steps}
        self.judged = np.all([c >= 0 for by_policy in self.right.values() for c in by_policy.values()], axis=0)
        self.wrong = {int(s): by_policy for s, by_policy in held_out.get("wrong", {}).items()}
        self.lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def policies(self) -> list[str]:
        """Those that are trained."""
        return [name for name, p in self.config["policies"].items() if not p["frozen"]]

    @property
    def label(self) -> str:
        """Name of the label source; older folders have nothing but the name."""
        label = self.config["label"]
        return label if isinstance(label, str) else label["name"]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps i64[n] and values f64[n] of a metric, where there are any."""
        found = [(x["step"], x[name]) for x in self.lines if name in x]
        return np.array([s for s, _ in found], np.int64), np.array([v for _, v in found], np.float64)

    def use(self, kinds: Sequence[str]) -> np.ndarray:
        """bool[N] problems of these kinds that could be judged."""
        return np.isin(self.kinds, kinds) & self.judged

    def passed(
        self, step: int, policy: str, kinds: Sequence[str], k: int = 1, use: np.ndarray | None = None
    ) -> np.ndarray:
        """f64[n] pass@k of each problem of these kinds, or of those to `use`."""
        return pass_at_k(self.samples, self.right[step][policy][self.use(kinds) if use is None else use], k)


def open_runs(folders: Sequence[str]) -> dict[str, Run]:
    """Runs by the part of their folders' paths that tells them apart.

    Raises:
      ConfigError: none or one of them twice is given, or a folder holds no finished, evaluated run.
    """
    if not folders:
        raise ConfigError("RUN is missing: the folder of a finished run, or several")
    paths = [Path(f).expanduser().resolve() for f in folders]
    for folder, path in zip(folders, paths):
        if paths.count(path) > 1:
            raise ConfigError(f"RUN={folder}: is given twice")
    common = Path(os.path.commonpath([p.parent for p in paths]))
    out = {}
    for folder, path in zip(folders, paths):
        name = path.relative_to(common).as_posix()
        try:
            out[name] = Run(name, 0, path)
        except (OSError, ValueError, KeyError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(
                f"RUN={folder}: must be the folder of a finished run with held-out problems ({why})"
            ) from (error)
    return out


def parse(argv: Sequence[str], out: str) -> tuple[dict[str, Run], Path]:
    """The runs of `RUN [RUN ...] [--out=PREFIX]`, and what the names of the files to write begin with.

    Raises:
      ConfigError: a flag, a folder or the place to write to is wrong; the message is one line.
    """
    values = flags.FlagValues()
    flags.DEFINE_string("out", out, "what the names of the files begin with", flag_values=values)
    try:
        folders = values(list(argv))[1:]
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from error
    prefix = Path(values["out"].value).expanduser()
    if not prefix.name or not prefix.parent.is_dir() or not os.access(prefix.parent, os.W_OK):
        raise ConfigError(f"out={values['out'].value!r}: must begin with a folder that can be written to")
    return open_runs(folders), prefix
