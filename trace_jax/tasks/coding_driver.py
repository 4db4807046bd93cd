"""Runs inside the sandbox: the tests in one process, the untrusted solution in another.

In one process a solution could end the program before the tests, read their expected values, or
return an object that equals everything. Here it only ever answers calls, with plain Python values.
Stands alone: `coding.py` hands this file's text to the sandbox.
"""

import ast
import builtins
import ctypes
import json
import subprocess
import sys

WORKER = """
import ast, os, sys
replies = os.fdopen(os.dup(1), "w")
requests = os.fdopen(os.dup(0))
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
space = {"__name__": "solution"}
try:
    exec(compile(ast.literal_eval(requests.readline()), "solution", "exec"), space)
except BaseException as error:
    space = {}
for line in requests:
    name, args, kwargs = ast.literal_eval(line)
    try:
        reply = ("value", space[name](*args, **kwargs))
    except BaseException as error:
        reply = ("raise", type(error).__name__)
    try:
        text = repr(reply)
        ast.literal_eval(text)
    except BaseException:
        text = repr(("raise", "TypeError"))
    print(text, file=replies, flush=True)
"""
MAX_REPLY = 1 << 20
PR_SET_DUMPABLE = 4


class Solution:
    """The untrusted side; `function(name)` is a stand-in that calls over there."""

    def __init__(self, source: str):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send(source)

    def _send(self, value: object) -> None:
        print(repr(value), file=self._process.stdin, flush=True)

    def function(self, name: str):
        def stand_in(*args, **kwargs):
            self._send((name, args, kwargs))
            line = self._process.stdout.readline(MAX_REPLY)
            kind, value = ast.literal_eval(line)
            if kind == "value":
                return value
            error = getattr(builtins, value, None)
            if not (isinstance(error, type) and issubclass(error, Exception)):
                error = RuntimeError
            raise error(f"{name} failed")

        stand_in.__name__ = name
        return stand_in


def main() -> None:
    # The other process has our user id; this keeps it from reading our memory.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    request = json.load(sys.stdin)
    space = {"__name__": "tests"}
    exec(request["setup"], space)
    solution = Solution(request["solution"])
    for name in request["names"]:
        space[name] = solution.function(name)
    exec(request["tests"], space)
    print("passed")


main()
