"""The convention of torch.nn.functional.scaled_dot_product_attention: torch [B, H, S, D], autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...oracle.case import LAYOUTS, Case, Presentation
from ...oracle.result import GRADIENTS, Result
from ..candidate import Candidate
from ..presenting import present
from . import masks
from .declared import Declared, Signature, read_signature, without_pages
from .tensors import evaluate, place, tensor_result, to_array, to_tensor

if TYPE_CHECKING:
    import torch

ARRAYS = ("query", "key", "value")
DEFAULTS: dict[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}

#: what the convention has no argument or result for
NEVER = {
    "softcap": "scaled_dot_product_attention has no softcap",
    "dlse": "scaled_dot_product_attention returns no log-sum-exp",
    "sinks": "scaled_dot_product_attention has no sinks",
    "dropout": "scaled_dot_product_attention draws its own dropout mask",
}

REFUSALS = ("No available kernel", "invalid dtype for bias")


def wrap(function: Callable[..., Any], declared: Declared) -> Candidate:
    """A Candidate around ``function(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)``.

    What the signature does not accept is declined. Where an explicit mask is needed, causal is
    folded into it: is_causal and attn_mask are never given together. There are no lengths: padded
    keys are hidden by the mask, so they are poisoned only where all that is hidden is.
    """
    signature = read_signature(function, declared.name, "sdpa", ARRAYS, DEFAULTS)

    # a kernel may group heads by itself; without the flag it must say so
    unless = {} if signature.has("enable_gqa") else {"gqa": "its signature has no enable_gqa"}

    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        return _run(function, signature, declared, case, presentation, want)

    return Candidate(
        name=declared.name,
        run=run,
        dtypes=declared.dtypes,
        offers=frozenset({"o"} if declared.forward_only else {"o", *GRADIENTS} - {"dsink"}),
        lacks=declared.missing("sdpa", NEVER | ruled_out(signature), unless),
        conventions=declared.conventions,
        profiles={dtype: declared.profiles.get(dtype) or masks.profile(dtype) for dtype in declared.dtypes},
        known=declared.known,
        takes_layouts=frozenset(LAYOUTS),
        promises=declared.promises,
        convention="sdpa",
        device=declared.device,
        about=declared.about,
    )


def ruled_out(signature: Signature) -> dict[str, str]:
    """The features that the signature shows the callable lacks."""
    lacks: dict[str, str] = {}
    if not signature.has("attn_mask"):
        needs_mask = ("mask", "bias", "alibi", "window", "lengths", "causal-bottom-right")
        lacks |= dict.fromkeys(needs_mask, "its signature has no attn_mask")
        if not signature.has("is_causal"):
            causal = ("causal-square", "causal-top-left")
            lacks |= dict.fromkeys(causal, "its signature has neither is_causal nor attn_mask")
    if not signature.has("scale"):
        lacks |= dict.fromkeys(("scale", "scale<=0"), "its signature has no scale")
    return lacks


def says_causal(signature: Signature, case: Case, route: str) -> bool:
    """True where is_causal says all that restricts this case: the flag is top-left, and is not
    combined with a mask."""
    if case.causal is None or not signature.has("is_causal"):
        return False
    if route != "flags" and signature.has("attn_mask"):
        return False
    top_left = case.causal == "top-left" or case.q.shape[2] == case.k.shape[2]
    restricted = (case.window, case.mask, case.bias, case.alibi_slopes)
    return top_left and not masks.ragged(case) and all(field is None for field in restricted)


def attention_mask(case: Case, bias: torch.Tensor | None, *, positional: bool, device: str) -> torch.Tensor | None:
    """attn_mask: bool where nothing is added, additive otherwise (-inf hides), None where not needed.

    ``bias`` is the case's bias as a tensor, so that its gradient flows; a bias alone keeps its
    dtype, with ALiBi the sum is formed in float64 and rounded once to float32 (float64 cases stay
    float64). SDPA takes two axes or four: two where the case's own arrays have no more.
    """
    import torch

    seen = masks.visible(case, positional=positional)
    visible = None if seen is None else to_tensor(seen, device)
    slope = masks.alibi(case)
    mask = visible
    if bias is not None or slope is not None:
        wide = torch.float64 if case.dtype == "float64" else torch.float32
        if bias is not None:
            mask = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
            hides = visible is not None or masks.padded_rows(case) is not None
            if bias.requires_grad and hides and mask.shape != case.q.shape[:3] + case.k.shape[2:3]:
                # hiding expands the bias: its gradient must not be rounded before it is summed again
                mask = mask.to(wide)
            padded = masks.padded_rows(case)
            if padded is not None:
                # a padded row must see something: its -inf are lifted (its gradient is 0 anyway)
                rows = to_tensor(padded[:, None, :, None], device)
                mask = torch.where(rows & torch.isneginf(mask), 0.0, mask)
        if slope is not None:
            added = to_tensor(slope, device)
            mask = (added if mask is None or bias is None else mask.to(torch.float64) + added).to(wide)
        if visible is not None:
            mask = torch.where(visible, mask, -torch.inf)
    stored_axes = max((array.ndim for array in (case.mask, case.bias) if array is not None), default=4)
    if mask is not None and stored_axes <= 2 and mask.shape[:2] == (1, 1):
        mask = mask[0, 0]
    return mask


def _run(
    function: Callable[..., Any],
    signature: Signature,
    declared: Declared,
    case: Case,
    presentation: Presentation,
    want: frozenset[str],
) -> Result:
    device = declared.device
    without_pages(presentation, "sdpa")
    given = present(case, presentation, told_lengths=False)
    (q, q_whole), (k, k_whole), (v, v_whole) = (place(array, device) for array in (given.q, given.k, given.v))
    bias = None if case.bias is None else to_tensor(case.bias, device)
    leaves: dict[str, torch.Tensor] = {}
    if want & {"dq", "dk", "dv"}:
        for tensor in (q, k, v):
            tensor.requires_grad_()
        leaves = {name: x for name, x in (("dq", q), ("dk", k), ("dv", v)) if name in want}
    if "dbias" in want and bias is not None:
        leaves["dbias"] = bias.requires_grad_()

    flag = says_causal(signature, case, presentation.route)
    mask = attention_mask(case, bias, positional=not flag, device=device)
    values = {
        "attn_mask": mask,
        "dropout_p": 0.0,
        "is_causal": flag,
        "scale": case.scale,
        "enable_gqa": case.group > 1,
    }
    keywords = signature.pick(values, DEFAULTS)

    def call() -> tuple[torch.Tensor, None]:
        return tensor_result(function(q, k, v, **keywords), "output"), None

    do, do_whole = place(given.do, device) if leaves and given.do is not None else (None, None)
    # with what surrounds them: a kernel that writes beside its slice changes its input too
    inputs = {"q": q_whole, "k": k_whole, "v": v_whole, "bias": bias, "attn_mask": mask, "do": do_whole}
    output, _, gradients, mutated = evaluate(
        call,
        case,
        inputs,
        leaves,
        do,
        None,
        device=device,
        refusals=(*REFUSALS, *declared.refusals),
        poisons=presentation.poison is not None,
    )
    arrays: dict[str, np.ndarray | None] = {n: None if g is None else to_array(g) for n, g in gradients.items()}
    return Result(o=to_array(output), mutated=mutated, **arrays)
