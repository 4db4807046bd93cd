"""What cannot work in a run's settings: each check is one idea, and takes the whole `Config`."""

import dataclasses

from trace_jax import methods
from trace_jax.config.errors import ConfigError, choice, require
from trace_jax.fp4 import FORMATS, select_layers
from trace_jax.model import planned_layers
from trace_jax.model.remat import points_of
from trace_jax.rl.corrections import KINDS
from trace_jax.rl.losses import ALGORITHMS
from trace_jax.tasks import TASK_KINDS, ByteTokenizer
from trace_jax.tasks.multiturn import MAX_TURNS

MODES = ("bf16", "naive", "post_hoc", "qat", "w4a16", "quads", "trace")

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
    "rl.pack_length": 0,
    "rl.logprob_chunk": 1,
    "rl.kl_coef": 0,
    "rl.score_centering": 0,
    "rl.balance_coef": 0,
    "rollout.engine_noise": 0,
    "rollout.slots": 0,
    "rollout.devices": 0,
    "precision.kv_window": 0,
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0,
    "optim.max_bad_steps": 1,
    "eval.every": 0,
    "eval.problems": 1,
    "eval.samples": 1,
    "ledger.audit_rows": 1,
    "checkpoint.every": 0,
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
_SHARES = ("warmup.wrong_answers", "optim.b1", "optim.b2")
_CHOICES = {
    "method": ("", *methods.METHODS),
    "mode": MODES,
    "rl.algorithm": tuple(ALGORITHMS),
    "rl.correction": KINDS,
    "rl.old_logprobs": ("learner", "rollout"),
    "rollout.engine": ("batch", "continuous"),
    "precision.weights": (*FORMATS, "bf16"),
    "precision.activations": (*FORMATS, "bf16"),
    "precision.kv": (*FORMATS, "fp8", "bf16"),
    "task.kind": TASK_KINDS,
}


def check(c) -> None:
    """Raises ConfigError with one line for the first thing in the Config `c` that cannot work."""
    for one in (
        _numbers,
        _choices,
        _rollout_and_loss,
        _score_centering,
        _batches,
        _packing,
        _distributed,
        _task,
        _resolved,
        _model,
        _kv,
        _guidance,
        _mesh,
    ):
        one(c)


def _numbers(c) -> None:
    for path, least in _AT_LEAST.items():
        value = _at(c, path)
        require(value >= least, f"{path} is {value}; write {least} or more")
    for path in _ABOVE_ZERO:
        value = _at(c, path)
        extra = " (temperature 0 is for evaluation)" if path == "rollout.temperature" else ""
        require(value > 0, f"{path} is {value}; write a number above 0{extra}")
    for path in ("seed", "data_seed"):
        value = _at(c, path)
        require(0 <= value < 2**31, f"{path} is {value}; write a number from 0 to {2**31 - 1}")
    for path in _SHARES:
        value = _at(c, path)
        require(0 <= value < 1, f"{path} is {value}; write a number from 0 up to, not 1")


def _choices(c) -> None:
    for path, choices in _CHOICES.items():
        choice(path, _at(c, path), choices)


def _at(c, path: str):
    for name in path.split("."):
        c = getattr(c, name)
    return c


def _rollout_and_loss(c) -> None:
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


def _score_centering(c) -> None:
    if not c.rl.score_centering:
        return
    require(
        c.rl.correction == "none",
        f"rl.score_centering is {c.rl.score_centering} with rl.correction {c.rl.correction!r}; "
        "write rl.correction='none', the two together are not implemented",
    )
    require(
        c.rl.max_version_lag == 0,
        f"rl.score_centering is {c.rl.score_centering} with rl.max_version_lag "
        f"{c.rl.max_version_lag}, and the weights that drew a stale rollout are gone; write 0 for "
        "one of the two",
    )


def _batches(c) -> None:
    require(
        c.rl.samples >= 2,
        f"rl.samples is {c.rl.samples}; write 2 or more, a group of one has no baseline",
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


def _packing(c) -> None:
    width = c.rl.pack_length
    require(
        width == 0 or width >= c.max_length,
        f"rl.pack_length is {width}, and a sequence may have task.max_prompt + task.max_response = "
        f"{c.max_length} tokens; write {c.max_length} or more, or 0",
    )
    require(
        width == 0 or c.model.full_attention_every == 1,
        f"rl.pack_length is {width}, and the state of linear attention would pass from one "
        "sequence to the next; write rl.pack_length=0",
    )


def _distributed(c) -> None:
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


def _task(c) -> None:
    task = c.task
    require(
        _is_params(task.params),
        f"task.params is {task.params!r}; write ((parameter, value), ...)",
    )
    for row in task.datasets:
        require(
            _is_dataset(row),
            f"task.datasets has the row {row!r}; write (name, weight, ((parameter, value), ...))",
        )
    require(task.turns <= MAX_TURNS, f"task.turns is {task.turns}; write {MAX_TURNS} or less")
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


def _resolved(c) -> None:
    """Layers, plan and precision policy have checks of their own; here they get their turn."""
    layers = c.model.num_layers
    try:
        select_layers(c.guidance.layers, layers)
        c.guidance.plan()
        c.fp4_policy().resolve(layers)
    except ValueError as error:
        raise ConfigError(f"config: {error}") from error
    try:
        points_of(c.rl.remat)
    except ValueError as error:
        raise ConfigError(f"rl.remat: {error}") from error


def _model(c) -> None:
    require(
        c.init.checkpoint != "" or c.model.vocab_size >= ByteTokenizer.vocab_size,
        f"model.vocab_size is {c.model.vocab_size}; write {ByteTokenizer.vocab_size} or more, "
        "the byte tokenizer's ids",
    )


def _kv(c) -> None:
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


def _guidance(c) -> None:
    if c.mode != "trace":
        return
    plan = c.guidance.plan()
    precision = c.fp4_policy().resolve(c.model.num_layers)
    planned = planned_layers(c.model, precision, plan)  # {site: layers} that are quantized too
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


def _mesh(c) -> None:
    axes = [getattr(c.mesh, f.name) for f in dataclasses.fields(c.mesh)]
    require(
        axes.count(-1) <= 1 and all(a == -1 or a >= 1 for a in axes),
        f"mesh axes are {axes}; write sizes of 1 or more, at most one of them -1",
    )
