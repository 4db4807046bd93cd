"""Supervised warm start: a model that answers some problems, for RL to build on."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trace_jax import model
from trace_jax.config import Config
from trace_jax.model.layout import Layout
from trace_jax.modes import bf16_precision
from trace_jax.rl.learner import TrainState, apply_gradients, new_state
from trace_jax.rl.logprobs import chunked_logprobs
from trace_jax.scoring import budget
from trace_jax.tasks import Problem, demonstration, encode_answer, encode_prompt
from trace_jax.tasks.problems import stable_hash


def optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with a cosine decay to a tenth over `warmup.steps`."""
    w = config.warmup
    rate = optax.warmup_cosine_decay_schedule(
        0.0, w.learning_rate, max(w.steps // 20, 1), max(w.steps, 2), 0.1 * w.learning_rate
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98))


def spoiled(problem: Problem, share: float) -> Problem:
    """The problem as an unreliable teacher answers it: in `share` of the cases its lines or words
    (of a one-word answer, its letters) come in reverse order. Which ones is a matter of its index.
    """
    if stable_hash("spoiled", problem.index) / 2**64 >= share:
        return problem
    words = problem.answer.split("\n") if "\n" in problem.answer else problem.answer.split()
    between = "\n" if "\n" in problem.answer else " "
    answer = between.join(reversed(words)) if len(words) > 1 else problem.answer[::-1]
    return dataclasses.replace(problem, answer=answer)


def encode_examples(problems, tokenizer, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """tokens int32 [N, S] and mask bool [N, S] of the warm start's answers, EOS included.

    An example that does not fit the budgets gets an empty mask: it teaches nothing.
    """
    problems = [spoiled(p, config.warmup.wrong_answers) for p in problems]
    task = config.task
    tokens = np.full((len(problems), config.max_length), tokenizer.pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for i, problem in enumerate(problems):
        prompt = encode_prompt(problem, tokenizer)
        if len(prompt) > task.max_prompt:
            continue
        if task.multiturn:
            shown = demonstration(problem, tokenizer, budget(task, len(prompt)))
            ids, learnt = shown.ids, shown.mask
        else:
            answer = encode_answer(problem, tokenizer)
            ids, learnt = prompt + answer, [False] * len(prompt) + [True] * len(answer)
        if len(ids) - len(prompt) <= task.max_response:
            tokens[i, : len(ids)], mask[i, : len(ids)] = ids, learnt
    return tokens, mask


class WarmStart:
    """Compiled supervised step; state and data order belong to the caller."""

    def __init__(self, config: Config, layout: Layout | None = None):
        self.config = config
        self.tx = optimizer(config)
        self.ways = 1 if layout is None else layout.row_ways
        self.numerics = model.numerics(config.model, bf16_precision(config), layout=layout)
        self.step = jax.jit(self._step, donate_argnums=0)

    def init(self, params) -> TrainState:
        return new_state(params, self.tx)

    def _loss(self, params, tokens, mask):
        out = model.apply(self.config.model, params, tokens, self.numerics)
        logp, _ = chunked_logprobs(
            out.hidden[:, :-1],
            model.unembedding(params, out.hidden.dtype),
            tokens[:, 1:],
            temperature=1.0,
            chunk=self.config.rl.logprob_chunk * self.ways,
            ways=self.ways,
        )
        mask = mask[:, 1:]
        count = jnp.maximum(jnp.sum(mask), 1)
        loss = -jnp.sum(jnp.where(mask, logp, 0.0)) / count
        return loss + self.config.rl.balance_coef * out.balance, loss

    def _step(self, state: TrainState, tokens, mask):
        grad = jax.value_and_grad(partial(self._loss), has_aux=True)
        (_, loss), grads = grad(state.params, tokens, mask)
        state, metrics = apply_gradients(state, grads, self.tx)
        return state, {"warmup/loss": loss, "warmup/grad_norm": metrics["grad_norm"]}
