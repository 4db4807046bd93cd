"""The actor of a run: rollouts of the policy, and what they earned."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trace_jax import model, modes, sync
from trace_jax.audit import first_rows
from trace_jax.clock import Clock
from trace_jax.config import Config
from trace_jax.draws import Draw
from trace_jax.parallel import ACTOR, rows_sharding, to_host, token_layout
from trace_jax.play import Played, Player, engine_shape, episode_counts, shard_record
from trace_jax.pretrained import run_tokenizer
from trace_jax.rollout import Engine, EngineConfig, Rollout, make_engine
from trace_jax.rollout.record import map_rows
from trace_jax.rollout.sampling import request_keys
from trace_jax.rollout_queue import Launched, check_groups
from trace_jax.scoring import choose, episode_rewards, make_prompts, problem_set, score


class Actor:
    """The rollout side of a run: sync, prompts, sampling, rewards.

    Args:
      mesh: where rollouts are made.
      learner_mesh: where they are learned from; the same one, or other devices.
    """

    def __init__(self, config: Config, mode: modes.Mode, mesh, learner_mesh):
        self.config, self.mesh, self.learner_mesh = config, mesh, learner_mesh
        self.tokenizer = run_tokenizer(config)
        self.problems = problem_set(config, "train")
        self.engine = make_engine(
            config.rollout.engine,
            EngineConfig(
                model=config.model,
                precision=mode.rollout,
                eos_ids=self.tokenizer.eos_ids,
                temperature=config.rollout.temperature,
                plan=mode.plan,
                audit_rows=config.ledger.audit_rows,
                noise=config.rollout.engine_noise,
                layout=token_layout(mesh, ACTOR),
                **engine_shape(config, config.rl.samples),
            ),
            mesh=mesh,
            slots=config.rollout.slots,
            turns=config.task.multiturn,
        )
        self.player = Player(config, self.engine, self.tokenizer, config.rl.samples, mesh)
        self.sync = jax.jit(lambda params: sync.to_rollout(params, mode.rollout))
        self._synced = None, None  # rollout parameters on the learner's mesh, and on this one

    @property
    def apart(self) -> bool:
        """Whether other devices learn than generate."""
        return self.mesh != self.learner_mesh

    def take(self, params):
        """Rollout parameters where rollouts are made; they cross once, quantized."""
        if not self.apart:
            return params
        if self._synced[0] is not params:
            whole = NamedSharding(self.mesh, P())
            self._synced = params, jax.device_put(params, whole)
        return self._synced[1]

    def prompts(self, step: int):
        count = self.config.rl.prompts_per_step
        problems = choose(self.problems, step, count, self.config.data_seed)
        return make_prompts(problems, self.tokenizer, self.config)

    def generate(self, params, prompts, step: int, version) -> Rollout:
        """A rollout where the learner reads it."""
        rollout = self.play(params, prompts, step, version).rollout
        return shard_record(rollout, self.learner_mesh) if self.apart else rollout

    def play(self, params, prompts, step: int, version) -> Played:
        """`params` are rollout parameters, on either mesh.

        Samples depend on (seed, step, prompt, sample).
        """
        samples = self.config.rl.samples
        slots = np.arange(len(prompts.problems), dtype=np.int32)
        keys = request_keys(
            self.config.seed,
            step,
            jnp.repeat(slots, samples),
            jnp.tile(jnp.arange(samples, dtype=jnp.int32), len(slots)),
        )
        noise_seed = (self.config.seed * 1_000_003 + step) % 2**31
        params = self.take(params)
        return self.player(params, prompts, keys, version=version, noise_seed=noise_seed)

    def _rewards(self, played: Played, prompts):
        """Rewards FP32 [P, samples], valid bool [P, samples], and what to count."""
        samples = self.config.rl.samples
        if played.transcripts is None:
            return *score(played.rollout, prompts, self.tokenizer, samples), {}
        return (
            *episode_rewards(played.transcripts, prompts, samples),
            episode_counts(played.transcripts),
        )

    def launch(self, params, step: int, version: int, clock: Clock) -> Launched:
        """Prompts of one step, and their rollout dispatched; `params` are of `version`."""
        with clock.part("prompts"):
            prompts = self.prompts(step)
        with clock.part("rollout"):
            played = self.play(params, prompts, step, np.int32(version))
        made = played.rollout
        if self.apart:  # on its way as soon as it is made, while others are generated
            played = played._replace(rollout=shard_record(made, self.learner_mesh))
        return Launched(step, version, prompts, played, made)

    def judge(self, launched: Launched, clock: Clock) -> Draw:
        """Waits for a rollout and gives it its rewards."""
        _, version, prompts, played, made = launched
        rollout, samples = played.rollout, self.config.rl.samples
        with clock.part("rollout") as ready:
            ready(made)
        if self.apart:
            with clock.part("transfer") as ready:
                ready(rollout)
        check_groups(rollout, prompts, samples, version)
        with clock.part("reward"):
            rewards, valid, counts = self._rewards(played, prompts)
        mask, finished = to_host(rollout.mask), to_host(rollout.finished)
        counts |= {
            "dropped_prompts": prompts.dropped,
            "unscored": int((~valid).sum()) - prompts.dropped * samples,
            "finished": float(finished.mean()),
            "response_length": int(mask.sum()) / len(mask),
            "sampled_tokens": int(mask.sum()),
        }
        if self.apart:
            counts["transfer_bytes"] = sum(a.nbytes for a in jax.tree.leaves(rollout))
        return Draw(rollout, rewards, valid, counts)

    # --- shapes of what it makes, for restoring and compiling --------------------------

    def rollout_like(self, rows: int) -> Rollout:
        """Shapes, dtypes and layout of a rollout's first `rows` sequences."""
        params = jax.eval_shape(lambda key: model.init(self.config.model, key), jax.random.key(0))
        prompts = self.prompts(0)

        def sampled(params):
            keys = jax.random.split(jax.random.key(0), self.config.rows)
            plain = Engine(self.engine.config)  # of the same shapes, and can be traced
            rollout = plain(params, *self.player.opening(prompts), keys)
            return first_rows(rollout, rows)

        def placed(a, axis):
            return jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=rows_sharding(a.shape, axis, self.learner_mesh)
            )

        return map_rows(placed, jax.eval_shape(lambda p: sampled(self.sync(p)), params))

    def draw_like(self) -> dict:
        rl = self.config.rl
        shape = (rl.prompts_per_step, rl.samples)
        return {
            "rollout": self.rollout_like(self.config.rows),
            "rewards": np.zeros(shape, np.float32),
            "valid": np.zeros(shape, bool),
        }
