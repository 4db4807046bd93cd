"""The smallest change of a configuration that fits into the memory of a device, by arithmetic."""

import dataclasses
from collections.abc import Iterator

from trace_jax.config import Config, MeshConfig
from trace_jax.parallel import LEARNER
from trace_jax.parallel.mesh import AXES
from trace_jax.planning.chips import Topology
from trace_jax.planning.memory import Bytes, abstract_mesh, generation_bytes, learner_bytes, over

DEEPEST = 6  # changes together
FIT = 0.92  # of the memory: the rest is the compiler's, and what this arithmetic leaves out


def need(config: Config, topology: Topology) -> dict[str, Bytes]:
    """Bytes a device of the learner's update and of generation.

    Raises:
      ConfigError: the mesh does not divide the model or the devices.
    """
    mesh, tpu = abstract_mesh(config, topology.count), topology.chip.tpu
    return {
        "learner": learner_bytes(config, mesh, tpu),
        "generation": generation_bytes(config, mesh, tpu),
    }


def most(needed: dict[str, Bytes]) -> int:
    return max(sum(terms.values()) for terms in needed.values())


def largest_term(needed: dict[str, Bytes]) -> str:
    """'temporary of learner': what takes most where most is taken."""
    name = max(needed, key=lambda name: sum(needed[name].values()))
    return f"{max(needed[name], key=needed[name].get)} of {name}"


def smallest_change(config: Config, topology: Topology) -> tuple[list[str], Config] | None:
    """Settings to write, fewest first, and the configuration that they make; None if none does.

    Searches breadth first, and of equally many changes tries the cheapest first.
    """
    level, seen = [([], config)], {config}
    for _ in range(DEEPEST):
        following = []
        for texts, now in level:
            for text, changed in _changes(now):
                if changed in seen:
                    continue
                seen.add(changed)
                size = _most(changed, topology)
                if size is not None:
                    following.append((size, [*texts, text], changed))
        for size, texts, changed in following:
            if size <= FIT * topology.chip.memory:
                return _last_of_each(texts), changed
        following.sort(key=lambda found: found[0])
        level = [found[1:] for found in following[:8]]
    return None


def _changes(c: Config) -> Iterator[tuple[str, Config]]:
    """Single steps, those first that cost least."""
    rl, task, mesh = c.rl, c.task, c.mesh
    if rl.remat != "full":
        yield from _made(c, "rl.remat=full", rl={"remat": "full"})
    micro = 2 * rl.micro_batches
    yield from _made(c, f"rl.micro_batches={micro}", rl={"micro_batches": micro})
    for taken, given in (("fsdp", "expert"), ("data", "fsdp"), ("data", "expert"),
                         ("expert", "fsdp"), ("fsdp", "context"), ("fsdp", "tensor")):  # fmt: skip
        half, double = getattr(mesh, taken) // 2, 2 * getattr(mesh, given)
        if half >= 1 and 2 * half == getattr(mesh, taken):
            text = f"mesh.{taken}={half} mesh.{given}={double}"
            yield from _made(c, text, mesh={taken: half, given: double})
    if rl.samples > 2:
        half, prompts = rl.samples // 2, 2 * rl.prompts_per_step
        text = f"rl.samples={half} rl.prompts_per_step={prompts}"
        yield from _made(c, text, rl={"samples": half, "prompts_per_step": prompts})
    half = task.max_response // 2
    yield from _made(c, f"task.max_response={half}", task={"max_response": half})


def _made(c: Config, text: str, **groups) -> Iterator[tuple[str, Config]]:
    """The configuration with fields of some groups replaced, if it can be."""
    try:
        changed = {k: dataclasses.replace(getattr(c, k), **v) for k, v in groups.items()}
        yield text, dataclasses.replace(c, **changed)
    except ValueError:
        return


def _most(c: Config, topology: Topology) -> int | None:
    """Bytes a device; None if rows or parameters do not divide over the mesh."""
    try:
        if row_refusal(c, abstract_mesh(c, topology.count)):
            return None
        return most(need(c, topology))
    except ValueError:
        return None


def row_refusal(c: Config, mesh) -> str:
    """Why the rows do not divide over the mesh, as the trainer would say; "" if they do."""
    parts = c.rl.minibatches * c.rl.micro_batches
    ways = over(mesh, *LEARNER["rows"], *LEARNER["length"])
    whole = over(mesh, *LEARNER["rows"]) * parts
    if c.rl.prompts_per_step % ways == 0 and c.rl.prompts_per_step % whole == 0:
        return ""
    return (
        f"{c.rl.prompts_per_step} prompts do not divide over {ways} devices that generate and "
        f"{whole} pieces of the learner (rl.minibatches * rl.micro_batches = {parts}); write "
        f"--batch={c.rl.samples} times a multiple of both"
    )


def with_mesh(config: Config, text: str) -> Config:
    """`config` with the mesh "data=1,fsdp=16,expert=4"; axes that are not named are 1.

    Raises:
      ValueError: an axis that there is not, or no number.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.lstrip("-").isdigit():
            raise ValueError(
                f"mesh has {part!r}; write AXIS=SIZE of {', '.join(AXES)}, such as "
                "data=1,fsdp=16,expert=4"
            )
        sizes[axis] = int(size)
    return dataclasses.replace(config, mesh=MeshConfig(**sizes))


def _last_of_each(texts: list[str]) -> list[str]:
    """Settings without those that a later one writes again."""
    last = dict(part.split("=") for text in texts for part in text.split())
    return [f"{key}={value}" for key, value in last.items()]
