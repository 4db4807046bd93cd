"""A run's settings: frozen dataclasses, checked before any device work.

Config files build an `ml_collections.ConfigDict` (`default()` gives one with every
key); `freeze` turns it into a `Config` and refuses what cannot work, each time in
one line that says what to write.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections

from trace_jax import methods
from trace_jax.fp4 import FORMATS, GuidancePlan, PrecisionPolicy, Rule, select_layers
from trace_jax.model import ModelConfig, planned_layers
from trace_jax.model.checkpoint_io import checkpoint_config
from trace_jax.rl.corrections import KINDS
from trace_jax.rl.losses import ALGORITHMS
from trace_jax.tasks import ENVIRONMENTS, TASK_KINDS, ByteTokenizer
from trace_jax.tasks.multiturn import MAX_TURNS

MODES = ("bf16", "naive", "post_hoc", "qat", "w4a16", "quads", "trace")


class ConfigError(ValueError):
    """A setting that cannot work; the message says which, and what to write."""


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Problems.

    `kind` is "reasoning" (reasoning_gym), gsm8k, math_dataset, jsonl, lbpp, human_eval,
    coding_jsonl or examples (code), or an environment of several turns: key_maze, tools,
    frozen_lake, taxi. `params` holds its ((parameter, value), ...), see tasks.sources;
    `datasets` rows are (reasoning_gym name, weight, ((parameter, value), ...)).
    """

    kind: str = "reasoning"
    params: tuple = ()
    datasets: tuple = (("chain_sum", 1.0, (("min_terms", 2), ("max_terms", 2))),)
    max_prompt: int = 32  # tokens, BOS included; longer prompts are dropped and counted
    max_response: int = 16  # tokens of all that follows the prompt, every EOS included
    turns: int = 8  # answers an episode may have; environments only, as the next two
    turn_tokens: int = 16  # tokens of an answer, EOS included
    observation_tokens: int = 64  # longer observations are cut and counted

    @property
    def multiturn(self) -> bool:
        return self.kind in ENVIRONMENTS


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Where the parameters start. A checkpoint brings its model, tokenizer and chat template."""

    checkpoint: str = ""  # folder, .gguf file or pip:PACKAGE; "": random, with byte tokens


@dataclasses.dataclass(frozen=True)
class WarmupConfig:
    """Supervised warm start in BF16 on gold answers."""

    steps: int = 0
    batch_size: int = 256
    learning_rate: float = 3e-3
    wrong_answers: float = 0.0  # share of the answers that are spoiled (an unreliable teacher)
    init_from: str = ""  # run folder whose warm start is taken over


@dataclasses.dataclass(frozen=True)
class RLConfig:
    algorithm: str = "grpo"  # grpo | dr_grpo | dapo | gspo | tbpo
    steps: int = 100
    prompts_per_step: int = 64
    samples: int = 8  # responses a prompt
    minibatches: int = 1  # optimizer steps a rollout
    micro_batches: int = 1  # gradient accumulation within an optimizer step
    max_version_lag: int = 0  # policy versions that generation may run ahead; 0: on-policy
    old_logprobs: str = "learner"  # whose log-probs the ratio is against: learner | rollout
    correction: str = "none"  # none | tis | icepop | sequence_mask
    correction_cap: float = 5.0
    score_centering: int = 0  # the sampler's likeliest tokens that are centred on; 0 is off
    kl_coef: float = 0.0  # k3 to the policy that RL started from
    balance_coef: float = 0.0  # load-balance loss of the router
    routing_replay: bool = True
    logprob_chunk: int = 4096  # tokens whose logits exist at a time
    remat: bool = False


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    temperature: float = 1.0
    top_p: float = 1.0
    engine_noise: float = 0.0  # relative noise at the sites; emulates a foreign engine
    engine: str = "batch"  # batch: all rows step together | continuous: they come and go in slots
    slots: int = 0  # of the continuous engine; 0: one a row


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Formats of the FP4 side: nvfp4 | mxfp4 | nvfp4_4over6 | bf16; for kv also fp8."""

    weights: str = "nvfp4"
    activations: str = "nvfp4"
    kv: str = "nvfp4"
    kv_window: int = 0  # most recent tokens whose K and V a query reads in BF16; 0: none
    rotate_v: bool = False  # V is quantized after a Hadamard rotation over the head
    bf16_layers: str = "none"  # layers kept in BF16: none | first:N | last:N | 0,3,5


@dataclasses.dataclass(frozen=True)
class GuidanceConfig:
    """See `fp4.GuidancePlan`. `guard` 0 means no guard."""

    layers: str = "last:0.5"
    sites: tuple = ("expert_in", "k", "v")
    bits: int = 1
    rounding: str = "nearest"
    scale_bits: int = 8
    guard: float = 0.0
    on_stale: str = "obey"
    fade: float = 0.5

    def plan(self) -> GuidancePlan:
        return GuidancePlan(**{**dataclasses.asdict(self), "guard": self.guard or None})


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    clip_norm: float = 1.0
    max_bad_steps: int = 5  # non-finite steps in a row before the run stops


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int = 0  # steps; 0: before and after only
    problems: int = 256
    samples: int = 4  # responses a problem at rollout.temperature: accuracy is their mean


@dataclasses.dataclass(frozen=True)
class LedgerConfig:
    audit_rows: int = 8  # sequences whose whole codes are compared each iteration


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = 20  # steps
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices by axis; one may be -1, which takes what is left."""

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Processes of a run, one a host, through jax.distributed."""

    coordinator: str = ""  # "": one process | auto: as JAX detects (Slurm, MPI, Cloud TPU, GKE)
    # | host:port of the first process, for what is not detected; then also:
    processes: int = 1
    process: int = 0
    timeout: int = 100  # seconds of silence after which a process counts as dead


@dataclasses.dataclass(frozen=True)
class Config:
    model: ModelConfig
    method: str = ""  # a named set of settings, see trace_jax.methods
    mode: str = "trace"
    seed: int = 0  # initial parameters and sampling
    data_seed: int = 0  # problems and their order
    init: InitConfig = InitConfig()
    task: TaskConfig = TaskConfig()
    warmup: WarmupConfig = WarmupConfig()
    rl: RLConfig = RLConfig()
    rollout: RolloutConfig = RolloutConfig()
    precision: PrecisionConfig = PrecisionConfig()
    guidance: GuidanceConfig = GuidanceConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    ledger: LedgerConfig = LedgerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()

    def __post_init__(self):
        _validate(self)

    @property
    def rows(self) -> int:
        """Sequences a rollout."""
        return self.rl.prompts_per_step * self.rl.samples

    @property
    def max_length(self) -> int:
        return self.task.max_prompt + self.task.max_response

    def fp4_policy(self, weights_only: bool = False) -> PrecisionPolicy:
        """The FP4 side's policy; `weights_only` leaves the experts' activations in BF16."""
        p = self.precision
        rules = [Rule("expert_weight", p.weights)]
        if not weights_only:
            rules += [Rule("expert_in", p.activations), Rule("expert_mid", p.activations)]
        rules += [Rule("[kv]", p.kv)]
        if p.bf16_layers != "none":
            rules += [Rule("*", "bf16", p.bf16_layers)]
        return PrecisionPolicy(tuple(rules), p.kv_window, p.rotate_v)


# --- from ConfigDict -----------------------------------------------------------


def default(**model) -> ml_collections.ConfigDict:
    """A ConfigDict with every key at its default and the given model shape.

    Without a shape `model` is empty, for the one of init.checkpoint.
    """
    fields = {f.name: f.default for f in dataclasses.fields(Config)} | {"model": {}}
    if model:
        fields["model"] = ModelConfig(**model)
    return ml_collections.ConfigDict({k: _plain(v) for k, v in fields.items()})


def freeze(tree: Mapping[str, Any], given: Collection[str] = ()) -> Config:
    """The validated `Config` of a ConfigDict or mapping.

    A ConfigDict is what a user wrote: its method's settings are filled in, except where it
    has something else than the default and at the dotted paths `given`. A plain mapping is
    a configuration read back, and is taken as it stands.

    The model of init.checkpoint, where there is one, is that of the checkpoint.

    Raises:
      ConfigError: unknown key (with the nearest name), missing key, wrong type,
        NaN or infinity, a model that is not the checkpoint's, or values that cannot work
        together.
    """
    if isinstance(tree, ml_collections.ConfigDict):
        tree = _with_method(tree.to_dict(), given)
    init = tree.get("init")
    name = init.get("checkpoint") if isinstance(init, Mapping) else None
    if isinstance(name, str) and name:
        tree = {**tree, "model": _model_of(name, tree.get("model", {}))}
    require(
        tree.get("model") != {},
        "model is empty; write its shape, or init.checkpoint with the folder of a checkpoint",
    )
    return _build(Config, tree, "")


def _with_method(tree: Mapping[str, Any], given: Collection[str]) -> Mapping[str, Any]:
    if tree.get("method") not in methods.METHODS:  # none, or one that is refused later
        return tree
    known = [f for f in dataclasses.fields(Config) if f.default is not dataclasses.MISSING]
    return methods.apply(tree, {f.name: _plain(f.default) for f in known}, given)


def _plain(value):
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


def _model_of(name: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's model as settings; `stated` ones must agree, but for the dtype."""
    found = checkpoint_config(name, stated.get("dtype", "bfloat16"))
    model = dataclasses.asdict(found)
    hints = typing.get_type_hints(ModelConfig)
    for key in [k for k in stated if k in model]:
        value = _coerce(hints[key], stated[key], f"model.{key}")
        require(
            value == getattr(found, key),
            f"model.{key} is {value!r} and that of init.checkpoint {getattr(found, key)!r}; "
            "leave model.* out, the checkpoint brings its own",
        )
    return dict(stated) | model


def to_dict(config: Config) -> dict:
    """Plain nested dict, as `freeze` takes it; tuples become lists in JSON and back."""
    return dataclasses.asdict(config)


def _build(cls, tree: Mapping[str, Any], prefix: str):
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in tree:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"unknown config key {prefix}{key}; {hint}")
    values = {}
    for name, field in fields.items():
        if name not in tree:
            required = field.default is dataclasses.MISSING
            require(not required, f"config key {prefix}{name} is missing; write a value for it")
            continue
        values[name] = _coerce(hints[name], tree[name], f"{prefix}{name}")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: {error}") from error


def _coerce(hint, value, path):
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, Mapping), f"{path} must be a group of settings, not {value!r}")
        return _build(hint, value, f"{path}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint is tuple and isinstance(value, list | tuple):
        return _tuples(value)
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    wrong = not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)
    require(not wrong, f"{path} is {value!r}; write a value of type {name}")
    if isinstance(value, float):
        require(math.isfinite(value), f"{path} is {value}; write a finite number")
    return value


def _tuples(value):
    if isinstance(value, list | tuple):
        return tuple(_tuples(v) for v in value)
    if isinstance(value, Mapping):
        return tuple((k, _tuples(v)) for k, v in value.items())
    return value


# --- what cannot work ------------------------------------------------------------


def _choice(path: str, value: str, choices) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{path} is {value!r}; {hint}write one of {', '.join(choices)}")


_AT_LEAST = {
    "task.max_prompt": 2,
    "task.max_response": 1,
    "task.turns": 1,
    "task.turn_tokens": 1,
    "task.observation_tokens": 1,
    "warmup.steps": 0,
    "warmup.batch_size": 1,
    "rl.steps": 0,
    "rl.prompts_per_step": 1,
    "rl.minibatches": 1,
    "rl.micro_batches": 1,
    "rl.max_version_lag": 0,
    "rl.logprob_chunk": 1,
    "rl.kl_coef": 0,
    "rl.score_centering": 0,
    "rl.balance_coef": 0,
    "rollout.engine_noise": 0,
    "rollout.slots": 0,
    "precision.kv_window": 0,
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0,
    "optim.max_bad_steps": 1,
    "eval.every": 0,
    "eval.problems": 1,
    "eval.samples": 1,
    "ledger.audit_rows": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "distributed.processes": 1,
    "distributed.process": 0,
    "distributed.timeout": 1,
}
_ABOVE_ZERO = (
    "optim.learning_rate",
    "warmup.learning_rate",
    "optim.clip_norm",
    "rl.correction_cap",
    "rollout.temperature",
)


def _validate(c: Config) -> None:
    get = lambda path: getattr(getattr(c, path.split(".")[0]), path.split(".")[1])
    for path, least in _AT_LEAST.items():
        require(get(path) >= least, f"{path} is {get(path)}; write {least} or more")
    for path in _ABOVE_ZERO:
        extra = " (temperature 0 is for evaluation)" if path == "rollout.temperature" else ""
        require(get(path) > 0, f"{path} is {get(path)}; write a number above 0{extra}")
    for name in ("seed", "data_seed"):
        value = getattr(c, name)
        require(0 <= value < 2**31, f"{name} is {value}; write a number from 0 to {2**31 - 1}")
    _choice("method", c.method, ("", *methods.METHODS))
    _choice("mode", c.mode, MODES)
    _choice("rl.algorithm", c.rl.algorithm, tuple(ALGORITHMS))
    _choice("rl.correction", c.rl.correction, KINDS)
    _choice("rollout.engine", c.rollout.engine, ("batch", "continuous"))
    _choice("rl.old_logprobs", c.rl.old_logprobs, ("learner", "rollout"))
    for name in ("weights", "activations", "kv"):
        more = ("fp8", "bf16") if name == "kv" else ("bf16",)
        _choice(f"precision.{name}", getattr(c.precision, name), (*FORMATS, *more))
    wrong = c.warmup.wrong_answers
    require(0 <= wrong < 1, f"warmup.wrong_answers is {wrong}; write a share from 0 up to, not 1")
    for name in ("b1", "b2"):
        value = getattr(c.optim, name)
        require(0 <= value < 1, f"optim.{name} is {value}; write a number from 0 up to, not 1")
    require(
        c.rl.samples >= 2,
        f"rl.samples is {c.rl.samples}; write 2 or more, a group of one has no baseline",
    )
    require(
        c.rollout.top_p == 1.0,
        f"rollout.top_p is {c.rollout.top_p}; write 1.0: the learner's log-probs are of the whole "
        "distribution, and truncated sampling is not replayed",
    )
    require(
        c.rl.correction == "none" or c.rl.old_logprobs == "learner",
        f"rl.correction is {c.rl.correction!r} and the ratio is against the rollout already; "
        "write rl.old_logprobs='learner', or rl.correction='none'",
    )
    require(
        not c.rl.score_centering or c.rl.correction == "none",
        f"rl.score_centering is {c.rl.score_centering} with rl.correction {c.rl.correction!r}; "
        "write rl.correction='none', the two together are not implemented",
    )
    require(
        not c.rl.score_centering or c.rl.max_version_lag == 0,
        f"rl.score_centering is {c.rl.score_centering} with rl.max_version_lag "
        f"{c.rl.max_version_lag}, and the weights that drew a stale rollout are gone; write 0 for "
        "one of the two",
    )
    parts = c.rl.minibatches * c.rl.micro_batches
    require(
        c.rl.prompts_per_step % parts == 0,
        f"rl.prompts_per_step is {c.rl.prompts_per_step}; write a multiple of "
        f"rl.minibatches * rl.micro_batches = {parts}, so that groups stay whole",
    )
    require(
        c.ledger.audit_rows <= c.rows,
        f"ledger.audit_rows is {c.ledger.audit_rows}; write at most the {c.rows} rows of a rollout",
    )
    d = c.distributed
    require(
        d.process < d.processes,
        f"distributed.process is {d.process} of distributed.processes {d.processes}; write 0 to "
        f"{d.processes - 1}",
    )
    require(
        d.processes == 1 or d.coordinator not in ("", "auto"),
        f"distributed.processes is {d.processes} and distributed.coordinator {d.coordinator!r}; "
        "write host:port of the first process as the coordinator",
    )
    _validate_task(c.task)
    _validate_numerics(c)


def _validate_task(task: TaskConfig) -> None:
    _choice("task.kind", task.kind, TASK_KINDS)
    require(
        _is_params(task.params),
        f"task.params is {task.params!r}; write ((parameter, value), ...)",
    )
    for row in task.datasets:
        require(
            _is_dataset(row),
            f"task.datasets has the row {row!r}; write (name, weight, ((parameter, value), ...))",
        )
    require(
        task.turns <= MAX_TURNS, f"task.turns is {task.turns}; write {MAX_TURNS} or less"
    )
    require(
        not task.multiturn or task.turn_tokens <= task.max_response,
        f"task.max_response is {task.max_response}; write task.turn_tokens = {task.turn_tokens} "
        "or more",
    )


def _is_params(pairs) -> bool:
    return isinstance(pairs, tuple) and all(
        isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) for p in pairs
    )


def _is_dataset(row) -> bool:
    if not (isinstance(row, tuple) and len(row) == 3 and _is_params(row[2])):
        return False
    return isinstance(row[0], str) and isinstance(row[1], int | float)


def _validate_numerics(c: Config) -> None:
    layers = c.model.num_layers
    try:
        select_layers(c.guidance.layers, layers)
        plan = c.guidance.plan()
        precision = c.fp4_policy().resolve(layers)
    except ValueError as error:
        raise ConfigError(f"config: {error}") from error
    require(
        c.init.checkpoint != "" or c.model.vocab_size >= ByteTokenizer.vocab_size,
        f"model.vocab_size is {c.model.vocab_size}; write {ByteTokenizer.vocab_size} or more, "
        "the byte tokenizer's ids",
    )
    paged = c.model.full_attention_every == 1 and not c.model.latent.kv_rank
    require(
        paged or c.rollout.engine == "batch",
        f"rollout.engine is {c.rollout.engine!r}, whose KV pages hold neither latents nor linear "
        "attention's states; write rollout.engine='batch'",
    )
    _validate_kv(c)
    if c.mode == "trace":
        _validate_plan(c, plan, planned_layers(c.model, precision, plan), precision)
    axes = [getattr(c.mesh, f.name) for f in dataclasses.fields(c.mesh)]
    require(
        axes.count(-1) <= 1 and all(a == -1 or a >= 1 for a in axes),
        f"mesh axes are {axes}; write sizes of 1 or more, at most one of them -1",
    )


def _validate_kv(c: Config) -> None:
    p = c.precision
    for name, off in (("kv_window", 0), ("rotate_v", False)):
        value = getattr(p, name)
        require(
            value == off or p.kv != "bf16",
            f"precision.{name} is {value} with precision.kv 'bf16', which it would not change; "
            f"write precision.{name}={off}, or a format for precision.kv",
        )
    require(
        not p.rotate_v or not c.model.latent.kv_rank,
        "precision.rotate_v is True, and the values of latent attention are its keys too; "
        "write precision.rotate_v=False",
    )
    require(
        not p.rotate_v or c.model.head_dim.bit_count() == 1,
        f"precision.rotate_v is True, and model.head_dim {c.model.head_dim} is not a power of "
        "two; write precision.rotate_v=False",
    )


def _validate_plan(c: Config, plan: GuidancePlan, planned: dict, precision) -> None:
    """`planned`: {site: layers} that the plan chooses and the precision quantizes."""
    if "expert_mid" in plan.sites and c.model.num_experts:
        require(
            c.rl.routing_replay,
            "guidance.sites has expert_mid, which lines up with the rollout's experts only; "
            "write rl.routing_replay=True",
        )
    require(
        bool(planned) or not select_layers(plan.layers, c.model.num_layers),
        f"guidance.sites {plan.sites} are quantized in none of guidance.layers {plan.layers!r}; "
        "write sites and layers that precision.* keeps in FP4, or mode='qat'",
    )
    vague = [
        site
        for site, layers in planned.items()
        if any(getattr(precision[i], site).scale_rule == "four_over_six" for i in layers)
    ]
    require(
        plan.scale_bits == 8 or not vague,
        f"guidance.scale_bits is {plan.scale_bits}, which cannot tell the two scales of 4-over-6 "
        f"apart ({', '.join(vague)}); write 8, or 'nvfp4' as the format",
    )
