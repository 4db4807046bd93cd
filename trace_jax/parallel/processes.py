"""The processes of a run: one a host, the same command on each.

Every process runs the same program on global arrays. What only the host knows (verdicts of
scorers, Ctrl-C, a refusal of the run's folder) must not differ between them, or they would wait
for each other forever: the first process decides and tells the others.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from trace_jax.config import ConfigError, DistributedConfig

MESSAGE = 1024  # bytes of an error that the others are told
PATIENCE = 1_800_000  # milliseconds until a process that lives and does not come is given up


def join(config: DistributedConfig) -> None:
    """Joins the other processes of the run, before anything asks for devices.

    A process that dies ends the others after `config.timeout` seconds, with JAX's word on which
    one it was.

    Raises:
      ConfigError: no cluster was detected, or the coordinator cannot be reached.
    """
    if not config.coordinator or jax.distributed.is_initialized():
        return
    known = {}
    if config.coordinator != "auto":
        known = {
            "coordinator_address": config.coordinator,
            "num_processes": config.processes,
            "process_id": config.process,
        }
    try:
        jax.distributed.initialize(**known, heartbeat_timeout_seconds=config.timeout)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"distributed.coordinator is {config.coordinator!r} and the processes did not meet "
            f"({str(error).splitlines()[0]}); write host:port of the first process, "
            "distributed.processes and distributed.process"
        ) from error


def is_first() -> bool:
    """Whether this process writes the run's files."""
    return jax.process_index() == 0


def meet() -> None:
    """Waits for every process, however long one compiles or scores.

    A collective of CPU processes gives up after 30 seconds; this barrier does not, and a
    process that dies ends it after `distributed.timeout`.
    """
    multihost.get_barrier_sync_fn()(key="trace_jax", timeout_ms=PATIENCE)


def from_first(tree):
    """A tree of NumPy arrays as the first process has it; shapes and dtypes agree everywhere."""
    if jax.process_count() == 1:
        return tree
    meet()
    told = multihost_utils.broadcast_one_to_all(tree)
    return jax.tree.map(lambda a, like: np.asarray(a).astype(like.dtype), told, tree)


def any_of(flag: bool) -> bool:
    """Whether the flag is up on any process."""
    if jax.process_count() == 1:
        return flag
    meet()
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def once(act: Callable[[], object]) -> None:
    """Runs `act` on the first process; what it raises is raised on all, elsewhere as ValueError."""
    failure = None
    if is_first():
        try:
            act()
        except Exception as error:  # re-raised below
            failure = error
    text = "" if failure is None else str(failure) or type(failure).__name__
    told = np.zeros(MESSAGE, np.uint8)
    told[: len(text.encode()[:MESSAGE])] = np.frombuffer(text.encode()[:MESSAGE], np.uint8)
    told = bytes(from_first(told)).rstrip(b"\0").decode(errors="replace")
    if failure is not None:
        raise failure
    if told:
        raise ValueError(told)
