"""Python programs, judged by the tests of their problem; run in a sandbox only (`sandbox.py`).

Tests, by fields of `Problem.extra`, the first that is there:

  - `test` and `entry_point` (HumanEval): `test` defines `check(candidate)`; the question is the head of the program.
  - `test_list`, `test_setup` (MBPP): assertions, and statements before them.
  - `func_name`, `test_cases` (LiveCodeBench): a function, or a method of the class `Solution`, is called with the
    values that the lines of each case's `input` hold as JSON, and gives that of `output`; a tuple stands for a list.
    What its own runner imports first is there.
  - `inputs`, `outputs`: texts given on standard input, and what is to be written to standard output, compared line by
    line without white space at the ends.

All tests of a problem share the time limit.

Assertions run in one sandboxed process and the program in another (`program.py`): the first asks the second to call
the functions that the program defines and gets plain values back, so nothing that the program does to its own
interpreter, not even leaving it, reaches the comparison. Functions that the head of a HumanEval program defines are
the head's own in the tests, whatever the program makes of them.

Not supported: tests that hand functions or objects of their own to the program, look at arguments that it changed in
place, or compare, iterate or compute with an object that is no plain value (it equals nothing). The program may not
write files or start processes, and text that follows a completed function body has to be Python.

Votes are among what programs give for the inputs of `inputs` or `test_cases`, in a problem that does not have the
outputs: there the answer of a program is a digest of all that it gave, and it is right if it equals `Problem.answer`,
such a digest. A program that gives nothing for any input, or is not done with all in time, has none. Problems of
HumanEval and MBPP have no inputs apart from their tests: `votable` says no.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import hashlib
import json
import math
import re
import socket
import subprocess
import tempfile
import textwrap
import time
from typing import Any

from mutualrl.rewards import program as inside
from mutualrl.rewards import reply as replies
from mutualrl.rewards import sandbox
from mutualrl.types import Problem

IN_WORKER = True
BY_ANSWER = True
VERSION = "2"

_LONGEST = 100_000  # characters of a program; what is longer is none
_OUTPUT = 4 << 20  # bytes that a program may write to standard output
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a program may use."""

    timeout_s: float = 4.0  # seconds for all tests of a problem; keep it below the time limit of the workers
    memory_mb: int = 512  # MiB of address space
    allow_unsafe_exec: bool = False  # run programs without isolation: they can do whatever this user can


def check(options: Options) -> None:
    """Raises:
    ValueError: a value that is not positive, or programs cannot be isolated here.
    """
    for name in ("timeout_s", "memory_mb"):
        if not getattr(options, name) > 0:
            raise ValueError(f"grader 'code': {name} is {getattr(options, name)!r}; allowed are numbers above 0")
    if not options.allow_unsafe_exec and (reason := sandbox.unavailable()):
        raise ValueError(
            f"grader 'code' cannot run programs: {reason}; install bubblewrap where user namespaces are allowed, "
            "or set allow_unsafe_exec to true to run them without isolation"
        )


def votable(problem: Problem) -> str | None:
    """Why programs for a problem cannot vote, in a few words; None if they can."""
    if _asked(problem):
        return None
    return "has no `inputs`, or `func_name` and `test_cases`, for which programs could be compared"


def gold(problem: Problem) -> str | None:
    """The digest of the outputs that a problem wants, as a label would be; None where it has none."""
    name, given = _asked(problem) or ("", ())
    wanted = _wanted(problem)
    if not given or not wanted:
        return None
    return inside.digest([json.loads(x) for x in wanted]) if name else _digest(list(map(_lines, wanted)))


def extract(reply: str, problem: Problem, options: Options = Options()) -> str | None:
    """The program: the last block fenced as Python, else the last fenced block, else the reply if all of it is Python;
    in a problem that has inputs but neither outputs nor tests the digest of what the program gives for them.

    With an `entry_point`, the question is put before it, and a mere function body completes the question.

    Raises:
      RuntimeError: the sandbox did not start; this says nothing about the program.
    """
    program = _program(reply, problem)
    if program is None or _wanted(problem) or _tests(problem) or not (asked := _asked(problem)):
        return program
    return _behaviour(program, *asked, options)


def grade(reply: str, problem: Problem, options: Options = Options()) -> float:
    """1.0 if the program passes all tests in time, or without tests gives the outputs whose digest is `problem.answer`,
    else 0.0; NaN with neither. A digest stands for a program that gives these outputs.

    Raises:
      RuntimeError: the sandbox did not start; this says nothing about the program.
    """
    tests, asked, wanted = _tests(problem), _asked(problem), _wanted(problem)
    label = problem.answer if asked and not tests and not wanted and _DIGEST.fullmatch(problem.answer or "") else None
    if not tests and not wanted and not label:
        return math.nan
    if not tests and _DIGEST.fullmatch(reply):
        return float(reply == (label or gold(problem)))
    program = _program(reply, problem)
    if program is None:
        return 0.0
    if label:
        return float(_behaviour(program, *asked, options) == label)
    _isolated(options)
    end = time.monotonic() + options.timeout_s
    if tests:
        setup, names = _names(tests, problem)
        return float(_said({"setup": setup, "tests": tests, "names": names}, program, options, end) == b"pass")
    name, given = asked
    if name:
        return float(_said({"calls": [name, given, wanted]}, program, options, end) == b"pass")
    return float(all(_lines(_output(program, i, options, end)) == _lines(o) for i, o in zip(given, wanted)))


def _asked(problem: Problem) -> tuple[str, tuple[str, ...]] | None:
    """The function that is called ('' for standard input) and the inputs; None without any."""
    extra = problem.extra
    if extra.get("func_name") and extra.get("test_cases"):
        return extra["func_name"], tuple(c["input"] for c in extra["test_cases"])
    return ("", tuple(extra["inputs"])) if extra.get("inputs") else None


def _wanted(problem: Problem) -> tuple[str, ...]:
    """The outputs for the inputs of `_asked`; none where the problem does not say."""
    extra = problem.extra
    if extra.get("func_name") and extra.get("test_cases"):
        return tuple(c["output"] for c in extra["test_cases"] if "output" in c)
    return tuple(extra.get("outputs") or ())


def _isolated(options: Options) -> None:
    if not options.allow_unsafe_exec and (reason := sandbox.unavailable()):
        raise RuntimeError(reason)


@functools.lru_cache(maxsize=4)  # the same reply is extracted from and graded
def _behaviour(program: str, name: str, given: tuple[str, ...], options: Options) -> str | None:
    """The digest of what a program gives for the inputs; None if it gives nothing or takes too long."""
    _isolated(options)
    end = time.monotonic() + options.timeout_s
    if name:
        said = _said({"calls": [name, given, []]}, program, options, end)
        return None if said in (None, b"fail") else said.decode()
    found = []
    for text in given:
        found.append(_lines(_output(program, text, options, end)))
        if found[-1] is None:
            return None
    return _digest(found)


def _digest(outputs: list[list[str]]) -> str | None:
    if all(x == [""] for x in outputs):
        return None
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()


def _program(reply: str, problem: Problem) -> str | None:
    text = replies.final_part(reply, problem)
    blocks = [(m.group(1).lower(), m.group(2)) for m in _FENCE.finditer(text)]
    blocks = [b for lang, b in blocks if lang in ("python", "py", "python3")] or [b for _, b in blocks]
    code = blocks[-1] if blocks else text
    if not code.strip() or len(code) > _LONGEST:
        return None
    program = _complete(code, problem)
    if program is None:
        plain = textwrap.dedent(code)
        program = plain if blocks or _is_program(plain) else None
    return program


def _complete(code: str, problem: Problem) -> str | None:
    """The program whose head is the question; None where the question is no head of a program."""
    head, name = _head(problem), problem.extra.get("entry_point")
    if not head:
        return None
    plain = textwrap.dedent(code)
    if re.search(rf"^(?:(?:async\s+)?def|class)\s+{name}\b|^{name}\s*[:=]", plain, re.MULTILINE):
        return f"{head}\n\n{plain}"
    indented = code.lstrip("\n")[:1].isspace()
    # A reply that lost its leading white space has one line too far left, or all of them.
    for body in (code,) if indented else (textwrap.indent(plain, "    "), "    " + code.lstrip()):
        if _tree(head + body):
            return head + body
    return None


def _head(problem: Problem) -> str:
    text = problem.extra.get("prompt") or problem.question
    return text.rstrip() + "\n" if problem.extra.get("entry_point") and _tree(text) else ""


def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_program(text: str) -> bool:
    tree = _tree(text)
    return bool(tree) and any(not isinstance(s, ast.Expr) or isinstance(s.value, ast.Call) for s in tree.body)


def _tests(problem: Problem) -> str:
    extra = problem.extra
    if extra.get("test"):
        return f"{extra['test']}\ncheck({extra['entry_point']})\n"
    listed = list(extra.get("test_list") or ())
    return "\n".join([extra.get("test_setup") or "", *listed, ""]) if listed else ""


def _names(tests: str, problem: Problem) -> tuple[str, list[str]]:
    """What runs before the tests (the head of the program, and what the reference imports), and the names that they
    take from the program."""
    head, name = _head(problem), problem.extra.get("entry_point")
    reference = _tree(problem.answer or "") or ast.Module([], [])
    uses = [n for n in ast.walk(_tree(tests) or ast.Module([], [])) if isinstance(n, ast.Name)]
    used = {n.id for n in uses if isinstance(n.ctx, ast.Load)}
    bound = {n.id for n in uses if isinstance(n.ctx, ast.Store)} | set(dir(builtins))
    imports = [s for s in reference.body if isinstance(s, (ast.Import, ast.ImportFrom)) and _binds(s) & used]
    provided = set().union(*map(_binds, [*imports, *(_tree(head).body if head else ())]))
    defined = set().union(*map(_binds, (s for s in reference.body if s not in imports)))
    names = (used - bound - provided) | (used & defined) | ({name} if name else set())
    return "\n".join([head, *map(ast.unparse, imports)]), sorted(names)


def _binds(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {a.asname or a.name.partition(".")[0] for a in statement.names}
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _limits(options: Options) -> sandbox.Limits:
    return sandbox.Limits(math.ceil(options.timeout_s) + 1, options.memory_mb)


def _said(job: dict[str, Any], program: str, options: Options, end: float) -> bytes | None:
    """What the tests of a job say of a program: `pass`, `fail` or a digest; None if nothing in time."""
    ours, theirs = socket.socketpair()
    started: list[subprocess.Popen] = []
    unsafe = options.allow_unsafe_exec
    try:
        with ours, theirs, tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps({"program": program, **job}).encode())
            stdin.seek(0)
            fd = ours.fileno()
            started.append(
                sandbox.start("serve", _limits(options), unsafe=unsafe, stdin=theirs, stdout=subprocess.DEVNULL)
            )
            pipes = {"stdin": stdin, "stdout": subprocess.PIPE}
            started.append(sandbox.start("test", _limits(options), fd, unsafe=unsafe, pass_fds=(fd,), **pipes))
        said = sandbox.read(started[1], end, 1 << 16)
    finally:
        for process in started:
            sandbox.stop(process)
    if said == b"":
        raise RuntimeError("the sandbox did not start")
    hello, _, rest = (said or b"").partition(b"\n")
    return rest[:-1] if hello == b"hello" and rest.endswith(b"\n") else None


def _output(program: str, text: str, options: Options, end: float) -> str | None:
    encoded = program.encode(errors="replace")
    with tempfile.TemporaryFile() as stdin:
        stdin.write(len(encoded).to_bytes(8, "little") + encoded + text.encode())
        stdin.seek(0)
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE}
        process = sandbox.start("script", _limits(options), unsafe=options.allow_unsafe_exec, **pipes)
    try:
        said = sandbox.read(process, end, _OUTPUT)
    finally:
        sandbox.stop(process)
    return None if said is None else said.decode(errors="replace")


def _lines(text: str | None) -> list[str] | None:
    return None if text is None else [line.strip() for line in text.strip().split("\n")]
