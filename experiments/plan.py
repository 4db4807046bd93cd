"""Whether a configuration fits on chips that are not here, and what bounds its step.

    python -m experiments.plan --config=configs/qwen3_30b_a3b.py --topology=v6e:8x8

For TPUs (v5e, v5p, v6e, tpu7x) the learner's update, the prefill and a decode step are compiled
ahead of time by libtpu, from shapes alone; for GPUs (h100:8, h200:8, b200:8) and with
--programs=none everything is arithmetic. Nothing is run. Compiling takes minutes a program.
"""

import dataclasses
import datetime
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from absl import flags
from ml_collections import config_flags

from experiments import cli
from trace_jax.config import Config
from trace_jax.planning import compiled, fit, memory, report
from trace_jax.planning.chips import parse_topology

CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.")
TOPOLOGY = flags.DEFINE_string("topology", None, "CHIP:SIZES, such as v6e:8x8 or h200:8.")
MESH = flags.DEFINE_string("mesh", "", "Axes such as data=1,fsdp=16,expert=4; else config.mesh.")
BATCH = flags.DEFINE_integer("batch", 0, "Sequences a step; 0: as configured.")
LENGTH = flags.DEFINE_integer("length", 0, "Tokens a sequence, a quarter of them the prompt's.")
PROGRAMS = flags.DEFINE_list("programs", list(compiled.PROGRAMS), "What to compile, or none.")
JSON = flags.DEFINE_string("json", "", "File for the result.")


def config_of() -> Config:
    config = cli.config_of(CONFIG)
    if MESH.value:
        config = fit.with_mesh(config, MESH.value)
    if LENGTH.value:
        prompt = LENGTH.value // 4
        budget = {"max_prompt": prompt, "max_response": LENGTH.value - prompt}
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, **budget))
    if BATCH.value:
        if BATCH.value % config.rl.samples:
            raise ValueError(
                f"--batch is {BATCH.value}; write a multiple of rl.samples, {config.rl.samples}"
            )
        prompts = BATCH.value // config.rl.samples
        config = dataclasses.replace(
            config, rl=dataclasses.replace(config.rl, prompts_per_step=prompts)
        )
    return config


def programs_of(tpu: bool) -> tuple[str, ...]:
    names = tuple(name for name in PROGRAMS.value if name != "none")
    unknown = [name for name in names if name not in compiled.PROGRAMS]
    if unknown:
        raise ValueError(
            f"--programs has {', '.join(unknown)}; write some of {','.join(compiled.PROGRAMS)}, "
            "or none"
        )
    return names if tpu else ()


def main():
    topology = parse_topology(TOPOLOGY.value)
    config, names = config_of(), programs_of(topology.chip.tpu)
    mesh = memory.abstract_mesh(config, topology.count)
    config = fit.with_mesh(config, ",".join(f"{k}={v}" for k, v in mesh.shape.items()))
    needed = fit.need(config, topology)
    if refusal := fit.row_refusal(config, mesh):
        raise ValueError(refusal)
    done = compiled.compile_programs(config, topology.name, names) if names else {}
    result = report.result_of(config, topology, mesh, needed, done)
    print(report.table(result))
    if JSON.value:
        header = {
            "date": datetime.date.today().isoformat(),
            "jax": jax.__version__,
            "libtpu": report.version_of("libtpu") if done else None,
            "command": " ".join(["python -m experiments.plan", *sys.argv[1:]]),
        }
        Path(JSON.value).write_text(json.dumps(header | result, indent=1) + "\n")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "topology"])
    cli.run(main)
