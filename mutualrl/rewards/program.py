"""What runs inside the sandbox: `python program.py ROLE CPU_S MEMORY_MB PROCESSES [FD]`; imported for `digest` only.

Roles:

  probe   says "ok": the isolation works.
  serve   reads messages from the socket that is its standard input: loads a program, then calls what it defines.
  test    runs trusted tests (a job of JSON on standard input). What the program defines is reached through the socket
          FD, so that comparisons happen in a process that the program never touches. Writes "hello", then "pass" or
          "fail", or the digest of what the program returned where nothing says what it should.
  script  runs a program (8 bytes of length, then the text, on standard input) on the rest of its standard input.

Between `serve` and `test` go JSON lines of plain values: None, bool, int, float, complex, str, bytes, list, tuple, set,
frozenset and dict, subclasses as what they derive from, and these types themselves. Any other object stays with the
program; the tests get a `Remote` that can be called and whose attributes can be read and set, and that equals nothing
but itself.
"""

import hashlib
import json
import os
import resource
import sys
import types

_LONGEST = 4 << 20  # bytes of a message
_TYPES = {t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)}
# What LiveCodeBench puts before a program that defines a function; `builtins` come late to be themselves again.
_STARS = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
_BEFORE = "".join(f"from {m} import *\n" for m in [*_STARS.split(), "builtins", "typing"])
_BEFORE += f"import {', '.join(_STARS.split())}\nsys.setrecursionlimit(50000)\n"
_EXACT = 1 << 63  # integers beyond cross in hexadecimal: long decimals take quadratic time and are refused


def _limit(cpu_s, memory_mb, processes):
    for what, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, processes),
    ):
        if value >= 0:
            hard = resource.getrlimit(what)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(what, (value, value))


def _encode(x, keep):
    if x is None or isinstance(x, (bool, str, float)):
        return x
    if isinstance(x, int):
        return int(x) if -_EXACT < x < _EXACT else {"i": hex(x)}
    if isinstance(x, list):
        return [_encode(y, keep) for y in x]
    for kind, tag in ((tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(x, kind):
            return {tag: [_encode(y, keep) for y in x]}
    if isinstance(x, dict):
        return {"d": [[_encode(k, keep), _encode(v, keep)] for k, v in x.items()]}
    if isinstance(x, (bytes, bytearray)):
        return {"b": bytes(x).hex()}
    if isinstance(x, complex):
        return {"c": [x.real, x.imag]}
    if isinstance(x, type) and _TYPES.get(x.__name__) is x:
        return {"k": x.__name__}
    return {"o": keep(x)}


def _decode(x, find):
    if isinstance(x, list):
        return [_decode(y, find) for y in x]
    if not isinstance(x, dict):
        return x
    ((tag, value),) = x.items()
    if tag == "i":
        return int(value, 16)
    if tag in ("t", "s", "z"):
        return {"t": tuple, "s": set, "z": frozenset}[tag](_decode(y, find) for y in value)
    if tag == "d":
        return {_decode(k, find): _decode(v, find) for k, v in value}
    if tag == "b":
        return bytes.fromhex(value)
    if tag == "c":
        return complex(float(value[0]), float(value[1]))
    return _TYPES[value] if tag == "k" else find(value)


def digest(values):
    """SHA-256 of a list of values, in hexadecimal: equal where `==` holds the values equal. None in it is no value, and
    so is what JSON has no equal of; None if there is nothing else."""
    texts = []
    for value in values:
        try:
            texts.append("null" if value is None else _canonical(value))
        except (TypeError, RecursionError):
            texts.append("null")
    return hashlib.sha256("\n".join(texts).encode()).hexdigest() if set(texts) - {"null"} else None


def _canonical(x):
    if x is None:
        return "null"
    if isinstance(x, int) or isinstance(x, float) and x.is_integer():
        return hex(int(x))
    if isinstance(x, (float, str)):
        return json.dumps(x)
    if isinstance(x, list):
        return f"[{','.join(map(_canonical, x))}]"
    if isinstance(x, dict) and all(isinstance(k, str) for k in x):
        return f"{{{','.join(sorted(f'{json.dumps(k)}:{_canonical(v)}' for k, v in x.items()))}}}"
    raise TypeError


class _Channel:
    def __init__(self, fd):
        self.reading, self.writing = os.fdopen(fd, "rb"), os.fdopen(os.dup(fd), "wb")

    def send(self, message):
        line = json.dumps(message).encode() + b"\n"
        if len(line) > _LONGEST:
            raise ValueError(f"a message of {len(line)} bytes; allowed are {_LONGEST}")
        self.writing.write(line)
        self.writing.flush()

    def receive(self):
        line = self.reading.readline(_LONGEST + 1)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def _serve():
    channel = _Channel(os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    channel.send("hello")
    module = types.ModuleType("solution")
    sys.modules["solution"] = module  # dataclasses and the like look their module up
    objects = []

    def keep(x):
        objects.append(x)
        return len(objects) - 1

    def answer(op, *args):
        if op == "load":
            exec(compile(args[0], "solution", "exec"), vars(module))
            return None
        if op == "get":
            return vars(module)[args[0]]
        target, *rest = (_decode(a, objects.__getitem__) for a in args)
        if op == "call":
            return target(*rest[0], **rest[1])
        return getattr(target, *rest) if op == "attr" else setattr(target, *rest)

    while True:
        message = channel.receive()
        try:
            response = {"ok": _encode(answer(*message), keep)}
            channel.send(response)
        except BaseException as e:
            channel.send({"error": type(e).__name__})


class Failed(Exception):
    """The program raised something that has no name among Python's own exceptions."""


def _test(fd):
    """Runs the tests of the job and says how they end."""
    verdict = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what tests print is no verdict
    job = json.loads(sys.stdin.buffer.read())
    channel = _Channel(fd)
    if channel.receive() != "hello":
        return
    verdict.write(b"hello\n")
    broken = []

    def ask(*message):
        sent = [message[0], *(m if isinstance(m, str) else _encode(m, place) for m in message[1:])]
        try:
            channel.send(sent)
            response = channel.receive()
            value = _decode(response["ok"], Remote) if "ok" in response else None
        except BaseException:
            broken.append(message[0])  # even a test that swallows every exception does not pass after this
            raise
        if "ok" not in response:
            error = getattr(__builtins__, str(response["error"]), Failed)
            raise error if isinstance(error, type) and issubclass(error, Exception) else Failed
        return value

    def place(x):
        if type(x) is not Remote:
            raise TypeError(f"a {type(x).__name__} cannot be handed to the program")
        return object.__getattribute__(x, "place")

    class Remote:
        def __init__(self, at):
            object.__setattr__(self, "place", at)

        def __call__(self, *args, **kwargs):
            return ask("call", self, args, kwargs)

        def __getattribute__(self, name):
            if name.startswith("__"):
                return object.__getattribute__(self, name)
            return ask("attr", self, name)

        def __setattr__(self, name, value):
            ask("set", self, name, value)

    def called(name, inputs, outputs):
        """What is said of a function, or a method of `Solution`, that is called with the JSON lines of each input."""
        ask("load", f"{_BEFORE}globals().pop({name!r}, None)\n")  # an import, like `gcd`, is not the program's own
        ask("load", job["program"])
        try:
            owner = ask("get", "Solution")
        except KeyError:
            function = ask("get", name)
        else:
            function = ask("attr", ask("call", owner, (), {}), name)
        values = []
        for i, text in enumerate(inputs):
            try:
                value = ask("call", function, [json.loads(line) for line in text.split("\n")], {})
            except Exception:
                value = None
                if outputs or broken:
                    raise
            values.append(list(value) if isinstance(value, tuple) else value)
            if outputs and values[-1] != json.loads(outputs[i]):
                return "fail"
        return "pass" if outputs else digest(values) or "fail"

    try:
        if "calls" in job:
            verdict.write(f"{called(*job['calls'])}\n".encode())
            return
        namespace = {"__name__": "tests"}
        if "random" in job["tests"]:
            import random

            random.seed(0)  # the same program gets the same verdict
        exec(job["setup"], namespace)
        ask("load", job["program"])
        for name in job["names"]:
            try:
                namespace[name] = ask("get", name)
            except (KeyError, NameError):
                pass  # the tests say so, if they need it
        exec(compile(job["tests"], "tests", "exec"), namespace)
        passed = not broken
    except BaseException:
        passed = False
    verdict.write(b"pass\n" if passed else b"fail\n")


def _script():
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        size = int.from_bytes(stdin.read(8), "little")
        text = b""
        while len(text) < size and (chunk := stdin.read(size - len(text))):
            text += chunk
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(text.decode(), "solution", "exec"), vars(module))


if __name__ == "__main__":
    role, *limits = sys.argv[1:]
    _limit(*map(int, limits[:3]))
    if role == "probe":
        print("ok")
    elif role == "serve":
        _serve()
    elif role == "test":
        _test(int(limits[3]))
    else:
        sys.argv[1:] = []
        _script()
