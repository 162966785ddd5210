"""What attention costs on paper, and what reading it block by block saves.

This ledger counts the arithmetic that the definition needs and the numbers that must outlive the
forward pass. The peak memory of a real kernel is more than anything here: it also holds inputs,
outputs and their gradients, tiles in several stages of a pipeline, partial results of split rows,
workspaces and padding. The time of a real kernel follows from none of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .case import Case, Presentation, partition
from .formats import FORMATS
from .visibility import visible


@dataclass(frozen=True)
class Cost:
    """The cost ledger of a case.

    ``score_entries``    B Hq Sq Sk, the score matrix that block-wise computation never stores;
                         ``score_bytes`` the same in the storage format.
    ``visible_pairs``    (row, key) pairs that are seen, counted exactly: as many dot products <q, k>
                         forward, and as many again backward, where they are recomputed.
    ``forward_flops``    2 (D + Dv) per visible pair: Q K^T and P V, a multiply and an add each.
                         Dense, with Dv = D: 4 Sq Sk D per head; causal, about half of that.
    ``backward_flops``   2 (3 D + 2 Dv) per visible pair: Q K^T again, dO V^T, and the products
                         that give dV, dQ and dK; 0 where the case asks for no gradients.
    ``lse_entries``      B Hq Sq, the only state saved between the passes beside q, k, v and o;
                         ``lse_bytes`` the same in ``lse_format``.
    ``largest_block``    entries of the largest block of probabilities that the presentation's
                         partition ever holds, per head; ``largest_block_bytes`` in the storage format.
    """

    score_entries: int
    score_bytes: int
    visible_pairs: int
    forward_flops: int
    backward_flops: int
    lse_entries: int
    lse_bytes: int
    lse_format: str
    largest_block: int
    largest_block_bytes: int


def cost(case: Case, presentation: Presentation | None = None) -> Cost:
    """The cost ledger of ``case``, with the blocks of ``presentation`` (None: one block)."""
    presentation = presentation or Presentation()
    b, hq, _, sq, sk, d, dv = case.shape
    width = case.q.dtype.itemsize
    lse_format = case.wide_format.name
    pairs = int(np.count_nonzero(visible(case)))
    rows, keys = (
        max((stop - start for start, stop in partition(size, blocks)), default=0)
        for size, blocks in ((sq, presentation.q_blocks), (sk, presentation.k_blocks))
    )
    return Cost(
        score_entries=b * hq * sq * sk,
        score_bytes=b * hq * sq * sk * width,
        visible_pairs=pairs,
        forward_flops=2 * (d + dv) * pairs,
        backward_flops=0 if case.do is None else 2 * (3 * d + 2 * dv) * pairs,
        lse_entries=b * hq * sq,
        lse_bytes=b * hq * sq * FORMATS[lse_format].dtype.itemsize,
        lse_format=lse_format,
        largest_block=rows * keys,
        largest_block_bytes=rows * keys * width,
    )
