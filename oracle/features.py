"""The features a case may use, in the words in which candidates declare and reports print them."""

from __future__ import annotations

from .case import Case
from .visibility import empty_rows

#: feature -> what it means
FEATURES: dict[str, str] = {
    "backward": "gradients are asked for (do is given)",
    "dlse": "a gradient flows in through the log-sum-exp",
    "scale": "a scale other than the default",
    "scale<=0": "a scale that is zero or negative",
    "softcap": "scores capped by tanh",
    "causal-square": "causal with as many queries as keys in every batch entry",
    "causal-top-left": "causal, first row aligned with first key, with unequal lengths",
    "causal-bottom-right": "causal, last row aligned with last key, with unequal lengths",
    "window": "a sliding window",
    "alibi": "ALiBi slopes",
    "lengths": "ragged lengths in a padded batch",
    "mask": "a boolean mask",
    "bias": "an additive bias",
    "sinks": "attention sinks",
    "dropout": "dropout with a given keep mask",
    "gqa": "fewer key heads than query heads",
    "dv!=d": "values of another width than queries and keys",
    "zero-size": "a batch, query or key axis of size 0",
    "empty-row": "a row that sees no key",
}


def features(case: Case) -> frozenset[str]:
    """The FEATURES that this case uses."""
    b, hq, hk, sq, sk, d, dv = case.shape
    used = {
        "backward": case.do is not None,
        "dlse": case.dlse is not None,
        "scale": case.scale is not None,
        "scale<=0": case.scale is not None and case.scale <= 0,
        "softcap": case.softcap is not None,
        "window": case.window is not None,
        "alibi": case.alibi_slopes is not None,
        "lengths": case.q_lengths is not None or case.k_lengths is not None,
        "mask": case.mask is not None,
        "bias": case.bias is not None,
        "sinks": case.sinks is not None,
        "dropout": case.dropout is not None,
        "gqa": hq != hk,
        "dv!=d": d != dv,
        "zero-size": 0 in (b, sq, sk),
        "empty-row": bool(empty_rows(case).any()),
    }
    if case.causal is not None:
        square = case.q_length == case.k_length
        used["causal-square" if square else f"causal-{case.causal}"] = True
    return frozenset(name for name, yes in used.items() if yes)
