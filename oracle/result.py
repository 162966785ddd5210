"""Result: what a kernel returned for a case."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

OUTPUTS: tuple[str, ...] = ("o", "lse", "dq", "dk", "dv", "dbias", "dsink")
GRADIENTS: tuple[str, ...] = ("dq", "dk", "dv", "dbias", "dsink")


@dataclass(frozen=True)
class Result:
    """A kernel's outputs as host arrays; None where it does not offer one.

    ``o [B, Hq, Sq, Dv]``, ``lse [B, Hq, Sq]`` (natural log unless declared), ``dq``, ``dk``, ``dv``
    shaped as q, k, v, ``dbias`` shaped as the stored bias, ``dsink [Hq]``. ``mutated`` names the
    inputs whose bits the call changed.
    """

    o: np.ndarray | None = None
    lse: np.ndarray | None = None
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dbias: np.ndarray | None = None
    dsink: np.ndarray | None = None
    mutated: tuple[str, ...] = ()
