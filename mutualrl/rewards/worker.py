"""The process behind `workers.GraderPool`: `python -m mutualrl.rewards.worker MODULE OPTIONS TIMEOUT_S MEMORY_MB`.

OPTIONS is JSON. Requests come on standard input as length-prefixed pickles of (reply, problem). Responses go out as
JSON lines, first `{"ready": true}` or `{"error": ...}`, then `{"reward": ..., "answer": ...}` or `{"error": ...}` a
request. They are JSON, not pickle, because this process handles text that models wrote and its parent must not have
to trust it.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import signal
import struct
import sys

from mutualrl import rewards
from mutualrl.types import Problem


def main(module: str, options: str, timeout_s: float, memory_mb: int) -> None:
    """Serves requests until standard input closes."""
    requests = sys.stdin.buffer
    responses = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a grader prints must not get among the responses

    def respond(**fields) -> None:
        responses.write(json.dumps(fields) + "\n")
        responses.flush()

    try:
        grader = importlib.import_module(module)
        keywords = rewards.keywords(grader, json.loads(options))
        if hasattr(grader, "warm_up"):
            grader.warm_up()  # lazy imports and first-call costs, before any clock runs
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    except Exception as e:
        respond(error=f"{type(e).__name__}: {e}")
        return
    # The parent kills a late worker; this is for a worker whose parent is gone. The default action of the signal ends
    # the process even inside a long call into C.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    respond(ready=True)
    while len(header := requests.read(4)) == 4:
        reply, fields = pickle.loads(requests.read(struct.unpack("<I", header)[0]))
        problem = Problem(**fields)
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 1)
        try:
            answer = grader.extract(reply, problem, **keywords)
            result = {"reward": float(grader.grade(reply, problem, **keywords)), "answer": answer}
        except BaseException as e:  # MemoryError, RecursionError and whatever a parser raises
            result = {"error": type(e).__name__}
        signal.setitimer(signal.ITIMER_REAL, 0)
        respond(**result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
