"""Which sequence runs when, and in which pages: the host's half of continuous batching.

A sequence of n known tokens stores keys and values for its first n - 1; the newest token
is fed to draw the next. Its prompt but for the last token is prefilled in chunks; every
later token is fed by decode steps, those that were known already (after preemption, or
appended by an environment) as well. So a token's values come from the same program
whenever they are made, and a sequence draws the same tokens alone, in any batch, and
after preemption.

Some models have a state too: what belongs to a sequence as a whole (the state of linear
attention, the window of recent tokens). A slot has one, always that of the sequence in it;
the states of shared prompts and of held sequences are kept in places beside the slots.
"""

import collections
from collections.abc import Iterable

from trace_jax.rollout.page_pool import PagePool
from trace_jax.rollout.sequence import Chunk, Prefix, Sequence


class Scheduler:
    """Slots, queue and pages.

    Args:
      slots: sequences that decode together.
      pool: the pages.
      page: tokens of a page.
      steps: decode steps of a dispatch.
      chunk, prefill_rows: tokens of a sequence, and sequences, that a prefill dispatch takes.
      states: places for states that no slot holds; None: the model has no states.
    """

    def __init__(
        self,
        slots: int,
        pool: PagePool,
        *,
        page: int,
        steps: int,
        chunk: int,
        prefill_rows: int,
        states: PagePool | None = None,
    ):
        self.pool, self.page, self.steps, self.states = pool, page, steps, states
        self.chunk, self.prefill_rows = chunk, prefill_rows
        self.slots: list[Sequence | None] = [None] * slots
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.held: list[Sequence] = []
        self.prefixes: collections.OrderedDict[bytes, Prefix] = collections.OrderedDict()
        # What the device must do before the next dispatch: keeps come before gives.
        self.page_copies: dict[int, int] = {}  # page: page whose contents it takes
        self.record_copies: list[tuple[int, int, int]] = []  # (from row, to row, tokens)
        self.keeps: dict[int, int] = {}  # place: slot whose state it takes
        self.gives: dict[int, int] = {}  # slot: place whose state it takes
        self.preemptions = 0
        self._admitted: list[Sequence] = []  # running, oldest first

    # --- queue ---

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
          ValueError: an empty prompt, one that leaves no room, or more than the pool holds.
        """
        if not sequence.tokens:
            raise ValueError("a prompt has no token; write at least one, such as a BOS")
        if sequence.limit <= len(sequence.tokens):
            raise ValueError(
                f"a prompt of {len(sequence.tokens)} tokens leaves no room below the limit of "
                f"{sequence.limit}; write a shorter prompt or a longer limit"
            )
        # One page more, for the copy of a shared prompt's last page.
        needed = self._pages_for(sequence.limit) + 1
        if needed > self.pool.count:
            raise ValueError(
                f"a sequence of {sequence.limit} tokens needs {needed} pages of {self.page}, the "
                f"cache has {self.pool.count}; write a larger cache or a shorter limit"
            )
        self.waiting.append(sequence)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self._admitted

    @property
    def running(self) -> list[tuple[int, Sequence]]:
        """(slot, sequence) of those that decode."""
        return [
            (slot, s) for slot, s in enumerate(self.slots) if s is not None and s.stored >= s.prefix
        ]

    # --- admission ---

    def admit(self) -> None:
        """Moves sequences from the queue to free slots while pages last.

        One whose prompt another is prefilling waits for it, and others may pass.
        """
        busy = {s.prefix_key for s in self._admitted if s.stored < s.prefix}
        for sequence in list(self.waiting):
            slot = self._free_slot(sequence)
            if slot is None:
                if None not in self.slots:
                    return
                continue
            if not sequence.pages and sequence.prefix_key in busy:
                continue
            if not self._place(sequence, slot):
                return
            self.waiting.remove(sequence)
            self.slots[slot] = sequence
            self._admitted.append(sequence)
            if sequence.stored < sequence.prefix:
                busy.add(sequence.prefix_key)

    def _free_slot(self, sequence: Sequence) -> int | None:
        if sequence.first_slot is not None:
            free = self.slots[sequence.first_slot] is None
            return sequence.first_slot if free else None
        # From the end, so that the first slots stay with those that need them.
        return next((i for i in reversed(range(len(self.slots))) if self.slots[i] is None), None)

    def _place(self, sequence: Sequence, slot: int) -> bool:
        """Gives the pages to start with: its own, shared ones, or new ones."""
        if sequence in self.held:
            self.held.remove(sequence)
        if sequence.pages:
            if sequence.state is not None:
                self.gives[slot] = sequence.state
                self._drop_state(sequence)
            return True
        shared = self.prefixes.get(sequence.prefix_key)
        if shared is not None and sequence.prefix:
            if self._share(sequence, shared, slot):
                return True
            if self._admitted:
                return False  # pages come back when a running one ends
        needed = self._pages_for(min(len(sequence.tokens) + self.steps, sequence.limit))
        if not self._make_room(needed):
            return False
        sequence.pages, sequence.stored = self.pool.take(self._pages_for(sequence.prefix)), 0
        return True

    def _share(self, sequence: Sequence, shared: Prefix, slot: int) -> bool:
        whole, partial = divmod(sequence.prefix, self.page)
        if not self._make_room(2 if partial else 1, keep=sequence.prefix_key):
            return False
        self.prefixes.move_to_end(sequence.prefix_key)
        sequence.pages = list(shared.pages[:whole])
        self.pool.share(sequence.pages)
        if partial:
            (own,) = self.pool.take(1)
            self.page_copies[own] = shared.pages[whole]
            sequence.pages.append(own)
        if shared.state is not None:
            self.gives[slot] = shared.state
        if shared.row != sequence.row:
            self.record_copies.append((shared.row, sequence.row, sequence.prefix))
        sequence.stored = sequence.prefix
        return True

    # --- prefill ---

    def plan_prefill(self) -> list[Chunk]:
        """The next chunks, oldest sequences first."""
        unfinished = [s for s in self._admitted if s.stored < s.prefix]
        return [
            Chunk(s, s.stored, min(s.stored + self.chunk, s.prefix))
            for s in unfinished[: self.prefill_rows]
        ]

    def prefilled(self, chunks: Iterable[Chunk]) -> None:
        """Takes note that `chunks` are stored; finished prompts become shareable."""
        for chunk in chunks:
            s = chunk.sequence
            s.stored = chunk.stop
            others = any(w.prefix_key == s.prefix_key and not w.pages for w in self.waiting)
            if s.stored == s.prefix and others and s.prefix_key not in self.prefixes:
                self._publish(s)

    def _publish(self, sequence: Sequence) -> None:
        """Lets the waiting sequences of the same prompt share its pages."""
        whole, partial = divmod(sequence.prefix, self.page)
        if partial and not self.pool.free:
            return  # no page to go on in: the others prefill for themselves
        state = self._keep(self.slots.index(sequence))
        if self.states is not None and state is None:
            return  # no place for the state: the same
        pages = list(sequence.pages)
        self.pool.share(pages)
        self.prefixes[sequence.prefix_key] = Prefix(pages, sequence.row, state)
        if partial:
            (own,) = self.pool.take(1)
            self.page_copies[own] = pages[whole]
            self.pool.release([pages[whole]])
            sequence.pages = [*pages[:whole], own]

    # --- decode ---

    def plan_decode(self) -> list[tuple[int, Sequence]]:
        """(slot, sequence) of the next dispatch, each with pages for all its steps.

        Where pages run out, unused prompts go first, then held sequences, then the
        youngest running one, which is computed again later.
        """
        for s in list(self._admitted):
            if s not in self._admitted or s.stored < s.prefix:
                continue
            needed = self._pages_for(min(s.stored + self.steps, s.limit)) - len(s.pages)
            while needed > 0 and not self._make_room(needed):
                youngest = self._youngest()
                self._preempt(youngest)
                if youngest is s:
                    break
            if needed > 0 and s in self._admitted:
                s.pages += self.pool.take(needed)
        return self.running

    def _youngest(self) -> Sequence:
        free = [s for s in self._admitted if s.first_slot is None]
        return free[-1] if free else self._admitted[-1]

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_slot(sequence)
        self._drop_pages(sequence)
        sequence.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def finish(self, sequence: Sequence, *, overran: bool = False) -> None:
        """Frees the slot of a sequence that has ended, and its pages unless it is held.

        `overran`: more was fed than is stored now. Pages take that again; a state that has
        seen it cannot go back, so the sequence is computed again when it is continued.
        """
        slot = self.slots.index(sequence)
        self._leave_slot(sequence)
        if sequence.hold:
            sequence.state = None if overran else self._keep(slot)
            self.held.append(sequence)
        if not sequence.hold or (self.states is not None and sequence.state is None):
            self._drop_pages(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Gives up the pages of a held sequence."""
        sequence.hold = False
        if sequence in self.held:
            self.held.remove(sequence)
            self._drop_pages(sequence)

    def drop_prefixes(self) -> None:
        """Forgets every stored prompt and the pages of held sequences: the weights changed."""
        for key in list(self.prefixes):
            self._forget(key)
        for sequence in self.held:
            self._drop_pages(sequence)

    # --- pages ---

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _make_room(self, number: int, keep=None) -> bool:
        """Whether `number` pages are free, after giving up what nobody is using."""
        for key in list(self.prefixes):
            if self.pool.free >= number:
                break
            if key != keep:
                self._forget(key)
        for sequence in self.held:
            if self.pool.free >= number:
                break
            self._drop_pages(sequence)
        return self.pool.free >= number

    def _forget(self, key: bytes) -> None:
        prefix = self.prefixes.pop(key)
        self.pool.release(prefix.pages)
        self._drop_state(prefix)

    def _drop_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        self._drop_state(sequence)
        sequence.pages, sequence.stored = [], 0

    # --- states ---

    def _keep(self, slot: int) -> int | None:
        """The place that takes a slot's state; None if there is none. Stored prompts give way."""
        if self.states is None:
            return None
        for key in list(self.prefixes):
            if self.states.free:
                break
            self._forget(key)
        if not self.states.free:
            return None
        (place,) = self.states.take(1)
        self.keeps[place] = slot
        return place

    def _drop_state(self, owner: Sequence | Prefix) -> None:
        if owner.state is not None:
            self.states.release([owner.state])
            owner.state = None

    def _leave_slot(self, sequence: Sequence) -> None:
        self.slots[self.slots.index(sequence)] = None
        self._admitted.remove(sequence)
