"""The host's half of continuous batching, without a model: who runs when, in which pages."""

import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from trace_jax.rollout.page_pool import PagePool
from trace_jax.rollout.scheduler import Scheduler
from trace_jax.rollout.sequence import Sequence

PAGE, STEPS, CHUNK = 4, 3, 8


def scheduler(slots=2, pages=16, prefill_rows=1, states=None) -> Scheduler:
    shape = dict(page=PAGE, steps=STEPS, chunk=CHUNK, prefill_rows=prefill_rows)
    places = None if states is None else PagePool(states)
    return Scheduler(slots, PagePool(pages), **shape, states=places)


def sequence(row, prompt, new, first_token=None, **settings) -> Sequence:
    tokens = list(range(100, 100 + prompt)) if first_token is None else [first_token] * prompt
    return Sequence(row, tokens, prompt + new, **settings)


class Device:
    """Checks on a model of the device that what is attended to is what was stored.

    A stored token is (row, position, token); shared prompts count as equal by token. A state
    is the list of tokens that it has seen, of slots as of the places beside them. With
    `cut`, held sequences end one token early, at a stop string in the last dispatch.
    """

    def __init__(self, s: Scheduler, cut=False):
        self.cut = cut
        self.s, self.contents, self.drawn = s, {}, collections.Counter()
        self.records, self.chunks = {}, 0
        self.states = [["another's"] for _ in s.slots]
        self.kept = [["nobody's"] for _ in range(s.states.count if s.states else 0)]

    def turn(self):
        s = self.s
        s.admit()
        self.copies()
        if chunks := s.plan_prefill():
            assert len(chunks) <= s.prefill_rows
            self.chunks += len(chunks)
            for c in chunks:
                assert c.start % PAGE == 0 and 0 < c.stop - c.start <= CHUNK
                assert c.sequence.stored == c.start
                for i in range(c.start, c.stop):
                    self.write(c.sequence, i)
            s.prefilled(chunks)
            s.admit()
            self.copies()
        ended = []
        for slot, q in s.plan_decode():
            assert s.slots[slot] is q
            if self.decode(q):
                ended.append(q)
        for q in ended:
            s.finish(q, overran=self.end_early(q))
        self.check_pages()
        return ended

    def copies(self):
        before = dict(self.contents)
        for target, source in self.s.page_copies.items():
            for i in range(PAGE):
                self.contents[target, i] = before.get((source, i))
        for source, target, n in self.s.record_copies:
            for i in range(n):
                self.records[target, i] = self.records[source, i]
        self.s.record_copies = []
        for place, slot in self.s.keeps.items():
            self.kept[place] = list(self.states[slot])
        for slot, place in self.s.gives.items():
            self.states[slot] = list(self.kept[place])
        self.s.page_copies, self.s.keeps, self.s.gives = {}, {}, {}

    def write(self, q, i):
        if self.s.states:
            slot = self.s.slots.index(q)
            self.states[slot] = [] if i == 0 else self.states[slot]
            assert self.states[slot] == q.tokens[:i], "a state of other tokens"
            self.states[slot].append(q.tokens[i])
        self.contents[q.pages[i // PAGE], i % PAGE] = (i, q.tokens[i])
        self.records[q.row, i] = q.tokens[i]

    def decode(self, q):
        for _ in range(STEPS):
            for i in range(q.stored):
                assert self.contents[q.pages[i // PAGE], i % PAGE] == (i, q.tokens[i])
            self.write(q, q.stored)
            q.stored += 1
            if q.stored == len(q.tokens):
                q.tokens.append(7 * q.row + len(q.tokens))
                q.sampled.append(True)
                q.logp.append(-1.0)
                self.drawn[q.row] += 1
                if len(q.tokens) >= q.limit:
                    q.done = "length"
                    return True
        return False

    def end_early(self, q):
        if not (self.cut and q.hold and len(q.tokens) > q.prompt + 1):
            return False
        del q.tokens[-1], q.sampled[-1], q.logp[-1]
        q.stored -= 1
        return True

    def check_pages(self):
        held = [q for q in self.s.slots if q is not None] + self.s.held
        uses = collections.Counter(p for q in held for p in q.pages)
        uses.update(p for prefix in self.s.prefixes.values() for p in prefix.pages)
        assert dict(uses) == {p: n for p, n in enumerate(self.s.pool._references) if n}, (
            "pages are lost or held twice"
        )
        assert self.s.pool.free == self.s.pool.count - len(uses)
        owners = [*self.s.held, *self.s.waiting, *self.s.prefixes.values()]
        places = [o.state for o in {id(o): o for o in owners}.values() if o.state is not None]
        assert len(places) == len(set(places)), "a state has two owners"
        if self.s.states:
            assert self.s.states.free == self.s.states.count - len(places)

    def run(self, limit=500):
        ended = []
        for _ in range(limit):
            if self.s.idle:
                return ended
            ended += self.turn()
        raise AssertionError(f"not done after {limit} turns")


@hypothesis.given(
    requests=st.lists(
        st.tuples(st.integers(1, 13), st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=9
    ),
    slots=st.integers(1, 4),
    spare=st.integers(0, 6),
    rows=st.integers(1, 3),
    states=st.none() | st.integers(0, 3),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_every_request_draws_its_tokens_once_whatever_the_pages_and_states(
    requests, slots, spare, rows, states
):
    largest = max(-(-(p + n) // PAGE) for p, n, _ in requests)
    s = scheduler(slots, largest + 1 + spare, rows, states)
    device = Device(s)
    all_of_them = [sequence(i, p, n, first_token=f) for i, (p, n, f) in enumerate(requests)]
    for q in all_of_them:
        s.submit(q)
    ended = device.run()
    assert sorted(q.row for q in ended) == list(range(len(requests)))
    for q, (prompt, new, _) in zip(all_of_them, requests, strict=True):
        assert device.drawn[q.row] == new and len(q.tokens) == prompt + new
        for i in range(len(q.tokens) - 1):
            assert device.records[q.row, i] == q.tokens[i]  # one record a token fed
    s.drop_prefixes()
    assert s.pool.free == s.pool.count and (states is None or s.states.free == states)


@hypothesis.given(
    turns=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    slots=st.integers(1, 3),
    spare=st.integers(0, 8),
    states=st.none() | st.integers(0, 4),
    cut=st.booleans(),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_held_sequences_go_on_from_their_own_states(turns, slots, spare, states, cut):
    """Three episodes, two of them with one prompt; `cut`: turns end at a stop string."""
    longest = 7 + sum(max(said + 1 + new for said, new in turn) for turn in turns)
    s = scheduler(slots, -(-longest // PAGE) + 1 + spare, states=states)
    device = Device(s, cut)
    group = [sequence(i, 6, 1, first_token=i // 2, hold=True) for i in range(3)]
    for q in group:
        s.submit(q)
    device.run()
    for turn in turns:
        for q, (said, new) in zip(group, turn, strict=True):
            q.tokens += [50] * (said + 1)
            q.sampled += [False] * (said + 1)
            q.logp += [0.0] * (said + 1)
            q.limit, q.done = len(q.tokens) + new, None
            s.submit(q)
        device.run()
    for q in group:
        assert [device.records[q.row, i] for i in range(len(q.tokens) - 1)] == q.tokens[:-1]
        s.let_go(q)
    s.drop_prefixes()
    assert s.pool.free == s.pool.count and (states is None or s.states.free == states)


def test_samples_of_a_prompt_share_its_state_and_prefill_again_where_it_has_no_place():
    for states, times in ((1, 1), (0, 3)):
        s = scheduler(slots=3, states=states)
        device = Device(s)
        for i in range(3):
            s.submit(sequence(i, 11, 4))
        device.run()
        assert device.chunks == 2 * times  # of 8 and 2 tokens


def test_a_state_that_saw_what_was_cut_is_not_kept():
    for states, overran, kept in ((1, False, True), (1, True, False), (None, True, True)):
        s = scheduler(slots=1, states=states)
        q = sequence(0, 5, 4, hold=True)
        s.submit(q)
        Device(s).turn()
        s.finish(q, overran=overran)
        assert bool(q.pages) == kept and (q.state is not None) == (kept and states is not None)
        assert s.pool.free == s.pool.count - len(q.pages)


def test_samples_of_a_prompt_share_its_full_pages_and_copy_the_partial_one():
    s = scheduler(slots=3)
    device = Device(s)
    group = [sequence(i, 11, 4) for i in range(3)]  # 10 tokens are prefilled: two pages and a half
    for q in group:
        s.submit(q)
    device.turn()  # 8 tokens
    assert [q is not None for q in s.slots].count(True) == 1  # the others wait for the prompt
    device.turn()
    pages = np.array([q.pages[:3] for q in group])
    assert (pages[:, :2] == pages[0, :2]).all()
    assert len(set(pages[:, 2])) == 3
    assert s.pool._references[pages[0, 0]] == 4  # three samples and the stored prompt
    device.run()
    assert s.preemptions == 0


def test_another_prompt_passes_those_that_wait_for_a_prefill():
    s = scheduler(slots=2)
    for q in (sequence(0, 20, 2), sequence(1, 20, 2), sequence(2, 1, 2)):
        s.submit(q)
    s.admit()
    assert {q.row for q in s.slots if q} == {0, 2}


def test_a_long_prompt_does_not_stall_running_sequences():
    s = scheduler(slots=2, pages=64)
    device = Device(s)
    short = sequence(0, 2, 40)
    s.submit(short)
    device.turn()
    s.submit(sequence(1, 80, 2))
    for _ in range(5):  # ten chunks of prefill, and no turn without decode steps
        before = len(short.tokens)
        device.turn()
        assert len(short.tokens) == before + STEPS


def test_the_youngest_is_preempted_and_its_tokens_stay():
    s = scheduler(slots=2, pages=7)
    device = Device(s)
    old, young = sequence(0, 5, 18, first_token=1), sequence(1, 5, 18, first_token=2)
    s.submit(old), s.submit(young)
    while not s.preemptions:
        device.turn()
    assert old in s.slots and young not in s.slots
    assert young.preempted == 1 and young.pages == [] and young.stored == 0
    kept = list(young.tokens)
    device.run()
    assert young.tokens[: len(kept)] == kept and device.drawn[1] == 18


def test_a_held_sequence_goes_on_in_its_pages_and_loses_them_only_to_need():
    s = scheduler(slots=1, pages=7)
    device = Device(s)
    q = sequence(0, 5, 4, hold=True)
    s.submit(q)
    device.run()
    pages, stored = list(q.pages), q.stored
    assert stored == 8 and s.pool.free == s.pool.count - len(pages)
    q.tokens += [1, 2, 3]
    q.sampled += [False] * 3
    q.limit, q.done = 14, None
    s.submit(q)
    s.admit()
    assert q.pages == pages and q.stored == stored and not s.plan_prefill()
    device.run()
    assert len(q.tokens) == 14
    s.submit(sequence(1, 20, 3))  # needs all pages
    device.run()
    assert q.pages == [] and q.stored == 0 and q in s.held
    s.let_go(q)
    assert not s.held


def test_what_can_never_run_is_refused_when_it_is_submitted():
    s = scheduler(pages=4)
    with pytest.raises(ValueError, match="at least one"):
        s.submit(Sequence(0, [], 4))
    with pytest.raises(ValueError, match="write a shorter prompt"):
        s.submit(sequence(0, 4, 0))
    with pytest.raises(ValueError, match="needs 5 pages of 4, the cache has 4"):
        s.submit(sequence(0, 9, 7))
    assert not s.waiting


def test_a_page_is_counted_exactly():
    pool = PagePool(2)
    pages = pool.take(2)
    with pytest.raises(RuntimeError, match="0 free"):
        pool.take(1)
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.free == 1
    pool.release(pages[:1])
    assert pool.free == 2
    with pytest.raises(RuntimeError, match="already"):
        pool.release(pages[:1])
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share(pages[:1])
