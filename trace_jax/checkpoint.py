"""Atomic, verified checkpoints: Orbax writes the arrays, a commit record proves them whole.

A save is written to a hidden folder, sealed with a record of every leaf (dtype, shape) and every
file (size, CRC), and renamed into place: a folder named by its step is complete or damaged later,
never half-written. The CRCs are ours because Orbax restores a flipped bit of a value in silence.
Saves are synchronous, so the caller may donate the state to its next step at once.
One process only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from trace_jax.checkpoint_files import damage, read_body, seal, swap

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
        self._orbax = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())

    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> Path:
        """Commits `state` as the newest step and returns its folder.

        A save at or below the newest step follows a roll-back: it replaces that step and removes
        the later ones, which belong to an abandoned branch. Raises CheckpointError, with every
        earlier save untouched, when the disk is full or the write fails.
        """
        if step < 0:
            raise ValueError(f"step is {step}: write 0 or more")
        final = self.directory / str(step)
        scratch = self.directory / f".saving-{step}"
        leaves = _named_leaves(state)
        body = {"step": step, "metadata": metadata, "leaves": {k: _kind(v) for k, v in leaves}}
        json.dumps(body)  # bad metadata raises TypeError before anything is written
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
            _check_space(self.directory, leaves)
            scratch.mkdir()
            arrays = {k: _to_array(v) for k, v in leaves if np.size(_to_array(v))}
            if arrays:
                with _quiet():
                    self._orbax.save(scratch / ARRAYS, args=ocp.args.PyTreeSave(arrays))
            seal(scratch, body)
            swap(scratch, final)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"step {step} was not saved to {self.directory}: {_first_line(error)}; "
                "earlier checkpoints are untouched"
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        newest_first = self._committed()
        kept = [s for s in newest_first if s <= step][: self.keep]
        for old in set(newest_first) - set(kept):
            shutil.rmtree(self.directory / str(old), ignore_errors=True)
        return final

    def empty(self) -> bool:
        """No step was ever committed, neither a whole one nor one that was damaged later."""
        return not self._committed()

    def latest_step(self) -> int | None:
        """The newest step whose every file is whole, or None."""
        return next((s for s in self._committed() if not damage(self.directory / str(s))), None)

    def all_steps(self) -> list[int]:
        """Steps whose every file is whole, oldest first."""
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
