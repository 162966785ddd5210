"""The kernels compiled for a GPU that need not be there: registers, spills, shared memory, instructions.

Triton's wheel holds what this takes: ptxas, cuobjdump and nvdisasm for CUDA, LLVM for AMD.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .launch import KERNELS, parameters
from .problem import FULL, IN_INTERPRETER
from .tiles import Tile, padded, split_of, tile

_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_POINTERS = {
    "lse": "*fp32",
    **dict.fromkeys(("parts", "sums", "tops"), "*fp32"),
    "dlse": "*fp32",
    "delta": "*fp32",
    "slopes": "*fp32",
    "q_ranges": "*i32",
    "k_ranges": "*i32",
    "pages": "*i32",
    "mask": "*u8",
}
_TENSORS = ("q", "k", "v", "o", "do", "dq", "dk", "dv", "bias", "dbias")
_NUMBERS = ("factor", "cap", "scale")

#: features that a launch may have; all off is the plain dense call
FEATURES: dict[str, Any] = {
    "HAS_MASK": False,
    "HAS_BIAS": False,
    "HAS_SLOPES": False,
    "HAS_CAP": False,
    "HAS_DLSE": False,
    "HAS_LEFT": False,
    "HAS_RIGHT": False,
    "TOP_LEFT": False,
    "PAGED": False,
    "RAGGED_Q": FULL,
    "RAGGED_K": FULL,
    "SUM_ROWS": False,
    "SUM_KEYS": False,
}

#: those that take tiles of their own
FEATURED = ("HAS_MASK", "HAS_BIAS", "HAS_SLOPES", "HAS_CAP")


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs on its target: ``shared`` in bytes per program, ``spills`` as instructions that
    store registers to memory or load them back, ``text`` in the target's own assembly (PTX or AMD's)."""

    kernel: str
    target: str
    tile: Tile
    registers: int
    spills: int
    shared: int
    tensor_memory: int
    text: str


def compile_for(
    kernel: str,
    target: str,
    dtype: str,
    d: int,
    dv: int | None = None,
    *,
    precision: str = "ieee",
    chosen: Tile | None = None,
    **features: Any,
) -> Compiled:
    """Compile a kernel as a launch with contiguous tensors would, with the table's tile or a ``chosen`` one.

    ``features`` are those of FEATURES that differ. Raises RuntimeError in a process that interprets.
    """
    if IN_INTERPRETER:
        raise RuntimeError("this process interprets Triton's kernels (TRITON_INTERPRET=1) and can compile none")
    dv = d if dv is None else dv
    featured = kernel == "backward_bias" or any(features.get(name) for name in FEATURED)
    chosen = chosen or tile(kernel, target, dtype, d, dv, featured=featured)
    constants = {**FEATURES, **features} | {
        "EVEN_Q": False,
        "EVEN_K": False,
        "EVEN_D": d == padded(d),
        "EVEN_DV": dv == padded(dv),
        "M": chosen.m,
        "N": chosen.n,
        "D": padded(d),
        "DV": padded(dv),
        "CHUNK": chosen.channels(d, dv),
        "SHORT": 0,
        "KEYS": split_of(target).keys,
        "PRECISION": precision,
        "BFLOAT16_BY_HAND": False,
    }
    signature, attributes = {}, {}
    for place, name in enumerate(parameters(kernel)):
        if name.isupper():
            signature[name] = "constexpr"
        elif name in _TENSORS:
            signature[name] = f"*{_TYPES[dtype]}"
        elif name in _NUMBERS:
            signature[name] = "fp32"
        else:
            signature[name] = _POINTERS.get(name, "i32")
        if name.endswith(("_d", "_j")):
            signature[name], constants[name] = "constexpr", 1  # as the launch specialises the stride of 1
        elif signature[name].startswith("*") or _is_stride(name):
            attributes[(place,)] = [["tt.divisibility", 16]]
    used = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(fn=KERNELS[kernel], signature=signature, constexprs=used, attrs=attributes)
    # fusion said aloud: some versions warn when it is left to the default
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages, "enable_fp_fusion": True}
    made = triton.compile(source, target=gpu(target), options=options)
    shared, memory = made.metadata.shared, getattr(made.metadata, "tmem_size", 0) or 0
    if target.startswith("sm_"):
        registers, spills = _nvidia(made.asm["cubin"])
        return Compiled(kernel, target, chosen, registers, spills, shared, memory, made.asm["ptx"])
    text = made.asm["amdgcn"]
    return Compiled(kernel, target, chosen, *_amd(text), shared, memory, text)


def _is_stride(name: str) -> bool:
    return bool(re.fullmatch(r"\w+_[bhsi]", name))


def gpu(target: str) -> GPUTarget:
    """Triton's name for a target of the tile table."""
    if target.startswith("sm_"):
        return GPUTarget("cuda", int(target[3:]), 32)
    return GPUTarget("hip", target, 64)


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and instructions that spill to local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        if found is None:
            raise RuntimeError(f"cuobjdump names no registers: {usage[:200]!r}")
        if found[2] == "0":  # without a stack there is nowhere to spill to
            return int(found[1]), 0
        return int(found[1]), len(re.findall(r"\b(?:STL|LDL)\b", _output("nvdisasm", "-c", file.name)))


def _output(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _amd(text: str) -> tuple[int, int]:
    """Vector registers (with the accumulation registers), and what is spilled to memory: vector registers, and
    bytes of scratch if there are any. Scalar registers are spilled into lanes of vector registers."""

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        if found is None:
            raise RuntimeError(f"the assembly names no {key}")
        return int(found[1])

    return number("vgpr_count"), number("vgpr_spill_count") + number("private_segment_fixed_size")
