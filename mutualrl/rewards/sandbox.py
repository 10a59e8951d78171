"""Runs Python programs that nobody has read, behind bubblewrap (`bwrap`), Linux only.

Inside there are the interpreter, its standard library and the system's libraries, all read-only, `/dev/null` and
`/dev/urandom`, and nothing else: no home, no `/etc`, `/proc` or `/tmp`, no network, no environment, no other process,
and no place to write to. CPU time, memory and open files are limited, and a system call filter (x86-64, AArch64) lets
it start threads but no processes. It ends with the thread that started it. What it may use is in `program.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import platform
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import time
from typing import Any

_PROGRAM = pathlib.Path(__file__).with_name("program.py")
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}  # the same program gets the same order of its sets
_PROBE_S = 30.0

# AUDIT_ARCH; then the numbers of clone, clone3 and those refused: fork, vfork, ptrace, unshare, setns, shmget, msgget,
# semget, io_uring_setup, bpf, perf_event_open, userfaultfd, keyctl, add_key, memfd_create.
_CALLS = {
    "x86_64": (0xC000003E, 56, 435, (57, 58, 101, 272, 308, 29, 68, 64, 425, 321, 298, 323, 250, 248, 319)),
    "aarch64": (0xC00000B7, 220, 435, (117, 97, 268, 194, 186, 190, 425, 280, 241, 282, 219, 217, 279)),
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one process may use: seconds of CPU time and MiB of address space."""

    cpu_s: int
    memory_mb: int


def unavailable() -> str | None:
    """Why programs cannot be isolated on this machine, in one line; None if they can. Tried once a process."""
    return _probe()


def start(role: str, limits: Limits, *args: int, unsafe: bool = False, pass_fds: tuple = (), **pipes: Any):
    """Starts `program.py` in a role, with no isolation if `unsafe`.

    Args:
      role: one of those in program.py.
      args: descriptors that the role takes; to be given in `pass_fds`, too.
      pipes: stdin and stdout, as in `subprocess.Popen`.

    Returns:
      the `subprocess.Popen`; to be ended by `stop`.
    """
    # Without the filter processes are counted instead: fewer than these, all of one user's together.
    processes = 64 if unsafe or not _filter() else -1
    python = [_python(), "-P", "-s", "-S", "-B"]
    tail = [role, str(limits.cpu_s), str(limits.memory_mb), str(processes), *map(str, args)]
    if unsafe:
        command, filter_fd = [*python, str(_PROGRAM), *tail], None
    else:
        filter_fd = _filter_fd()
        seccomp = [] if filter_fd is None else ["--seccomp", str(filter_fd)]
        command = [*_bwrap(), *seccomp, "--", *python, "/program.py", *tail]
    try:
        return subprocess.Popen(
            command,
            env=_ENVIRONMENT,
            cwd="/",
            pass_fds=pass_fds if filter_fd is None else (*pass_fds, filter_fd),
            start_new_session=True,
            **{"stderr": subprocess.DEVNULL, **pipes},
        )
    finally:
        if filter_fd is not None:
            os.close(filter_fd)


def stop(process: subprocess.Popen) -> None:
    """Kills a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stdout:
        process.stdout.close()


def read(process: subprocess.Popen, end: float, longest: int) -> bytes | None:
    """All that a process writes to standard output; None if that is more than `longest` bytes or not over by `end`.

    Args:
      end: on the clock of `time.monotonic`, seconds.
    """
    fd, parts, size = process.stdout.fileno(), [], 0
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while poll.poll(max(0.0, end - time.monotonic()) * 1000):
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return b"".join(parts)
        parts.append(chunk)
        size += len(chunk)
        if size > longest:
            return None
    return None


@functools.cache
def _python() -> str:
    return os.path.realpath(sys.executable)


@functools.cache
def _bwrap() -> tuple[str, ...]:
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--clearenv"]
    command += ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    # Not sysconfig's platstdlib: in a virtual environment that is the environment's own library.
    paths = [os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    paths += [sysconfig.get_path("stdlib"), _python(), "/etc/ld.so.cache"]
    for path in dict.fromkeys(paths):
        if os.path.exists(path) and not path.startswith(("/usr/lib/", "/lib/")) and path != "/usr/lib":
            command += ["--ro-bind", path, path]
    for path in ("/dev/null", "/dev/urandom"):
        command += ["--dev-bind", path, path]
    return (*command, "--ro-bind", str(_PROGRAM), "/program.py", "--remount-ro", "/", "--chdir", "/")


@functools.cache
def _filter() -> bytes:
    """The system call filter as BPF code; empty on a machine whose call numbers are not known here."""
    if platform.machine() not in _CALLS:
        return b""
    arch, clone, clone3, refused = _CALLS[platform.machine()]
    load, equal, at_least, any_bit, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, refuse, unknown, allow = 0x80000000, 0x00050000 | 1, 0x00050000 | 38, 0x7FFF0000  # EPERM 1, ENOSYS 38
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (ret, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (ret, 0, 0, refuse)]  # the x32 calls
    for number in refused:
        code += [(equal, 0, 1, number), (ret, 0, 0, refuse)]
    code += [(equal, 0, 1, clone3), (ret, 0, 0, unknown)]  # its flags lie in memory; the C library then takes clone
    code += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 1, 0, 0x00010000), (ret, 0, 0, refuse)]  # CLONE_THREAD
    return b"".join(struct.pack("<HBBI", *line) for line in [*code, (ret, 0, 0, allow)])


def _filter_fd() -> int | None:
    if not _filter():
        return None
    reading, writing = os.pipe()  # it holds far more than the filter is long
    os.write(writing, _filter())
    os.close(writing)
    return reading


@functools.cache
def _probe() -> str | None:
    if not sys.platform.startswith("linux"):
        return f"programs are isolated on Linux only, not on {sys.platform}"
    if not shutil.which("bwrap"):
        return "bubblewrap (the command bwrap) is not installed"
    process = start(
        "probe", Limits(10, 512), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        said = read(process, time.monotonic() + _PROBE_S, 1 << 16)
    finally:
        stop(process)
    if said == b"ok\n":
        return None
    lines = (said or b"no response").decode(errors="replace").strip().splitlines()
    return f"bubblewrap does not work here: {lines[-1] if lines else 'no response'}"
