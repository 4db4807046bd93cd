"""Asks math-verify in a process that can be stopped, from any thread."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

WORKER = Path(__file__).with_name("math_worker.py")
DEAD, LATE = "dead", "late"
START_SECONDS = 120.0  # importing sympy on a busy machine


class MathCheckError(RuntimeError):
    """An answer could not be judged: drop the sample, never score it 0."""


class MathProcess:
    """One math-verify process, started when first asked and again after a timeout.

    Args:
        timeout: seconds for one pair of answers.

    Raises:
        MathCheckError: math-verify is not installed.
    """

    def __init__(self, timeout: float = 5.0):
        if importlib.util.find_spec("math_verify") is None:
            raise MathCheckError('math-verify is missing: pip install "math-verify>=0.9,<0.10"')
        self.timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def equal(self, gold: str, answer: str) -> bool:
        """Whether two expressions are equal.

        An answer that takes too long is wrong, if the gold one alone is judged in time.

        Raises:
            MathCheckError: the process does not start, or fails on the gold answer too.
        """
        with self._lock:
            verdict = self._ask(gold, answer)
            if verdict is DEAD:  # ended from outside, or by this answer: a second time tells
                verdict = self._ask(gold, answer)
            if verdict in (DEAD, LATE) and self._ask(gold, gold) in (DEAD, LATE):
                raise MathCheckError(f"math-verify does not judge even the gold answer {gold!r}")
            return verdict is True

    def close(self) -> None:
        """Stops the process and waits for it, so that none is left behind."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, gold: str, answer: str) -> object:
        if self._process is None:
            self._start()
        try:
            self._process.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.close()
            return DEAD
        return self._read(self.timeout)

    def _start(self) -> None:
        command = [sys.executable, "-P", str(WORKER)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the user's Ctrl-C is for us to pass on
            )
        except OSError as error:
            raise MathCheckError(f"the math-verify process did not start: {error}") from error
        if self._read(START_SECONDS) != "ready":
            raise MathCheckError("the math-verify process did not start: see `import math_verify`")

    def _read(self, seconds: float) -> object:
        """One reply; LATE or DEAD, and no process any more, where there is none."""
        pipe, line = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            ready = select.select([pipe], [], [], left)[0]
            part = os.read(pipe, 4096) if ready else b""
            if not part:
                self.close()
                return DEAD if ready else LATE
            line += part
        return json.loads(line)


@functools.cache
def shared_process() -> MathProcess:
    """The process of this program, stopped at its end."""
    process = MathProcess()
    atexit.register(process.close)
    return process
