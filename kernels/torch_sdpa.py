"""Built-ins torch-sdpa-math and torch-sdpa-flash: PyTorch's own attention on a CPU, backend pinned.

Their profiles state arithmetic that was read off the kernels' behaviour in torch 2.13.0:

- math raises float16 and bfloat16 inputs to float32, computes everything there and rounds each
  output once (its bits equal those of the float32 call, rounded). It multiplies q and k by the
  root of the scale before their product.
- flash keeps P and dS in the storage type, and its sums in float32. Its exp of half types is a
  short polynomial good to 2^-13.1 (float32: five units). It adds each block of 512 keys to dQ, and
  each block of 32, 64 or 256 queries to dK and dV, in the storage type, and sums the heads of a
  group there too. Empty rows get a log-sum-exp of 0.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..oracle.case import Case, Presentation
from ..oracle.formats import FORMATS
from ..oracle.profile import Conventions, Profile
from ..oracle.result import Result
from .adapters import masks, sdpa
from .adapters.declared import Declared, Signature
from .candidate import Candidate, Known

if TYPE_CHECKING:
    import torch

#: fewest query rows per block (32 below 192 rows, 64 below 768, then 256) and keys per block
FLASH_Q_BLOCK, FLASH_K_BLOCK = 32, 512

#: What was seen of both to hold. Not the same bits for other strides or in other company (the order of a
#: sum follows alignment), and NaN, infinity or large numbers in hidden keys and values reach O and dV as
#: 0 times NaN. Flash declines a last axis whose stride is not 1.
PROMISED = frozenset({"repeatable", "strided"})

#: relative error of flash's exp in half types: 1.09e-4 at worst over [-2, 0], below 2^-13
FLASH_HALF_EXP = 2.0**-13


def math_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """scaled_dot_product_attention on the math backend."""
    return _pinned("MATH", query, key, value, keywords)


def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """scaled_dot_product_attention on the flash backend."""
    return _pinned("FLASH_ATTENTION", query, key, value, keywords)


def flash_log_sum_exp(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The log-sum-exp that flash saves for its backward pass, [B, Hq, Sq].

    From the private operator behind the flash backend, given what SDPA gives it: repeated key
    heads and an additive mask of four axes.
    """
    import torch

    if enable_gqa:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    returned = operator(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    lse: torch.Tensor = returned[1]
    return lse


def _pinned(
    backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keywords: dict[str, Any]
) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(getattr(SDPBackend, backend)), warnings.catch_warnings():
        # a refusal warns of each reason before it raises "No available kernel"
        warnings.simplefilter("ignore", UserWarning)
        return scaled_dot_product_attention(query, key, value, **keywords)


def math_profile(dtype: str) -> Profile:
    """Everything in float32 (float64 for float64); q and k each rounded after the scale's root."""
    base = masks.profile(dtype)
    # float64: the root of 1/sqrt(D) is itself four roundings from exact, of which the bound has three
    return replace(base, u_p=0.0, u_prescale=(3 if dtype == "float64" else 2) * base.u)


def flash_profile(dtype: str) -> Profile:
    """P, dS and running gradients in storage; the half types' exp is short."""
    base = replace(masks.profile(dtype), key_block=FLASH_K_BLOCK)
    if FORMATS[dtype].dtype.itemsize > 2:
        # exp good to ten units ("u20" in its name is a promise of twenty, five are seen)
        return replace(base, u_p=0.0, u_exp=10 * base.u if dtype == "float32" else base.u_exp)
    return replace(base, u_exp=FLASH_HALF_EXP, grads_in_storage=(FLASH_Q_BLOCK, FLASH_K_BLOCK))


def _causal_flag_with_scale_up_to_0(case: Case, presentation: Presentation) -> bool:
    accepts_all = Signature(names=frozenset(), open=True)
    return case.scale is not None and case.scale <= 0 and sdpa.says_causal(accepts_all, case, presentation.route)


def _no_keys_and_a_sum_that_overflows(case: Case, presentation: Presentation) -> bool:
    if case.k.shape[2] > 0:
        return False
    with np.errstate(over="ignore"):
        sums = [np.abs(x.astype(np.float64)).sum() for x in (case.q, case.do) if x is not None]
    return any(total > case.format.max for total in sums)


def _flash() -> Candidate:
    declared = Declared(
        name="torch-sdpa-flash",
        conventions=Conventions(empty_lse="0"),
        profiles={dtype: flash_profile(dtype) for dtype in FORMATS},
        promises=PROMISED,
        lacks={
            "dv!=d": "flash on a CPU needs values as wide as queries and keys",
            "zero-size": "SDPA answers axes of size 0 without calling the flash kernel, which would divide by them",
        },
        known=(
            Known(
                properties=("output", "lse", "dq", "dk", "dv", "nan-pattern", "shape-dtype", "empty-rows"),
                dtypes=tuple(FORMATS),
                when=_causal_flag_with_scale_up_to_0,
                reason="is_causal hides keys with -inf before the scale is multiplied in: a scale of 0 or below "
                "makes NaN or +inf of it, and rows come out NaN",
                versions="2.13.0",
                case="regressions/torch-sdpa-flash-causal-scale",
            ),
        ),
        about="torch.nn.functional.scaled_dot_product_attention, flash backend, CPU",
    )
    candidate = sdpa.wrap(flash_attention, declared)
    log_sum_exp = sdpa.wrap(flash_log_sum_exp, replace(declared, forward_only=True))

    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        result = candidate.run(case, presentation, want)
        if "lse" in want:
            result = replace(result, lse=log_sum_exp.run(case, presentation, frozenset({"o"})).o)
        return result

    return replace(candidate, run=run, offers=candidate.offers - {"dbias"} | {"lse"})


MATH = sdpa.wrap(
    math_attention,
    Declared(
        name="torch-sdpa-math",
        profiles={dtype: math_profile(dtype) for dtype in FORMATS},
        promises=PROMISED,
        known=(
            Known(
                properties=("output", "dq", "nan-pattern", "empty-rows"),
                dtypes=tuple(FORMATS),
                when=_no_keys_and_a_sum_that_overflows,
                reason="without keys SDPA adds 0 times the sum of all inputs to its zeros, to keep a graph: "
                "a sum that overflows (of q, or of dO on the way back) makes NaN of it",
                versions="2.13.0",
                case="regressions/torch-sdpa-no-keys",
            ),
        ),
        about="torch.nn.functional.scaled_dot_product_attention, math backend, CPU",
    ),
)
FLASH = _flash()
