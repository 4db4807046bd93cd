"""RL from a checkpoint: its model, tokenizer, template and every EOS; resume and export."""

import dataclasses
import io
import json
from functools import cache

import golden_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_checkpoints import EOS, files
from run_helpers import share_compiled

import trace_jax
from trace_jax import model, sync
from trace_jax.config import ConfigError, default, freeze, to_dict
from trace_jax.exports import check_format, export_run
from trace_jax.loop import train
from trace_jax.model import ModelConfig
from trace_jax.model.upcycle import upcycle
from trace_jax.parallel import make_mesh
from trace_jax.pretrained import export_files, run_params, run_tokenizer, tokenizer_of
from trace_jax.tasks import ByteTokenizer
from trace_jax.trainer import Trainer

DENSE = ModelConfig(
    vocab_size=262,
    num_layers=2,
    hidden=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    expert_dim=32,
    rope_theta=5000.0,
)


@cache
def weights():
    return model.init(DENSE, jax.random.key(3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "dense"
    return str(trace_jax.save_checkpoint(folder, DENSE, weights(), files=files()))


@pytest.fixture(scope="module")
def upcycled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "moe"
    config, params = upcycle(DENSE, weights(), 4, 2, jax.random.key(0), noise=0.01)
    return str(trace_jax.save_checkpoint(folder, config, params, "nvfp4", files=files()))


def settings(checkpoint, **groups):
    config = default()
    config.init.checkpoint = checkpoint
    config.task.datasets = (("chain_sum", 1.0, (("min_terms", 2), ("max_terms", 2))),)
    config.task.max_prompt, config.task.max_response = 12, 4
    config.rl.steps, config.rl.prompts_per_step, config.rl.samples = 2, 8, 2
    config.guidance.layers = "all"
    config.eval.problems, config.eval.samples, config.ledger.audit_rows = 8, 1, 4
    config.checkpoint.every = 1
    for name, values in groups.items():
        config[name].update(values)
    return config


# --- settings ----------------------------------------------------------------------------


def test_the_model_is_the_checkpoints(checkpoint, upcycled):
    assert freeze(settings(checkpoint)).model == DENSE
    moe = freeze(settings(upcycled)).model
    assert moe == dataclasses.replace(DENSE, num_experts=4, top_k=2, qk_norm=True)


@pytest.mark.parametrize("family", golden_files.ALL)
def test_a_run_folders_config_freezes_again(family):
    """Of every family, whose nested settings JSON holds as lists and objects."""
    config = freeze(settings(str(golden_files.GOLDEN / family)))
    assert config.model == golden_files.checkpoint(family, "bfloat16")[0]
    assert freeze(json.loads(json.dumps(to_dict(config)))) == config


def test_a_model_setting_that_is_not_the_checkpoints_is_an_error(checkpoint):
    tree = settings(checkpoint).to_dict()
    assert freeze(tree | {"model": {"hidden": 32, "dtype": "float32"}}).model.dtype == "float32"
    with pytest.raises(ConfigError, match=r"model\.hidden is 64 and that of init.checkpoint 32"):
        freeze(tree | {"model": {"hidden": 64}})
    with pytest.raises(ConfigError, match=r"unknown config key model\.hiden"):
        freeze(tree | {"model": {"hiden": 32}})


def test_no_model_and_no_checkpoint_says_what_to_write(tmp_path):
    with pytest.raises(ConfigError, match="model is empty; write its shape, or init.checkpoint"):
        freeze(default())
    with pytest.raises(ValueError, match="holds no checkpoint: config.json is missing"):
        freeze(settings(str(tmp_path)))


# --- parameters and tokenizer --------------------------------------------------------------


def test_masters_are_the_checkpoints_values_on_the_mesh(checkpoint):
    config = freeze(settings(checkpoint, mesh={"data": 2, "fsdp": 4}))
    params = run_params(config, make_mesh(config.mesh))
    wanted = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), weights())
    exact = {"weight", "router"}  # norms: kept FP32 in the file too
    for (path, got), want, full in zip(
        jax.tree_util.tree_flatten_with_path(params)[0],
        jax.tree.leaves(wanted),
        jax.tree.leaves(weights()),
        strict=True,
    ):
        assert got.dtype == jnp.float32
        norm = "norm" in jax.tree_util.keystr(path) and path[-1].key in exact
        np.testing.assert_array_equal(got, full if norm else want)
    assert not params["layers"]["moe"]["down"].sharding.is_fully_replicated


def test_masters_of_an_fp4_checkpoint_quantize_to_its_codes(upcycled):
    config = freeze(settings(upcycled))
    params = run_params(config, make_mesh(config.mesh))
    _, stored = trace_jax.load_checkpoint(upcycled)
    precision = config.fp4_policy().resolve(2)
    rollout = sync.to_rollout(params, precision)["layers"][0]["moe"]["down"]
    assert params["layers"]["moe"]["down"].dtype == jnp.float32
    np.testing.assert_array_equal(rollout.packed, stored["layers"]["moe"]["down"].packed)


def test_prompts_go_through_the_template_and_every_eos_counts(checkpoint, tmp_path):
    trainer = Trainer(freeze(settings(checkpoint)), tmp_path)
    prompts = trainer.actor.prompts(0)
    for row, length, problem in zip(prompts.tokens, prompts.lengths, prompts.problems, strict=True):
        ids = [*f"[{problem.prompt}]".encode(), EOS[0]]
        assert row[:length].tolist() == ids
    assert trainer.actor.engine.config.eos_ids == EOS
    assert trainer.evaluate.engine.config.eos_ids == EOS
    assert trainer.evaluate.prompts.tokens[0, 0] == ord("[")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    small = dataclasses.replace(DENSE, vocab_size=258)
    params = model.init(small, jax.random.key(0))
    folder = trace_jax.save_checkpoint(tmp_path / "out", small, params, files=files())
    with pytest.raises(ConfigError, match="tokenizer has 259 ids and its model 258"):
        run_tokenizer(freeze(settings(str(folder))))


def test_a_checkpoint_without_a_template_reads_plain_text(tmp_path):
    plain = files()
    del plain["chat_template.jinja"]
    for name, text in plain.items():
        (tmp_path / name).write_text(text)
    assert tokenizer_of(tmp_path).prompt_ids("hi") == list(b"hi")


def test_byte_tokens_survive_their_files(tmp_path):
    """What a run without a checkpoint exports reads as the run did."""
    for name, text in export_files("").items():
        (tmp_path / name).write_text(text)
    theirs, ours = tokenizer_of(tmp_path), ByteTokenizer()
    text = "añ 😀\n" + bytes(range(1, 128)).decode()
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.prompt_ids(text) == ours.prompt_ids(text)
    assert theirs.decode([*range(259)]) == ours.decode([*range(259)])
    assert (theirs.eos_ids, theirs.pad_id) == (ours.eos_ids, ours.pad_id)


def test_export_files_keep_what_the_checkpoint_says_and_add_every_eos(tmp_path):
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    (tmp_path / "config.json").write_text('{"eos_token_id": [256, 258]}')
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    exported = export_files(tmp_path)
    generation = json.loads(exported["generation_config.json"])
    assert generation["temperature"] == 0.6 and generation["eos_token_id"] == [256, 258]
    assert json.loads(exported["tokenizer_config.json"]) == {"model_max_length": 77}


# --- the whole way -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    """One step of RL, then resumed to the second: (folder, result, its lines).

    The reward is the share of low ids, which even random parameters earn.
    """
    folder, lines = tmp_path_factory.mktemp("run") / "rl", io.StringIO()

    def low_ids(rollout, prompts, tokenizer, samples):
        share = ((np.asarray(rollout.tokens) < 128) & np.asarray(rollout.mask)).sum(1)
        return share.reshape(-1, samples).astype(np.float32), np.ones((8, samples), bool)

    with pytest.MonkeyPatch.context() as patch:
        share_compiled(patch)
        patch.setattr("trace_jax.actor.score", low_ids)
        train(freeze(settings(checkpoint, rl={"steps": 1})), folder, stream=lines)
        yield folder, train(freeze(settings(checkpoint)), folder, resume=True, stream=lines), lines


def test_rl_begins_from_the_checkpoint_and_resumes(run, checkpoint):
    _, result, lines = run
    config = freeze(settings(checkpoint))
    start = run_params(config, make_mesh(config.mesh, jax.devices()[:1]))
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), result.params, start)
    assert 0 < max(jax.tree.leaves(moved)) < 1e-3  # two steps of 1e-4 from the start
    assert [line[:9] for line in lines.getvalue().splitlines()] == ["step    0", "step    1"]


def test_export_of_the_run_is_a_whole_checkpoint(run, checkpoint):
    folder, result, _ = run
    out = folder / "out"
    assert export_run(folder, out, "bf16") == 2
    config, params = trace_jax.load_checkpoint(out)
    assert config == DENSE
    np.testing.assert_array_equal(params["embed"], result.params["embed"].astype(jnp.bfloat16))
    assert tokenizer_of(out).prompt_ids("2 + 2 =") == tokenizer_of(checkpoint).prompt_ids("2 + 2 =")
    hub = json.loads((out / "config.json").read_text())
    assert hub["eos_token_id"] == list(EOS)
    card = (out / "README.md").read_text()
    for fact in (f"| began from | {checkpoint} |", "| step | 2 |", "| task | chain_sum |"):
        assert fact in card


@pytest.mark.parametrize(
    "precision, format, told",
    [
        ({"weights": "mxfp4"}, "nvfp4", "rolled out with mxfp4 weights"),
        ({"bf16_layers": "last:1"}, "nvfp4-modelopt", "kept layers last:1 in BF16"),
    ],
)
def test_an_fp4_export_that_the_rollouts_did_not_use_is_refused(
    checkpoint, precision, format, told
):
    config = freeze(settings(checkpoint, precision=precision))
    with pytest.raises(ConfigError, match=told):
        check_format(config.precision, format)
    check_format(config.precision, "bf16")


def test_a_folder_without_a_run_has_nothing_to_export(tmp_path):
    with pytest.raises(ValueError, match="holds no run; write --run=DIR"):
        export_run(tmp_path, tmp_path / "out", "bf16")
