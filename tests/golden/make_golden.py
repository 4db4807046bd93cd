"""Makes the golden checkpoints of tests/test_parity.py with transformers' own classes.

    pip install torch==2.13.0 transformers==5.24.0    (CPU, Python 3.11)
    python tests/golden/make_golden.py

Each family gets a folder with a tiny random model in the Hub's layout (BF16) and
expected.safetensors: tokens int32 [2, S], logits FP32 [2, S, vocab] of an FP32 forward
on those weights, routes int32 [layers with experts, 2, S, top_k] (sorted), 16 greedy tokens
that follow the first 8 of row 0, and bf16_error FP32 [1]: how far transformers' own BF16
forward is from its FP32 one. Real structure in small: several experts and groups of them,
grouped queries, dense first layers, windows shorter than the sequence, positions beyond the
original context.
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
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
DEEPSEEK_YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=40.0,
    beta_fast=32.0,
    beta_slow=1.0,
    original_max_position_embeddings=16,
)
DEEPSEEK = dict(
    num_hidden_layers=3,
    num_key_value_heads=4,
    max_position_embeddings=640,
    first_k_dense_replace=1,
    intermediate_size=48,
    moe_intermediate_size=32,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
FAMILIES = {
    "llama": dict(tie_word_embeddings=True, rope_parameters=LLAMA3),
    "qwen3": dict(head_dim=16),
    "qwen3_moe": dict(head_dim=16, moe_intermediate_size=32, norm_topk_prob=True, **EXPERTS),
    "olmoe": dict(clip_qkv=0.9, **EXPERTS),
    "mixtral": dict(num_local_experts=5, num_experts_per_tok=2, head_dim=8, sliding_window=8),
    "gpt_oss": dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=8,
        rope_parameters=YARN,
    ),
    "deepseek_v2": dict(
        q_lora_rank=None,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters=DEEPSEEK_YARN | dict(mscale=1.0, mscale_all_dim=0.707),
        **DEEPSEEK,
    ),
    "deepseek_v3": dict(
        q_lora_rank=24,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=3,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_parameters=DEEPSEEK_YARN | dict(mscale=1.0, mscale_all_dim=1.0),
        **DEEPSEEK,
    ),
    "qwen3_5_moe_text": dict(
        num_hidden_layers=4,
        full_attention_interval=3,
        head_dim=16,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.5),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        **EXPERTS,
    ),
}
FP32 = ("e_score_correction_bias",)  # what files hold in FP32, whatever the rest
SHARDED = "qwen3_moe"  # written in several files with an index


def randomize(model: torch.nn.Module, zero_centred: bool) -> None:
    """BF16-valued parameters of a size at which every part matters; FP32 where files have it."""
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn_like(p)
        if "inv_freq" in name:
            continue
        if name.endswith(FP32):
            p.data = 0.1 * noise
            continue
        if "norm" in name:
            value = (not zero_centred or "linear_attn" in name) + 0.3 * noise
        elif name.endswith("A_log"):
            value = noise
        elif "sinks" in name or "bias" in name:
            value = 0.5 * noise
        elif "embed" in name or "lm_head" in name:
            value = 0.7 * noise
        else:
            value = 1.5 * noise * p.shape[-1] ** -0.5
        p.data = value.to(torch.bfloat16).float()


def narrow(model: torch.nn.Module) -> None:
    """The model in BF16, but for what its files hold in FP32."""
    kept = {n: b.clone() for n, b in model.named_buffers() if n.endswith((*FP32, "inv_freq"))}
    model.to(torch.bfloat16)
    for name, value in kept.items():
        model.get_buffer(name).data = value


@torch.no_grad()
def expected(model, config) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, config.vocab_size, (2, LENGTH))
    moe, routes = getattr(config, "num_experts_per_tok", 0), []
    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    keep = lambda module, inputs, output: routes.append(output[2].sort(dim=-1).values)
    hooks = [router.register_forward_hook(keep) for router in routers]
    result = {"tokens": tokens.int(), "logits": model(tokens).logits.contiguous()}
    for hook in hooks:
        hook.remove()
    if moe:
        result["routes"] = torch.stack(routes).reshape(-1, 2, LENGTH, moe).int()
    row = tokens[:1, :PROMPT]
    for _ in range(GREEDY):
        row = torch.cat([row, model(row).logits[:, -1:].argmax(-1)], dim=1)
    result["greedy"] = row[0, PROMPT:].int()
    return result


@torch.no_grad()
def bf16_error(model, values) -> torch.Tensor:
    """Error of the BF16 model in standard deviations of the FP32 logits: the median token's.

    A token's error is its root mean square. The median, because a route that flips at a
    near tie moves its token by much more than rounding does.
    """
    logits = values["logits"]
    error = model(values["tokens"].long()).logits.float() - logits
    by_token = error.square().mean(dim=-1).sqrt() / logits.std()
    print(f"BF16 rms {by_token.square().mean().sqrt():.4f}, median {by_token.median():.4f}")
    return by_token.median().reshape(1)


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
        randomize(model, family.startswith("qwen3_5"))
        folder = HERE / family
        values = expected(model, config)
        narrow(model)
        values["bf16_error"] = bf16_error(model, values)
        shard = "60KB" if family == SHARDED else "1GB"
        model.save_pretrained(folder, max_shard_size=shard)
        save_file(values, folder / "expected.safetensors", metadata=PINNED)
        shapes = json.dumps({k: list(v.shape) for k, v in values.items()})
        print(family, shapes)


if __name__ == "__main__":
    main()
