"""The isolation itself: what a program inside can see, reach and use up; and that it is refused where there is none."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from mutualrl.rewards import sandbox

needs_isolation = pytest.mark.skipif(sandbox.unavailable() is not None, reason=f"no isolation: {sandbox.unavailable()}")


def run(text, seconds=10.0, memory_mb=256, longest=1 << 20):
    """What a program writes to standard output inside; None if it did not end in time."""
    with tempfile.TemporaryFile() as stdin:
        stdin.write(len(text.encode()).to_bytes(8, "little") + text.encode() + b"the input")
        stdin.seek(0)
        limits = sandbox.Limits(int(seconds) + 1, memory_mb)
        process = sandbox.start("script", limits, stdin=stdin, stdout=subprocess.PIPE)
    try:
        said = sandbox.read(process, time.monotonic() + seconds, longest)
    finally:
        sandbox.stop(process)
    return None if said is None else said.decode()


def tried(statements):
    """`ok`, or the name of the exception that statements raise inside."""
    indented = "".join(f"    {line}\n" for line in statements.splitlines())
    return run(f"try:\n{indented}    print('ok')\nexcept BaseException as e:\n    print(type(e).__name__)\n").strip()


@needs_isolation
def test_a_program_runs():
    assert run("print(input().upper())") == "THE INPUT\n"
    assert tried("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()").split() == ["ok"]


@needs_isolation
def test_there_is_no_place_to_write_to(tmp_path):
    target = tmp_path / "escaped"
    for path in (target, "/tmp/x", "/x", "/dev/x", "/dev/shm/x", "/usr/lib/x", "/program.py"):
        assert tried(f"open({str(path)!r}, 'w').write('x')") in ("FileNotFoundError", "OSError", "PermissionError")
    assert not target.exists()
    assert tried("import os\nos.mkdir('/made')") in ("OSError", "PermissionError")


@needs_isolation
def test_files_of_this_machine_are_not_seen(tmp_path):
    (tmp_path / "secret").write_text("secret")
    for path in (tmp_path / "secret", "/etc/passwd", "/proc/self/environ", pathlib.Path(__file__), "/var"):
        assert tried(f"import os\nos.stat({str(path)!r})") == "FileNotFoundError"
    seen = json.loads(run("import json, os; print(json.dumps(os.listdir('/')))"))
    assert not {"proc", "sys", "var", "boot"} & set(seen)


@needs_isolation
def test_the_environment_is_clean(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    assert set(json.loads(run("import json, os; print(json.dumps(dict(os.environ)))"))) <= {
        "PYTHONHASHSEED",
        "LC_ALL",
        "LC_CTYPE",
        "PWD",
    }


@needs_isolation
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5).close()
        said = tried(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)")
    assert said in ("ConnectionRefusedError", "OSError", "PermissionError")


@needs_isolation
def test_no_process_is_started_or_reached():
    assert tried("import os\nos.fork()") in ("PermissionError", "BlockingIOError")
    assert tried("import subprocess\nsubprocess.run(['/bin/true'])") != "ok"
    assert int(run("import os; print(os.getpid())")) < 10
    assert tried(f"import os\nos.kill({os.getpid()}, 9)") in ("ProcessLookupError", "PermissionError")


@needs_isolation
def test_descriptors_of_this_process_are_not_inherited():
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        text = "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'x'); print(fd)\n    except OSError: pass"
        run(text)
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    finally:
        os.close(reading)
        os.close(writing)


@needs_isolation
def test_memory_output_and_time_are_limited():
    assert tried("bytearray(1 << 30)") == "MemoryError"
    assert tried("import os\nfor _ in range(100): os.pipe()") == "OSError"
    assert run("while True: print('x' * 1000)", longest=1 << 16) is None
    start = time.monotonic()
    assert run("while True: pass", seconds=0.5) is None
    assert time.monotonic() - start < 10


@needs_isolation
def test_cpu_time_ends_a_program():
    """No one stops it from outside here: the limit does."""
    with tempfile.TemporaryFile() as stdin:
        text = b"print('on', flush=True)\nwhile True: pass"
        stdin.write(len(text).to_bytes(8, "little") + text)
        stdin.seek(0)
        process = sandbox.start("script", sandbox.Limits(1, 256), stdin=stdin, stdout=subprocess.PIPE)
    try:
        assert sandbox.read(process, time.monotonic() + 60, 100) == b"on\n"
    finally:
        sandbox.stop(process)


@needs_isolation
def test_it_dies_with_its_parent():
    """The end of the output tells that the process behind it is gone: nobody else holds the pipe."""
    parent = """
import os, subprocess, sys, tempfile, time
from mutualrl.rewards import sandbox
text = b"import time\\nprint('on', flush=True)\\ntime.sleep(3600)"
stdin = tempfile.TemporaryFile()
stdin.write(len(text).to_bytes(8, "little") + text)
stdin.seek(0)
sandbox.start("script", sandbox.Limits(60, 256), stdin=stdin, stdout=1)
os.close(1)
time.sleep(3600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"on\n"
        process.send_signal(signal.SIGKILL)
        assert sandbox.read(process, time.monotonic() + 30, 100) == b""
    finally:
        process.kill()
        process.wait()


def test_refused_without_bubblewrap(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in sandbox._probe.__wrapped__()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_refused_where_bubblewrap_does_not_work(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    sandbox._bwrap.cache_clear()
    try:
        reason = sandbox._probe.__wrapped__()
    finally:
        monkeypatch.undo()
        sandbox._bwrap.cache_clear()
    assert reason == "bubblewrap does not work here: bwrap: No permissions to create new namespace"
