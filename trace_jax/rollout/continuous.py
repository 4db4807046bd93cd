"""Continuous batching: requests come and go between dispatches of many decode steps."""

import concurrent.futures
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import sync
from trace_jax.kernels.expert_matmul import ExpertWeights
from trace_jax.model.layers import ExpertWeight
from trace_jax.rollout import programs, store
from trace_jax.rollout.page_pool import PagePool
from trace_jax.rollout.programs import Chunks, ProgramConfig, Slots
from trace_jax.rollout.record import Rollout
from trace_jax.rollout.scheduler import Scheduler
from trace_jax.rollout.sequence import Sequence, cut_at_stop


@dataclasses.dataclass
class Counts:
    """What a run of the engine did; tokens are of decode steps but for `prefilled`."""

    dispatches: int = 0
    prefills: int = 0
    drawn: int = 0
    replayed: int = 0
    prefilled: int = 0
    shared: int = 0
    idle_steps: int = 0


class ContinuousEngine:
    """Generates for any number of requests with a fixed number of slots and pages.

    `load` gives it weights; `submit`, `extend` and `step` run requests one by one, and
    `generate` a batch of them to its end.

    Args:
      config: static settings.
      rows: requests whose records are kept at a time.
      record_on: "device", where the learner reads them in place, or "host", for records
        that do not fit beside the cache.
      decode_text: tokens to text; needed for stop strings.
    """

    def __init__(
        self,
        config: ProgramConfig,
        rows: int,
        *,
        record_on: str = "device",
        decode_text: Callable[[Sequences[int]], str] | None = None,
    ):
        if record_on not in ("device", "host"):
            raise ValueError(f"engine: record_on is {record_on!r}; write device or host")
        self.config, self.rows, self.on_host = config, rows, record_on == "host"
        self.record_length = config.cache.length
        self.decode_text = decode_text
        self.counts = Counts()
        self._pools = jax.jit(programs.empty_pools, static_argnums=0)(config)
        self._kept = None  # states beside those of the slots
        if config.cache.kept and programs.state_bytes(config):
            self._kept = programs.empty_states(config, config.cache.kept)
        self._decode = jax.jit(partial(programs.decode, config), donate_argnums=1)
        self._prefill = jax.jit(partial(programs.prefill, config), donate_argnums=1)
        # partial: a jit of the bare function would share its count with other engines.
        self._copy_pages = jax.jit(partial(programs.copy_pages), donate_argnums=0)
        self._keep_states = jax.jit(partial(programs.keep_states, config), donate_argnums=1)
        self._give_states = jax.jit(partial(programs.give_states, config), donate_argnums=0)
        self._commit = partial(store.commit, audit_rows=config.audit_rows)
        self._copy_rows = store.copy_rows
        if not self.on_host:
            self._commit = jax.jit(self._commit, donate_argnums=0)
            self._copy_rows = jax.jit(self._copy_rows, donate_argnums=0)
        self._params, self._store = None, None
        self.version, self.noise_seed, self._dispatched = 0, 0, 0
        self._keys = np.zeros((rows, *_key_shape()), np.uint32)
        self._pending = []  # records on their way to the host, in order
        self._landing = concurrent.futures.ThreadPoolExecutor(1) if self.on_host else None
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        c = self.config.cache
        return Scheduler(
            c.slots,
            PagePool(c.pages),
            page=c.page,
            steps=c.steps,
            chunk=c.chunk,
            prefill_rows=c.prefill_rows,
            states=PagePool(c.kept) if programs.state_bytes(self.config) else None,
        )

    # --- weights ---

    def load(self, params: dict, version: int = 0) -> None:
        """Takes rollout parameters: of sync.to_rollout, or by layer already (sync.by_layer).

        Nothing that older weights made survives: stored prompts and the pages and states of
        held sequences are dropped. May be called again at any time between requests.

        Raises:
          RuntimeError: sequences are running; finish them first.
        """
        if not self.scheduler.idle:
            raise RuntimeError("weights cannot change while sequences run; step() to their end")
        self.scheduler.drop_prefixes()
        self._params = None  # frees the older weights first
        ready = isinstance(params["layers"][-1]["moe"]["gate_up"], ExpertWeight | ExpertWeights)
        self._params = params if ready else _by_layer(params, self.config.cache.kernels)
        self.version = version

    # --- requests ---

    def submit(self, row: int, tokens, key, max_response: int, **settings) -> Sequence:
        """Queues a request.

        Args:
          row: its row of the record, from 0 to rows - 1; whatever stood there is overwritten.
          tokens: the prompt's ids.
          key: its request key (sampling.request_keys).
          max_response: tokens it may draw.
          settings: `hold`, keep its pages for `extend`; `stop`, strings that end it.

        Raises:
          ValueError: a prompt that is empty or too long, or stop strings without decode_text.
        """
        tokens = [int(t) for t in tokens]
        limit = len(tokens) + max_response
        if limit > self.config.cache.length:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and {max_response} more exceed the engine's "
                f"length of {self.config.cache.length}; write a larger length or drop the prompt"
            )
        if settings.get("stop") and self.decode_text is None:
            raise ValueError("stop strings need decode_text; give the engine a tokenizer's decode")
        sequence = Sequence(row, tokens, limit, **settings)
        if row < self.config.audit_rows:
            sequence.first_slot = row
        self._keys[row] = np.asarray(jax.random.key_data(key))
        self.scheduler.submit(sequence)
        return sequence

    def extend(self, sequence: Sequence, tokens, max_response: int) -> None:
        """Goes on with a held sequence that has ended, after `tokens` of an environment.

        The tokens are fed one by one and nothing before them is computed again, unless
        its pages were needed elsewhere, or no place was left for its state.
        """
        if sequence.done is None:
            raise RuntimeError("the sequence has not ended; extend it after its `done`")
        tokens = [int(t) for t in tokens]
        limit = len(sequence.tokens) + len(tokens) + max_response
        if limit > self.config.cache.length:
            raise ValueError(
                f"the sequence would have {limit} tokens, the engine's length is "
                f"{self.config.cache.length}; write a larger length or smaller turns"
            )
        sequence.tokens += tokens
        sequence.sampled += [False] * len(tokens)
        sequence.logp += [0.0] * len(tokens)
        sequence.limit, sequence.done = limit, None
        self.scheduler.submit(sequence)

    # --- running ---

    def step(self) -> list[Sequence]:
        """Admits, prefills one dispatch of chunks, decodes one; the sequences that ended."""
        if self._params is None:
            raise RuntimeError("the engine has no weights; load(params) first")
        if self._store is None:
            self._store = self._empty_store()
        self.scheduler.admit()
        self._copies()
        if chunks := self.scheduler.plan_prefill():
            self._run_prefill(chunks)
            self.scheduler.admit()
            self._copies()
        if running := self.scheduler.plan_decode():
            return self._run_decode(running)
        return []

    def generate(self, prompts, lengths, keys, samples: int, max_response: int) -> Rollout:
        """Runs `samples` requests a prompt to their end.

        Args:
          prompts: int32 [P, L] right-padded. lengths: int32 [P], at least 1.
          keys: [P * samples] request keys; the samples of a prompt are adjacent.

        Returns:
          Rollout of N = P * samples rows (which must be `rows`) and S = L + max_response tokens.
        """
        prompts, lengths = np.asarray(prompts), np.asarray(lengths)
        if len(prompts) * samples != self.rows:
            raise ValueError(
                f"{len(prompts)} prompts of {samples} samples do not fill the engine's "
                f"{self.rows} rows"
            )
        self.scheduler.drop_prefixes()  # their records are those of the call before
        self._store = None
        sequences = [
            self.submit(row, prompts[row // samples][: lengths[row // samples]], key, max_response)
            for row, key in enumerate(keys)
        ]
        while not self.scheduler.idle:
            self.step()
        rollout = self.rollout(sequences, prompts.shape[1] + max_response, copy=False)
        self._store = None  # the rollout's now
        return rollout

    def rollout(self, sequences: Sequences[Sequence], length: int, *, copy=True) -> Rollout:
        """The records of `sequences`, in their order, as a Rollout.

        Without a copy it may share the store's buffers, which the next dispatch takes.
        """
        self._land()
        kept = self._store or self._empty_store()
        return store.rollout_of(kept, sequences, length, self.version, copy)

    def compilations(self) -> dict[str, int]:
        """Programs compiled so far, by what they do; each stays at one after warm-up."""
        jitted = {
            "decode": self._decode,
            "prefill": self._prefill,
            "pages": self._copy_pages,
            "keep": self._keep_states,
            "give": self._give_states,
        }
        return {name: f._cache_size() for name, f in jitted.items()}

    # --- dispatches ---

    def _copies(self) -> None:
        """Copies of pages, states and records that sharing, holding and going on ask for."""
        s, slots = self.scheduler, self.config.cache.slots
        for target, source in _groups(s.page_copies, slots, s.pool.count):
            self._pools = self._copy_pages(self._pools, source, target)
        few = self.config.cache.prefill_rows  # states are large, and so are copies on their way
        for place, slot in _groups(s.keeps, few, self.config.cache.kept):
            self._kept = self._keep_states(self._pools, self._kept, slot, place)
        for slot, place in _groups(s.gives, few, slots):
            self._pools = self._give_states(self._pools, self._kept, place, slot)
        s.page_copies, s.keeps, s.gives = {}, {}, {}
        while s.record_copies:
            some, s.record_copies = s.record_copies[:slots], s.record_copies[slots:]
            self._land()
            where = np.zeros((3, slots), np.int32)
            where[1] = self.rows
            where[:, : len(some)] = np.asarray(some).T
            self._store = self._copy_rows(self._store, *where)
            self.counts.shared += sum(tokens for *_, tokens in some)

    def _run_prefill(self, chunks) -> None:
        c = self.config.cache
        tokens = np.zeros((c.prefill_rows, c.chunk), np.int32)
        start, count = np.zeros(c.prefill_rows, np.int32), np.zeros(c.prefill_rows, np.int32)
        table = np.zeros((c.prefill_rows, c.table_pages), np.int32)
        slot = np.full(c.prefill_rows, c.slots, np.int32)
        rows = np.full((c.prefill_rows, c.chunk), self.rows, np.int32)
        for i, chunk in enumerate(chunks):
            slot[i] = self.scheduler.slots.index(chunk.sequence)
            n = chunk.stop - chunk.start
            tokens[i, :n] = chunk.sequence.tokens[chunk.start : chunk.stop]
            start[i], count[i] = chunk.start, n
            table[i, : len(chunk.sequence.pages)] = chunk.sequence.pages
            rows[i, :n] = chunk.sequence.row
        told = Chunks(tokens, start, count, table, slot)
        self._pools, record = self._prefill(self._params, self._pools, told, self._noise_key())
        self._keep(record, rows, start[:, None] + np.arange(c.chunk)[None])
        self.scheduler.prefilled(chunks)
        self.counts.prefills += 1
        self.counts.prefilled += int(count.sum())

    def _run_decode(self, running) -> list[Sequence]:
        c = self.config.cache
        known = np.zeros((c.slots, c.steps + 1), np.int32)
        position, count, limit = (np.zeros(c.slots, np.int32) for _ in range(3))
        table = np.zeros((c.slots, c.table_pages), np.int32)
        rows = np.full(c.slots, self.rows, np.int32)
        for slot, s in running:
            some = s.tokens[s.stored : s.stored + c.steps + 1]
            known[slot, : len(some)], count[slot] = some, len(some)
            position[slot], limit[slot], rows[slot] = s.stored, s.limit, s.row
            table[slot, : len(s.pages)] = s.pages
        keys = jax.random.wrap_key_data(self._keys[np.minimum(rows, self.rows - 1)])
        told = Slots(table, position, known, count, limit, keys)
        self._pools, left = self._decode(self._params, self._pools, told, self._noise_key())
        tokens, logp, fed, drawn = jax.device_get(left[:4])
        at = position[None] + np.arange(c.steps, dtype=np.int32)[:, None]
        self._keep(store.steps_record(left.record), np.where(fed, rows[None], self.rows), at)
        self.counts.dispatches += 1
        self.counts.drawn += int(drawn.sum())
        self.counts.replayed += int((fed & ~drawn).sum())
        self.counts.idle_steps += int((~fed).sum())
        ended = []
        for slot, s in running:
            s.stored = reached = s.stored + int(fed[:, slot].sum())
            new = drawn[:, slot]
            s.tokens += tokens[new, slot].tolist()
            s.logp += logp[new, slot].tolist()
            s.sampled += [True] * int(new.sum())
            s.done = self._why_done(s, int(new.sum()))
            if s.done:
                self.scheduler.finish(s, overran=s.stored < reached)
                ended.append(s)
        return ended

    def _why_done(self, s: Sequence, new: int) -> str | None:
        if s.stop and cut_at_stop(s, new, self.decode_text):
            return "stop"
        if s.sampled[-1] and s.tokens[-1] in self.config.eos_ids:
            return "eos"
        return "length" if len(s.tokens) >= s.limit else None

    # --- records ---

    def _noise_key(self):
        if not self.config.noise:
            return None
        self._dispatched += 1
        return jax.random.fold_in(jax.random.key(self.noise_seed), self._dispatched)

    def _empty_store(self):
        c = self.config.cache
        shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
        r = c.prefill_rows
        chunks = Chunks(shape(r, c.chunk), shape(r), shape(r), shape(r, c.table_pages), shape(r))
        _, like = jax.eval_shape(self._prefill, self._params, self._pools, chunks)
        return store.empty_store(
            like, self.rows, self.record_length, self.config.audit_rows, host=self.on_host
        )

    def _keep(self, record, rows, positions) -> None:
        """Sends records on their way to where they belong."""
        if not self.on_host:
            self._store = self._commit(self._store, record, rows, positions)
            return
        jax.tree.map(lambda a: a.copy_to_host_async(), record)
        self._pending.append(self._landing.submit(self._land_one, record, rows, positions))
        while len(self._pending) > 2:  # what is under way takes memory
            self._pending.pop(0).result()

    def _land_one(self, record, rows, positions) -> None:
        self._store = self._commit(self._store, jax.device_get(record), rows, positions)

    def _land(self) -> None:
        """Waits until every record has reached the host's store."""
        while self._pending:
            self._pending.pop(0).result()


@partial(jax.jit, static_argnames="kernels")
def _by_layer(params, kernels: bool):
    return sync.by_layer(params, kernels)


def _key_shape() -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape


def _groups(copies: dict[int, int], size: int, nowhere: int):
    """Targets and sources int32 [size] of copies {target: source}; the last are filled up."""
    pairs = list(copies.items())
    for first in range(0, len(pairs), size):
        part = pairs[first : first + size]
        target, source = np.full(size, nowhere, np.int32), np.zeros(size, np.int32)
        target[: len(part)], source[: len(part)] = zip(*part, strict=True)
        yield target, source
