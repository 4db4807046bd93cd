"""Family, parameters and bytes of a checkpoint, from its config alone.

    python -m experiments.inspect --checkpoint=DIR

DIR needs no more than a config.json; a .gguf file and pip:PACKAGE do too.
"""

from absl import flags

from experiments import cli
from trace_jax.fp4 import GuidancePlan
from trace_jax.model.accounting import summary
from trace_jax.model.checkpoint_io import checkpoint_config
from trace_jax.model.families import family_of

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder, .gguf file or pip:PACKAGE.")
flags.mark_flag_as_required("checkpoint")


def main():
    config = checkpoint_config(CHECKPOINT.value)
    found = summary(config, GuidancePlan())
    # Rounded down, as the names of models are.
    billions = lambda n: f"{n // 10**8 / 10} B" if n >= 1e9 else f"{n // 10**5 / 10} M"
    print(f"family      {family_of(config)}")
    print(f"parameters  {billions(found['parameters'])} total, {billions(found['active'])} active")
    for name in ("bf16", "nvfp4", "mxfp4"):
        print(f"weights     {found[f'bytes_{name}'] / 2**30:.2f} GiB with experts in {name}")
    for name in ("bf16", "fp8", "nvfp4"):
        print(f"KV-cache    {found[f'kv_bytes_per_token_{name}']} bytes a token in {name}")
    print(f"guidance    {found['guidance_bytes_per_token']} bytes a token (default plan)")
    cli.print_json({"family": family_of(config), **found})


if __name__ == "__main__":
    cli.run(main)
