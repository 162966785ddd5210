"""The convention f(q, k, v, *, scale, mask, bias) -> o or (o, lse): numpy [B, H, S, D], forward only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...oracle.case import LAYOUTS, Case, Presentation
from ...oracle.result import Result
from ..candidate import Candidate
from ..presenting import buffer, fresh, present
from . import masks
from .declared import Declared, Signature, read_signature, without_pages

ARRAYS = ("q", "k", "v")
DEFAULTS: dict[str, Any] = {"scale": None, "mask": None, "bias": None}

#: what the convention has no argument or result for
NEVER = {
    "softcap": "the numpy convention passes no softcap",
    "dlse": "the numpy convention is forward only",
    "sinks": "the numpy convention passes no sinks",
    "dropout": "the numpy convention passes no dropout mask",
}


def wrap(function: Callable[..., Any], declared: Declared) -> Candidate:
    """A Candidate around ``function(q, k, v, *, scale, mask, bias)``.

    q, k, v in the storage dtype (bfloat16 is ml_dtypes'), ``scale`` a float, ``mask`` None or bool
    (True = visible), ``bias`` None or float32 (float64 for float64); both have one to four axes
    that broadcast to [B, Hq, Sq, Sk]. Causal, window, lengths and ALiBi are put into mask and bias.
    """
    signature = read_signature(function, declared.name, "numpy", ARRAYS, DEFAULTS)

    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        return _run(function, signature, case, presentation)

    return Candidate(
        name=declared.name,
        run=run,
        dtypes=declared.dtypes,
        offers=frozenset({"o", "lse"}),
        lacks=declared.missing("numpy", NEVER | ruled_out(signature), {}),
        conventions=declared.conventions,
        profiles={dtype: declared.profiles.get(dtype) or masks.profile(dtype) for dtype in declared.dtypes},
        known=declared.known,
        takes_layouts=frozenset(LAYOUTS),
        promises=declared.promises,
        convention="numpy",
        device=declared.device,
        about=declared.about,
    )


def ruled_out(signature: Signature) -> dict[str, str]:
    """The features that the signature shows the callable lacks."""
    hides = ("mask", "window", "lengths", "causal-square", "causal-top-left", "causal-bottom-right")
    needs = {"scale": ("scale", "scale<=0"), "mask": hides, "bias": ("bias", "alibi")}
    return {
        feature: f"its signature has no {keyword}"
        for keyword, features in needs.items()
        if not signature.has(keyword)
        for feature in features
    }


def additive(case: Case) -> np.ndarray | None:
    """bias + ALiBi: formed in float64, rounded once to float32 (float64 cases stay float64)."""
    slope = masks.alibi(case)
    if case.bias is None and slope is None:
        return None
    total = np.zeros(()) if case.bias is None else case.bias.astype(np.float64)
    if slope is not None:
        total = total + slope
    padded = masks.padded_rows(case)
    if padded is not None and np.isneginf(total).any():
        total = np.where(padded[:, None, :, None] & np.isneginf(total), 0.0, total)
    with np.errstate(over="ignore"):
        return np.asarray(total).astype(case.wide_format.dtype)


def _run(function: Callable[..., Any], signature: Signature, case: Case, presentation: Presentation) -> Result:
    without_pages(presentation, "numpy")
    given = present(case, presentation, told_lengths=False)
    q, k, v = (fresh(array) for array in (given.q, given.k, given.v))
    mask = masks.visible(case, positional=True)
    bias = additive(case)
    scale = 1 / math.sqrt(case.q.shape[3]) if case.scale is None else case.scale
    keywords = signature.pick({"scale": scale, "mask": mask, "bias": bias}, DEFAULTS)
    inputs = {n: a for n, a in (("q", q), ("k", k), ("v", v), ("mask", mask), ("bias", bias)) if a is not None}
    # with what surrounds them: a kernel that writes beside its slice changes its input too
    saved = {name: buffer(array).tobytes() for name, array in inputs.items()}
    returned = function(q, k, v, **keywords)
    mutated = tuple(name for name, array in inputs.items() if buffer(array).tobytes() != saved[name])
    o, lse = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    for what, value in (("output", o), ("log-sum-exp", lse)):
        if not isinstance(value, np.ndarray) and not (what == "log-sum-exp" and value is None):
            raise TypeError(f"the kernel's {what} is a {type(value).__name__}; it must be a numpy array")
    return Result(o=o, lse=lse, mutated=mutated)
