"""Continuous engines side by side: one a device, with the rows that the learner keeps there."""

import concurrent.futures
import dataclasses

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trace_jax.parallel import rows_sharding, to_host
from trace_jax.rollout.batches import ContinuousBatches
from trace_jax.rollout.engine import Engine, EngineConfig
from trace_jax.rollout.record import Rollout, map_rows

NOISE_STRIDE = 65_537  # between the seeds of the emulated noise of two devices


def make_engine(kind: str, config: EngineConfig, *, mesh=None, slots: int = 0, turns: bool = False):
    """The engine called `kind`: "batch" or "continuous", for one device or those of `mesh`.

    See ContinuousBatches for the rest.
    """
    if kind == "batch":
        return Engine(config)
    if mesh is None or mesh.size == 1:
        return ContinuousBatches(config, slots, turns=turns)
    return DataParallelBatches(config, mesh, slots, turns=turns)


def refusal(mesh) -> str | None:
    """Why continuous engines cannot run on a mesh; None if they can."""
    if reason := axes_refusal(mesh):
        return reason
    if any(d.process_index != jax.process_index() for d in mesh.devices.flat):
        return (
            "rollout.engine is 'continuous', which runs in one process so far; write "
            "rollout.engine='batch'"
        )
    return None


def axes_refusal(mesh) -> str | None:
    """The same of a mesh whose devices may be elsewhere: of its axes alone."""
    others = {name: n for name, n in mesh.shape.items() if name not in ("data", "fsdp")}
    if any(n > 1 for n in others.values()):
        return (
            "rollout.engine is 'continuous', which cuts rows over data and fsdp alone, and the "
            f"mesh has {others}; write 1 for these, or rollout.engine='batch'"
        )
    return None


class DataParallelBatches:
    """`ContinuousBatches` on every device of a mesh; rows are cut over data and fsdp.

    Every device has the whole rollout parameters (the quantized ones are what is gathered),
    pages, slots and a scheduler of its own, and waits for no other. Records are joined where
    they lie: the result has the layout of `rows_sharding`, and nothing was moved for it.

    Args:
      config, turns: as for `ContinuousBatches`.
      slots: of all devices together; 0: as many as a batch has rows.

    Raises:
      ValueError: a mesh that cuts more than rows, or devices of other processes.
    """

    def __init__(self, config: EngineConfig, mesh, slots: int = 0, *, turns: bool = False):
        if reason := refusal(mesh):
            raise ValueError(reason)
        self.config, self.mesh, self.devices = config, mesh, list(mesh.devices.flat)
        # Whole codes are kept of the first rows, which are the first device's.
        rest = dataclasses.replace(config, audit_rows=0)
        each = -(-slots // len(self.devices))
        self.engines = [
            ContinuousBatches(rest if i else config, each, turns=turns)
            for i in range(len(self.devices))
        ]
        self._mark, self._version, self._params = None, None, []

    def __call__(
        self, params, prompts, lengths, keys, *, version=0, noise_seed=0, turn=0
    ) -> Rollout:
        """See `ContinuousBatches.__call__`; the number of prompts is a multiple of the devices'.

        Raises:
          ValueError: prompts that do not divide among the devices.
        """
        prompts, lengths = to_host(prompts), to_host(lengths)
        ways, data = len(self.devices), to_host(jax.random.key_data(keys))
        if len(prompts) % ways:
            raise ValueError(
                f"{len(prompts)} prompts do not divide among {ways} devices; write a multiple"
            )
        self._take(params, int(version))

        def run(i: int) -> Rollout:
            mine = slice(i * len(prompts) // ways, (i + 1) * len(prompts) // ways)
            rows = slice(i * len(data) // ways, (i + 1) * len(data) // ways)
            with jax.default_device(self.devices[i]):
                return self.engines[i](
                    self._params[i],
                    prompts[mine],
                    lengths[mine],
                    jax.random.wrap_key_data(data[rows]),
                    version=version,
                    noise_seed=(noise_seed + NOISE_STRIDE * i) % 2**31,
                    turn=turn,
                )

        with concurrent.futures.ThreadPoolExecutor(ways) as pool:
            return self._join(list(pool.map(run, range(ways))))

    def _take(self, params, version: int) -> None:
        """Every device's own view of the parameters; the same objects for the same weights."""
        mark = params["final_norm"]["weight"]
        if mark is self._mark and version == self._version:
            return
        self._params = []  # frees the older weights first
        whole = jax.device_put(params, NamedSharding(self.mesh, P()))

        def on(device):
            def view(a):
                return next(s.data for s in a.addressable_shards if s.device == device)

            return jax.tree.map(view, whole)

        self._params = [on(device) for device in self.devices]
        self._mark, self._version = mark, version

    def _join(self, parts: list[Rollout]) -> Rollout:
        first, rest = parts[0], parts[1:]
        audit = jax.tree.map(
            lambda a: jax.device_put(a, rows_sharding(a.shape, 1, self.mesh)), first.audit
        )

        def joined(a, axis, *others):
            shape = (*a.shape[:axis], a.shape[axis] * len(parts), *a.shape[axis + 1 :])
            pieces = [
                jax.device_put(piece, device)
                for piece, device in zip((a, *others), self.devices, strict=True)
            ]
            sharding = rows_sharding(shape, axis, self.mesh)
            return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

        bare = [part.replace(audit={}) for part in (first, *rest)]
        return _map_rows_of(joined, *bare).replace(audit=audit)


def _map_rows_of(fn, first: Rollout, *rest: Rollout) -> Rollout:
    """fn(array, axis of its rows, the same array of the others...) of every array."""
    leaves = [iter(jax.tree.leaves(record)) for record in rest]
    return map_rows(lambda a, axis: fn(a, axis, *(next(other) for other in leaves)), first)
