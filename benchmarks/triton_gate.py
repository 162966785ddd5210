"""The tile table, proved: every entry compiles for its target without a spill and within its shared memory.

    python -m pytest benchmarks/triton_gate.py

No GPU takes part: the compiler and the disassemblers come with Triton. Not all entries pass yet, so this
is not among the tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("a process that interprets Triton's kernels compiles none", allow_module_level=True)

from attncheck.kernels.triton_attention.compiled import Compiled, compile_for
from attncheck.kernels.triton_attention.tiles import KERNELS, SHARED_MEMORY, TABLE, Tile, target_named, tile

MAIN = ("forward", "backward_q", "backward_kv")

#: what a launch may have beside the plain call, all at once
EVERYTHING = {
    "HAS_MASK": True,
    "HAS_BIAS": True,
    "HAS_CAP": True,
    "HAS_SLOPES": True,
    "HAS_LEFT": True,
    "HAS_RIGHT": True,
    "HAS_DLSE": True,
    "RAGGED_Q": 1,
    "RAGGED_K": 1,
}
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
    assert found.spills == 0, f"{where} spills"
    assert 0 < found.shared <= SHARED_MEMORY[found.target], f"{where} takes {found.shared} bytes of shared memory"
    assert found.tensor_memory <= 512, where


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


@pytest.mark.parametrize("target", SHARED_MEMORY)
@pytest.mark.parametrize("kernel", MAIN)
def test_the_plain_call(target: str, kernel: str) -> None:
    for dtype, widths in (("bfloat16", (64, 128, 256)), ("float32", (64, 128, 256)), ("float16", (128,))):
        for d in widths:
            found = compile_for(kernel, target, dtype, d, **CAUSAL)
            sound(found)
            right_products(found, dtype)


@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_masks_biases_caps_and_ragged_lengths(target: str) -> None:
    for kernel in KERNELS:
        features = {**EVERYTHING, "SUM_ROWS": True} if kernel == "backward_bias" else EVERYTHING
        found = compile_for(kernel, target, "bfloat16", 96, 80, **features)  # widths that need their own masks
        sound(found)
        right_products(found, "bfloat16")


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_tf32_is_used_where_it_is_chosen(precision: str) -> None:
    for target in ("sm_80", "sm_90"):
        found = compile_for("forward", target, "float32", 64, precision=precision, **CAUSAL)
        sound(found)
        assert "tf32" in found.text


def test_the_gate_can_fail() -> None:
    found = compile_for("backward_kv", "sm_80", "float32", 128, chosen=Tile(64, 64, 4, 2), **CAUSAL)
    with pytest.raises(AssertionError, match="spills"):
        sound(found)
    found = compile_for("forward", "sm_89", "float16", 256, chosen=Tile(128, 64, 8, 2), **CAUSAL)
    with pytest.raises(AssertionError, match="shared memory"):
        sound(found)
    with pytest.raises(AssertionError, match="holds no"):
        right_products(found, "bfloat16")


def every_entry() -> Iterator[tuple[str, str, str, int, bool]]:
    for target, storage in TABLE:
        for kernel in KERNELS:
            for d in (1, 64, 65, 128, 129, 256):
                for featured in (False, True):
                    yield target, storage, kernel, d, featured


def test_the_table_is_complete() -> None:
    assert set(TABLE) == {(target, storage) for target in SHARED_MEMORY for storage in ("half", "float32")}
    for target, storage, kernel, d, featured in every_entry():
        dtype = "float32" if storage == "float32" else "float16"
        found = tile(kernel, target, dtype, 1, d, featured=featured)
        assert found == tile(kernel, target, dtype, d, 1, featured=featured)
        for size in (found.m, found.n):
            assert 16 <= size <= 128 and size & (size - 1) == 0


@pytest.mark.parametrize(
    ("device", "entry"),
    [("sm_86", "sm_89"), ("sm_87", "sm_80"), ("sm_103", "sm_100"), ("sm_121", "sm_120"), ("gfx90a", "gfx942")],
)
def test_relatives_of_the_tables_targets_are_served(device: str, entry: str) -> None:
    assert target_named(device) == entry
