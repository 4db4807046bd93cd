"""The groups of a run's settings with their defaults: frozen dataclasses, checked as a whole."""

import dataclasses

from trace_jax.config.checks import check
from trace_jax.fp4 import GuidancePlan, PrecisionPolicy, Rule
from trace_jax.model import ModelConfig
from trace_jax.tasks import ENVIRONMENTS


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
    pack_length: int = 0  # tokens a row of the learner's forward, several sequences; 0: one a row
    logprob_chunk: int = 4096  # tokens of a device whose logits exist at a time
    remat: str = "none"  # none | full | what of a layer is kept, see model.remat: gate_up,router


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    temperature: float = 1.0
    top_p: float = 1.0
    engine_noise: float = 0.0  # relative noise at the sites; emulates a foreign engine
    engine: str = "batch"  # batch: all rows step together | continuous: they come and go in slots
    slots: int = 0  # of the continuous engine; 0: one a row
    devices: int = 0  # the last so many generate and the others learn; 0: all do both


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
    checks: float = 0.0
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
    every: int = 20  # steps; 0: none is written
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices by axis; one may be -1, which takes what is left."""

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    context: int = 1


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
        check(self)

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
