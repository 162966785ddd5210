"""The tile table, proved: kernels compile for its targets without a spill and within their shared memory.

No GPU takes part: the compilers and the disassemblers come with Triton. benchmarks/triton_resources.py
prints what every entry takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("a process that interprets Triton's kernels compiles none", allow_module_level=True)

from attncheck.kernels.triton_attention.compiled import compile_for
from attncheck.kernels.triton_attention.tiles import KERNELS, SHARED_MEMORY, TABLE, Tile, target_named, tile

from .compiled_kernels import CAUSAL, right_products, sound

pytestmark = pytest.mark.usefixtures("fresh_triton_cache")

#: a dtype and head size for each tile of a row of the table; half types share their tiles, and take turns
WIDTHS = [
    *(("float16", 64), ("bfloat16", 128), ("bfloat16", 256)),
    *(("float32", 64), ("float32", 128), ("float32", 256)),
]

# -- the entries ----------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "d"), WIDTHS)
@pytest.mark.parametrize("kernel", ["forward", "backward_q", "backward_kv"])
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_the_plain_call(target: str, kernel: str, dtype: str, d: int) -> None:
    found = compile_for(kernel, target, dtype, d, **CAUSAL)
    sound(found)
    right_products(found, dtype)


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
