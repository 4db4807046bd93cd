"""Device meshes, how arrays lie on them, and the processes behind them."""

from trace_jax.parallel.mesh import (
    make_mesh,
    named_rows,
    row_ways,
    rows_sharding,
    shard_params,
    shard_rows,
    to_host,
    token_layout,
)
from trace_jax.parallel.processes import any_of, from_first, is_first, join, once
from trace_jax.parallel.rules import ACTOR, LEARNER, check_params
from trace_jax.parallel.two_meshes import split_meshes
