"""Ways to call the Triton kernel that its built-in candidate does not take; each is judged by the tests."""

from __future__ import annotations

import numpy as np
import torch

from attncheck.kernels.adapters.tensors import to_array, to_tensor
from attncheck.kernels.candidate import Candidate
from attncheck.kernels.triton_attention.candidate import INTERPRETED, _run
from attncheck.kernels.triton_attention.functional import attention, flash_attn_varlen_func
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.result import Result

Want = frozenset[str]


def packed(case: Case, presentation: Presentation, want: Want) -> Result:
    """A padded batch with ragged lengths as packed sequences; padding comes back as 0 and -inf."""
    lengths = (case.q_length, case.k_length)
    q, do = (_pack(getattr(case, name), lengths[0]) for name in ("q", "do"))
    k, v = (_pack(getattr(case, name), lengths[1]) for name in ("k", "v"))
    starts = [torch.tensor(np.cumsum([0, *n]), dtype=torch.int32) for n in lengths]
    left, right = case.window or (None, None)
    for x in (q, k, v):
        x.requires_grad_()
    o, lse, _ = flash_attn_varlen_func(
        q,
        k,
        v,
        *starts,
        max(lengths[0]),
        max(lengths[1]),
        softmax_scale=case.scale,
        causal=case.causal is not None,
        window_size=(-1 if left is None else left, -1 if right is None else right),
        softcap=case.softcap or 0.0,
        alibi_slopes=None if case.alibi_slopes is None else torch.from_numpy(case.alibi_slopes.copy()),
        return_attn_probs=True,
    )
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    return Result(
        o=_unpack(o, lengths[0], case.q.shape[2]),
        lse=_unpack(lse.T[..., None], lengths[0], case.q.shape[2], -np.inf)[..., 0],
        dq=_unpack(dq, lengths[0], case.q.shape[2]),
        dk=_unpack(dk, lengths[1], case.k.shape[2]),
        dv=_unpack(dv, lengths[1], case.k.shape[2]),
    )


def _pack(x: np.ndarray, lengths: tuple[int, ...]) -> torch.Tensor:
    """[B, H, S, D] as [T, H, D]."""
    return torch.cat([to_tensor(x[b, :, :n]).transpose(0, 1) for b, n in enumerate(lengths)])


def _unpack(x: torch.Tensor, lengths: tuple[int, ...], rows: int, padding: float = 0.0) -> np.ndarray:
    """[T, H, D] as [B, H, S, D]."""
    array, start = to_array(x), 0
    out = np.full((len(lengths), x.shape[1], rows, x.shape[2]), padding).astype(array.dtype)
    for b, n in enumerate(lengths):
        out[b, :, :n] = array[start : start + n].swapaxes(0, 1)
        start += n
    return out


def strided(case: Case, presentation: Presentation, want: Want) -> Result:
    """Inputs in memory that is full of NaN between their elements, each in an order of axes of its own."""

    def spread(array: np.ndarray, order: tuple[int, ...]) -> torch.Tensor:
        x = to_tensor(array)
        room = torch.full([2 * n + 1 for n in np.take(array.shape, order)], torch.nan, dtype=x.dtype)
        view = room[tuple(slice(1, None, 2) for _ in order)].permute(tuple(np.argsort(order)))
        view.copy_(x)
        assert not view.is_contiguous()
        return view

    q, k, v = spread(case.q, (0, 2, 1, 3)), spread(case.k, (3, 0, 1, 2)), spread(case.v, (1, 3, 2, 0))
    bias = None if case.bias is None else spread(case.bias, (1, 0, 3, 2))
    return _call(case, q, k, v, spread(case.do, (3, 2, 1, 0)), bias)


def expanded(case: Case, presentation: Presentation, want: Want) -> Result:
    """Keys, values and upstream gradients that are the same for all heads, as views with stride 0."""
    k, v, do = (to_tensor(getattr(case, name)[:, :1]).expand(getattr(case, name).shape) for name in ("k", "v", "do"))
    return _call(case, to_tensor(case.q), k, v, do, None)


def _call(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, bias: torch.Tensor | None
) -> Result:
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *(() if bias is None else (bias,)))]
    assert [x.stride() for x in leaves[:3]] == [x.stride() for x in (q, k, v)]
    o, lse = attention(*leaves[:3], causal=case.causal, window=case.window, bias=leaves[3] if len(leaves) > 3 else None)
    gradients = torch.autograd.grad(o, leaves, do)
    found = dict(zip(("dq", "dk", "dv", "dbias"), map(to_array, gradients), strict=False))
    return Result(o=to_array(o), lse=to_array(lse), **found)


def far(case: Case) -> Result:
    """Rows so far apart that the third one begins 2^31 elements from the first. (Untouched memory costs nothing.)"""
    room = torch.empty(2**31 + 2**20, dtype=torch.float16)
    rows = room.as_strided(case.q.shape, (0, 0, 2**30, 1))
    rows.copy_(to_tensor(case.q))
    o, lse = attention(rows, rows, rows)
    return Result(o=to_array(o), lse=to_array(lse))


def far_narrow(case: Case) -> Result:
    """``far`` with a copy of the kernel that computes offsets in 32 bits."""
    import tempfile
    from importlib import import_module
    from pathlib import Path

    from triton_faults import NARROW, plant

    with tempfile.TemporaryDirectory() as folder:
        module = plant(NARROW, Path(folder))
        globals()["attention"] = import_module(f"{module.__name__}.functional").attention
        return far(case)


def twice(case: Case, presentation: Presentation, want: Want) -> Result:
    """Two calls, with the second in the company of another batch entry; the first entry's bits must not change."""
    once = _run(case, presentation, want, "cpu")
    again = _run(case, presentation, want, "cpu")
    for name in want:
        a, b = getattr(once, name), getattr(again, name)
        if a is not None and a.tobytes() != b.tobytes():
            raise AssertionError(f"{name} changes from call to call")
    return once


right: Candidate = INTERPRETED
