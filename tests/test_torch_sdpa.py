"""What the profiles of torch-sdpa-math and torch-sdpa-flash state, shown on the kernels themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attncheck.fixtures.shipped import load
from attncheck.kernels.adapters.tensors import to_tensor
from attncheck.kernels.candidate import Candidate
from attncheck.kernels.torch_sdpa import FLASH, FLASH_HALF_EXP, MATH
from attncheck.oracle.case import Case, Presentation
from attncheck.properties.catalogue import PROPERTIES, judge_output
from attncheck.properties.replay import replay
from attncheck.properties.verdict import Outcome

SDPA = torch.nn.functional.scaled_dot_product_attention
HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FLAGS = Presentation()


def absorbed(dtype: Any) -> Case:
    """dK_0 = sum of do and dV_0 half of it; each block of 64 rows after the first adds less than half an ulp.

    Two keys of equal score, v = 1 and -1, q = 2: P = 1/2, D = 0, dS = do / 2, all exact.
    """
    rows = 767
    do = np.full(rows, 0.9 / 64)
    do[0] = 2 / float(ml_dtypes.finfo(dtype).eps)  # ulp 2, and P halves it: ulp 1
    q, kv = np.full((1, 1, rows, 1), 2.0), np.array([1.0, -1.0]).reshape(1, 1, 2, 1)
    return Case(*(x.astype(dtype) for x in (q, 0 * kv, kv, do.reshape(q.shape))), scale=1.0)


def undeclared(candidate: Candidate) -> Candidate:
    """The same kernel, with the default profile."""
    return replace(candidate, profiles={})


def ratio(candidate: Candidate, case: Case, output: str) -> float:
    verdict = judge_output(candidate, case, FLAGS, output)
    assert verdict.worst is not None, verdict.sentence
    return verdict.worst.ratio


@pytest.mark.parametrize("output", ["dk", "dv"])
@pytest.mark.parametrize("dtype", HALVES)
def test_flash_adds_blocks_of_queries_in_storage(dtype: str, output: str) -> None:
    case = absorbed(HALVES[dtype])
    assert ratio(undeclared(FLASH), case, output) > 1
    assert ratio(FLASH, case, output) <= 1
    assert ratio(undeclared(MATH), case, output) <= 1


@pytest.mark.parametrize("dtype", HALVES)
def test_flash_has_a_short_exp_in_half_types(dtype: str) -> None:
    """Equal scores: 16 lanes of the short exp(0), which is not 1."""
    zeros = np.zeros((1, 1, 16, 1), HALVES[dtype])
    case = Case(q=zeros[:, :, :1], k=zeros, v=zeros)
    assert ratio(undeclared(FLASH), case, "lse") > 1
    assert ratio(FLASH, case, "lse") <= 1


def test_how_short_the_exp_is() -> None:
    """Worst relative error of the exp, read off the log-sum-exp of 15 equal scores and one 0."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, kv = torch.zeros(1, 1, 1, 1, dtype=torch.float16), torch.zeros(1, 1, 16, 1, dtype=torch.float16)

    def total(x: float) -> float:
        mask = torch.full((1, 1, 1, 16), x)
        mask[..., 0] = 0
        return math.exp(float(operator(q, kv, kv, attn_mask=mask, scale=1.0)[1].double()))

    at_0 = total(0.0) / 16
    worst = max(abs((total(x) - at_0) / 15 / math.exp(x) - 1) for x in np.linspace(0, -2, 257).tolist())
    # reading it off a float32 logarithm costs up to 4 units of 16/15 e^2 relative to exp(x)
    assert 2**-14 < worst <= FLASH_HALF_EXP + 4 * 2.0**-24 * 8


@pytest.mark.parametrize("name", HALVES)
def test_math_computes_half_types_in_float32_and_rounds_once(name: str) -> None:
    dtype = getattr(torch, name)
    torch.manual_seed(0)
    half = [torch.randn(1, 2, 9, 4).to(dtype).requires_grad_() for _ in range(3)]
    wide = [x.detach().float().requires_grad_() for x in half]
    do = torch.randn(1, 2, 9, 4).to(dtype)
    with sdpa_kernel(SDPBackend.MATH):
        o, o_wide = SDPA(*half), SDPA(*wide)
    assert torch.equal(o, o_wide.to(dtype))
    found = torch.autograd.grad(o, half, do)
    for got, want in zip(found, torch.autograd.grad(o_wide, wide, do.float()), strict=True):
        assert torch.equal(got, want.to(dtype))
    assert MATH.profile(name).u_p == 0 and FLASH.profile(name).u_p == 2.0 ** {"float16": -11, "bfloat16": -8}[name]


# -- known faults ----------------------------------------------------------------------------


def causal(scale: float | None, sk: int = 2) -> Case:
    one = np.ones((1, 1, 1, 1), np.float32)
    return Case(q=one, k=one[:, :, [0] * sk], v=one[:, :, [0] * sk], do=one, scale=scale, causal="top-left")


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_flash_is_nan_where_causal_meets_a_scale_up_to_0(scale: float) -> None:
    """In plain torch: hidden keys get -inf before the scale is multiplied in."""
    one = torch.ones(1, 1, 1, 1)
    two = torch.ones(1, 1, 2, 1)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = SDPA(one, two, two, is_causal=True, scale=scale)
        by_mask = SDPA(one, two, two, attn_mask=torch.tensor([[True, False]]), scale=scale)
    with sdpa_kernel(SDPBackend.MATH):
        math_ = SDPA(one, two, two, is_causal=True, scale=scale)
    assert flash.isnan().all() and by_mask.item() == math_.item() == 1


def test_the_fault_is_declared_where_it_strikes_and_nowhere_else() -> None:
    (known,) = FLASH.known
    for scale in (0.0, -1.0):
        assert judge_output(FLASH, causal(scale), FLAGS, "o").outcome is Outcome.VIOLATED
        assert known.when(causal(scale), FLAGS)
        mask = Presentation(route="mask")
        assert judge_output(FLASH, causal(scale), mask, "o").outcome is Outcome.HOLDS
        assert not known.when(causal(scale), mask)
    for scale in (None, 0.5):
        assert not known.when(causal(scale), FLAGS)
    assert not known.when(replace(causal(-1.0), causal="bottom-right"), FLAGS)
    assert not known.when(replace(causal(-1.0), causal=None), FLAGS)


def without_keys(largest: float) -> Case:
    q = np.full((1, 1, 1, 2), largest, np.float32)
    return Case(q=q, k=q[:, :, :0], v=q[:, :, :0], do=q)


def test_sdpa_is_nan_without_keys_where_the_sum_of_q_overflows() -> None:
    """In plain torch: the answer for axes of size 0 is 0 plus 0 times the sum of the inputs."""
    q, empty = torch.full((1, 1, 1, 2), 3e38), torch.zeros(1, 1, 0, 2)
    assert SDPA(q, empty, empty).isnan().all()
    q = torch.ones(1, 1, 1, 2, requires_grad=True)
    o = SDPA(q, empty, empty)
    assert (o == 0).all() and torch.autograd.grad(o, q, torch.full_like(o, 3e38))[0].isnan().all()
    (known,) = MATH.known
    for output in ("o", "dq"):
        assert judge_output(MATH, without_keys(3e38), FLAGS, output).outcome is Outcome.VIOLATED
        assert judge_output(MATH, without_keys(1e38), FLAGS, output).outcome is Outcome.HOLDS
    assert known.when(without_keys(3e38), FLAGS) and not known.when(without_keys(1e38), FLAGS)
    assert not known.when(causal(None), FLAGS)


@pytest.mark.parametrize("candidate", [MATH, FLASH], ids=lambda candidate: candidate.name)
def test_each_known_fault_ships_its_smallest_case(candidate: Candidate) -> None:
    for known in candidate.known:
        record = load(known.case)
        assert known.when(record.case, record.presentation)
        assert replay(record, candidate).outcome is Outcome.VIOLATED
        assert record.seen["versions"]["torch"] in known.versions
        assert set(known.properties) <= PROPERTIES.keys()


def test_flash_declines_what_it_cannot_do() -> None:
    case = causal(None)
    wide = replace(case, v=np.ones((1, 1, 2, 3), np.float32), do=np.ones((1, 1, 1, 3), np.float32))
    assert judge_output(FLASH, wide, FLAGS, "o").outcome is Outcome.DECLINED
    assert "dbias" not in FLASH.offers and "lse" in FLASH.offers
    # the reason: a mask that requires a gradient leaves no kernel
    one = torch.ones(1, 1, 1, 1, requires_grad=True)
    with pytest.raises(RuntimeError, match="No available kernel"), pytest.warns(UserWarning):  # noqa: SIM117
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            SDPA(one, one, one, attn_mask=torch.zeros(1, 1, requires_grad=True))


def test_what_overflows_in_padded_rows_does_not_reach_the_keys() -> None:
    """A kernel that is not told of padding works on padded rows too: huge scores there, taken again on the way
    back, are as far off as exp can be infinite, and that times the 0 of dO is NaN."""
    q = np.zeros((1, 1, 2, 8), ml_dtypes.bfloat16)
    q[..., 1, 2:] = np.ldexp([1.0, 0.0, 1.5, 0.0, -1.5, 1.0], [50, 0, 47, 0, 46, 59]).astype(q.dtype)
    k = np.array([[[[0, 0, 1, 0, 0.28125, 0, -0.25, -544]]]], q.dtype)
    case = Case(q, k, np.zeros_like(k), do=np.zeros_like(q), q_lengths=(1,), mask=np.array([False]))
    for candidate in (FLASH, MATH):
        verdict = PROPERTIES["empty-rows"].judge(candidate, case, Presentation())
        assert verdict.outcome is Outcome.HOLDS, verdict.sentence
    tensors = [to_tensor(x).requires_grad_() for x in (q, k, np.zeros_like(k))]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = SDPA(*tensors, attn_mask=torch.tensor([[False], [True]]))
    assert torch.isnan(torch.autograd.grad(o, tensors[1], torch.zeros_like(o))[0]).all()  # or this tests nothing
