"""Split keys, and what a launch may have beside the plain call, compiled like the tile table's entries."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("a process that interprets Triton's kernels compiles none", allow_module_level=True)

from attncheck.kernels.triton_attention.compiled import compile_for
from attncheck.kernels.triton_attention.tiles import KERNELS, SHARED_MEMORY

from .compiled_kernels import CAUSAL, right_products, sound

pytestmark = pytest.mark.usefixtures("fresh_triton_cache")

#: everything at once
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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_masks_biases_caps_and_ragged_lengths(target: str, kernel: str) -> None:
    found = compile_for(kernel, target, "bfloat16", 96, 80, **EVERYTHING)  # widths that need masks of their own
    sound(found)
    right_products(found, "bfloat16")


@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_keys_that_are_split_and_in_pages(target: str) -> None:
    for paged in (False, True):
        found = compile_for("decode", target, "bfloat16", 128, PAGED=paged, RAGGED_K=1, **CAUSAL)
        sound(found)
        right_products(found, "bfloat16")
    found = compile_for("merge", target, "bfloat16", 128)
    assert found.spills == 0
    assert found.shared <= SHARED_MEMORY[target]


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_tf32_is_used_where_it_is_chosen(target: str, precision: str) -> None:
    found = compile_for("forward", target, "float32", 64, precision=precision, **CAUSAL)
    sound(found)
    assert "tf32" in found.text
    with pytest.raises(AssertionError, match="rounded to tf32"):
        right_products(found, "float32")
