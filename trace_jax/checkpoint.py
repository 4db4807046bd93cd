"""Atomic, verified checkpoints: Orbax writes the arrays, a commit record proves them whole.

A save is written to a hidden folder, sealed with a record of every leaf (dtype, shape) and every
file (size, CRC), and renamed into place: a folder named by its step is complete or damaged later,
never half-written. The CRCs are ours because Orbax restores a flipped bit of a value in silence.
A save returns once the state is copied to the host, so the caller may donate it to its next step
at once; the writing goes on behind it. All processes save and restore together: each writes its
own shards, the first one seals.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from trace_jax.checkpoint_files import SCRATCH, damage, read_body, recover, seal, swap
from trace_jax.parallel import is_first

ARRAYS = "arrays"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, trusted or fitted to the state; says which and why."""


class Checkpointer:
    """Saves and restores a pytree of arrays, PRNG keys and Python numbers, with JSON metadata.

    Args:
        directory: holds one folder a step; made by the first save.
        keep: how many newest steps stay.
    """

    def __init__(self, directory: str | Path, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep is {keep}: write 1 or more checkpoints to keep")
        self.directory = Path(directory).resolve()
        self.keep = keep
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        if is_first():
            recover(self.directory)

    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> Path:
        """Starts to save `state` as the newest step and returns the folder that it will be.

        An earlier save is waited for. A save at or below the newest step follows a roll-back: it
        replaces that step and removes the later ones, which belong to an abandoned branch.

        Raises:
            CheckpointError: the disk is full or a write failed, with every earlier save
                untouched. What fails behind the caller is raised by the next `save`, `check`,
                `wait`, or question about steps.
        """
        if step < 0:
            raise ValueError(f"step is {step}: write 0 or more")
        scratch = self.directory / f"{SCRATCH}{step}"
        leaves = _named_leaves(state)
        body = {"step": step, "metadata": metadata, "leaves": {k: _kind(v) for k, v in leaves}}
        json.dumps(body)  # bad metadata raises TypeError before anything is written
        self.wait()
        with contextlib.ExitStack() as quiet:
            quiet.enter_context(_quiet())
            try:
                self._start_writing(scratch, leaves)
            except Exception as error:
                self._discard(scratch)
                raise self._not_saved(step, error) from error
            arguments = (step, scratch, body, quiet.pop_all())
            self._writer = threading.Thread(target=self._finish, args=arguments, name="checkpoint")
            self._writer.start()
        return self.directory / str(step)

    def wait(self) -> None:
        """Returns once nothing is being written; raises what failed, once."""
        if self._writer is not None:
            self._writer.join()
        self.check()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Waits for what is being written; its failure does not hide another error."""
        if kind is None:
            self.wait()
        elif self._writer is not None:
            self._writer.join()

    def check(self) -> None:
        """Raises CheckpointError if a save has failed behind the caller; does not wait."""
        if self._writer is None or self._writer.is_alive():
            return
        failure, self._writer, self._failure = self._failure, None, None
        if failure is not None:
            raise failure

    def _start_writing(self, scratch: Path, leaves: list[tuple[str, Any]]) -> None:
        """Copies the state to the host and lets Orbax write it; returns after the copy."""
        if is_first():
            self.directory.mkdir(parents=True, exist_ok=True)
            for left in self.directory.glob(f"{SCRATCH}*"):  # by a killed process
                shutil.rmtree(left, ignore_errors=True)
            _check_space(self.directory, leaves)
            scratch.mkdir()
        arrays = {k: _snapshot(_to_array(v)) for k, v in leaves if np.size(_to_array(v))}
        if arrays:
            self._orbax.save(scratch / ARRAYS, args=ocp.args.PyTreeSave(arrays))

    def _finish(self, step: int, scratch: Path, body: dict, quiet: contextlib.ExitStack) -> None:
        """Waits for Orbax, proves and publishes the save, removes old ones."""
        with quiet:
            try:
                self._orbax.wait_until_finished()
                if is_first():
                    seal(scratch, body)
                    swap(scratch, self.directory / str(step))
                    self._retire(step)
            except Exception as error:
                self._failure = self._not_saved(step, error)
                self._failure.__cause__ = error
            finally:
                self._discard(scratch)

    def _discard(self, scratch: Path) -> None:
        if is_first():  # the others may be done while it still seals
            shutil.rmtree(scratch, ignore_errors=True)

    def _retire(self, step: int) -> None:
        newest_first = self._committed()
        kept = [s for s in newest_first if s <= step][: self.keep]
        for old in set(newest_first) - set(kept):
            shutil.rmtree(self.directory / str(old), ignore_errors=True)

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        return CheckpointError(
            f"step {step} was not saved to {self.directory}: {_first_line(error)}; "
            "earlier checkpoints are untouched"
        )

    def empty(self) -> bool:
        """No step was ever committed, neither a whole one nor one that was damaged later."""
        self.wait()
        return not self._committed()

    def latest_step(self) -> int | None:
        """The newest step whose every file is whole, or None."""
        self.wait()
        return next((s for s in self._committed() if not damage(self.directory / str(s))), None)

    def all_steps(self) -> list[int]:
        """Steps whose every file is whole, oldest first."""
        self.wait()
        return [s for s in self._committed()[::-1] if not damage(self.directory / str(s))]

    def read_metadata(self, step: int | None = None) -> dict[str, Any]:
        """Metadata of one step (None: the newest). Raises as `restore` does."""
        return read_body(self._trusted(step))["metadata"]

    def restore(self, step: int | None, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state of one step (None: the newest), laid out like `like`, and its metadata.

        Args:
            step: never replaced by another: if the newest is damaged, None raises.
            like: pytree of arrays, ShapeDtypeStructs, NumPy arrays or Python numbers; its
                shardings decide where arrays go, whatever mesh saved them. Or a function that
                makes it from the metadata.

        Raises:
            CheckpointError: no such step, a damaged one, or a leaf that differs in name, dtype
                or shape.
        """
        folder = self._trusted(step)
        body = read_body(folder)
        like = like(body["metadata"]) if callable(like) else like
        wanted = _named_leaves(like)
        _check_leaves(body["leaves"], wanted, folder)
        how = {k: _restore_args(v) for k, v in wanted if 0 not in body["leaves"][k][1]}
        try:
            args = ocp.args.PyTreeRestore(restore_args=how)
            with _quiet():
                arrays = self._orbax.restore(folder / ARRAYS, args=args) if how else {}
            leaves = [_from_array(arrays.get(k), v) for k, v in wanted]
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be restored: {_first_line(error)}") from error
        return jax.tree.unflatten(jax.tree.structure(like), leaves), body["metadata"]

    def _committed(self) -> list[int]:
        """Step folders, newest first, trusted or not."""
        names = os.listdir(self.directory) if self.directory.is_dir() else []
        return sorted((int(n) for n in names if n.isdecimal() and str(int(n)) == n), reverse=True)

    def _trusted(self, step: int | None) -> Path:
        self.wait()
        committed = self._committed()
        if not committed or step not in (None, *committed):
            steps = ", ".join(map(str, committed[::-1])) or "none"
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{self.directory} has {what}; steps there: {steps}")
        step = committed[0] if step is None else step
        folder = self.directory / str(step)
        if problem := damage(folder):
            whole = ", ".join(str(s) for s in self.all_steps()) or "none"
            raise CheckpointError(
                f"{folder} is damaged ({problem}); delete that folder to go on from an older "
                f"step, whole ones: {whole}"
            )
        return folder


# Leaves


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(dotted name, leaf) in tree order."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = [(jax.tree_util.keystr(p, simple=True, separator=".") or "state", x) for p, x in paths]
    if len({name for name, _ in named}) < len(named):
        raise CheckpointError("two leaves of the state share one dotted name: rename a key")
    return named


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(leaf: Any) -> list:
    """[dtype, shape]; Python numbers keep their own type's name."""
    if isinstance(leaf, (bool, int, float)):
        return [type(leaf).__name__, []]
    if not hasattr(leaf, "dtype"):
        raise CheckpointError(f"a {type(leaf).__name__} is no array: put it in the metadata")
    return [str(leaf.dtype), list(leaf.shape)]


def _to_array(leaf: Any) -> Any:
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _snapshot(array: Any) -> Any:
    """An array that no donation can reach.

    Orbax copies what lies on an accelerator before its `save` returns. On the CPU its copy would
    be the very buffer that the next step is given.
    """
    if isinstance(array, np.ndarray):
        return array.copy()
    return jnp.copy(array) if next(iter(array.devices())).platform == "cpu" else array


def _sharding(like: Any) -> jax.sharding.Sharding | None:
    """Where `like` is pinned: a free array must come back free, to join a sharded step."""
    return getattr(like, "sharding", None) if getattr(like, "committed", True) else None


def _restore_args(like: Any) -> ocp.RestoreArgs:
    if _sharding(like) is None or _is_key(like):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=_sharding(like))


def _from_array(array: Any, like: Any) -> Any:
    """`array` as the kind of leaf that `like` is."""
    if isinstance(like, (bool, int, float)):
        return type(like)(array.item())
    if array is None:  # nothing was written for an empty array
        array = np.zeros(like.shape, like.dtype)
    if isinstance(like, (np.ndarray, np.generic)):
        return array if isinstance(like, np.ndarray) else array[()]
    if isinstance(array, np.ndarray):
        array = jnp.array(array)  # a copy that JAX owns, so the first step may donate it
    if _is_key(like):
        array = jax.random.wrap_key_data(array, impl=_key_impl(like))
    return array if _sharding(like) is None else jax.device_put(array, _sharding(like))


def _key_impl(like: Any) -> str:
    """The generator's name, of a key array or of its ShapeDtypeStruct."""
    return jax.random.key_impl(like if isinstance(like, jax.Array) else jnp.empty((), like.dtype))


def _check_leaves(saved: dict, wanted: list[tuple[str, Any]], folder: Path) -> None:
    asked = {name: _kind(leaf) for name, leaf in wanted}
    for name in [*asked, *saved]:
        if name not in saved:
            raise CheckpointError(f"{folder} has no leaf {name}, which the state needs")
        if name not in asked:
            raise CheckpointError(f"{folder} has a leaf {name}, which the state lacks")
        for what, old, new in zip(("dtype", "shape"), saved[name], asked[name], strict=True):
            if old != new:
                raise CheckpointError(f"{folder}: {name} was saved with {what} {old}, not {new}")


def _check_space(directory: Path, leaves: list[tuple[str, Any]]) -> None:
    """Refuses before writing: a disk that fills half-way buries the cause under Orbax's own."""
    need = sum(_to_array(v).nbytes for _, v in leaves)
    free = shutil.disk_usage(directory).free
    if need > free:
        raise CheckpointError(
            f"{directory} has {free / 2**20:.1f} MiB free and a checkpoint may take "
            f"{need / 2**20:.1f} MiB: free some space or write elsewhere"
        )


@contextlib.contextmanager
def _quiet():
    """Mutes the pages that Orbax's threads log about an error which we raise as one line."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    """One line; of a long one the end, where the operating system's own words stand."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = text.split(" [tensorstore_spec")[0].split(" [os_error")[0]
    return text if len(text) < 260 else f"{text[:60]} ... {text[-190:]}"
