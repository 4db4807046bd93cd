"""States in the continuous engine: linear attention, windows of recent tokens; and latents."""

import dataclasses
from functools import cache

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import relative_error
from test_continuous import (
    CACHE,
    KERNEL_MODEL,
    agreement_of_kernels,
    assert_same_rollout,
    fresh,
    generate,
    request_key,
)
from test_layer_kinds import HYBRID, LATENT

from trace_jax import fp4
from trace_jax.model import paged, pools, recent
from trace_jax.model.config import LayerKind
from trace_jax.model.sites import LayerSpec, SiteInputs, Sites
from trace_jax.rollout.continuous import ContinuousEngine
from trace_jax.rollout.programs import ProgramConfig

# (model, policy): what has a state, or no keys and values of its own.
CASES = {
    "hybrid": (HYBRID, "nvfp4"),
    "window": (helpers.MOE, "window"),
    "latent": (LATENT, "nvfp4"),
    "latent, window": (LATENT, "window"),
}
WITH_STATE = [name for name in CASES if name != "latent"]
KEPT = 3


@cache
def engine(name: str) -> ContinuousEngine:
    """Compiled once a case; tests give it a fresh scheduler."""
    model_config, policy = CASES[name]
    settings = {"temperature": helpers.TEMPERATURE, "plan": helpers.FULL}
    cache_config = dataclasses.replace(CACHE, kept=KEPT)
    programs = ProgramConfig(
        model_config, helpers.PRECISIONS[policy], cache_config, helpers.EOS, **settings
    )
    run = ContinuousEngine(programs, helpers.ROWS)
    run.load(helpers.rollout_params_of(model_config, policy), 3)
    return run


def poisoned(run: ContinuousEngine) -> ContinuousEngine:
    """Whatever a slot, a place or a page may hold of others: NaN."""
    bad = lambda a: jnp.full_like(a, 0x7F if a.dtype == jnp.uint8 else jnp.nan)
    run._pools, run._kept = jax.tree.map(bad, (run._pools, run._kept))
    return run


def finished(run: ContinuousEngine, *sequences):
    while not run.scheduler.idle:
        run.step()
    return [(s.tokens, s.logp, s.done) for s in sequences]


PROMPTS = [np.asarray(helpers.random_tokens(1, 16, seed))[0] for seed in range(2)]


def requests(run: ContinuousEngine, rows, **settings):
    """Two samples of a prompt of 9 tokens, one of 14, one of a single token."""
    shapes = [(0, 9, 12), (0, 9, 12), (1, 14, 9), (1, 1, 12)]
    return [
        run.submit(row, PROMPTS[p][:n], request_key(row), new, **settings)
        for row, (p, n, new) in enumerate(shapes)
        if row in rows
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_what_the_plain_engine_generates(name):
    mine = generate(poisoned(fresh(engine(name))))
    theirs = helpers.rollout(CASES[name][1], CASES[name][0])
    if name != "hybrid":
        assert_same_rollout(mine, theirs)
        return
    # The delta rule's chunks begin elsewhere, so that FP32 sums differ in their last bits.
    np.testing.assert_array_equal(mine.tokens, theirs.tokens)
    np.testing.assert_allclose(mine.logp, theirs.logp, atol=2e-3)
    fed = np.asarray(theirs.guidance.recorded)
    np.testing.assert_array_equal(mine.guidance.recorded, fed)
    leaves = (jax.tree.leaves((r.guidance.sites, r.routes)) for r in (mine, theirs))
    for a, b in zip(*leaves, strict=True):
        assert np.mean(np.asarray(a)[:, fed] == np.asarray(b)[:, fed]) > 0.999


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_same_alone_in_company_and_after_preemption(name):
    run, alone = engine(name), []
    for row in range(4):
        alone += finished(poisoned(fresh(run)), *requests(run, [row]))
    together = requests(poisoned(fresh(run)), range(4))
    assert finished(run, *together) == alone
    record = jax.device_get(run.rollout(together, 32))
    pressed = requests(fresh(run, pages=9), range(4))
    assert finished(run, *pressed) == alone
    assert run.scheduler.preemptions > 0
    again = jax.device_get(run.rollout(pressed, 32))
    fed = np.asarray(record.guidance.recorded)
    np.testing.assert_array_equal(again.guidance.recorded, fed)
    leaves = (jax.tree.leaves((r.guidance.sites, r.routes)) for r in (record, again))
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_array_equal(a[:, fed], b[:, fed])


@pytest.mark.parametrize("name", WITH_STATE)
def test_samples_go_on_from_one_prefilled_prompt(name):
    run = poisoned(fresh(engine(name)))
    before = dataclasses.replace(run.counts)
    finished(run, *requests(run, [0, 1]))
    assert run.counts.prefilled - before.prefilled == run.counts.shared - before.shared == 8
    assert run.compilations()["give"] == run.compilations()["keep"] == 1


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_held_sequence_goes_on_from_its_state(name):
    """Another one takes its slot meanwhile, and its place where there is only one."""
    run, transcripts = engine(name), []
    for places, company in ((KEPT, False), (KEPT, True), (0, True)):
        poisoned(fresh(run)).scheduler.states.take(KEPT - places)
        held = run.submit(0, PROMPTS[0][:7], request_key(0), 5, hold=True)
        finished(run, held)
        counts = dataclasses.replace(run.counts)
        if company:
            finished(run, *requests(run, [1, 2, 3]))
        run.extend(held, [1, 2, 3], 4)
        prefilled = run.counts.prefilled
        transcripts += finished(run, held)
        assert (run.counts.prefilled == prefilled) == (places > 0)
        assert run.counts.drawn > counts.drawn
    assert transcripts[1:] == transcripts[:1] * 2


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_turn_cut_at_a_stop_string_goes_on_as_if_nothing_had_followed_it(name):
    text = lambda ids: "".join(chr(97 + i % 26) for i in ids)
    run = poisoned(fresh(engine(name)))
    (plain,) = requests(run, [2])
    finished(run, plain)
    run.decode_text = text
    # The second of a dispatch's three tokens: the third was fed already.
    stop = text(plain.tokens[14:16])
    held = run.submit(2, PROMPTS[1][:14], request_key(2), 9, hold=True, stop=(stop,))
    finished(run, held)
    assert held.done == "stop" and len(held.tokens) == 16
    run.extend(held, [1, 2, 3], 4)
    finished(run, held)
    run.decode_text = None
    whole = fresh(run).submit(2, held.tokens[:19], request_key(2), 4)
    finished(run, whole)
    assert whole.tokens == held.tokens


# --- the kernels' layouts ---

WINDOWED = tuple(dataclasses.replace(p, kv_window=64) for p in helpers.PRECISIONS["nvfp4"])
KERNEL_HYBRID = dataclasses.replace(
    KERNEL_MODEL,
    full_attention_every=2,
    attention_gate=True,
    zero_centred_norms=True,
    rotary_fraction=0.25,
    head_dim=256,
    shared_dim=64,
    shared_gate=True,
    delta=HYBRID.delta,
)


def test_a_window_of_recent_tokens_in_the_kernels_layout_is_the_same_policy():
    share, gap, same = agreement_of_kernels(KERNEL_MODEL, WINDOWED)
    # Of 32 tokens; a sequence counts up to its first draw that fell the other way.
    assert share == 1.0 and gap < 0.1 and same > 0.7, (share, gap, same)


@pytest.mark.parametrize("platform", ("cpu", pytest.param("gpu", marks=pytest.mark.gpu)))
def test_a_decode_step_reads_the_window_in_bf16_and_the_rest_from_pages(platform):
    """Against plain pages, which attend to every key where it stands; one slot is idle."""
    config, precision = dataclasses.replace(KERNEL_MODEL, num_kv_heads=2), WINDOWED[0]
    table, layer = jnp.arange(9).reshape(3, 3), LayerKind()
    normal = lambda seed, n, heads: jax.random.normal(
        jax.random.key(seed), (3, n, heads, 64), jnp.bfloat16
    )
    q, k, v = normal(0, 134, 4), normal(1, 134, 2), normal(2, 134, 2)

    def outputs(kernel):
        stored = pools.Stored(
            pools.empty_pool(config, precision, 9, 64, kernel),
            pools.empty_state(config, precision, layer, 3, kernel),
        )

        @jax.jit
        def step(stored, start, valid, q, k, v):
            sites = Sites(LayerSpec(precision), fp4.NO_GUIDANCE, SiteInputs(), decoding=True)
            at = start + jnp.broadcast_to(jnp.arange(q.shape[1])[None], q.shape[:2])
            return paged.Pages(table, valid).step(q, k, v, stored, at, sites, None, None)

        for first, last in ((0, 64), (64, 128)):
            span, valid = slice(first, last), jnp.ones((3, 64), bool)
            out, stored = step(stored, first, valid, q[:, span], k[:, span], v[:, span])
            yield out
        for at in range(128, 134):
            span, valid = slice(at, at + 1), jnp.array([[True], [True], [False]])
            out, stored = step(stored, at, valid, q[:, span], k[:, span], v[:, span])
            yield out[:2]

    for mine, theirs in zip(outputs(True), outputs(False), strict=True):
        assert relative_error(mine, theirs) < 4.5e-3  # BF16 results


def test_linear_attention_beside_the_kernels_layout_is_the_same_policy():
    share, gap, same = agreement_of_kernels(KERNEL_HYBRID)
    assert share == 1.0 and gap < 0.1 and same > 0.8, (share, gap, same)


@pytest.mark.gpu
def test_the_kernels_give_the_same_policy_with_states_on_a_gpu():
    """Thresholds as for models without states, see test_continuous."""
    for shape, precision in ((KERNEL_MODEL, WINDOWED), (KERNEL_HYBRID, WINDOWED)):
        share, gap, same = agreement_of_kernels(shape, precision)
        assert share > 0.98 and gap < 0.15 and same > 0.4, (share, gap, same)


@pytest.mark.parametrize("size", (64, 160))
def test_rings_are_the_same_in_the_kernels_layout(size):
    """Pushed chunk by chunk or all at once, with a row that has none and one that ends early."""
    config = dataclasses.replace(KERNEL_MODEL, num_kv_heads=1)
    plain, pages = (recent.empty_rings(config, WINDOWED[0], 3, kernel) for kernel in (False, True))
    k = jax.random.normal(jax.random.key(0), (3, 160, 1, 64), jnp.bfloat16)
    ends = (160, 94, 0)
    for start in range(0, 160, size):
        span = slice(start, min(start + size, 160))
        at = jnp.broadcast_to(jnp.arange(160)[None, span], (3, span.stop - start))
        valid = at < jnp.asarray(ends)[:, None]
        new = {"k": k[:, span], "v": -k[:, span]}
        plain, pages = (recent.pushed(r, new, at, valid) for r in (plain, pages))
    nothing = jnp.zeros((3, 1), bool)
    at = jnp.asarray(ends)[:, None]
    for rings in (plain, pages):
        got = recent.by_position(rings, {"k": k[:, :1], "v": k[:, :1]}, at, nothing, 160)
        for row, end in enumerate(ends):
            near = (np.arange(160) >= end - 64) & (np.arange(160) < end)
            want = np.where(near[:, None, None], k[row], 0)
            np.testing.assert_array_equal(got["recent_k"][row], want)
            np.testing.assert_array_equal(got["recent_v"][row], -want)


def test_what_the_kernels_cannot_hold_is_said():
    odd = dataclasses.replace(WINDOWED[0], kv_window=65)
    assert "multiple of 64 tokens, not 65" in pools.kernel_refusal(KERNEL_MODEL, odd, 64)
    assert "no latents" in pools.kernel_refusal(LATENT, WINDOWED[0], 64)
