"""Which key each query row sees. The oracle's own index code: no kernel or adapter may use it."""

from __future__ import annotations

import numpy as np

from .case import Case


def offsets(case: Case, alignment: str | None) -> np.ndarray:
    """What is added to a row's index before it is compared with a key's, per batch entry [B]."""
    if alignment == "top-left":
        return np.zeros(case.q.shape[0], dtype=np.int64)
    return np.array(case.k_length, dtype=np.int64) - np.array(case.q_length, dtype=np.int64)


def distances(case: Case) -> np.ndarray:
    """i + offset - j per batch entry, [B, Sq, Sk]: how far key j lies before row i.

    Aligned as causal is; bottom-right where there is no causal.
    """
    sq, sk = case.q.shape[2], case.k.shape[2]
    rows = np.arange(sq, dtype=np.int64)[None, :, None] + offsets(case, case.causal)[:, None, None]
    return rows - np.arange(sk, dtype=np.int64)[None, None, :]


def rows_judged(case: Case) -> np.ndarray:
    """True where a query row is not padding, [B, Sq]."""
    lengths = np.array(case.q_length, dtype=np.int64).reshape(-1, 1)
    return np.arange(case.q.shape[2])[None, :] < lengths


def keys_valid(case: Case) -> np.ndarray:
    """True where a key is not padding, [B, Sk]."""
    lengths = np.array(case.k_length, dtype=np.int64).reshape(-1, 1)
    return np.arange(case.k.shape[2])[None, :] < lengths


def broadcast_mask(case: Case, array: np.ndarray) -> np.ndarray:
    """A mask or bias of one to four axes as [B, Hq, Sq, Sk] (a read-only view)."""
    b, hq, _, sq, sk, _, _ = case.shape
    return np.broadcast_to(array.reshape((1,) * (4 - array.ndim) + array.shape), (b, hq, sq, sk))


def visible(case: Case) -> np.ndarray:
    """True where query row i of head h sees key j, bool [B, Hq, Sq, Sk].

    The conjunction of all that hides: lengths, causal, window, mask and a bias of -inf. Padded
    query rows see nothing.
    """
    b, hq, _, sq, sk, _, _ = case.shape
    seen = rows_judged(case)[:, :, None] & keys_valid(case)[:, None, :]
    if case.causal is not None or case.window is not None:
        distance = distances(case)
        if case.causal is not None:
            seen = seen & (distance >= 0)
        if case.window is not None:
            left, right = case.window
            if left is not None:
                seen = seen & (distance <= left)
            if right is not None:
                seen = seen & (distance >= -right)
    out = np.broadcast_to(seen[:, None], (b, hq, sq, sk))
    if case.mask is not None:
        out = out & broadcast_mask(case, case.mask)
    if case.bias is not None:
        out = out & (broadcast_mask(case, case.bias).astype(np.float64) != -np.inf)
    return np.ascontiguousarray(out)


def empty_rows(case: Case, seen: np.ndarray | None = None) -> np.ndarray:
    """True where a judged row sees neither a key nor a sink, bool [B, Hq, Sq]."""
    if case.sinks is not None:
        return np.zeros(case.q.shape[:3], dtype=bool)
    seen = visible(case) if seen is None else seen
    return rows_judged(case)[:, None, :] & ~seen.any(axis=-1)


def kept(case: Case) -> np.ndarray:
    """True where dropout keeps a pair (everywhere without it), bool [B, Hq, Sq, Sk]."""
    b, hq, _, sq, sk, _, _ = case.shape
    if case.keep is None:
        return np.broadcast_to(np.True_, (b, hq, sq, sk))
    return broadcast_mask(case, case.keep)
