"""Held-out accuracy of parameters under given inference formats."""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import sync
from trace_jax.config import Config
from trace_jax.fp4 import LayerPrecision
from trace_jax.parallel import ACTOR, token_layout
from trace_jax.play import Player, engine_shape
from trace_jax.rollout import EngineConfig, make_engine
from trace_jax.rollout.sampling import request_keys
from trace_jax.scoring import episode_rewards, first_problems, make_prompts, problem_set, score
from trace_jax.tasks.tokenizer import Tokenizer

EVAL_SEED = 7919  # keys of evaluation; training uses config.seed


class Evaluator:
    """Mean accuracy over `eval.samples` responses to each held-out problem, compiled once.

    Problems and sampling keys are the same at every call, and those of no other seed.
    """

    def __init__(
        self, config: Config, precision: tuple[LayerPrecision, ...], mesh, tokenizer: Tokenizer
    ):
        self.config, self.mesh, self.tokenizer = config, mesh, tokenizer
        count = config.eval.problems
        problems = first_problems(problem_set(config, "heldout"), count)
        self.prompts = make_prompts(problems, self.tokenizer, config)
        self.engine = make_engine(
            config.rollout.engine,
            EngineConfig(
                config.model,
                precision,
                self.tokenizer.eos_ids,
                temperature=config.rollout.temperature,
                layout=token_layout(mesh, ACTOR),
                **engine_shape(config, config.eval.samples),
            ),
            mesh=mesh,
            slots=config.rollout.slots,
            turns=config.task.multiturn,
        )
        self.player = Player(config, self.engine, tokenizer, config.eval.samples, mesh)
        self.sync = jax.jit(lambda params: sync.to_rollout(params, precision))

    def __call__(self, params) -> dict[str, float]:
        """{"accuracy", "accuracy/<dataset>"} of learner parameters."""
        count, samples = self.config.eval.problems, self.config.eval.samples
        keys = request_keys(
            EVAL_SEED,
            0,
            jnp.repeat(jnp.arange(count), samples),
            jnp.tile(jnp.arange(samples), count),
        )
        played = self.player(self.sync(params), self.prompts, keys)
        if played.transcripts is None:
            rewards, valid = score(played.rollout, self.prompts, self.tokenizer, samples)
        else:
            rewards, valid = episode_rewards(played.transcripts, self.prompts, samples)
        sources = np.array([p.source for p in self.prompts.problems])
        result = {"accuracy": _mean(rewards[valid])}
        for source in sorted(set(sources)):
            result[f"accuracy/{source}"] = _mean(rewards[valid & (sources == source)[:, None]])
        return result


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
