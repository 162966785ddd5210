"""Explicit masks and biases for kernels without the flag. The adapters' own index code.

Written with key intervals [first, stop) per row; deliberately not the oracle's way, so that one
mistake cannot hide in both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...oracle.case import Case
from ...oracle.formats import FORMATS
from ...oracle.profile import Profile, default_profile


def profile(dtype: str) -> Profile:
    """The default arithmetic, with the roundings that an explicit bias adds.

    ALiBi and bias are summed in float64 and rounded once, to float32; with float64 the product and
    the sum are rounded once each. A bias alone is passed in the type it is stored in, exactly.
    """
    unit = FORMATS["float64"].unit * 2 if dtype == "float64" else FORMATS["float32"].unit
    return replace(default_profile(dtype), u_bias=unit)


def ragged(case: Case) -> bool:
    """True where some batch entry is shorter than the arrays."""
    return case.q_lengths is not None or case.k_lengths is not None


def visible(case: Case, *, positional: bool) -> np.ndarray | None:
    """What a mask argument must say, bool, True = visible, broadcastable to [B, Hq, Sq, Sk].

    ``positional`` includes causal and window (False: the kernel's flags say them). Axes that
    nothing distinguishes stay 1. None where there is nothing to hide. Padded query rows see every
    valid key: they are not judged, and a row that sees something cannot poison dK and dV.
    """
    _, _, _, sq, sk, _, _ = case.shape
    parts: list[np.ndarray] = []
    if positional and (case.causal is not None or case.window is not None):
        parts.append(_intervals(case))
    if case.mask is not None:
        parts.append(four_axes(case.mask))
    keys = None
    if case.k_lengths is not None:
        keys = np.stack([np.arange(sk) < n for n in case.k_lengths])[:, None, None] if case.k_lengths else None
    if parts and case.q_lengths:
        padded = np.stack([np.arange(sq) >= n for n in case.q_lengths])[:, None, :, None]
        parts = [part | padded for part in parts]
    if keys is not None:
        parts.append(keys)
    if not parts:
        return None
    seen = parts[0]
    for part in parts[1:]:
        seen = seen & part
    return np.array(seen)


def alibi(case: Case) -> np.ndarray | None:
    """-slope |i + shift - j| in float64, [B or 1, Hq, Sq, Sk], unrounded but for float64 slopes."""
    if case.alibi_slopes is None:
        return None
    _, _, _, sq, sk, _, _ = case.shape
    slopes = case.alibi_slopes.astype(np.float64)
    slopes = slopes.reshape(-1, slopes.shape[-1])[:, :, None, None]
    keys = np.arange(sk, dtype=np.float64)
    away = [np.abs(np.arange(sq, dtype=np.float64)[:, None] + shift - keys) for shift in _shifts(case)]
    distance = np.stack(away)[:, None] if away else np.zeros((0, 1, sq, sk))
    return np.asarray(-slopes * distance)


def four_axes(array: np.ndarray) -> np.ndarray:
    """Left-padded with axes of 1 to four."""
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def padded_rows(case: Case) -> np.ndarray | None:
    """True at padded query rows, [B, Sq]; None where there are none to speak of."""
    if not case.q_lengths:
        return None
    return np.stack([np.arange(case.q.shape[2]) >= n for n in case.q_lengths])


def _shifts(case: Case) -> list[int]:
    """How many keys to the right of its own index each row's diagonal lies: one per batch entry,
    or a single one where all agree by construction."""
    if case.causal == "top-left":
        return [0]
    if not ragged(case):
        return [case.k.shape[2] - case.q.shape[2]]
    return [nk - nq for nq, nk in zip(case.q_length, case.k_length, strict=True)]


def _intervals(case: Case) -> np.ndarray:
    """Causal and window as the keys [first, stop) of each row, [B or 1, 1, Sq, Sk]."""
    sq, sk = case.q.shape[2], case.k.shape[2]
    left, right = case.window if case.window is not None else (None, None)
    if case.causal is not None:
        right = 0 if right is None else min(right, 0)
    key = np.arange(sk)
    blocks = []
    for shift in _shifts(case):
        diagonal = np.arange(sq) + shift
        first = np.zeros(sq, dtype=np.int64) if left is None else diagonal - left
        stop = np.full(sq, sk) if right is None else diagonal + right + 1
        blocks.append((key >= first[:, None]) & (key < stop[:, None]))
    return np.stack(blocks)[:, None] if blocks else np.zeros((0, 1, sq, sk), dtype=bool)
