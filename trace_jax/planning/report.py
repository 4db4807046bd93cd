"""A plan as data, and as a table to read."""

import importlib.metadata

from trace_jax.config import Config
from trace_jax.planning import fit, work
from trace_jax.planning.chips import GB, Topology
from trace_jax.planning.compiled import Compiled
from trace_jax.planning.engine import engine_plan
from trace_jax.planning.memory import piece_of


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def result_of(config: Config, topology: Topology, mesh, needed, done: dict[str, Compiled]) -> dict:
    """Everything of a plan, in bytes and seconds a device; what is compiled says so."""
    chip, refused = topology.chip, [name for name, c in done.items() if c.refused]
    beside = beside_bytes(needed)
    totals = {name: sum(terms.values()) for name, terms in needed.items()}
    totals |= {f"{name}, compiled": total_of(c) + beside[name] for name, c in done.items()}
    engine, engine_fits = engine_line(config, mesh, chip.memory)
    fits = not refused and engine_fits and max(totals.values()) <= chip.memory
    change = None
    if not fits:
        found = fit.smallest_change(config, topology)
        change = found[0] if found else []
    return {
        "topology": topology.name,
        "devices": topology.count,
        "memory": chip.memory,
        "mesh": dict(mesh.shape),
        "sequences": config.rows,
        "prompts": config.rl.prompts_per_step,
        "length": config.max_length,
        "micro_batches": config.rl.micro_batches,
        "remat": config.rl.remat,
        "tokens_of_a_piece": piece_of(config, mesh).tokens,
        "arithmetic": needed,
        "compiled": {name: compiled_row(c, beside[name]) for name, c in done.items()},
        "engine": engine,
        "totals": totals,
        "fits": fits,
        "largest_term": fit.largest_term(needed),
        "smallest_change": change,
        "roofline": roofline(config, mesh, chip, needed, done),
    }


def engine_line(config: Config, mesh, memory: int) -> tuple[str | None, bool]:
    """The continuous engine's plan, or why there is none, and whether it can run."""
    try:
        plan = engine_plan(config, mesh, memory)
    except ValueError as error:
        return str(error), False
    return None if plan is None else str(plan), True


def beside_bytes(needed) -> dict[str, int]:
    """What a device holds beside each program's own arguments."""
    state = needed["generation"]["parameters"] + needed["generation"]["optimizer"]
    weights = needed["generation"]["rollout weights"]
    return {"learner": weights, "prefill": state + weights, "decode": state + weights}


def total_of(c: Compiled) -> int:
    return c.arguments + c.temporary + c.outputs


def compiled_row(c: Compiled, beside: int) -> dict:
    if c.refused:
        return {"refused": c.refused, "seconds_to_compile": round(c.seconds, 1)}
    return {
        "arguments": c.arguments,
        "temporary": c.temporary,
        "outputs": c.outputs,
        "held_beside": beside,
        "flops_of_loop_bodies_once": c.flops,
        "collectives": [each._asdict() for each in c.collectives],
        "seconds_to_compile": round(c.seconds, 1),
    }


def roofline(config: Config, mesh, chip, needed, done) -> dict:
    """{program: least seconds by bound, and which is the largest}; links are those of the compiled
    program, where it is one."""
    learner = done.get("learner", Compiled())
    links = sum(c.bytes for c in learner.collectives) or None
    works = {
        "learner": work.update_work(config, mesh, links),
        "prefill": work.prefill_work(config, mesh),
        "decode": work.decode_work(config, mesh, needed["generation"]["KV cache"]),
    }
    rows = {}
    for name, done_by in works.items():
        seconds = done_by.seconds(chip)
        rows[name] = {
            **done_by._asdict(),
            "links_from": "compiled" if name == "learner" and links else "arithmetic",
            **{f"{bound}_s": s for bound, s in seconds.items()},
            "bound": max(seconds, key=seconds.get),
            "step_s": max(seconds.values()),
        }
    return rows


# --- text -------------------------------------------------------------------------------


def table(result: dict) -> str:
    lines = [
        f"{result['topology']}: {result['devices']} devices of {result['memory'] / GB:.1f} GB, "
        + " ".join(f"{k}={v}" for k, v in result["mesh"].items() if v > 1),
        f"{result['sequences']} sequences of {result['length']} tokens, "
        f"{result['micro_batches']} micro-batches, remat {result['remat']}",
    ]
    for name, terms in result["arithmetic"].items():
        lines += ["", f"{name}, GB a device by arithmetic"]
        lines += [f"  {term:<18}{n / GB:9.3f}" for term, n in terms.items()]
        lines.append(f"  {'total':<18}{sum(terms.values()) / GB:9.3f}")
    if result["engine"]:
        lines += ["", f"continuous engine, a device by arithmetic: {result['engine']}"]
    for name, row in result["compiled"].items():
        lines += ["", *_compiled_lines(name, row)]
    lines += ["", "roofline, least seconds   products      HBM    links   bound"]
    for name, row in result["roofline"].items():
        seconds = "".join(f"{row[f'{b}_s']:9.4f}" for b in ("products", "HBM", "links"))
        lines.append(f"  {name:<22}{seconds}   {row['bound']}")
    return "\n".join([*lines, "", _verdict(result)])


def _compiled_lines(name: str, row: dict) -> list[str]:
    if "refused" in row:
        return [f"{name}: the compiler refuses: {row['refused']}"]
    terms = ("arguments", "temporary", "outputs", "held_beside")
    lines = [f"{name}, GB a device as compiled ({row['seconds_to_compile']:.0f} s)"]
    lines += [f"  {term:<18}{row[term] / GB:9.3f}" for term in terms]
    lines.append(f"  {'total':<18}{sum(row[term] for term in terms) / GB:9.3f}")
    for c in row["collectives"][:8]:
        over = f"{c['kind']} over {c['axes']}"
        lines.append(f"  {over:<42}{c['count']:6} times {c['bytes'] / GB:9.3f} GB")
    return lines


def _verdict(result: dict) -> str:
    if result["fits"]:
        return "fits"
    change = result["smallest_change"]
    write = f"write {' '.join(change)}" if change else "no change that was tried fits: more devices"
    return f"does not fit: {result['largest_term']} is the largest term; {write} (by arithmetic)"
