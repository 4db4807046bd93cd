"""How the tokens of a forward lie over devices."""

import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Layout(NamedTuple):
    """How tokens [B, S] lie over a mesh; experts lie over its axis "expert".

    Attributes:
      rows, length: mesh axes that B and S are cut over. The expert axis is among them, or its
        devices would all do the same.
    """

    mesh: Mesh
    rows: tuple[str, ...]
    length: tuple[str, ...] = ()

    @property
    def spec(self) -> P:
        return P(self.rows, self.length or None)

    @property
    def axes(self) -> tuple[str, ...]:
        return self.rows + self.length

    def ways(self, axes: tuple[str, ...]) -> int:
        """Parts that `axes` cut something into."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def row_ways(self) -> int:
        return self.ways(self.rows)

    def place(self, x: jax.Array) -> jax.Array:
        """x [B, S, ...] cut so, where it divides; a short batch or one token is left whole."""
        cuts = [
            axes if axes and size % self.ways(axes) == 0 else None
            for axes, size in zip((self.rows, self.length), x.shape[:2], strict=True)
        ]
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*cuts)))
