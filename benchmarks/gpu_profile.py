"""Where the time of a traced run went, from the profiler's own events."""

import collections
import pathlib
import re

import jax


def kernel_times(folder: str, steps: int = 1, top: int = 0) -> dict[str, float]:
    """{kernel: milliseconds a step} of a `jax.profiler.trace` of `steps` steps on a GPU.

    Empty elsewhere. Prints the `top` longest with their launches a step.
    """
    path = next(pathlib.Path(folder).rglob("*.xplane.pb"))
    times, launches = collections.Counter(), collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                times[event.name] += event.duration_ns / 1e6 / steps
                launches[event.name] += 1 / steps
    for name, ms in times.most_common(top):
        print(f"      {ms:8.4f} ms {launches[name]:6.1f} x  {name[:100]}")
    return dict(times)


def by_kind(times: dict[str, float], kinds, wall: float) -> dict[str, float]:
    """Milliseconds by kind, longest first; what `wall` has beyond them is host and gaps.

    `kinds`: (kind, pattern) pairs, of which the first whose pattern is in a name counts.
    """
    total = collections.Counter()
    for name, ms in times.items():
        kind = next((kind for kind, pattern in kinds if re.search(pattern, name)), "other kernels")
        total[kind] += ms
    total["host and gaps"] = wall - total.total()
    return {kind: round(ms, 4) for kind, ms in total.most_common()}
