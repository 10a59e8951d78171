"""Several ways to learn, compared: arms × seeds on the same problems in the same order, and one report.

    python -m mutualrl.compare --config=configs/compare_demo.py --workdir=runs/compare [--config.seeds=0,1 ...]

The config file's `get_config()` returns a ConfigDict (made with `mutualrl.arms.comparison`) of

    base       a run, as `mutualrl.train` takes it; `--config.base.steps=50` works from the command line
    arms       name -> {dotted setting of the run: value}: what this arm does differently, and nothing else
    seeds      each arm is run with each of them; same seed: same models, problems and order in every arm
    jobs       runs at a time, each a process of its own; on Linux they share the cores evenly. On a CPU tiny models
               gain little from a second core: with one core each, two runs take not much longer than one with two. On
               accelerators leave it at 1: a process claims most of their memory
    baseline   the arm to which all others are compared
    contrasts  further comparisons, 'arm/against'

A value may hold `{other}`, the folder of the same seed's run of arm `other`, which is then finished first: with it an
arm listens to the log of another. `policies.<new>` with {'like': 'qwen', 'frozen': True, ...} adds a policy that has
the model and the settings of another but for those given.

Each run is in `<workdir>/<arm>/<seed>`, with its `log.txt`. The same command again skips finished runs, takes up
unfinished ones, tries failed ones again, and writes the report anew: `compare.json` and `report.html`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from mutualrl import command_line
from mutualrl.arms import MODELS, Comparison, is_finished, plan
from mutualrl.config import ConfigError
from mutualrl.processes import Job, run_jobs


def run_part(compared: Comparison, part: str) -> None:
    """What one of the processes does: makes the models of a seed, or trains one run."""
    name, _, digest = part.partition(":")
    if digest != compared.digest:
        raise ConfigError("the config file has changed since the comparison was started; start it again")
    arm, _, seed = name.partition("/")
    here = [r for r in compared.runs if r.seed == int(seed) and arm in (r.arm, MODELS)]
    planned = here[0]
    run = planned.run
    if run.warmup:
        from mutualrl.warmup import ensure_models

        run = ensure_models(run)
    if arm == MODELS:
        return
    from mutualrl.train import train

    policies = dict(run.policies)
    for new, like in planned.copies.items():
        policies[new] = dataclasses.replace(policies[new], model=policies[like].model)
    train(dataclasses.replace(run, policies=policies), planned.folder)


def run_everything(compared: Comparison, argv: Sequence[str]) -> dict[str, str]:
    """Runs what is not finished yet.

    Args:
      argv: this command line, which the processes are given too.

    Returns:
      run -> what went wrong; empty if all are finished.

    Raises:
      ConfigError: some folder holds another run; nothing has been started.
    """
    finished = {r.name for r in compared.runs if is_finished(r)}
    todo = [r for r in compared.runs if r.name not in finished]
    compared.workdir.mkdir(parents=True, exist_ok=True)

    def command(name: str) -> list[str]:
        return [sys.executable, "-m", "mutualrl.compare", *argv[1:], f"--part={name}:{compared.digest}"]

    # Every run compiles the same programs: found again, they cost half a minute less a run on a CPU.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str((compared.workdir / "compiled").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    options = {"slots": compared.jobs, "env": {**cache, **os.environ}}
    seeds = sorted({r.seed for r in todo if r.run.warmup})
    made = [Job(n, tuple(command(n)), compared.workdir / n) for n in (f"{MODELS}/{s}" for s in seeds)]
    failed = run_jobs(made, title="Warm-ups", **options) if made else {}
    jobs = [
        Job(
            r.name,
            tuple(command(r.name)),
            r.folder,
            needs=(*(f"{a}/{r.seed}" for a in r.needs), *((f"{MODELS}/{r.seed}",) if r.run.warmup else ())),
            steps=r.run.steps,
            weight=r.rollouts_per_step,
            result="summary.json",
        )
        for r in todo
    ]
    done = finished | {j.name for j in made if j.name not in failed}
    if finished:
        print(f"{len(finished)} of {len(compared.runs)} runs are finished already", file=sys.stderr)
    return failed | run_jobs(jobs, title=f"{len(jobs)} runs, rollouts", done=done, **options)


def read_command_line(argv: Sequence[str]) -> tuple[Comparison, str]:
    """The comparison of a command line, and which part of it this process is to do ('' for all).

    Raises:
      ConfigError: a flag, file, setting or value is wrong; the message is one line.
    """
    config, workdir, part = command_line.parse(argv, internal="part")
    return plan(config, workdir), part


def report(compared: Comparison, failed: Mapping[str, str]) -> None:
    """Collects what is finished, writes compare.json and report.html, and prints the tables."""
    from mutualrl.analysis import comparison_report
    from mutualrl.analysis.comparison import collect

    folders = {a: {r.seed: r.folder for r in compared.runs if r.arm == a} for a in compared.arms}
    found = collect(folders, baseline=compared.baseline, contrasts=compared.contrasts, failed=failed)
    comparison_report.write(found, compared.workdir)
    comparison_report.show(found, compared.workdir)


def main() -> None:
    """Command line."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds, which ends the processes
    try:
        compared, part = read_command_line(sys.argv)
        if part:
            return run_part(compared, part)
        failed = run_everything(compared, sys.argv)
        report(compared, failed)
    except ConfigError as error:
        sys.exit(f"config: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
    for name, reason in failed.items():
        print(f"\n{name} failed: {reason}", file=sys.stderr)
    if failed:
        sys.exit("\nsomething failed; the same command tries it again")


if __name__ == "__main__":
    main()
