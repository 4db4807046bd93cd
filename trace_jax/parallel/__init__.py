"""Device meshes and how arrays lie on them."""

from trace_jax.parallel.mesh import make_mesh, rows_sharding, shard_params, shard_rows, to_host
