"""Reading and writing a folder of safetensors files, tensor by tensor.

The header is read here because the library's NumPy reader lacks FP8.
"""

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


class _Where(NamedTuple):
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsDir:
    """The tensors of model.safetensors, or of all files that an index names."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._where = {name: at for file in self._files() for name, at in _header(file).items()}
        index = self._index()
        absent = sorted(set(index) - set(self._where))
        if absent:
            raise ValueError(f"{INDEX} lists tensors that no file holds: {listed(absent)}")

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        return json.loads(path.read_text())["weight_map"] if path.exists() else {}

    def _files(self) -> list[Path]:
        names = sorted(set(self._index().values())) or ["model.safetensors"]
        for name in names:
            if not (self.folder / name).is_file():
                raise ValueError(f"{self.folder} has no {name}")
        return [self.folder / name for name in names]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: at.shape for name, at in self._where.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor; FP8 keeps its ml_dtypes type."""
        at = self._where[name]
        size = math.prod(at.shape) * at.dtype.itemsize
        # Not a memory map: its pages count as the process's until the whole shard goes.
        data = np.fromfile(at.file, np.uint8, size, offset=at.offset)
        return data.view(at.dtype).reshape(at.shape)


def _header(file: Path) -> dict[str, _Where]:
    with open(file, "rb") as f:
        (size,) = struct.unpack("<Q", f.read(8).ljust(8, b"\0"))
        text = f.read(size)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} is no safetensors file, or is cut short") from error
    header.pop("__metadata__", None)
    length, out = file.stat().st_size, {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{file}: {name} has dtype {entry['dtype']}, which is not supported")
        begin, end = entry["data_offsets"]
        if 8 + size + end > length:
            raise ValueError(f"{file} is cut short: {name} lies beyond its end")
        out[name] = _Where(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + size + begin)
    return out


def write(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int) -> None:
    """Writes shards of at most `max_shard_bytes` (one tensor at least) and their index."""
    weight_map, total, shard, size, count = {}, 0, {}, 0, 0

    def flush():
        nonlocal shard, size, count
        count += 1
        part = folder / f"{count}.part"
        save_file(shard, part, metadata={"format": "pt"})
        part.chmod(0o644)  # the library's own mode lets nobody else read it
        weight_map.update(dict.fromkeys(shard, count))
        shard, size = {}, 0

    for name, array in tensors:
        if shard and size + array.nbytes > max_shard_bytes:
            flush()
        shard[name] = np.ascontiguousarray(array).reshape(array.shape)
        size, total = size + array.nbytes, total + array.nbytes
    flush()
    if count == 1:
        (folder / "1.part").rename(folder / "model.safetensors")
        return
    names = {i: f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    for i, name in names.items():
        (folder / f"{i}.part").rename(folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {k: names[v] for k, v in weight_map.items()},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def listed(names: list[str], most: int = 8) -> str:
    """The names in one line, a long list cut."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
