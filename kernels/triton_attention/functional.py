"""Attention for users of torch: the general call, and the calls of flash_attn and SDPA.

All but the one over a cache are differentiable (once) in q, k, v, an additive bias, and through the
log-sum-exp; all are deterministic: the same inputs give the same bits. Rows that see no key give O = 0 and -inf, and no
gradient. Tensors are read with the strides they have. Supported are float32, float16 and bfloat16,
D and Dv up to 256, on CUDA and ROCm devices. ValueError, one sentence, for what is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .launch import run_backward, run_forward
from .problem import Problem


class _Attention(torch.autograd.Function):
    """(q, k, v, bias) -> (o, lse). q, k, v and bias are passed beside the Problem for autograd's sake."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = run_forward(problem)
        ctx.save_for_backward(q, k, v, bias, o, lse)
        # the tensors are kept by autograd, which frees them and notices when they are changed in place
        ctx.rest = replace(problem, bias=None)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch gives it no types
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        q, k, v, bias, o, lse = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * 5
        if do is None:
            do = torch.zeros((), dtype=o.dtype, device=o.device).expand(o.shape)
        problem = replace(ctx.rest, q=q, k=k, v=v, bias=bias)
        dq, dk, dv, dbias = run_backward(problem, o, lse, do, dlse, with_bias=ctx.needs_input_grad[3])
        return dq, dk, dv, dbias, None


def _apply(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _Attention.apply(problem.q, problem.k, problem.v, problem.bias, problem)
    return o, lse


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    q_lengths: torch.Tensor | None = None,
    k_lengths: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    precision: str = "ieee",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O [B, Hq, Sq, Dv], natural log-sum-exp [B, Hq, Sq], float32) of q [B, Hq, Sq, D], k and v.

    The keywords mean what the fields of Case do: ``causal`` "top-left" or "bottom-right", ``window``
    (left, right), ``alibi_slopes`` float32 [Hq] or [B, Hq], ``q_lengths`` and ``k_lengths`` int32
    [B], ``mask`` bool (True = visible) and ``bias`` of one to four axes that broadcast to
    [B, Hq, Sq, Sk]. ``precision`` is how float32 products are taken: "ieee", "tf32" or "tf32x3".
    """
    return _apply(
        Problem(
            q=q,
            k=k,
            v=v,
            batches=q.shape[0],
            q_size=q.shape[2],
            k_size=k.shape[2],
            scale=_scale(scale, q),
            softcap=softcap,
            causal=causal,
            window=window or (None, None),
            slopes=_slopes(alibi_slopes),
            mask=_four_axes(mask),
            bias=_four_axes(bias),
            q_ranges=q_lengths,
            k_ranges=k_lengths,
            precision=precision,
        )
    )


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    q_size: int,
    k_size: int,
    scale: float | None = None,
    softcap: float | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    order: str = "bhsd",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O [1, Hq, Tq, Dv], natural log-sum-exp [1, Hq, Tq], float32) of a packed batch: q [1, Hq, Tq, D], k and v.

    Rows ``q_starts[b]`` to ``q_starts[b + 1]`` of q are sequence b's, and likewise of k and v: int32
    [B + 1]. ``q_size`` and ``k_size`` are the lengths of the longest. The other keywords are those of
    ``attention``; positions count from a sequence's own first row. ``order`` is how O lies in memory.
    """
    return _apply(
        Problem(
            q=q,
            k=k,
            v=v,
            batches=q_starts.shape[0] - 1,
            q_size=q_size,
            k_size=k_size,
            scale=_scale(scale, q),
            softcap=softcap,
            causal=causal,
            window=window or (None, None),
            slopes=_slopes(alibi_slopes),
            q_ranges=q_starts,
            k_ranges=k_starts,
            packed=True,
            order=order,
        )
    )


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention on four axes, except for dropout; is_causal is top-left."""
    _no_dropout(dropout_p)
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask is given together with is_causal; give one of them")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}; that needs enable_gqa=True")
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    o, _ = attention(
        query,
        key,
        value,
        scale=scale,
        causal="top-left" if is_causal else None,
        mask=attn_mask if boolean else None,
        bias=None if boolean else attn_mask,
    )
    return o


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn's flash_attn_func: q [B, Sq, Hq, D], causal and window bottom-right, except for dropout.

    Always deterministic. With ``return_attn_probs`` it returns (O, log-sum-exp [B, Hq, Sq], None).
    """
    _no_dropout(dropout_p)
    o, lse = _apply(
        Problem(
            q=q.transpose(1, 2),
            k=k.transpose(1, 2),
            v=v.transpose(1, 2),
            batches=q.shape[0],
            q_size=q.shape[1],
            k_size=k.shape[1],
            scale=_scale(softmax_scale, q),
            softcap=softcap or None,
            causal="bottom-right" if causal else None,
            window=_sides(window_size),
            slopes=_slopes(alibi_slopes),
            order="bshd",
        )
    )
    return (o.transpose(1, 2), lse, None) if return_attn_probs else o.transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn's flash_attn_varlen_func: packed q [Tq, Hq, D], k and v [Tk, Hk, D], except for dropout.

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are int32 [B + 1] and start with 0. With ``return_attn_probs``
    it returns (O, log-sum-exp [Hq, Tq], None).
    """
    _no_dropout(dropout_p)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    o, lse = packed_attention(
        q,
        k,
        v,
        q_starts=cu_seqlens_q,
        k_starts=cu_seqlens_k,
        q_size=int(max_seqlen_q),
        k_size=int(max_seqlen_k),
        scale=softmax_scale,
        softcap=softcap or None,
        causal="bottom-right" if causal else None,
        window=_sides(window_size),
        alibi_slopes=alibi_slopes,
        order="bshd",
    )
    o = o[0].transpose(0, 1)
    return (o, lse[0], None) if return_attn_probs else o


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn's flash_attn_with_kvcache: q [B, Sq, Hq, D] over keys that are in the cache already; no gradients.

    ``k_cache`` and ``v_cache`` are [B, S, Hk, D], or pools [pages, page size, Hk, D] of pages of any size with
    ``block_table`` int32 [B, most pages of an entry]. ``cache_seqlens`` int32 [B] says how many keys count (None:
    all). With ``return_softmax_lse`` it returns (O, log-sum-exp [B, Hq, Sq]).
    """
    with torch.no_grad():
        o, lse = run_forward(
            Problem(
                q=q.transpose(1, 2),
                k=k_cache.transpose(1, 2),
                v=v_cache.transpose(1, 2),
                batches=q.shape[0],
                q_size=q.shape[1],
                k_size=k_cache.shape[1] * (1 if block_table is None else block_table.shape[1]),
                scale=_scale(softmax_scale, q),
                softcap=softcap or None,
                causal="bottom-right" if causal else None,
                window=_sides(window_size),
                slopes=_slopes(alibi_slopes),
                k_ranges=cache_seqlens,
                pages=block_table,
                order="bshd",
            )
        )
    return (o.transpose(1, 2), lse) if return_softmax_lse else o.transpose(1, 2)


def _scale(scale: float | None, q: torch.Tensor) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else float(scale)


def _sides(window: tuple[int, int]) -> tuple[int | None, int | None]:
    """flash_attn writes an unlimited side as -1."""
    left, right = window
    return (None if left < 0 else left), (None if right < 0 else right)


def _slopes(slopes: torch.Tensor | None) -> torch.Tensor | None:
    return slopes[None] if slopes is not None and slopes.ndim == 1 else slopes


def _four_axes(x: torch.Tensor | None) -> torch.Tensor | None:
    """A mask or bias with leading axes of size 1: a view."""
    return None if x is None else x[(None,) * (4 - x.ndim)]


def _no_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p:g}; this kernel has no dropout")
