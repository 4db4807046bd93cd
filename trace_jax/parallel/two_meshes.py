"""A mesh each for actor and learner."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from trace_jax.config import ConfigError, MeshConfig
from trace_jax.parallel.mesh import AXES, make_mesh


def split_meshes(config: MeshConfig, generating: int, devices=None) -> tuple[Mesh, Mesh]:
    """(learner's mesh, actor's mesh).

    Args:
      config: axes of the learner's mesh.
      generating: the last so many devices, 1 or more, only generate; rows are cut over them.

    Raises:
      ConfigError: no device is left to learn, devices of several processes, or axes that do
        not multiply to what is left.
    """
    devices = jax.devices() if devices is None else list(devices)
    if generating >= len(devices):
        raise ConfigError(
            f"rollout.devices is {generating}, and there are {len(devices)} devices; write at "
            f"most {len(devices) - 1}, so that one is left to learn, or 0 for all to do both"
        )
    if len({d.process_index for d in devices}) > 1:
        raise ConfigError(
            "rollout.devices cuts the devices of one process; write rollout.devices=0 with several"
        )
    learner = make_mesh(config, devices[:-generating])
    shape = [generating if axis == "data" else 1 for axis in AXES]
    grid = np.asarray(devices[-generating:]).reshape(shape)
    return learner, Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
