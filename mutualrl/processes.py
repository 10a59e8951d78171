"""Jobs as processes: several at a time, each after those it needs, on cores of its own; a failed one stops no other."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mutualrl.report import Progress

POLL_S = 0.5
TAIL_LINES = 12  # of the log of a job that failed


@dataclasses.dataclass(frozen=True)
class Job:
    """A command and what it is part of.

    Attributes:
      name: unique.
      command: argv of the process.
      folder: has its `log.txt`, and the `metrics.jsonl` from which progress is read.
      needs: names of jobs that must be done first.
      steps: steps in all, the last one's number in metrics.jsonl. 0: the job counts as one step.
      weight: what a step costs, relative to those of other jobs.
      result: file in the folder without which the job has failed, whatever its exit status.
    """

    name: str
    command: Sequence[str]
    folder: Path
    needs: tuple[str, ...] = ()
    steps: int = 0
    weight: int = 1
    result: str = ""

    @property
    def units(self) -> int:
        return self.weight * max(1, self.steps)


def run_jobs(
    jobs: Sequence[Job],
    *,
    title: str,
    slots: int,
    done: Collection[str] = (),
    env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Runs jobs in their order, up to `slots` at a time, and shows how far they all are together.

    On Linux the cores are split evenly between the slots. If this is interrupted, the processes are ended.

    Args:
      title: of the progress display.
      done: names of jobs that may be needed and have been done before.
      env: of the processes; None: this one's.

    Returns:
      name -> what went wrong, of the jobs that failed or could not run because one that they need has failed.
    """
    waiting, running, done, failed = list(jobs), {}, set(done), {}
    shares = cores(slots)
    start = sum(min(j.steps, last_step(j.folder / "metrics.jsonl")) * j.weight for j in jobs)
    try:
        with Progress(title, sum(j.units for j in jobs), done=start) as bar:
            while waiting or running:
                for job in [j for j in waiting if lost(j, jobs, done, failed)]:
                    failed[job.name] = f"not run: it needs {lost(job, jobs, done, failed)}"
                    waiting.remove(job)
                for slot in range(slots):
                    ready = next((j for j in waiting if done.issuperset(j.needs)), None)
                    if slot not in running and ready:
                        waiting.remove(ready)
                        running[slot] = ready, start_process(ready, shares[slot], env)
                for slot, (job, process) in list(running.items()):
                    if (status := process.poll()) is None:
                        continue
                    del running[slot]
                    if status == 0 and (not job.result or (job.folder / job.result).is_file()):
                        done.add(job.name)
                    else:
                        failed[job.name] = f"exit status {status}:\n{tail(job.folder / 'log.txt')}"
                        bar.console.print(f"{job.name} failed with exit status {status}; the others go on")
                bar.update(sum(progress(j, done, failed) for j in jobs), note(jobs, running, done))
                if running:
                    time.sleep(POLL_S)
    finally:
        end([process for _, process in running.values()])
    return failed


def lost(job: Job, jobs: Sequence[Job], done: Collection[str], failed: Mapping[str, str]) -> str:
    """A needed job that will never be done, or ''."""
    known = {j.name for j in jobs} - set(failed) | set(done)
    return next((n for n in job.needs if n not in known), "")


def progress(job: Job, done: Collection[str], failed: Mapping[str, str]) -> int:
    """Units of a job that are behind us."""
    if job.name in done or job.name in failed:
        return job.units
    return min(job.steps, last_step(job.folder / "metrics.jsonl")) * job.weight


def note(jobs: Sequence[Job], running: Mapping[int, tuple[Job, subprocess.Popen]], done: Collection[str]) -> str:
    """What goes on, in a few words. A job that does not count its steps says itself how far it is."""
    now = []
    for job, _ in running.values():
        said = "" if job.steps else tail(job.folder / "log.txt", lines=1)
        now.append(f"{job.name} ({said})" if said else job.name)
    return f"{sum(j.name in done for j in jobs)} of {len(jobs)} done" + (f", now {'; '.join(now)}" if now else "")


def start_process(job: Job, share: Collection[int], env: Mapping[str, str] | None = None) -> subprocess.Popen:
    """Starts a job with its output appended to its log."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=None if env is None else dict(env)
        )
    if share:
        os.sched_setaffinity(process.pid, share)  # before Python is up there, so all its threads have it
    return process


def end(processes: Sequence[subprocess.Popen], patience_s: float = 10.0) -> None:
    """Asks processes to end, and after a while makes them."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + patience_s
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cores(slots: int) -> list[list[int]]:
    """Cores of each slot; empty lists where there is nothing to split, or where it cannot be done."""
    if slots == 1 or not hasattr(os, "sched_setaffinity"):
        return [[]] * slots
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < slots:
        return [[]] * slots
    bounds = [len(mine) * i // slots for i in range(slots + 1)]
    return [mine[a:b] for a, b in zip(bounds, bounds[1:])]


def last_step(path: Path) -> int:
    """`step` of the last whole line of a metrics file; 0 where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
