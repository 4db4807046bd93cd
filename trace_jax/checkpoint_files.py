"""The commit record of a checkpoint folder: what makes it complete, and what shows damage."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

RECORD = "commit.json"
SCRATCH = ".saving-"  # folders of saves under way
REPLACED = ".replaced-"  # steps that give way to a newer save of the same number


def seal(folder: Path, body: dict) -> None:
    """Writes the commit record, last, after every other file is on disk."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    body = body | {"files": {str(p.relative_to(folder)): _fingerprint(p) for p in files}}
    text = json.dumps(body, sort_keys=True)
    with open(folder / RECORD, "w", encoding="utf-8") as out:
        out.write(f"{zlib.crc32(text.encode()):08x}\n{text}\n")
        out.flush()
        os.fsync(out.fileno())


def swap(scratch: Path, final: Path) -> None:
    """Renames into place; a step saved before gives way only once the new one stands ready."""
    old = final.with_name(f"{REPLACED}{final.name}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    try:
        scratch.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def recover(directory: Path) -> None:
    """Undoes a swap that was killed between its two renames: the step that gave way returns."""
    for old in directory.glob(f"{REPLACED}*"):
        final = directory / old.name.removeprefix(REPLACED)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(final)


def read_body(folder: Path) -> dict:
    """The commit record. Raises ValueError or OSError when it is missing or altered."""
    crc, text = (folder / RECORD).read_text(encoding="utf-8").rstrip("\n").split("\n")
    if int(crc, 16) != zlib.crc32(text.encode()):
        raise ValueError("the commit record was altered")
    return json.loads(text)


def damage(folder: Path) -> str | None:
    """What is wrong with a committed step, or None."""
    try:
        files = read_body(folder)["files"]
    except FileNotFoundError:
        return f"{RECORD} is missing"
    except (OSError, ValueError, KeyError):
        return f"{RECORD} was altered"
    for name, fingerprint in files.items():
        try:
            if _fingerprint(folder / name) != fingerprint:
                return f"{name} was altered"
        except OSError:
            return f"{name} is missing"
    return None


def _fingerprint(path: Path) -> list[int]:
    """[size, CRC-32] of one file."""
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]
