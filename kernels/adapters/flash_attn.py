"""The conventions of flash_attn_func, torch [B, S, H, D], and flash_attn_varlen_func, torch [T, H, D] packed.

Both: autograd, causal and window bottom-right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...oracle.case import LAYOUTS, Case, Presentation
from ...oracle.result import GRADIENTS, Result
from ..candidate import Candidate
from ..presenting import present, unpacked
from .declared import Declared, Signature, read_signature, without_pages
from .tensors import evaluate, output_and_lse, place, to_array, to_tensor

if TYPE_CHECKING:
    import torch

ARRAYS = ("q", "k", "v")
PACKED_ARRAYS = (*ARRAYS, "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
DEFAULTS: dict[str, Any] = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}

#: what the convention has no argument for
NEVER = {
    "mask": "flash_attn_func has no mask",
    "bias": "flash_attn_func has no bias",
    "lengths": "flash_attn_func has no lengths; ragged batches go to its varlen form",
    "causal-top-left": "flash_attn_func is causal bottom-right",
    "sinks": "flash_attn_func has no sinks",
    "dropout": "flash_attn_func draws its own dropout mask",
}

PACKED_NEVER = {feature: reason for feature, reason in NEVER.items() if feature != "lengths"}

#: what it lacks unless it declares that it has it
UNLESS = {"dlse": "it does not declare that its log-sum-exp carries a gradient"}

REFUSALS = (
    "FlashAttention only support",
    "FlashAttention forward only support",
    "FlashAttention backward only support",
)


def wrap(function: Callable[..., Any], declared: Declared) -> Candidate:
    """A Candidate around ``function(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
    alibi_slopes, deterministic, return_attn_probs)``.

    The log-sum-exp is offered where the signature has return_attn_probs. That a gradient flows
    through it must be declared: supports dlse.
    """
    return _wrap(function, declared, "flash_attn", packed=False)


def wrap_varlen(function: Callable[..., Any], declared: Declared) -> Candidate:
    """A Candidate around ``function(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ...)``.

    The seven are passed by position, the rest as to flash_attn_func. The log-sum-exp is [Hq, T].
    """
    return _wrap(function, declared, "flash_attn_varlen", packed=True)


def _wrap(function: Callable[..., Any], declared: Declared, like: str, *, packed: bool) -> Candidate:
    signature = read_signature(function, declared.name, like, PACKED_ARRAYS if packed else ARRAYS, DEFAULTS)

    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        without_pages(presentation, like)
        return _run(function, signature, declared, case, replace(presentation, packed=packed), want)

    offers, lacks = {"o"}, (PACKED_NEVER if packed else NEVER) | ruled_out(signature)
    if signature.has("return_attn_probs"):
        offers.add("lse")
    else:
        lacks["dlse"] = "its signature has no return_attn_probs"
    if not declared.forward_only:
        offers |= set(GRADIENTS) - {"dbias", "dsink"}
    return Candidate(
        name=declared.name,
        run=run,
        dtypes=declared.dtypes,
        offers=frozenset(offers),
        lacks=declared.missing(like, lacks, UNLESS),
        conventions=declared.conventions,
        profiles=declared.profiles,
        known=declared.known,
        takes_layouts=frozenset(LAYOUTS),
        promises=declared.promises,
        convention=like,
        device=declared.device,
        about=declared.about,
    )


def ruled_out(signature: Signature) -> dict[str, str]:
    """The features that the signature shows the callable lacks."""
    needs = {
        "softmax_scale": ("scale", "scale<=0"),
        "causal": ("causal-square", "causal-bottom-right"),
        "window_size": ("window",),
        "softcap": ("softcap",),
        "alibi_slopes": ("alibi",),
    }
    return {
        feature: f"its signature has no {keyword}"
        for keyword, features in needs.items()
        if not signature.has(keyword)
        for feature in features
    }


def flags(case: Case, slopes: torch.Tensor | None) -> dict[str, Any]:
    """The case's scale, causality, window, softcap and slopes as this convention and its relatives pass them."""
    values: dict[str, Any] = {"softmax_scale": case.scale, "alibi_slopes": slopes}
    if case.causal is not None:
        values["causal"] = True
    if case.window is not None:
        values["window_size"] = tuple(-1 if side is None else side for side in case.window)
    if case.softcap is not None:
        values["softcap"] = case.softcap
    return values


def _run(
    function: Callable[..., Any],
    signature: Signature,
    declared: Declared,
    case: Case,
    presentation: Presentation,
    want: frozenset[str],
) -> Result:
    device, packed = declared.device, presentation.packed
    given = present(case, presentation, told_lengths=packed, axes=(0, 2, 1, 3))
    (q, q_whole), (k, k_whole), (v, v_whole) = (place(array, device) for array in (given.q, given.k, given.v))
    arguments: list[Any] = [q, k, v]
    if packed:
        assert given.q_starts is not None and given.k_starts is not None
        q, k, v = q[0], k[0], v[0]
        sizes = (max(case.q_length, default=0), max(case.k_length, default=0))
        arguments = [q, k, v, to_tensor(given.q_starts, device), to_tensor(given.k_starts, device), *sizes]
    leaves: dict[str, torch.Tensor] = {}
    if want & {"dq", "dk", "dv"}:
        for tensor in (q, k, v):
            tensor.requires_grad_()
        leaves = {name: x for name, x in (("dq", q), ("dk", k), ("dv", v)) if name in want}
    slopes = None if case.alibi_slopes is None else to_tensor(case.alibi_slopes, device)
    do, do_whole = place(given.do, device) if leaves and given.do is not None else (None, None)
    dlse = to_tensor(given.dlse, device) if leaves and given.dlse is not None else None
    if packed:
        do, dlse = (None if x is None else x[0] for x in (do, dlse))
    asks_lse = "lse" in want or dlse is not None

    values = DEFAULTS | flags(case, slopes)
    if asks_lse:
        values["return_attn_probs"] = True
    keywords = signature.pick(values, DEFAULTS)

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        return output_and_lse(function(*arguments, **keywords), asked=asks_lse)

    # with what surrounds them: a kernel that writes beside its slice changes its input too
    inputs = {"q": q_whole, "k": k_whole, "v": v_whole, "alibi_slopes": slopes, "do": do_whole, "dlse": dlse}
    output, lse, gradients, mutated = evaluate(
        call,
        case,
        inputs,
        leaves,
        do,
        dlse,
        device=device,
        refusals=(*REFUSALS, *declared.refusals),
        poisons=presentation.poison is not None,
    )
    found = {"o": output, "lse": lse, **gradients}
    arrays: dict[str, np.ndarray | None] = {}
    for name, tensor in found.items():
        if tensor is None:
            arrays[name] = None
        elif packed:
            at, size = (given.k_starts, case.k.shape[2]) if name in ("dk", "dv") else (given.q_starts, case.q.shape[2])
            assert at is not None
            arrays[name] = _padded(to_array(tensor), at, size, heads_first=name == "lse")
        else:
            arrays[name] = to_array(tensor) if name == "lse" else swap(to_array(tensor))
    return Result(**arrays, mutated=mutated)


def _padded(array: np.ndarray, at: np.ndarray, size: int, *, heads_first: bool) -> np.ndarray:
    """[T, H, D], or [H, T], as [B, H, size, ...]; an array of other rank or with fewer rows is left alone."""
    if array.ndim != (2 if heads_first else 3):
        return array
    array = array if heads_first else array.swapaxes(0, 1)
    return unpacked(array[None], at, size) if array.shape[1] >= at[-1] else array


def swap(array: np.ndarray) -> np.ndarray:
    """[B, H, S, D] <-> [B, S, H, D], contiguous; an array of other rank is left alone."""
    return np.ascontiguousarray(array.swapaxes(1, 2)) if array.ndim == 4 else array
