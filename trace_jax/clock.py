"""Where the seconds of an iteration go."""

import contextlib
import time

import jax


class Clock:
    """Seconds by part; a part ends when its arrays are ready."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str):
        start, ready = time.perf_counter(), []
        yield ready.append
        jax.block_until_ready(ready)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
