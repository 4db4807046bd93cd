"""Makes the golden checkpoints of tests/test_parity.py with transformers' own classes.

    pip install torch==2.13.0 transformers==5.24.0    (CPU, Python 3.11)
    python tests/golden/make_golden.py

Each family gets a folder with a tiny random model in the Hub's layout (BF16) and
expected.safetensors: tokens int32 [2, S], logits FP32 [2, S, vocab] of an FP32 forward
on those weights, routes int32 [layers, 2, S, top_k] (sorted), and 16 greedy tokens that
follow the first 8 of row 0. Real structure in small: several experts, grouped queries,
windows shorter than the sequence, positions beyond YaRN's original context.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

PINNED = {"torch": "2.13.0", "transformers": "5.24.0"}
HERE = Path(__file__).parent
LENGTH, PROMPT, GREEDY = 40, 8, 16

SHARED = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=32,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
EXPERTS = dict(num_experts=5, num_experts_per_tok=2)
YARN = dict(
    rope_type="yarn",
    rope_theta=150000.0,
    factor=4.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=32,
)
FAMILIES = {
    "llama": dict(tie_word_embeddings=True),
    "qwen3": dict(head_dim=16),
    "qwen3_moe": dict(head_dim=16, moe_intermediate_size=32, norm_topk_prob=True, **EXPERTS),
    "olmoe": dict(clip_qkv=0.9, **EXPERTS),
    "mixtral": dict(num_local_experts=5, num_experts_per_tok=2, head_dim=8, sliding_window=None),
    "gpt_oss": dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=8,
        rope_parameters=YARN,
    ),
}
SHARDED = "qwen3_moe"  # written in several files with an index


def randomize(model: torch.nn.Module) -> None:
    """BF16-valued parameters of a size at which every part matters."""
    for name, p in model.named_parameters():
        if "norm" in name:
            value = 1 + 0.3 * torch.randn_like(p)
        elif "sinks" in name or "bias" in name:
            value = 0.5 * torch.randn_like(p)
        elif "embed" in name or "lm_head" in name:
            value = 0.7 * torch.randn_like(p)
        else:
            value = 1.5 * torch.randn_like(p) * p.shape[-1] ** -0.5
        p.data = value.to(torch.bfloat16).float()


@torch.no_grad()
def expected(model, config) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, config.vocab_size, (2, LENGTH))
    moe = getattr(config, "num_experts_per_tok", 0)
    out = model(tokens, **({"output_router_logits": True} if moe else {}))
    result = {"tokens": tokens.int(), "logits": out.logits.contiguous()}
    if moe:
        ids = [layer.topk(moe, dim=-1).indices for layer in out.router_logits]
        routes = [layer.sort(dim=-1).values for layer in ids]
        result["routes"] = torch.stack(routes).reshape(-1, 2, LENGTH, moe).int()
    row = tokens[:1, :PROMPT]
    for _ in range(GREEDY):
        row = torch.cat([row, model(row).logits[:, -1:].argmax(-1)], dim=1)
    result["greedy"] = row[0, PROMPT:].int()
    return result


def main():
    for module, wanted in ((torch, PINNED["torch"]), (transformers, PINNED["transformers"])):
        found = module.__version__.split("+")[0]
        if found != wanted:
            raise SystemExit(f"{module.__name__} is {found}; install {wanted}")
    for seed, (family, settings) in enumerate(FAMILIES.items()):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(family, **(SHARED | settings))
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        randomize(model)
        folder = HERE / family
        values = expected(model, config)
        shard = "60KB" if family == SHARDED else "1GB"
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
        save_file(values, folder / "expected.safetensors", metadata=PINNED)
        print(family, json.dumps({k: list(v.shape) for k, v in values.items()}))


if __name__ == "__main__":
    main()
