"""The grader of programs: programs in replies, verdicts, and programs that try to pass without solving."""

import math
import os
import socket
import threading
import time

import numpy as np
import pytest

from mutualrl.rewards import code, sandbox
from mutualrl.rewards.workers import GraderPool
from mutualrl.types import Problem

needs_isolation = pytest.mark.skipif(sandbox.unavailable() is not None, reason=f"no isolation: {sandbox.unavailable()}")

HEAD = 'from typing import List\n\n\ndef double(x: List[int]) -> List[int]:\n    """Twice each."""\n'
TEST = "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n    assert candidate([]) == []\n"
COMPLETED = Problem("h", HEAD, answer="    return [2 * y for y in x]\n", extra={"entry_point": "double", "test": TEST})
LISTED = Problem(
    "m",
    "Write a function that adds.",
    answer="import math\ndef add(a, b):\n    return a + b",
    extra={"test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(0.1, 0.2), 0.3)", "assert add(5, -5) == 0"]},
)
PIPED = Problem("s", "Add two numbers.", extra={"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
HONEST = "```python\ndef add(a, b):\n    return a + b\n```"
QUICK = code.Options(timeout_s=3.0)


def listed(tests, answer=None, setup=""):
    return Problem("t", "Do it.", answer=answer, extra={"test_list": tests, "test_setup": setup})


# Where the program is.


@pytest.mark.parametrize(
    "reply, program",
    [
        ("def f():\n    return 1\n", "def f():\n    return 1\n"),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nbetter\n```python\nx = 2\n```\nOutput:\n```\n2\n```", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("1. so\n   ```py\n   x = 1\n   ```", "x = 1\n"),
        ("```python\nx = 1\n", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think>```python\nx = 2\n```", "x = 2\n"),
        ("I do not know.", None),
        ("42", None),
        ("", None),
        ("```python\n\n```", None),
        ("<think>```python\nx = 1\n```", None),
        ("x = '" + "y" * 200_000 + "'", None),
    ],
)
def test_extract(reply, program):
    assert code.extract(reply, LISTED) == program


@pytest.mark.parametrize(
    "reply",
    [
        "    return [2 * y for y in x]\n",
        "return [2 * y for y in x]\n",
        "```python\n    return [2 * y for y in x]\n```",
        "```python\nreturn [2 * y for y in x]\n```",
        "if not x:\n        return []\n    return [2 * y for y in x]",
        "```python\ndef double(x: List[int]):\n    return [2 * y for y in x]\n```",
        HEAD + "    return [2 * y for y in x]\n",
        "double = lambda x: [2 * y for y in x]",
    ],
)
@needs_isolation
def test_completions_of_a_head(reply):
    assert code.grade(reply, COMPLETED, QUICK) == 1.0


def test_a_head_with_a_wrong_completion_is_not_one():
    assert code.extract("This is prose, not code.", COMPLETED) is None


# Verdicts.


@needs_isolation
@pytest.mark.parametrize("problem", [COMPLETED, LISTED])
def test_references_pass_and_wrong_programs_fail(problem):
    assert code.grade(problem.answer, problem, QUICK) == 1.0
    for wrong in ("def add(a, b):\n    return 3", "def double(x):\n    return [2, 4]", "x = 1", "def f(:", "prose"):
        assert code.grade(f"```python\n{wrong}\n```", problem, QUICK) == 0.0
    assert code.grade("", problem, QUICK) == 0.0


def test_nan_without_tests():
    assert math.isnan(code.grade(HONEST, Problem("p", "q", answer="x")))
    assert math.isnan(code.grade(HONEST, listed([])))


@needs_isolation
def test_plain_values_cross_unchanged():
    values = [None, True, 7, 10**5000, -(1 << 70), 0.1, "é\ud800\n", b"\0\xff", 2 - 1j, [], (), {}, set(), float("inf")]
    values += [[1, (2, [3])], {1, "a", (2, 3)}, frozenset({1}), {(1, 2): {"a": [None]}, 3: b"x"}, int, str]
    tests = "import sys\nsys.set_int_max_str_digits(0)\nfor v in VALUES:\n    w = f(v)\n"
    tests += "    assert type(w) is type(v) and w == v, v\nassert str(f(-0.0)) == '-0.0' and f(float('nan')) != 0"
    names = "[" + ", ".join(getattr(v, "__name__", None) or _literal(v) for v in values) + "]"
    problem = listed([f"VALUES = {names}", tests])
    assert code.grade("def f(x):\n    return x", problem, QUICK) == 1.0
    assert code.grade("def f(x):\n    return [x]", problem, QUICK) == 0.0


def _literal(value):
    if value == float("inf"):
        return "float('inf')"
    return hex(value) if type(value) is int else repr(value)


@needs_isolation
def test_subclasses_cross_as_what_they_derive_from():
    reply = "import collections\ndef f():\n    return collections.Counter('aab')\ndef g():\n"
    reply += "    return collections.namedtuple('P', 'x y')(1, 2)"
    assert code.grade(reply, listed(["assert f() == {'a': 2, 'b': 1}", "assert g() == (1, 2)"]), QUICK) == 1.0


@needs_isolation
def test_objects_stay_and_are_handled_from_afar():
    reply = "class Node:\n    def __init__(self, x):\n        self.x, self.next = x, None\n"
    reply += "def total(n):\n    return n.x + total(n.next) if n else 0"
    setup = "root = Node(1)\nroot.next = Node(2)\nroot.next.next = Node(3)"
    problem = listed(["assert total(root) == 6", "assert root.next.x == 2"], setup=setup)
    assert code.grade(reply, problem, QUICK) == 1.0
    assert code.grade(reply.replace("n.x +", "1 +"), problem, QUICK) == 0.0


@needs_isolation
def test_exceptions_cross_by_name():
    test = "try:\n    f()\n    raise SystemExit\nexcept ValueError:\n    pass"
    assert code.grade("def f():\n    raise ValueError('x')", listed([test]), QUICK) == 1.0
    for other in ("raise KeyError", "pass", "raise SystemExit", "import os; os._exit(0)"):
        assert code.grade(f"def f():\n    {other}", listed([test]), QUICK) == 0.0


@needs_isolation
def test_a_builtin_is_replaced_only_where_the_reference_does():
    reply = "def sum(a, b):\n    return a + b\ndef len(x):\n    return 0"
    problem = listed(
        ["assert sum(1, 2) == 3", "assert len([]) == 0 and len([1]) == 1"], "def sum(a, b):\n    return a+b"
    )
    assert code.grade(reply, problem, QUICK) == 1.0


@needs_isolation
def test_helpers_of_the_head_are_the_heads_own():
    head = "def encode(s):\n    return s[::-1]\n\n\ndef decode(s):\n    '''Undoes encode.'''\n"
    test = "def check(candidate):\n    assert candidate(encode('abc')) == 'abc'\n"
    problem = Problem("p", head, extra={"entry_point": "decode", "test": test})
    assert code.grade("    return s[::-1]\n", problem, QUICK) == 1.0
    assert code.grade("def encode(s):\n    return s\ndef decode(s):\n    return s", problem, QUICK) == 0.0


@needs_isolation
def test_programs_on_standard_input():
    right = "a, b = map(int, input().split())\nprint(a + b, ' ')"
    assert code.grade(right, PIPED, QUICK) == 1.0
    assert code.grade("if __name__ == '__main__':\n    " + right.replace("\n", "\n    "), PIPED, QUICK) == 1.0
    for wrong in (
        "print(3)",
        "print(input())",
        "print(3); print(7)",
        "while True: print(3)",
        "import time; time.sleep(9)",
    ):
        assert code.grade(wrong, PIPED, code.Options(timeout_s=1.0)) == 0.0


@needs_isolation
def test_the_same_program_gets_the_same_verdict():
    """Of tests that draw numbers, and of programs that rely on the order of a set."""
    problem = listed(["import random\nassert f(random.random()) < 0.5 or random.random() < 0.5"])
    verdicts = {code.grade("def f(x):\n    return x", problem, QUICK) for _ in range(4)}
    reply = "def f():\n    return list({'a', 'b', 'c', 'd', 'e'})[0]"
    verdicts_2 = {code.grade(reply, listed(["assert f() == 'a'"]), QUICK) for _ in range(4)}
    assert len(verdicts) == len(verdicts_2) == 1


# Programs that try to pass without solving, or to do harm.

ADD = "\ndef add(a, b):\n    return 3\n"
CHEATS = {
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "exit by exception": "def add(a, b):\n    raise SystemExit(0)",
    "marker": "import os\nfor fd in range(64):\n    try: os.write(fd, b'hello\\npass\\n')\n    except OSError: pass"
    + ADD,
    "marker printed": "print('hello\\npass', flush=True)" + ADD,
    "forged responses": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'{\"ok\": null}\\n' * 9)\n    except OSError: pass"
        + ADD
    ),
    "malformed response": "import os\ndef add(a, b):\n    for fd in range(3, 64):\n"
    '        try: os.write(fd, b\'[[[\\n{"ok": {"t": 5, "s": 6}}\\n\')\n        except OSError: pass',
    "nested response": "def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "always equal": "class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
    "    def __float__(self): return 0.3\n    def __bool__(self): return True\ndef add(a, b):\n    return E()",
    "equal number": "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
    "def add(a, b):\n    return E(4)",
    "equal type": "class M(type):\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\n"
    "class int(metaclass=M): pass\ndef add(a, b):\n    return int",
    "builtins": "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\n"
    "builtins.all = builtins.isinstance = lambda *a: True" + ADD,
    "isclose": "import math\nmath.isclose = lambda *a, **k: True" + ADD,
    "redefined checker": "def check(candidate):\n    pass" + ADD,
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\nimport sys\nsys.excepthook = lambda *a: os._exit(0)"
    + ADD,
    "trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setrecursionlimit(10**6)" + ADD,
    "frames": "import sys, gc, os\nf = sys._getframe()\nwhile f:\n    for n, v in list(f.f_globals.items()):\n"
    "        if callable(v) and n[0] == '_' and n[1] != '_': f.f_globals[n] = lambda *a, **k: True\n    f = f.f_back\n"
    "for o in gc.get_objects():\n    if isinstance(o, dict) and 'passed' in o: o['passed'] = True" + ADD,
    "deleted tests": "import os, shutil\nfor d in ('/program.py', '/tmp', '/', os.getcwd()):\n"
    "    shutil.rmtree(d, ignore_errors=True)\n    try: os.unlink(d)\n    except OSError: pass" + ADD,
    "read tests": "import glob, gc\nfound = []\nfor p in glob.glob('/proc/*/environ') + glob.glob('/tmp/**'):\n"
    "    found.append(open(p).read())\nfor o in gc.get_objects():\n    if isinstance(o, str) and 'assert add' in o:\n"
    "        found.append(o)\nclass Out(Exception): pass\ndef add(a, b):\n    return a + b if found else None",
    "kill the parent": "import os\nfor p in (os.getppid(), 1, -1, 0):\n    try: os.kill(p, 9)\n    except OSError: pass"
    + ADD,
    "signals": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, "
    "ValueError): pass\nwhile True: pass",
    "closed": "import os\nos.closerange(0, 64)" + ADD,
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": "import threading, time\nwhile True:\n"
    "    try: threading.Thread(target=time.sleep, args=(99,)).start()\n    except RuntimeError: pass",
    "background": "import os, subprocess, sys\ntry: subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
    "except OSError: pass\ntry:\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass\n"
    "except OSError: pass" + ADD,
    "output": "import os\nwhile True: print('x' * 100000)",
    "output to all": "import os\nwhile True:\n    for fd in range(64):\n        try: os.write(fd, b'x' * 100000)\n"
    "        except OSError: pass",
    "loop": "while True: pass",
    "loop in the call": "def add(a, b):\n    while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "allocation": "x = bytearray(1 << 40)" + ADD,
    "allocations": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "large result": "def add(a, b):\n    return 'x' * (1 << 26)",
    "endless result": "def add(a, b):\n    x = []\n    for _ in range(60): x = [x, x]\n    return x",
    "large number": "def add(a, b):\n    return 10 ** 10 ** 9",
    "crash": "import ctypes\nctypes.string_at(0)" + ADD,
    "deep source": "(" * 50000,
    "no text": "\0\ud800" + ADD,
}


@needs_isolation
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_fail_and_the_next_program_passes(cheat):
    if cheat not in ("deep source", "no text"):
        compile(CHEATS[cheat], cheat, "exec")  # that it fails says something only then
    start = time.monotonic()
    assert code.grade(f"```python\n{CHEATS[cheat]}\n```", LISTED, code.Options(timeout_s=1.0)) == 0.0
    assert time.monotonic() - start < 30
    assert code.grade(HONEST, LISTED, QUICK) == 1.0


@needs_isolation
def test_nothing_is_read_from_or_written_to_this_machine(tmp_path, monkeypatch):
    """The program answers rightly if it escapes, so that a leak is a pass; and honestly nothing is left behind."""
    (tmp_path / "secret").write_text("3")
    monkeypatch.setenv("SECRET", "3")
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]

        def escapes():
            yield f"int(open({str(tmp_path / 'secret')!r}).read())"
            yield "int(__import__('os').environ['SECRET'])"
            yield f"open({str(tmp_path / 'made')!r}, 'w').write('abc')"
            yield f"__import__('socket').create_connection(('127.0.0.1', {port}), 1) and 3"
            yield "open('/etc/passwd').read() and 3"
            yield f"__import__('os').kill({os.getpid()}, 0) or 3"

        problem = listed(["assert f() == 3"])
        assert code.grade("def f():\n    return 3", problem, QUICK) == 1.0
        for escape in escapes():
            assert code.grade(f"def f():\n    return {escape}", problem, QUICK) == 0.0, escape
        try:
            heard.append(server.accept())
        except TimeoutError:
            pass
    assert not heard and not (tmp_path / "made").exists()


# In the pool.


@needs_isolation
def test_in_workers_its_own_limit_comes_first():
    replies = [HONEST, CHEATS["loop"], "no program", CHEATS["signals"], HONEST]
    with GraderPool("code", options={"timeout_s": 1.0}, timeout_s=20.0) as pool:
        rewards, answers = pool.grade(replies, [LISTED] * 5)
        assert (pool.timeouts, pool.crashes) == (0, 0)
    np.testing.assert_array_equal(rewards, [1, 0, 0, 0, 1])
    assert answers[0] == "def add(a, b):\n    return a + b\n" and answers[2] is None


@needs_isolation
def test_any_thread_may_grade():
    results = []
    threads = [threading.Thread(target=lambda: results.append(code.grade(HONEST, LISTED))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [1.0] * 4


def test_refused_where_nothing_isolates(monkeypatch):
    monkeypatch.setattr(sandbox, "unavailable", lambda: "bubblewrap is not installed")
    with pytest.raises(ValueError, match="cannot run programs: bubblewrap is not installed; .*allow_unsafe_exec"):
        GraderPool("code")
    with pytest.raises(RuntimeError, match="not installed"):
        code.grade(HONEST, LISTED)
    code.check(code.Options(allow_unsafe_exec=True))
    unsafe = code.Options(allow_unsafe_exec=True)
    assert code.grade(HONEST, LISTED, unsafe) == 1.0
    assert code.grade(CHEATS["marker"], LISTED, unsafe) == 0.0


@pytest.mark.parametrize("option", ["timeout_s", "memory_mb"])
def test_refusals(option):
    with pytest.raises(ValueError, match=f"{option} is 0; allowed"):
        GraderPool("code", options={option: 0})
