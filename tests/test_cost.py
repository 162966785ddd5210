"""The ledger of costs, counted a second time by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import attncheck.oracle.cost as module
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.cost import Cost, cost


def flat(
    b: int, hq: int, hk: int, sq: int, sk: int, d: int, dv: int, dtype: type = np.float32, **fields: object
) -> Case:
    q, k, v = (np.zeros((b, h, s, n), dtype) for h, s, n in ((hq, sq, d), (hk, sk, d), (hk, sk, dv)))
    do = np.zeros((b, hq, sq, dv), dtype) if fields.pop("backward", False) else None
    return Case(q, k, v, do=do, **fields)  # type: ignore[arg-type]


def test_example_3_five_positions() -> None:
    causal = cost(flat(1, 1, 1, 5, 5, 2, 2, causal="top-left", backward=True), Presentation("flags", (2,), (2,)))
    assert causal.visible_pairs == 15  # dot products forward, and again backward
    assert causal.score_entries == 25
    assert causal.lse_entries == 5
    assert causal.largest_block == 4
    # each dot product is 2 multiplies and 2 adds; forward two products, backward five
    assert causal.forward_flops == 15 * 2 * 4
    assert causal.backward_flops == 15 * 5 * 4


def test_example_6_long_row() -> None:
    s, d = 4096, 64
    dense = cost(flat(1, 1, 1, s, s, d, d, np.float16))
    assert (dense.score_entries, dense.score_bytes) == (16_777_216, 32 * 2**20)
    assert dense.forward_flops == 4 * s**2 * d
    causal = cost(flat(1, 1, 1, s, s, d, d, np.float16, causal="top-left"))
    assert causal.forward_flops / dense.forward_flops == (s + 1) / (2 * s)  # about half
    assert (dense.lse_entries, dense.lse_bytes, dense.lse_format) == (s, 4 * s, "float32")


@pytest.mark.parametrize("causal", [None, "top-left", "bottom-right"])
def test_pairs_are_counted_one_by_one(causal: str | None) -> None:
    mask = np.ones((2, 1, 4, 5), dtype=bool)
    mask[1, 0, 2] = False
    case = flat(2, 4, 2, 4, 5, 3, 7, np.float64, causal=causal, window=(2, None), k_lengths=(5, 3), mask=mask)
    pairs = 0
    for b, _, i, j in itertools.product(range(2), range(4), range(4), range(5)):
        length = (5, 3)[b]
        offset = 0 if causal == "top-left" else length - 4
        if j < length and i + offset - 2 <= j and not (causal and j > i + offset) and not (b == 1 and i == 2):
            pairs += 1
    got = cost(case, Presentation("mask", (3,), (1, 4)))
    assert got == Cost(
        score_entries=2 * 4 * 4 * 5,
        score_bytes=2 * 4 * 4 * 5 * 8,
        visible_pairs=pairs,
        forward_flops=2 * (3 + 7) * pairs,
        backward_flops=0,
        lse_entries=2 * 4 * 4,
        lse_bytes=2 * 4 * 4 * 8,
        lse_format="float64",
        largest_block=3 * 4,
        largest_block_bytes=3 * 4 * 8,
    )


def test_one_block_holds_the_whole_matrix_and_no_keys_cost_nothing() -> None:
    whole = cost(flat(1, 1, 1, 4, 6, 2, 2))
    assert whole.largest_block == whole.score_entries == 24
    none = cost(flat(1, 1, 1, 4, 0, 2, 2, backward=True))
    assert (none.score_entries, none.forward_flops, none.backward_flops, none.largest_block) == (0, 0, 0, 0)
    assert none.lse_entries == 4


def test_it_says_that_a_real_kernel_needs_more() -> None:
    assert "peak memory of a real kernel is more than anything here" in " ".join((module.__doc__ or "").split())
