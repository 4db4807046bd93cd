"""Runs untrusted Python programs, each in processes and namespaces of its own.

A program sees an empty root in memory with the interpreter's standard library, read-only, and one
small writable folder; no network, no home, no run files, no environment. It needs Linux 5.14 with
user namespaces, and refuses to run anything without them.

Limits hold for each process, so the worst case in memory is `processes * memory + disk`.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

from trace_jax.tasks.sandbox_filter import filter_program

INNER = Path(__file__).with_name("sandbox_inner.py")
GRACE_SECONDS = 20.0  # the inside keeps the wall limit itself; this is for an inside that hangs
MAX_REQUEST = 1 << 20


class SandboxError(RuntimeError):
    """The sandbox failed, so the program was not judged: drop the sample, never score it 0."""


class SandboxUnavailable(SandboxError):
    """This machine cannot isolate programs; nothing was run."""


@dataclass(frozen=True)
class Limits:
    """What one program may use: seconds of CPU a process and of wall time, bytes, processes."""

    wall: float = 10.0  # larger than cpu: a busy machine must not fail a right program
    cpu: int = 5
    memory: int = 256 << 20
    processes: int = 8
    output: int = 1 << 18  # of each stream, and of any file
    disk: int = 16 << 20

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"sandbox limit {name} is {value}: write a positive number")


@dataclass(frozen=True)
class Outcome:
    """How a program ended: "ok" (exit 0), "error", "timeout" (wall or CPU) or "output" (flood)."""

    status: str
    code: int | None  # exit code, minus the signal's number, None when the wall limit ended it
    stdout: str
    stderr: str
    seconds: float


def run_program(source: str, stdin: str = "", limits: Limits = Limits()) -> Outcome:  # noqa: B008
    """Runs a Python program to its end or its limits; no process of it outlives the call.

    Args:
        source: the program; standard library only.
        stdin: what it reads; it is in no file that the program could open again.
        limits: what it may use.

    Raises:
        SandboxUnavailable: this machine lacks the isolation, or it was never there.
        SandboxError: the sandbox itself failed. Neither says anything about the program.
    """
    require_isolation()
    return _run(source, stdin, limits)


@functools.cache
def require_isolation() -> None:
    """Runs a first program to see that isolation works; remembers only success."""
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable("the sandbox needs Linux namespaces: run coding tasks on Linux")
    try:
        outcome = _run("print(6 * 7)", "", Limits(wall=30.0, cpu=30))
    except (SandboxError, ValueError) as error:
        raise SandboxUnavailable(
            "programs cannot be isolated here, so none was run: allow unprivileged user namespaces "
            f"(Linux 5.14; in a container its seccomp profile must allow unshare) ({error})"
        ) from error
    if outcome.stdout != "42\n":
        raise SandboxUnavailable(f"the sandbox's first program failed: {outcome.stderr.strip()!r}")


def _run(source: str, stdin: str, limits: Limits) -> Outcome:
    request = {"source": _text(source), "stdin": _text(stdin), **asdict(limits), **_interpreter()}
    body = json.dumps(request).encode()
    if len(body) > MAX_REQUEST:
        return Outcome("error", None, "", f"program and input exceed {MAX_REQUEST} bytes", 0.0)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(INNER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={},
        )
    except OSError as error:
        raise SandboxError(f"the sandbox did not start: {error}") from error
    with process:
        try:
            out, err = process.communicate(body, timeout=limits.wall + GRACE_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise SandboxError("the sandbox did not answer past its wall limit") from error
        finally:
            process.kill()  # a no-op once it has ended; its init dies with it
    try:
        report = json.loads(out)
    except ValueError:
        line = (err.decode(errors="replace").strip().splitlines() or ["no word from it"])[-1]
        raise SandboxError(f"the sandbox failed: {line}") from None
    return _outcome(report, limits)


def _outcome(report: dict, limits: Limits) -> Outcome:
    out, err = (base64.b64decode(report[name]) for name in ("stdout", "stderr"))
    code = None if report["status"] is None else os.waitstatus_to_exitcode(report["status"])
    if code is None or (code == -signal.SIGKILL and report["seconds"] >= limits.cpu):
        status = "timeout"
    elif max(len(out), len(err)) >= limits.output:
        status = "output"
    else:
        status = "error" if code else "ok"
    text = [stream.decode(errors="replace") for stream in (out, err)]
    return Outcome(status, code, *text, report["seconds"])


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()  # lone surrogates have no UTF-8


@functools.cache
def _interpreter() -> dict:
    """What never changes: the real interpreter, the paths that it needs, the filter of calls."""
    python = os.path.realpath(sys.executable)
    variables = sysconfig.get_config_vars()
    library = os.path.join(variables.get("LIBDIR") or "", variables.get("INSTSONAME") or "")
    version = f"python{sysconfig.get_python_version()}"
    wanted = [
        "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache",
        os.path.dirname(os.__file__), os.path.join(sys.base_exec_prefix, "lib", version),
        library, python,
        "/dev/null", "/dev/zero", "/dev/urandom",
    ]
    paths = sorted({os.path.abspath(p) for p in wanted if p and os.path.exists(p)})
    binds: list[str] = []
    for path in paths:  # sorted: a folder comes before what it holds
        if not any(path.startswith(b + "/") for b in binds if os.path.isdir(b)):
            binds.append(path)
    program = base64.b64encode(filter_program()).decode()
    return {"python": python, "binds": binds, "filter": program}
