"""Where the time of a traced run went, from the profiler's own events."""

import collections
import pathlib
import re

import jax


def kernel_times(folder: str) -> dict[str, tuple[float, int]]:
    """{kernel: (milliseconds, launches)} of a `jax.profiler.trace` of a GPU; empty elsewhere."""
    path = next(pathlib.Path(folder).rglob("*.xplane.pb"))
    times: dict[str, tuple[float, int]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                ms, count = times.get(event.name, (0.0, 0))
                times[event.name] = ms + event.duration_ns / 1e6, count + 1
    return times


def by_kind(times: dict[str, tuple[float, int]], kinds, wall: float) -> dict[str, float]:
    """Milliseconds by kind, longest first; what `wall` has beyond them is host and gaps.

    `kinds`: (kind, pattern) pairs, of which the first whose pattern is in a name counts.
    """
    total: dict[str, float] = collections.defaultdict(float)
    for name, (ms, _) in times.items():
        kind = next((kind for kind, pattern in kinds if re.search(pattern, name)), "other kernels")
        total[kind] += ms
    total["host and gaps"] = wall - sum(total.values())
    return {kind: round(ms, 4) for kind, ms in sorted(total.items(), key=lambda item: -item[1])}
