"""Responses to prompts, of one turn or of several, as one record that lines up by token."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.config import Config
from trace_jax.parallel import ACTOR, rows_sharding, shard_rows
from trace_jax.rollout import Rollout
from trace_jax.rollout.record import map_rows
from trace_jax.scoring import Prompts, budget
from trace_jax.tasks import Episode, Transcript, TranscriptError

NOISE_STRIDE = 7919  # between the seeds of the emulated noise of two turns
# (tokens int32 [N, W], lengths int32 [N], turn) to a Rollout of W + turn_tokens tokens
Generate = Callable[[np.ndarray, np.ndarray, int], Rollout]


class Played(NamedTuple):
    """N rows; `transcripts` of the episodes in the same order, None for single answers."""

    rollout: Rollout
    transcripts: list[Transcript] | None


def shard_record(record: Rollout, mesh) -> Rollout:
    """A rollout as the learner takes it: rows over the data axes, and no other axis cut.

    The compiler lays out what the engine returns as it likes, with blocks of guidance over
    several devices among it.
    """
    place = lambda a, axis: jax.device_put(a, rows_sharding(a.shape, axis, mesh))
    return map_rows(place, record)


def engine_shape(config: Config, samples: int) -> dict:
    """Settings of the engine: an episode's turn is a call in which every row is a prompt."""
    task = config.task
    if task.multiturn:
        return {"max_response": task.turn_tokens, "samples": 1}
    return {"max_response": task.max_response, "samples": samples}


class Player:
    """Plays prompts with an engine that has `engine_shape`; `samples` responses a prompt."""

    def __init__(self, config: Config, engine, tokenizer, samples: int, mesh):
        self.config, self.engine, self.tokenizer = config, engine, tokenizer
        self.samples, self.mesh = samples, mesh

    def call(self, params, tokens, lengths, keys, **settings) -> Rollout:
        rows = shard_rows((tokens, lengths, keys), self.mesh, ACTOR)
        return shard_record(self.engine(params, *rows, **settings), self.mesh)

    def opening(self, prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
        """What the engine is given first: tokens and lengths."""
        if not self.config.task.multiturn:
            return prompts.tokens, prompts.lengths
        task = self.config.task
        width = task.max_prompt + task.max_response - task.turn_tokens
        tokens = np.pad(prompts.tokens, ((0, 0), (0, width - prompts.tokens.shape[1])))
        return np.repeat(tokens, self.samples, axis=0), np.repeat(prompts.lengths, self.samples)

    def __call__(self, params, prompts: Prompts, keys, *, version=0, noise_seed=0) -> Played:
        """`params` are rollout parameters, `keys` [P * samples] request keys."""
        tokens, lengths = self.opening(prompts)
        if not self.config.task.multiturn:
            settings = dict(version=version, noise_seed=noise_seed)
            return Played(self.call(params, tokens, lengths, keys, **settings), None)

        def generate(tokens, lengths, turn) -> Rollout:
            seed = (noise_seed + NOISE_STRIDE * turn) % 2**31
            settings = dict(version=version, noise_seed=seed, turn=turn)
            return self.call(params, tokens, lengths, keys, **settings)

        task = self.config.task
        episodes = [
            problem.episode(self.tokenizer, budget(task, int(length)))
            for problem, length in zip(prompts.problems, prompts.lengths, strict=True)
            for _ in range(self.samples)
        ]
        return play_episodes(episodes, generate, width=tokens.shape[1])


def play_episodes(episodes: Sequence[Episode], generate: Generate, width: int) -> Played:
    """Plays all episodes side by side, a turn a call, until each of them is over.

    A call prefills what every open row has so far and draws its next answer; rows that are
    over ride along on their first token and leave no trace. Of each token the record of the
    call that fed it first is kept, and the log-prob of the call that drew it.

    Raises:
      TranscriptError: the record and the transcripts disagree.
    """
    record, turn = None, 0
    while turn == 0 or any(not e.done for e in episodes):
        active = np.array([not e.done for e in episodes])
        rows = [e.prompt if not e.done else e.prompt[:1] or [0] for e in episodes]
        lengths = np.array([len(row) for row in rows], np.int32)
        tokens = np.zeros((len(rows), width), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        new = generate(tokens, lengths, turn)
        record = new if record is None else _continued(record, new, lengths, active)
        drawn, ends = np.asarray(new.tokens), np.asarray(new.length)
        for i in np.flatnonzero(active):
            episodes[i].respond(drawn[i, lengths[i] : ends[i]].tolist())
        turn += 1
    transcripts = [e.transcript for e in episodes]
    _check(record, transcripts)
    return Played(record, transcripts)


def episode_counts(transcripts: Sequence[Transcript]) -> dict[str, float]:
    """What a batch of episodes was like; failed ones are unscored."""
    endings = [t.ending for t in transcripts]
    return {
        "turns": float(np.mean([len(t.turns) for t in transcripts])),
        "failed_episodes": endings.count("failed"),
        "cut_answers": endings.count("cut"),
        "out_of_budget": endings.count("turns") + endings.count("tokens"),
        "cut_observations": sum(t.cut_observations for t in transcripts),
    }


@jax.jit
def _continued(old: Rollout, new: Rollout, lengths, active) -> Rollout:
    """`old` with what a further turn adds: `new` was prompted with `lengths` tokens a row."""
    at = jnp.arange(old.tokens.shape[1])[None]
    # The last token drawn had not been fed yet: its record is of this call, its log-prob is not.
    fed = active[:, None] & (at >= old.length[:, None] - 1)
    drawn = active[:, None] & (at >= lengths[:, None])

    def where(mask, axis):
        def pick(a, b):
            rows = mask[: a.shape[axis]]
            rows = rows.reshape((1,) * axis + rows.shape + (1,) * (a.ndim - axis - 2))
            return jnp.where(rows, b, a)

        return pick

    by_layer = lambda a, b: jax.tree.map(where(fed, 1), a, b)
    return old.replace(
        tokens=where(fed, 0)(old.tokens, new.tokens),
        length=jnp.where(active, new.length, old.length),
        logp=where(drawn, 0)(old.logp, new.logp),
        mask=where(drawn, 0)(old.mask, new.mask),
        finished=jnp.where(active, new.finished, old.finished),
        guidance=old.guidance.replace(
            sites=by_layer(old.guidance.sites, new.guidance.sites),
            recorded=where(fed, 0)(old.guidance.recorded, new.guidance.recorded),
        ),
        routes=by_layer(old.routes, new.routes),
        audit=by_layer(old.audit, new.audit),
    )


def _check(record: Rollout, transcripts: list[Transcript]) -> None:
    tokens, mask, length = map(np.asarray, (record.tokens, record.mask, record.length))
    for i, t in enumerate(transcripts):
        t.check()
        n = len(t.ids)
        if not t.turns:  # it failed before its first answer
            continue
        same = n == length[i] and tokens[i, :n].tolist() == t.ids and mask[i, :n].tolist() == t.mask
        if not same:
            raise TranscriptError(f"row {i} of the record is not the transcript of its episode")
