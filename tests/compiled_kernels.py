"""What a compiled kernel must be: no spill, within the shared memory, products by matrix instructions."""

from __future__ import annotations

import re

from attncheck.kernels.triton_attention.compiled import Compiled
from attncheck.kernels.triton_attention.tiles import SHARED_MEMORY

#: the plain call's features
CAUSAL = {"HAS_RIGHT": True, "HAS_DLSE": True}

#: matrix instructions by target and storage
INSTRUCTIONS: dict[str, dict[str, str]] = {
    "mma": {
        "float16": r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32",
        "bfloat16": r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32",
    },
    "sm_90": {
        "float16": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.f16\.f16",
        "bfloat16": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    },
    "sm_100": {"float16": r"tcgen05\.mma\S*kind::f16", "bfloat16": r"tcgen05\.mma\S*kind::f16"},
    "amd": {
        "float16": r"v_mfma_f32_\d+x\d+x\d+_?f16",
        "bfloat16": r"v_mfma_f32_\d+x\d+x\d+_?bf16",
        "float32": r"v_mfma_f32_\d+x\d+x\d+_?f32",
    },
}


def sound(found: Compiled) -> None:
    __tracebackhide__ = True
    where = f"{found.kernel} for {found.target} at {found.tile}"
    limit = SHARED_MEMORY[found.target]
    assert 0 < found.shared <= limit, f"{where} takes {found.shared} bytes of shared memory; there are {limit}"
    assert found.tensor_memory <= 512, f"{where} takes {found.tensor_memory} columns of tensor memory"
    assert found.spills == 0, f"{where} spills"


def instruction(found: Compiled, dtype: str) -> str | None:
    """The pattern of the matrix instruction that a kernel must hold; None: none, it multiplies and adds."""
    target, small = found.target, min(found.tile.m, found.tile.n) < 64
    if target.startswith("gfx"):
        return INSTRUCTIONS["amd"][dtype]
    if dtype == "float32":
        return None
    if target in ("sm_90", "sm_100") and not small:
        return INSTRUCTIONS[target][dtype]
    if target in ("sm_90", "sm_100"):
        # products of fewer than 64 rows have no warp-group instruction
        return "|".join((INSTRUCTIONS[target][dtype], INSTRUCTIONS["mma"][dtype]))
    return INSTRUCTIONS["mma"][dtype]


def right_products(found: Compiled, dtype: str) -> None:
    __tracebackhide__ = True
    pattern = instruction(found, dtype)
    if pattern is None:
        assert not re.search(r"\b(?:w?mma|tcgen05\.mma)\S*", found.text), "float32 must not be rounded to tf32"
        assert "fma.rn.f32" in found.text
    else:
        assert re.search(pattern, found.text), f"{found.kernel} for {found.target} holds no {pattern}"
