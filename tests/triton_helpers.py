"""Triton kernels without a GPU: compiled for a chip that is not here, or interpreted."""

import collections
import concurrent.futures
import os
import re
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

TYPES = {"bfloat16": "bf16", "float32": "fp32", "int32": "i32", "uint8": "u8"}


def compiler(arch: int, kernels: list):
    """A stand-in for triton_call.call: compiles for sm_`arch` and appends what came out.

    Its results are zeros; run it under `jax.eval_shape`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def call(kernel, grid, *args, out, warps=4, stages=3, aliases=None, **constants):
        assert all(g > 0 for g in grid) and len(grid) == 3
        pointers = ["*" + TYPES[jnp.dtype(a.dtype).name] for a in (*args, *out)]
        names = [n for n in kernel.arg_names if n not in constants]
        assert len(names) == len(pointers), (names, pointers)
        types = dict(zip(names, pointers, strict=True)) | dict.fromkeys(constants, "constexpr")
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
        source = ASTSource(kernel, types, constants, aligned)
        options = dict(num_warps=warps, num_stages=stages)
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        kernels.append((made, warps, constants))
        return [jnp.zeros(o.shape, o.dtype) for o in out]

    return call


def instructions(cubin: bytes) -> collections.Counter:
    """How often each instruction stands in a kernel."""
    return collections.Counter(name.split()[0].split(".")[0] for name in _code(cubin)[0])


def main_loop(cubin: bytes) -> collections.Counter:
    """How often each instruction stands in the longest loop of a kernel."""
    names, labels = _code(cubin)
    longest = (0, 0)
    for end, name in enumerate(names):
        back = re.search(r"^BRA.*\((\.L_\w+)\)", name)
        start = labels[back[1]] if back else end
        if end - start > longest[1] - longest[0]:
            longest = (start, end + 1)
    return collections.Counter(n.split()[0].split(".")[0] for n in names[slice(*longest)])


def _code(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """A kernel's instructions in order, and where its labels stand among them."""
    import triton

    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [os.path.join(tools, "nvdisasm"), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(names)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*);", line):
            names.append(found[1])
    return names, labels


def repair_interpreter() -> None:
    """Mends two things in Triton's interpreter: it computes with the bits of BF16 operands as if
    they were integers, and loops to a loaded bound fail with numpy 2.5."""
    import ml_dtypes
    from triton import language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    product, dot, narrow = builder.create_fmul, builder.create_dot, builder.create_fp_trunc

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = np.ascontiguousarray(x.data).view(ml_dtypes.bfloat16)
        return handle(data.astype(np.float32), tl.float32)

    def rounded(x):
        return handle(x.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)

    def fmul(self, a, b):
        out = product(self, wide(a), wide(b))
        return rounded(out) if a.dtype.scalar == tl.bfloat16 else out

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch, interpreter._patch_lang_tensor = interpreter._patch_lang_tensor, patch_tensor
    builder.create_fmul = fmul
    builder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    builder.create_fp_trunc = lambda self, x, to: (
        rounded(x) if to.scalar == tl.bfloat16 else narrow(self, x, to)
    )


# --- interpreter -------------------------------------------------------------------------------


class Memory:
    """What Triton's interpreter asks of a tensor, over an array of numpy's."""

    def __init__(self, array=None):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    @property
    def dtype(self):
        return TYPES[self.array.dtype.name]

    def untyped_storage(self):
        return self

    def new_empty(self, *_, **__):
        return Memory()

    def set_(self, storage, *_):
        self.array = storage.array

    def cpu(self):
        return self

    def copy_(self, _):
        pass

    storage_offset = size = stride = lambda self: None


# XLA's threads, where callbacks run, flush subnormal numbers to zero; this one does not.
_worker = concurrent.futures.ThreadPoolExecutor(1)
_worker.submit(int).result()


def interpret(kernel, grid, *args, out, warps=4, stages=3, aliases=None, **constants):
    """A stand-in for triton_call.call: Triton's interpreter, on CPU."""
    aliases = aliases or {}

    def run(*args):
        args = [np.array(a) for a in args]
        results = [np.full(o.shape, 0xCD, np.uint8).astype(o.dtype) for o in out]
        for source, target in aliases.items():
            results[target] = args[source].copy()
        kernel[grid](*map(Memory, (*args, *results)), **constants)
        return results

    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in out]
    return jax.pure_callback(lambda *a: _worker.submit(run, *a).result(), shapes, *args)
