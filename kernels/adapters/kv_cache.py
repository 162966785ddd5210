"""The convention of flash_attn_with_kvcache: a few queries over a cache of keys, torch, contiguous or in pages.

q [B, Sq, Hq, D]; k_cache and v_cache [B, S, Hk, D], or pools [pages, page size, Hk, D] with a block_table;
cache_seqlens int32 [B] says how many keys count. Forward only; causal and window bottom-right by these lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...oracle.case import LAYOUTS, Case, Presentation
from ...oracle.result import Result
from ..candidate import Candidate, Unsupported
from ..presenting import present
from . import flash_attn
from .declared import Declared, Signature, read_signature, without_pages
from .tensors import evaluate, output_and_lse, place, to_array, to_tensor

if TYPE_CHECKING:
    import torch

LIKE = "flash_attn_with_kvcache"
ARRAYS = ("q", "k_cache", "v_cache")
DEFAULTS: dict[str, Any] = {
    "cache_seqlens": None,
    "block_table": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "return_softmax_lse": False,
}

#: what the convention has no argument for
NEVER = {feature: reason.replace("flash_attn_func", LIKE) for feature, reason in flash_attn.PACKED_NEVER.items()} | {
    "dlse": f"{LIKE} is forward only"
}

REFUSALS = (*flash_attn.REFUSALS, "Paged KV cache block size must be divisible by")


def wrap(function: Callable[..., Any], declared: Declared) -> Candidate:
    """A Candidate around ``function(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal,
    window_size, softcap, alibi_slopes, return_softmax_lse)``.

    The log-sum-exp is offered where the signature has return_softmax_lse, pages where it has block_table and
    cache_seqlens (the last page holds more than the keys that count).
    """
    signature = read_signature(function, declared.name, LIKE, ARRAYS, DEFAULTS)
    lacks = NEVER | flash_attn.ruled_out(signature)
    takes_pages = signature.has("block_table") and signature.has("cache_seqlens")
    if not signature.has("cache_seqlens"):
        lacks["lengths"] = "its signature has no cache_seqlens"

    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        if not takes_pages:
            without_pages(presentation, LIKE)
        if case.q_lengths is not None and set(case.q_lengths) != {case.q.shape[2]}:
            raise Unsupported(f"{LIKE} has no query lengths")
        return _run(function, signature, declared, case, presentation, want)

    return Candidate(
        name=declared.name,
        run=run,
        dtypes=declared.dtypes,
        offers=frozenset({"o", "lse"} if signature.has("return_softmax_lse") else {"o"}),
        lacks=declared.missing(LIKE, lacks, {}),
        conventions=declared.conventions,
        profiles=declared.profiles,
        known=declared.known,
        takes_layouts=frozenset(LAYOUTS),
        takes_pages=takes_pages,
        promises=declared.promises,
        convention=LIKE,
        device=declared.device,
        about=declared.about,
    )


def _run(
    function: Callable[..., Any],
    signature: Signature,
    declared: Declared,
    case: Case,
    presentation: Presentation,
    want: frozenset[str],
) -> Result:
    device = declared.device
    given = present(case, presentation, axes=(0, 2, 1, 3))
    (q, q_whole), (k, k_whole), (v, v_whole) = (place(array, device) for array in (given.q, given.k, given.v))
    slopes = None if case.alibi_slopes is None else to_tensor(case.alibi_slopes, device)
    values = DEFAULTS | flash_attn.flags(case, slopes)
    # a cache is longer than what counts of it more often than not: the lengths are always said
    values["cache_seqlens"] = to_tensor(np.array(case.k_length, dtype=np.int32), device)
    if given.table is not None:
        values["block_table"] = to_tensor(given.table, device)
    if "lse" in want:
        values["return_softmax_lse"] = True
    keywords = signature.pick(values, DEFAULTS)

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        return output_and_lse(function(q, k, v, **keywords), asked="lse" in want)

    inputs = {"q": q_whole, "k": k_whole, "v": v_whole, "alibi_slopes": slopes}
    output, lse, _, mutated = evaluate(
        call,
        case,
        inputs,
        {},
        None,
        None,
        device=device,
        refusals=(*REFUSALS, *declared.refusals),
        poisons=presentation.poison is not None,
    )
    return Result(o=flash_attn.swap(to_array(output)), lse=None if lse is None else to_array(lse), mutated=mutated)
