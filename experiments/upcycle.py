"""Makes a MoE checkpoint from a dense one.

    python -m experiments.upcycle --checkpoint=DIR --experts=8 --top_k=2 --out=DIR

The result computes the same function at the start (to FP32 rounding; --noise=0.01 breaks the
symmetry of the experts). A Llama model becomes a Mixtral one, Qwen3 becomes Qwen3-MoE. A
supervised run then separates the experts:

    python -m experiments.train --config=configs/smollm2.py --config.init.checkpoint=DIR \\
        --config.warmup.steps=200 --config.rl.steps=0 --workdir=DIR
"""

import jax
from absl import flags

import trace_jax
from experiments import cli
from trace_jax.model.checkpoint_io import checkpoint_path
from trace_jax.model.families import family_of
from trace_jax.model.tensors import parameter_count
from trace_jax.model.upcycle import upcycle
from trace_jax.pretrained import export_files

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Dense: folder, .gguf or pip:PACKAGE.")
EXPERTS = flags.DEFINE_integer("experts", 8, "Experts a layer.", lower_bound=1)
TOP_K = flags.DEFINE_integer("top_k", 2, "Experts a token.", lower_bound=1)
NOISE = flags.DEFINE_float("noise", 0.0, "Relative noise on the experts.", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", 0, "Of the router and the noise.")
OUT = flags.DEFINE_string("out", None, "New folder.")
flags.mark_flags_as_required(["checkpoint", "out"])


def main():
    config, params = trace_jax.load_checkpoint(CHECKPOINT.value)
    key = jax.random.key(SEED.value)
    config, params = upcycle(config, params, EXPERTS.value, TOP_K.value, key, NOISE.value)
    source = checkpoint_path(CHECKPOINT.value).name
    facts = {"upcycled from": source, "experts": EXPERTS.value, "noise": NOISE.value}
    files = export_files(CHECKPOINT.value)
    trace_jax.save_checkpoint(OUT.value, config, params, files=files, facts=facts)
    cli.print_json(
        {
            "out": OUT.value,
            "family": family_of(config),
            "parameters": parameter_count(config),
            "active": parameter_count(config, active=True),
        }
    )


if __name__ == "__main__":
    cli.run(main)
