"""A run's folder: what ran, with which versions, and whether it may go on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

CONFIG = "config.json"
VERSIONS = "versions.json"
# Keys that may differ on --resume: they move where or how long a run goes, not what it computes.
HARMLESS = ("rl.steps", "workdir", "distributed")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "reasoning-gym")


def create_run_dir(
    path: str | Path,
    config_json: Mapping[str, Any],
    resume: bool = False,
    harmless: Iterable[str] = HARMLESS,
) -> Path:
    """Makes or reopens a run's folder, with config.json and versions.json in it.

    Args:
        path: the folder.
        config_json: the configuration as nested dicts of JSON values.
        resume: go on in a folder that holds a run; a missing or empty one is started anew.
        harmless: dotted keys, or groups of keys, that may change on a resume.

    Raises:
        ValueError: a folder in use without `resume`, one that holds no run, or one of another
            configuration (the message lists key: old -> new).
    """
    path = Path(path)
    json.dumps(config_json)  # raises TypeError before anything is made
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: write another --workdir")
    # A start that was killed at once may leave a half-written file, which is no run.
    found = path.is_dir() and [p for p in path.iterdir() if not p.match(".*.tmp")]
    if found and not resume:
        raise ValueError(f"{path} is not empty: write --resume to go on, or another --workdir")
    if found:
        _check_same(path, config_json, tuple(harmless))
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / CONFIG, config_json)
    write_json(path / VERSIONS, _history(path / VERSIONS, versions()))
    return path


def _history(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """The first start's versions, with those of every resume under "resumed"."""
    try:
        first = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return now
    return first | {"resumed": [*first.get("resumed", []), now]}


def _check_same(path: Path, config: Mapping[str, Any], harmless: tuple[str, ...]) -> None:
    if not (path / CONFIG).exists():
        raise ValueError(f"{path} holds no run ({CONFIG} is missing): write another --workdir")
    try:
        old = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} is damaged: write another --workdir") from error
    changes = [line for key, line in config_changes(old, config)
               if not any(key == h or key.startswith(h + ".") for h in harmless)]
    if changes:
        raise ValueError(f"{path} was made with another configuration: {'; '.join(changes)}")


def config_changes(old: Mapping, new: Mapping) -> list[tuple[str, str]]:
    """(dotted key, "key: old -> new") of every leaf that differs, in order of key."""
    a, b = _flatten(old), _flatten(new)

    # Compared as JSON text, in which a tuple is a list, and 1, 1.0 and true are three things.
    def shown(leaves: dict[str, Any], key: str) -> str:
        return json.dumps(leaves[key]) if key in leaves else "(absent)"

    keys = sorted(k for k in a.keys() | b.keys() if shown(a, k) != shown(b, k))
    return [(key, f"{key}: {shown(a, key)} -> {shown(b, key)}") for key in keys]


def _flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    out = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            out |= _flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def write_json(path: Path, value: Any) -> None:
    """Writes a file whole or not at all."""
    text = json.dumps(value, indent=2) + "\n"  # before opening: a bad value leaves no file
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def versions() -> dict[str, Any]:
    """Code, libraries, hardware and command of this process."""
    import jax  # not needed to read or compare runs

    devices = jax.devices()
    return {
        **_git_state(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "hardware": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "cpus": os.cpu_count(),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
    }


def _git_state() -> dict[str, Any]:
    # An installed copy may lie inside somebody else's repository, whose commit says nothing.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"git_commit": None, "git_dirty": None}
    dirty = bool(_git("status", "--porcelain", "--untracked-files=no"))
    return {"git_commit": _git("rev-parse", "HEAD"), "git_dirty": dirty}


def _git(*args: str) -> str | None:
    """Output of git in this code's repository, or None where there is none."""
    try:
        root = Path(__file__).resolve().parent
        done = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
