"""Checkpoints come back equal, on any mesh, or say why not."""

import json
import os
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trace_jax import checkpoint as checkpoint_module
from trace_jax.checkpoint import Checkpointer, CheckpointError


def on(devices, *spec):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    return NamedSharding(mesh, PartitionSpec(*spec))


def small_state(fill=1.0):
    """Every kind of leaf: FP4, BF16, keys, empty arrays, NumPy, Python numbers, None, optax."""
    params = {"w": jnp.full((8, 16), fill), "b": jnp.arange(4, dtype=jnp.bfloat16)}
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "codes": jnp.array([0.5, -6.0, 1.5], jnp.float4_e2m1fn),
        "keys": jax.random.split(jax.random.key(7), 3),
        "key": jax.random.key(8, impl="rbg"),
        "empty": jnp.zeros((0, 3), jnp.int8),
        "count": np.arange(3, dtype=np.int64),
        "scalar": np.float32(2.5),
        "step": 12,
        "lr": 0.1,
        "done": False,
        "nothing": None,
    }


def values(tree):
    leaves = jax.tree.leaves(tree)
    is_key = [jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key) for x in leaves]
    return [np.asarray(jax.random.key_data(x) if k else x)
            for x, k in zip(leaves, is_key, strict=True)]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(values(a), values(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.tobytes() == y.tobytes()


def first_line_only(error):
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path):
    state = small_state()
    saver = Checkpointer(tmp_path / "ck")
    saver.save(3, state, {"reward": 0.5, "name": "run"})
    saver.wait()
    back, metadata = Checkpointer(tmp_path / "ck").restore(None, small_state(fill=0.0))
    assert_same(state, back)
    assert metadata == saver.read_metadata() == {"reward": 0.5, "name": "run"}
    assert type(back["step"]) is int and type(back["lr"]) is float and back["done"] is False
    assert type(back["count"]) is np.ndarray and type(back["scalar"]) is np.float32
    same = jax.random.uniform(back["keys"][1]) == jax.random.uniform(state["keys"][1])
    assert same and jax.random.key_impl(back["key"]) == "rbg"


def test_target_shardings_decide_where_arrays_go(tmp_path):
    """BR-130: saved on 8 devices, restored on 2, on 1 and to NumPy."""
    w = jnp.arange(128.0).reshape(8, 16)
    keys = jax.random.split(jax.random.key(0), 8)
    state = {"w": jax.device_put(w, on(8, "x")), "k": jax.device_put(keys, on(8, "x"))}
    saver = Checkpointer(tmp_path)
    saver.save(0, state, {})
    two = {
        "w": jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=on(2, None, "x")),
        "k": jax.ShapeDtypeStruct((8,), keys.dtype, sharding=on(2, "x")),
    }
    back, _ = saver.restore(0, two)
    assert back["w"].sharding == two["w"].sharding and back["k"].sharding == two["k"].sharding
    assert_same(back, state)
    host, _ = saver.restore(0, {"w": np.zeros((8, 16), np.float32), "k": keys})
    assert type(host["w"]) is np.ndarray and np.array_equal(host["w"], w)
    free, _ = saver.restore(0, jax.eval_shape(lambda: {"w": w, "k": keys}))
    assert_same(free, state)


def test_restored_counters_can_join_a_sharded_step(tmp_path):
    """An array that was free must not come back pinned to device 0."""
    state = {"w": jax.device_put(jnp.ones((8, 2)), on(8, "x")), "n": jnp.int32(3)}
    saver = Checkpointer(tmp_path)
    saver.save(0, state, {})
    back, _ = saver.restore(0, state)
    assert not back["n"].committed
    assert jax.jit(lambda s: s["w"].sum() * s["n"])(back) == 48


class Held:
    """Keeps a save from being published until `release`."""

    def __init__(self, saver, patch):
        self.release, self.started = threading.Event(), threading.Event()
        real = saver._orbax.wait_until_finished

        def wait():
            if threading.current_thread().name == "checkpoint":  # Orbax asks too, in its save
                self.started.set()
                assert self.release.wait(30)
            real()

        patch.setattr(saver._orbax, "wait_until_finished", wait)


@pytest.mark.parametrize("devices", [1, 8])
def test_saved_values_survive_donation(tmp_path, monkeypatch, devices):
    """BR-133: the next step may take the buffers of the state as soon as save returns."""
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    w = jax.device_put(jnp.arange(2.0**22), on(devices, "x"))
    state = {"w": w, "n": np.arange(3), "v": w + 1}
    where = state["v"].addressable_shards[0].data.unsafe_buffer_pointer()
    given = state["n"]
    saver = Checkpointer(tmp_path)
    held = Held(saver, monkeypatch)
    saver.save(1, state, {})
    assert saver._writer.is_alive() and not (tmp_path / "1").exists(), "nobody waited"
    arrays = {k: state[k] for k in "wv"}
    new = step(arrays)
    given[:] = -1
    jax.block_until_ready(new)
    taken = {a.addressable_shards[0].data.unsafe_buffer_pointer() for a in new.values()}
    assert arrays["v"].is_deleted() and where in taken, "the buffers were really taken"
    held.release.set()
    back, _ = saver.restore(1, new | {"n": given})
    assert np.array_equal(back["w"], np.arange(2.0**22))
    assert np.array_equal(back["v"], np.arange(2.0**22) + 1)
    assert np.array_equal(back["n"], [0, 1, 2])


def test_a_save_that_fails_behind_the_caller_is_raised_once_by_what_comes_next(
    tmp_path, monkeypatch
):
    saver = save_steps(tmp_path, 5)

    def full(folder, body):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "seal", full)
    for ask in (saver.wait, saver.latest_step, lambda: saver.save(7, LIKE, {}), saver.empty):
        saver.save(6, LIKE, {})
        with pytest.raises(CheckpointError, match="step 6 was not saved.*No space") as error:
            ask()
        first_line_only(error)
        saver.check()
        assert os.listdir(tmp_path) == ["5"] and saver.latest_step() == 5
    saver.save(6, LIKE, {})
    saver._writer.join()
    with pytest.raises(CheckpointError, match="step 6 was not saved"):
        saver.check()
    with pytest.raises(KeyError), saver:  # an error of the run itself comes first
        saver.save(6, LIKE, {})
        raise KeyError
    assert not saver._writer.is_alive()


def test_check_does_not_wait(tmp_path, monkeypatch):
    saver = Checkpointer(tmp_path)
    held = Held(saver, monkeypatch)
    saver.save(1, LIKE, {})
    assert held.started.wait(30)
    saver.check()
    assert not (tmp_path / "1").exists()
    held.release.set()
    assert saver.latest_step() == 1


def test_a_swap_killed_between_its_renames_loses_no_step(tmp_path):
    """The step that gave way returns, unless its successor stands already."""
    save_steps(tmp_path, 5, 10)
    (tmp_path / "10").rename(tmp_path / ".replaced-10")
    assert save_steps(tmp_path).all_steps() == [5, 10]
    shutil.copytree(tmp_path / "5", tmp_path / ".replaced-10")
    assert Checkpointer(tmp_path).restore(None, LIKE)[1] == {"s": 10}
    assert sorted(os.listdir(tmp_path)) == ["10", "5"]


def test_restored_arrays_can_be_donated(tmp_path):
    """BR-134: the first step after a resume needs no second copy of the state."""
    saver = Checkpointer(tmp_path)
    saver.save(0, jnp.ones((64, 64)), {})
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(10):  # memory that NumPy owns is shared or not by the luck of its alignment
        leaf, _ = saver.restore(0, jnp.ones((64, 64)))
        address = leaf.unsafe_buffer_pointer()
        out = step(leaf)
        assert leaf.is_deleted() and out.unsafe_buffer_pointer() == address


@pytest.mark.parametrize(
    "change, message",
    [
        ({"w": jnp.ones((8, 4), jnp.bfloat16)}, "params.w was saved with dtype float32, not bfl"),
        ({"w": jnp.ones((4, 8))}, r"params.w was saved with shape \[8, 4\], not \[4, 8\]"),
        ({"v": jnp.ones(2)}, "no leaf params.v"),
        ({"w": None}, "leaf params.w, which the state lacks"),
        ({"k": jax.random.key(0, impl="rbg")}, "params.k was saved with dtype key<fry>"),
        ({"n": np.int32(3)}, "params.n was saved with dtype int, not int32"),
    ],
)
def test_a_mismatch_names_the_leaf(tmp_path, change, message):
    """BR-138: never a silent cast, and never a missing leaf left at its initial value."""
    params = {"w": jnp.ones((8, 4)), "k": jax.random.key(0), "n": 3}
    saver = Checkpointer(tmp_path)
    saver.save(0, {"params": params}, {})
    with pytest.raises(CheckpointError, match=message) as error:
        saver.restore(0, {"params": params | change})
    first_line_only(error)


def test_optimizer_moments_stay_float32(tmp_path):
    """BR-138: moments that were kept in float32 are refused by a bfloat16 optimizer."""
    params = {"w": jnp.ones(4)}
    saver = Checkpointer(tmp_path)
    saver.save(0, optax.adam(1e-3).init(params), {})
    with pytest.raises(CheckpointError, match="mu.w was saved with dtype float32"):
        saver.restore(0, optax.adam(1e-3, mu_dtype=jnp.bfloat16).init(params))


def save_steps(path, *steps):
    saver = Checkpointer(path, keep=10)
    for s in steps:
        w = np.random.default_rng(s).normal(size=3000).astype(np.float32)
        saver.save(s, {"w": w, "s": s}, {"s": s})
    saver.wait()
    return saver


LIKE = {"w": np.zeros(3000, np.float32), "s": 0}


def values_file(folder):
    return max((folder / "arrays").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)


def flip(path, at=0.6):
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 4
    path.write_bytes(data)


def rewrite(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "hurt, found",
    [
        (lambda d: flip(values_file(d)), "arrays/.* was altered"),
        (lambda d: os.truncate(values_file(d), 10), "arrays/.* was altered"),
        (lambda d: values_file(d).unlink(), "arrays/.* is missing"),
        (lambda d: shutil.rmtree(d / "arrays"), "arrays/.* is missing"),
        (lambda d: rewrite(d / "commit.json", '{"s": 10}', '{"s": 11}'), "commit.json was altered"),
        (lambda d: (d / "commit.json").write_bytes(b"\xff\xfe"), "commit.json was altered"),
        (lambda d: (d / "commit.json").unlink(), "commit.json is missing"),
    ],
)
def test_a_damaged_save_is_never_named_and_never_replaced_in_silence(tmp_path, hurt, found):
    """BR-132. Orbax alone restores a flipped bit of a value without a word."""
    saver = save_steps(tmp_path, 5, 10)
    hurt(tmp_path / "10")
    assert saver.latest_step() == 5 and saver.all_steps() == [5]
    for step in (10, None):
        with pytest.raises(CheckpointError, match=f"{found}.*whole ones: 5") as error:
            saver.restore(step, LIKE)
        first_line_only(error)
    assert saver.restore(5, LIKE)[1] == {"s": 5}


def test_a_killed_save_leaves_nothing_that_counts(tmp_path):
    """BR-132: a folder that never committed is no step, and the next save goes through."""
    saver = save_steps(tmp_path, 5)
    shutil.copytree(tmp_path / "5", tmp_path / ".saving-10")
    assert saver.latest_step() == 5 and saver.restore(None, LIKE)[1] == {"s": 5}
    saver.save(10, LIKE, {"s": 10})
    saver.wait()
    assert sorted(os.listdir(tmp_path)) == ["10", "5"]


def test_saves_after_a_roll_back_happen_and_win(tmp_path):
    """BR-132: a manager that skips steps at or below its newest loses the whole new branch."""
    saver = save_steps(tmp_path, 5, 10, 15)
    saver.save(10, LIKE | {"s": -1}, {"s": "new"})
    assert saver.all_steps() == [5, 10]
    back, metadata = saver.restore(None, LIKE)
    assert back["s"] == -1 and metadata == {"s": "new"} and back["w"][7] == 0


def test_only_the_newest_are_kept(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    for s in (1, 2, 10, 9):
        saver.save(s, LIKE, {})
    assert saver.all_steps() == [2, 9]


def test_a_missing_step_says_which_there_are(tmp_path):
    saver = save_steps(tmp_path, 5, 10)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; steps there: 5, 10"):
        saver.restore(7, LIKE)
    empty = Checkpointer(tmp_path / "none")
    assert empty.latest_step() is None and not (tmp_path / "none").exists()
    with pytest.raises(CheckpointError, match="no checkpoint; steps there: none"):
        empty.restore(None, LIKE)


def test_a_failed_write_keeps_the_earlier_saves(tmp_path, monkeypatch):
    """A write that breaks half-way, on a replaced step too."""
    saver = save_steps(tmp_path, 5)

    def half(path, args):
        path.mkdir()
        (path / "part").write_bytes(b"x" * 100)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver._orbax, "save", half)
    for step in (5, 6):
        with pytest.raises(CheckpointError, match=f"step {step} was not saved.*No space") as error:
            saver.save(step, LIKE, {})
        first_line_only(error)
    assert os.listdir(tmp_path) == ["5"] and saver.restore(None, LIKE)[1] == {"s": 5}


def test_a_full_disk_is_refused_before_writing(tmp_path, monkeypatch):
    saver = save_steps(tmp_path, 5)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="0.0 MiB free and a checkpoint may take"):
        saver.save(6, LIKE, {})
    assert os.listdir(tmp_path) == ["5"]


def test_the_operating_system_refusing_bytes_is_one_clear_line(tmp_path):
    """The real write path: files may not grow beyond 2 KiB in this process."""
    code = (
        "import resource, signal, sys, numpy as np\n"
        "from trace_jax.checkpoint import Checkpointer, CheckpointError\n"
        "saver = Checkpointer(sys.argv[1])\n"
        "saver.save(1, {'w': np.zeros(4)}, {})\n"
        "saver.wait()\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    saver.save(2, {'w': np.random.default_rng(0).normal(size=9000)}, {})\n"
        "    saver.wait()\n"
        "except CheckpointError as error:\n"
        "    print(saver.latest_step(), error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.stdout.startswith("1 step 2 was not saved"), out.stderr[-500:]
    assert "File too large;" in out.stdout and "Traceback" not in out.stderr
    assert out.stdout.count("\n") == 1 and os.listdir(tmp_path) == ["1"]


def test_bad_arguments_write_nothing(tmp_path):
    saver = Checkpointer(tmp_path)
    with pytest.raises(TypeError):
        saver.save(0, {"w": 1}, {"bad": {1, 2}})
    with pytest.raises(CheckpointError, match="put it in the metadata"):
        saver.save(0, {"w": "text"}, {})
    with pytest.raises(ValueError, match="step is -1"):
        saver.save(-1, {"w": 1}, {})
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)
    assert os.listdir(tmp_path) == []


def test_the_record_is_plain_json(tmp_path):
    """Other tools can read what a step holds without JAX."""
    save_steps(tmp_path, 5)
    body = json.loads((tmp_path / "5" / "commit.json").read_text().split("\n")[1])
    assert body["leaves"]["w"] == ["float32", [3000]] and body["metadata"] == {"s": 5}
    assert any(name.startswith("arrays/") for name in body["files"])
