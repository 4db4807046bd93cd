"""Collectives of a compiled program, from the text of its HLO."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

KINDS = (
    "ragged-all-to-all",
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
)
ITEMS = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OP = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BOUND = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]+)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}]*)\}"
)
_CALL = re.compile(r"(body|calls|to_apply)=%?([\w.\-]+)")


class Collective(NamedTuple):
    """A kind of collective over `axes` of the mesh: how often it runs in one execution of the
    program, and the bytes that a device has of its results in all of these."""

    kind: str
    axes: str
    count: int
    bytes: int


def collectives(text: str, mesh: dict[str, int]) -> list[Collective]:
    """Of a whole execution, the largest first.

    A loop's are counted as often as it runs, where the compiler knows that (once elsewhere);
    branches of conditionals, the further rounds of crowded experts, are not counted.

    Args:
      text: of a compiled, partitioned module.
      mesh: {axis: size} in the order of the devices.
    """
    bodies = dict(_computations(text))
    entry = next(name for name, (first, _) in bodies.items() if first.startswith("ENTRY"))
    totals = defaultdict(lambda: [0, 0])
    for line, times in _executed(bodies, entry, 1):
        if found := _OP.search(line):
            shape, kind, start = found.groups()
            total = totals[kind, _axes(line, mesh)]
            total[0] += times
            total[1] += times * shape_bytes(_results(shape) if start else shape)
    joined = [Collective(*key, *total) for key, total in totals.items()]
    return sorted(joined, key=lambda c: -c.bytes)


def shape_bytes(text: str) -> int:
    """Bytes of the arrays in 'f32[8,4]{1,0}' or a tuple of such."""
    total = 0
    for kind, sizes in re.findall(r"([a-z]+\d*\w*)\[([\d,]*)\]", text):
        bits = re.search(r"\d+", kind)
        item = ITEMS.get(kind) or (int(bits.group()) / 8 if bits else 0)
        total += item * math.prod(int(n) for n in sizes.split(",") if n)
    return math.ceil(total)


def _computations(text: str) -> Iterator[tuple[str, tuple[str, list[str]]]]:
    name, header, lines = None, "", []
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            name, header, lines = opened.group(1), line, []
        elif line.startswith("}") and name:
            yield name, (header, lines)
            name = None
        elif name:
            lines.append(line)


def _executed(bodies, name: str, times: int) -> Iterator[tuple[str, int]]:
    """Lines of a computation and of those that it calls, and how often each runs."""
    for line in bodies.get(name, ("", []))[1]:
        yield line, times
        for how, called in _CALL.findall(line):
            loops = _trips(bodies, line) if how == "body" else 1
            yield from _executed(bodies, called, times * loops)


def _trips(bodies, line: str) -> int:
    """How often a loop runs: as stated, or by the one bound that its condition compares with."""
    if stated := _TRIPS.search(line):
        return int(stated.group(1))
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = bodies.get(condition.group(1), ("", []))[1] if condition else []
    bounds = [int(n) for n in _BOUND.findall("\n".join(lines))]
    return bounds[0] if len(bounds) == 1 else 1


def _results(shape: str) -> str:
    """The second element of the tuple that the start of an asynchronous collective gives."""
    depth, parts, current = 0, [], ""
    for c in shape.strip()[1:-1]:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += c
    parts.append(current)
    return parts[1] if shape.startswith("(") and len(parts) > 1 else shape


def _axes(line: str, mesh: dict[str, int]) -> str:
    """Names of the mesh axes that a collective's first group extends over."""
    group = _first_group(line)
    if group is None:
        return "all"
    at = np.array(np.unravel_index(group, tuple(mesh.values())))
    moved = [axis for axis, row in zip(mesh, at, strict=True) if len(set(row.tolist())) > 1]
    return " x ".join(moved) or "none"


def _first_group(line: str) -> np.ndarray | None:
    """Devices of the first group, or a pair that exchanges; None: all of them.

    Groups are listed, cut from a row of all devices, or the named axes of a mesh.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return np.array(_numbers(listed.group(1)))
    if pairs := re.findall(r"\{(\d+),(\d+)\}", line.partition("source_target_pairs=")[2]):
        moved = (pair for pair in pairs if pair[0] != pair[1])
        return np.array([int(n) for n in next(moved, pairs[0])])
    if named := _MESH.search(line):
        axes, source, order, over = named.groups()
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes))
        last = [i for i, name in enumerate(sizes) if f"'{name}'" in over]
        shape = [int(n) for n in sizes.values()]
        first = [i for i in range(len(shape)) if i not in last]
        devices = _devices(source or str(math.prod(shape)), order).reshape(shape)
        devices = devices.transpose(first + last)
        return devices.reshape(-1, math.prod(shape[i] for i in last))[0]
    made = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if not made:
        return None
    groups, source, order = made.groups()
    return _devices(source, order).reshape(_numbers(groups))[0]


def _devices(source: str, order: str | None) -> np.ndarray:
    """All devices as an array of shape `source`, its axes in another order."""
    devices = np.arange(math.prod(_numbers(source))).reshape(_numbers(source))
    return devices if order is None else devices.transpose(_numbers(order))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
