"""Chips by their vendors' public figures, and topologies of them."""

import math
import re
from typing import NamedTuple

GB, GIB, TERA = 10**9, 2**30, 10**12


class Chip(NamedTuple):
    """Of one device as JAX shows it.

    Attributes:
      memory: bytes of HBM.
      flops: dense BF16 products, operations a second.
      bandwidth: of HBM, bytes a second.
      links: bytes a second that leave it for others of its kind; those that come in may do so
        at the same time.
      devices: a chip.
      tpu: whether programs can be compiled for it without one.
    """

    memory: int
    flops: float
    bandwidth: float
    links: float
    devices: int = 1
    tpu: bool = True


# TPUs: cloud.google.com/tpu/docs, pages v5e, v5p, v6e, tpu7x; links are half of what is given
# there for both directions. A TPU7x chip is two devices, with half of everything each.
# GPUs: NVIDIA's data sheets (H100 and H200 SXM, HGX B200 a GPU), products without sparsity; links
# are NVLink in one direction, which reaches the eight GPUs of a host alone.
CHIPS = {
    "v5e": Chip(16 * GIB, 197 * TERA, 819 * GB, 200 * GB),
    "v5p": Chip(95 * GIB, 459 * TERA, 2765 * GB, 600 * GB),
    "v6e": Chip(32 * GIB, 918 * TERA, 1638 * GB, 400 * GB),
    "tpu7x": Chip(96 * GIB, 1153.5 * TERA, 3690 * GB, 300 * GB, devices=2),
    "h100": Chip(80 * GB, 989 * TERA, 3350 * GB, 450 * GB, tpu=False),
    "h200": Chip(141 * GB, 989 * TERA, 4800 * GB, 450 * GB, tpu=False),
    "b200": Chip(180 * GB, 2250 * TERA, 7700 * GB, 900 * GB, tpu=False),
}


class Topology(NamedTuple):
    """`count` devices of a kind of chip; `name` as the user wrote it."""

    name: str
    chip: Chip
    count: int


def parse_topology(name: str) -> Topology:
    """ "v6e:8x8", "v5p:4x4x4" or "h200:8".

    Raises:
      ValueError: an unknown chip or malformed sizes; says which are known.
    """
    kind, _, sizes = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
        raise ValueError(
            f"topology is {name!r}; write CHIP:SIZES such as v6e:8x8, v5p:4x4x4 or h200:8, with "
            f"a chip of {', '.join(CHIPS)}"
        )
    chip = CHIPS[kind]
    return Topology(name, chip, chip.devices * math.prod(map(int, sizes.split("x"))))
