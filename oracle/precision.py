"""How many bits the exact engines work with, read off the data."""

from __future__ import annotations

import math

import numpy as np

from .case import Case
from .visibility import distances

#: relative accuracy aimed at in every value that does not cancel
TARGET_BITS = 128

#: bits lost to sums, divisions and a few roundings in a row; generous, as the enclosure proves the result
GUARD_BITS = 24


def largest_score(case: Case) -> float:
    """An upper bound of |raw| + |bias| over all pairs, in float64 (may be inf)."""
    d = case.q.shape[3]
    scale = 1 / math.sqrt(d) if case.scale is None else abs(case.scale)

    def biggest(array: np.ndarray | None) -> float:
        if array is None or array.size == 0:
            return 0.0
        wide = np.abs(array.astype(np.float64))
        return float(wide[np.isfinite(wide)].max(initial=0.0))

    q, k = biggest(case.q), biggest(case.k)
    bound = scale * d * q * k + biggest(case.bias)
    if case.alibi_slopes is not None and case.q.size and case.k.size:
        bound += biggest(case.alibi_slopes) * float(np.abs(distances(case)).max(initial=0))
    return bound


def working_bits(case: Case, target: int = TARGET_BITS) -> int:
    """Bits at which scores are known to about 2^-target absolutely.

    exp turns an absolute error of the score into a relative error of the probability, so a score
    of 1e30 needs 100 bits more than a score of 1.
    """
    largest = largest_score(case)
    exponent = math.frexp(largest)[1] if math.isfinite(largest) else 2100
    terms = max(case.k.shape[2], case.q.shape[2], case.q.shape[3], 1)
    return target + GUARD_BITS + max(0, exponent) + terms.bit_length()
