"""The tile table, proved: kernels compile for its targets without a spill and within their shared memory.

No GPU takes part: the compilers and the disassemblers come with Triton. benchmarks/triton_resources.py
prints what every entry takes.
"""

from __future__ import annotations

import gc
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

CAUSAL = {"HAS_RIGHT": True, "HAS_DLSE": True}

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
    "SUM_ROWS": True,
}

#: the dtypes and head sizes that are compiled for a storage; half types share their tiles
WIDTHS = {
    "half": (("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float16", 64)),
    "float32": (("float32", 64), ("float32", 128), ("float32", 256)),
}

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


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every kernel is compiled here and now. Line information is left out: it costs time and changes no code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DISABLE_LINE_INFO", "1")
        gc.disable()  # collections would walk all of torch for little that the compiler leaves behind
        yield
        gc.enable()


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


# -- the entries ----------------------------------------------------------------------------


@pytest.mark.parametrize("storage", WIDTHS)
@pytest.mark.parametrize("kernel", ["forward", "backward_q", "backward_kv"])
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_the_plain_call(target: str, kernel: str, storage: str) -> None:
    for dtype, d in WIDTHS[storage]:
        found = compile_for(kernel, target, dtype, d, **CAUSAL)
        sound(found)
        right_products(found, dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_masks_biases_caps_and_ragged_lengths(target: str, kernel: str) -> None:
    found = compile_for(kernel, target, "bfloat16", 96, 80, **EVERYTHING)  # widths that need masks of their own
    sound(found)
    right_products(found, "bfloat16")


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_tf32_is_used_where_it_is_chosen(target: str, precision: str) -> None:
    found = compile_for("forward", target, "float32", 64, precision=precision, **CAUSAL)
    sound(found)
    assert "tf32" in found.text
    with pytest.raises(AssertionError, match="rounded to tf32"):
        right_products(found, "float32")


# -- the gate can fail ----------------------------------------------------------------------


@pytest.mark.parametrize(("target", "chosen"), [("sm_80", Tile(64, 64, 8, 2)), ("gfx950", Tile(64, 64, 8, 1))])
def test_a_tile_that_spills_is_refused(target: str, chosen: Tile) -> None:
    found = compile_for("backward_kv", target, "bfloat16", 64, chosen=chosen, **CAUSAL)
    with pytest.raises(AssertionError, match="spills"):
        sound(found)


def test_a_tile_that_is_too_large_and_a_missing_instruction_are_refused() -> None:
    found = compile_for("forward", "sm_89", "float16", 64, chosen=Tile(64, 64, 4, 8), **CAUSAL)
    assert found.spills == 0  # so that it is the memory that is refused
    with pytest.raises(AssertionError, match="bytes of shared memory"):
        sound(found)
    right_products(found, "float16")
    with pytest.raises(AssertionError, match="holds no"):
        right_products(found, "bfloat16")


# -- the table ------------------------------------------------------------------------------


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
