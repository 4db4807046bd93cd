"""Checkpoint folders as files: killed exports, shards and their index, host memory of imports."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import golden_files
import ml_dtypes
import numpy as np
import pytest

import trace_jax
from trace_jax.model import ModelConfig, checkpoint_export, safetensors_dir
from trace_jax.model.families import config_to_hub
from trace_jax.model.tensors import tensors

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}

KILLED = """
import os, signal, sys
import numpy as np
import trace_jax
from trace_jax.model import checkpoint_export, safetensors_dir

stage, out = sys.argv[1:]
config, params = trace_jax.load_checkpoint("tests/golden/olmoe")
calls = []

def killing(real, at):
    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call

if stage == "shards":
    safetensors_dir.save_file = killing(safetensors_dir.save_file, 3)
else:
    checkpoint_export._write_companions = killing(checkpoint_export._write_companions, 1)
trace_jax.save_checkpoint(out, config, params, max_shard_bytes=20_000)
"""


@pytest.mark.parametrize("stage", ["shards", "companions"])
def test_an_export_killed_on_the_way_is_no_checkpoint(stage, tmp_path):
    out = tmp_path / "out"
    line = [sys.executable, "-c", KILLED, stage, str(out)]
    done = subprocess.run(line, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.iterdir()
    assert left.name == ".out.saving" and any(left.iterdir()), "killed while writing"
    for folder in (out, left):
        with pytest.raises(ValueError, match="holds no checkpoint"):
            trace_jax.load_checkpoint(folder)
    config, params = golden_files.checkpoint("olmoe", "bfloat16")
    trace_jax.save_checkpoint(out, config, params)
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert trace_jax.load_checkpoint(out)[0] == config


def test_the_index_names_every_tensor_of_every_shard(tmp_path):
    config, params = golden_files.checkpoint("gpt_oss", "bfloat16")
    out = trace_jax.save_checkpoint(
        tmp_path / "out", config, params, "nvfp4", max_shard_bytes=9_000
    )
    index = json.loads((out / safetensors_dir.INDEX).read_text())
    stored = {}
    for file in sorted(out.glob("model-*.safetensors")):
        header = safetensors_dir._header(file)
        stored |= dict.fromkeys(header, file.name)
        assert file.stat().st_mode & 0o044, "others may read it"
        sizes = [np.prod(at.shape) * at.dtype.itemsize for at in header.values()]
        assert len(sizes) == 1 or sum(sizes) <= 9_000
    assert index["weight_map"] == stored
    everything = safetensors_dir.SafetensorsDir(out)
    total = sum(everything.read(name).nbytes for name in everything.shapes())
    assert index["metadata"]["total_size"] == total
    (out / file.name).unlink()
    with pytest.raises(ValueError, match=f"has no {file.name}"):
        trace_jax.load_checkpoint(out)


LOADED = """
import json, re, sys
import jax
import trace_jax

def kilobytes(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", open("/proc/self/status").read())[1])

trace_jax.load_checkpoint("tests/golden/qwen3_moe")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = kilobytes("VmRSS")
_, params = trace_jax.load_checkpoint(sys.argv[1])
held = sum(a.nbytes for a in jax.tree.leaves(params)) // 1024
print(json.dumps(kilobytes("VmHWM") - before - held))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_an_import_holds_little_beside_the_parameters(tmp_path):
    """At most 1.2 of the largest shard: neither a second copy of the model nor whole files."""
    config = ModelConfig(
        vocab_size=4096,
        num_layers=6,
        hidden=1024,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        expert_dim=1024,
        num_experts=7,
        top_k=2,
        tie_embeddings=False,
    )
    (tmp_path / "config.json").write_text(json.dumps(config_to_hub(config)))
    stored = ((t.name, np.ones(t.shape, ml_dtypes.bfloat16)) for t in tensors(config))
    safetensors_dir.write(tmp_path, stored, 45_000_000)
    shards = [f.stat().st_size for f in tmp_path.glob("*.safetensors")]
    assert len(shards) >= 6
    line = [sys.executable, "-c", LOADED, str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 <= 1.2 * max(shards)


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    config, params = golden_files.checkpoint("llama", "bfloat16")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_export, "_write_companions", stopped)
    with pytest.raises(KeyboardInterrupt):
        trace_jax.save_checkpoint(tmp_path / "out", config, params)
    assert list(tmp_path.iterdir()) == []
