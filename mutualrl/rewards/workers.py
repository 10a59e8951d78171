"""Grading many replies: inline, or in worker processes that may hang, crash or run out of memory at no one's cost."""

from __future__ import annotations

import importlib
import json
import math
import os
import pathlib
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mutualrl import rewards
from mutualrl.types import Problem

_START_LIMIT_S = 180.0  # importing a grader's libraries on a busy machine; not part of any reply's time


class _Worker:
    """One worker process and the pipe to it."""

    def __init__(self, module: str, options: Mapping[str, Any], timeout_s: float, memory_mb: int):
        root = str(pathlib.Path(rewards.__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        # Safe path: a file of the working directory must not stand in for a module the grader imports.
        hidden = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TPU_VISIBLE_CHIPS": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mutualrl.rewards.worker"]
            + [module, json.dumps(options), str(timeout_s), str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **hidden, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # an interrupt at the terminal is the parent's to handle
        )
        self.pending = b""
        self.ready = False

    def wait_ready(self) -> None:
        """Returns once the worker can grade; RuntimeError if it never will."""
        if not self.ready:
            answer = self.read(_START_LIMIT_S)
            if answer is None or "error" in answer:
                self.kill()
                raise RuntimeError(f"a grading worker did not start: {(answer or {}).get('error', 'no response')}")
            self.ready = True

    def ask(self, reply: str, problem: Problem, timeout_s: float) -> dict | None:
        """The worker's response, or None after `timeout_s` seconds; EOFError if the worker died."""
        fields = {**vars(problem), "extra": dict(problem.extra)}
        message = pickle.dumps((reply, fields))
        try:
            self.process.stdin.write(struct.pack("<I", len(message)) + message)
            self.process.stdin.flush()
        except BrokenPipeError as e:
            raise EOFError from e
        return self.read(timeout_s)

    def read(self, timeout_s: float) -> dict | None:
        end = time.monotonic() + timeout_s
        fd = self.process.stdout.fileno()
        poll = select.poll()  # unlike select(), no limit on the number of the file descriptor
        poll.register(fd, select.POLLIN)
        while b"\n" not in self.pending:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return None
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                raise EOFError
            self.pending += chunk
        line, _, self.pending = self.pending.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except OSError:  # unsent bytes of a dead worker
                pass


class GraderPool:
    """A grader, and the processes it runs in where it needs them.

    Processes start at the first call and are reused. One more than `workers` is kept warm, so that a killed worker is
    replaced at once and the rest of the batch does not wait for a start. May be used from any thread, and from several
    at a time: a worker serves one reply after another, whoever asks.

    Attributes:
      version: what the grader's verdicts depend on, as text.
      timeouts: replies given up because they took longer than `timeout_s`; each graded 0.
      crashes: replies at which the grader raised, ran out of memory or died; each graded 0.
    """

    def __init__(
        self,
        name: str,
        *,
        options: Mapping[str, Any] | None = None,
        workers: int = 2,
        timeout_s: float = 5.0,
        memory_mb: int = 2048,
    ):
        """Args:
          name: a grader, i.e. a module of `mutualrl.rewards`, or another module by its dotted name.
          options: fields of the grader's `Options` that differ from their defaults.
          workers: processes at work at a time.
          timeout_s: seconds a reply may take.
          memory_mb: address space a process may use, in MiB.

        Raises:
          ValueError: no such grader or option, a value that is not positive, or a grader that cannot work here.
        """
        module = rewards.find(name)
        for option, value in (("workers", workers), ("timeout_s", timeout_s), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ValueError(f"{option} is {value!r}; allowed are numbers above 0")
        self.module = module
        self.workers, self.timeout_s, self.memory_mb = workers, timeout_s, memory_mb
        self.timeouts = self.crashes = 0
        self._grader = importlib.import_module(module)
        self._given = dict(options or {})
        self._keywords = rewards.keywords(self._grader, self._given)
        self.version = rewards.version(self._grader)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._free = threading.Semaphore(workers)
        self._lock = threading.Lock()

    def grade(self, replies: Sequence[str], problems: Sequence[Problem]) -> tuple[np.ndarray, list[str | None]]:
        """Grades replies[i] as an answer to problems[i].

        Returns:
          f64[n] rewards (NaN where a reply cannot be judged) and n canonical answers (None where there is none), both
          in the order of `replies`.
        """
        if len(replies) != len(problems):
            raise ValueError(f"{len(replies)} replies for {len(problems)} problems")
        items = list(zip(replies, problems))
        if not self._grader.IN_WORKER:
            results = [self._inline(*item) for item in items]
        else:
            results = self._spread(items)
        return np.array([r[0] for r in results], np.float64), [r[1] for r in results]

    def gold(self, problem: Problem) -> str | None:
        """The gold answer in the form of a label."""
        return getattr(self._grader, "gold", lambda x: x.answer)(problem)

    def _inline(self, reply: str, problem: Problem) -> tuple[float, str | None]:
        try:
            reward = float(self._grader.grade(reply, problem, **self._keywords))
            answer = self._grader.extract(reply, problem, **self._keywords)
            return (reward if math.isfinite(reward) else math.nan), answer
        except Exception:  # as in a worker: no reply may stop a run
            self._count("crashes")
            return 0.0, None

    def _spread(self, items: list[tuple[str, Problem]]) -> list[tuple[float, str | None]]:
        results: list[tuple[float, str | None]] = [(0.0, None)] * len(items)
        failures: list[BaseException] = []
        todo = iter(range(len(items)))

        def serve() -> None:
            try:
                while not failures:
                    with self._lock:
                        i = next(todo, None)
                    if i is None:
                        return
                    results[i] = self._in_worker(*items[i])
            except BaseException as e:  # a worker that cannot start: raise it where grade() was called
                failures.append(e)

        threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(self.workers, len(items)))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if failures:
            raise failures[0]
        return results

    def _in_worker(self, reply: str, problem: Problem) -> tuple[float, str | None]:
        with self._free:
            worker = self._take()
            try:
                response = worker.ask(reply, problem, self.timeout_s)
                lost = "timeouts" if response is None else None
            except EOFError:
                response, lost = None, "crashes"
            if lost or "error" in response:
                # After an error the process may hold half-freed memory or broken caches: do not trust it again.
                self._count(lost or "crashes")
                self._drop(worker)
                return 0.0, None
            with self._lock:
                self._idle.append(worker)
        reward = response["reward"]
        return (reward if math.isfinite(reward) else math.nan), response["answer"]

    def _take(self) -> _Worker:
        with self._lock:
            while len(self._all) < self.workers + 1:
                worker = _Worker(self.module, self._given, self.timeout_s, self.memory_mb)
                self._all.add(worker)
                self._idle.insert(0, worker)
            # One that is known to be ready goes first, then the one started longest ago.
            self._idle.sort(key=lambda w: w.ready)
            worker = self._idle.pop()
        try:
            worker.wait_ready()
        except BaseException:
            self._drop(worker)
            raise
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        with self._lock:
            self._all.discard(worker)

    def _count(self, what: str) -> None:
        with self._lock:
            setattr(self, what, getattr(self, what) + 1)

    def close(self) -> None:
        """Ends the worker processes; a later `grade` starts new ones."""
        with self._lock:
            workers, self._all, self._idle = self._all, set(), []
        for worker in workers:
            worker.kill()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        if getattr(self, "_all", None):
            self.close()


def self_check(pool: GraderPool, problems: Sequence[Problem]) -> list[Problem]:
    """The problems whose own gold answer is not graded fully right: a grader cannot reward these fairly.

    Problems without a gold answer are not looked at.
    """
    with_gold = [p for p in problems if p.answer is not None]
    rewards_, _ = pool.grade([p.answer for p in with_gold], with_gold)
    return [p for p, r in zip(with_gold, rewards_) if not r >= 1]
