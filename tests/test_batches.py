"""Whole batches and episodes of several turns through the continuous engine."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_continuous import assert_same_rollout
from test_layer_kinds import HYBRID

from trace_jax.rollout import make_engine
from trace_jax.rollout.batches import ContinuousBatches
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.memory import MemoryPlan, plan_memory
from trace_jax.rollout.programs import CacheConfig, ProgramConfig

CONFIG = helpers.engine(audit_rows=0).config
PARAMS = lambda: helpers.rollout_params_of(helpers.MOE, "nvfp4")


def test_fewer_slots_than_rows_give_the_batch_engines_rollout():
    run = make_engine("continuous", CONFIG, slots=2)
    mine = run(PARAMS(), *helpers.prompts(), helpers.keys(), version=3)
    assert_same_rollout(mine, helpers.rollout())
    assert len(run._engine.scheduler.slots) == 2
    again = run(PARAMS(), *helpers.prompts(), helpers.keys(), version=3)
    np.testing.assert_array_equal(again.tokens, mine.tokens)


def test_turns_go_on_in_place_and_are_what_prefilling_them_again_gives():
    config = dataclasses.replace(CONFIG, samples=1, eos_ids=(helpers.VOCAB,))
    turns, plain = ContinuousBatches(config, turns=True), Engine(config)
    rows = [[1, 2, 3], [4, 5, 6, 7, 8]]
    keys, width = helpers.keys()[:2], 32
    for turn in range(3):
        lengths = np.array([len(row) for row in rows], np.int32)
        tokens = np.zeros((2, width), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        mine = turns(PARAMS(), tokens, lengths, keys, version=3, turn=turn)
        theirs = plain(PARAMS(), jnp.asarray(tokens), jnp.asarray(lengths), keys, version=3)
        assert_same_rollout(mine, theirs)
        if turn == 0:
            prefilled = turns._engine.counts.prefilled
        for i, row in enumerate(rows):
            drawn = np.asarray(mine.tokens)[i, lengths[i] : int(mine.length[i])].tolist()
            rows[i] = [*row, *drawn, 9, 10]  # and what the environment says
    assert turns._engine.counts.prefilled == prefilled == 2 + 4
    # A row that is over is given its first token: nothing runs for it, and earlier
    # rollouts are not touched by what runs for the other.
    before = jax.tree.map(np.array, mine)
    rows[0] = rows[0][:1]
    lengths = np.array([1, len(rows[1])], np.int32)
    tokens = np.zeros((2, width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    dispatched = turns._engine.counts.drawn
    turns(PARAMS(), tokens, lengths, keys, version=3, turn=3)
    assert turns._engine.counts.drawn - dispatched == helpers.RESPONSE
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, mine), before)
    # A new episode with the same prompt starts afresh.
    again = turns(PARAMS(), tokens, lengths, keys, version=3)
    assert int(again.length[1]) == lengths[1] + helpers.RESPONSE
    # Other weights: everything is computed again.
    prefilled = turns._engine.counts.prefilled
    other = helpers.rollout_params_of(helpers.MOE, "nvfp4", seed=1)
    turns(other, tokens, lengths, keys, version=4)
    assert turns._engine.counts.prefilled > prefilled


def test_states_are_kept_for_every_prompt_and_episode():
    """Prompts of 10, 1 and 4 tokens, two samples each in two slots; then two more turns."""
    config = dataclasses.replace(CONFIG, model=HYBRID, eos_ids=(helpers.VOCAB,))
    run = ContinuousBatches(config, slots=2, turns=True)
    params = helpers.rollout_params_of(HYBRID, "nvfp4")
    prompts, lengths = map(np.asarray, helpers.prompts())
    rows = [prompts[i // 2, : lengths[i // 2]].tolist() for i in range(helpers.ROWS)]
    for turn in range(3):
        lengths = np.array([len(row) for row in rows], np.int32)
        tokens = np.zeros((helpers.ROWS, 48), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        rolled = run(params, tokens, lengths, helpers.keys(), version=3, turn=turn)
        assert run._engine.counts.prefilled == 9 + 3
        drawn = np.asarray(rolled.tokens)
        rows = [
            [*row, *drawn[i, len(row) : int(rolled.length[i])].tolist(), 9, 10]
            for i, row in enumerate(rows)
        ]
    assert run._engine.scheduler.preemptions == 0


# --- memory ---

BIG = ProgramConfig(
    dataclasses.replace(helpers.MOE, head_dim=64, num_heads=4, num_kv_heads=2),
    helpers.PRECISIONS["nvfp4"],
    CacheConfig(slots=4, pages=1, length=1024, page=64),
    (),
)
# 64 tokens x 2 KV heads x K and V x (32 codes + 4 scales + 1 exponent) bytes x 3 layers.
PAGE_BYTES = 64 * 2 * 2 * (32 + 4 + 1) * 3


def test_pages_take_what_weights_records_and_workspace_leave():
    free = 2**28
    plan = plan_memory(BIG, 10_000_000, free, rows=8)
    assert plan.page_bytes == PAGE_BYTES
    used = plan.weights + plan.records + plan.workspace + plan.pages * plan.page_bytes
    assert free - PAGE_BYTES < used <= free
    on_host = plan_memory(BIG, 10_000_000, free, rows=8, record_on="host")
    assert on_host.records == 0 and on_host.pages > plan.pages
    assert isinstance(plan, MemoryPlan) and f"{plan.pages} pages of 64 tokens" in str(plan)


def test_states_of_slots_and_of_those_kept_beside_them_are_counted():
    """Two layers of linear attention and one with a window of four BF16 tokens."""
    shape = dataclasses.replace(BIG.model, full_attention_every=3, delta=HYBRID.delta)
    precision = helpers.PRECISIONS["window"]
    delta = shape.delta
    matrix = 4 * delta.value_heads * delta.key_dim * delta.value_dim
    convolution = 2 * (delta.conv_width - 1) * delta.channels
    each = 2 * (matrix + convolution) + 2 * 2 * helpers.WINDOW * 2 * 64
    cache = dataclasses.replace(BIG.cache, kept=3)
    plan = plan_memory(ProgramConfig(shape, precision, cache, ()), 10_000_000, 2**28, rows=8)
    assert plan.states == (4 + 3) * each and "states 0.00 GiB" in str(plan)
    assert plan.page_bytes == PAGE_BYTES // 3
    used = plan.weights + plan.records + plan.workspace + plan.pages * plan.page_bytes
    assert 2**28 - PAGE_BYTES < used + plan.states <= 2**28


def test_experts_that_prefill_unpacks_are_counted_where_the_kernels_run():
    model = dataclasses.replace(BIG.model, hidden=512, expert_dim=512, num_experts=8, top_k=8)
    plans = {}
    for kernels in (False, True):
        for chunk in (1024, 512):  # 1,024 rows an expert, and half of them
            cache = dataclasses.replace(BIG.cache, chunk=chunk, prefill_rows=1, kernels=kernels)
            config = dataclasses.replace(BIG, model=model, cache=cache)
            plans[kernels, chunk] = plan_memory(config, 10_000_000, 2**29, rows=8)
    unpacked = 8 * 2 * (2 * 512 * 512)  # gate and up in BF16
    assert plans[True, 1024].workspace - plans[False, 1024].workspace == unpacked
    assert plans[True, 512].workspace == plans[False, 512].workspace


def test_too_small_a_device_is_one_line_with_what_would_fit():
    small = plan_memory(BIG, 0, 2**26, rows=1, record_on="host")
    weights = 2**26 - small.workspace - 9 * PAGE_BYTES  # leaves nine pages
    with pytest.raises(ValueError, match="write a length of 512 or less") as error:
        plan_memory(BIG, weights, 2**26, rows=1, record_on="host")
    assert "\n" not in str(error.value)
