"""The continuous engine's memory on a device that is not here, by the engine's own arithmetic."""

from trace_jax.config import Config
from trace_jax.planning.compiled import engine_config
from trace_jax.planning.memory import MASTER, MOMENTS, over, param_bytes, rollout_bytes
from trace_jax.rollout.batches import program_config
from trace_jax.rollout.data_parallel import axes_refusal
from trace_jax.rollout.memory import MemoryPlan, plan_memory


def engine_plan(config: Config, mesh, memory: int) -> MemoryPlan | None:
    """What a device's engine has beside the learner's state; None if the batch engine is asked.

    Every device of a mesh has an engine with whole weights and the rows that it learns from.

    Raises:
      ValueError: the engine does not run on such a mesh, or not one sequence fits.
    """
    if config.rollout.engine != "continuous":
        return None
    if reason := axes_refusal(mesh):
        raise ValueError(reason)
    c = engine_config(config)
    ways = over(mesh, *mesh.axis_names)
    whole = type(mesh)((1,) * len(mesh.axis_names), mesh.axis_names)
    weights = rollout_bytes(config, whole, c.precision)
    state = param_bytes(config, mesh, MASTER + MOMENTS)
    rows = -(-config.rows // ways)
    settings = {"slots": config.rollout.slots, "turns": config.task.multiturn}
    programs = program_config(c, rows, config.task.max_prompt, **settings)
    # The learner's copy of the rollout's weights stays while the engine lays out its own.
    return plan_memory(programs, weights, max(memory - state - weights, 0), rows=rows)
