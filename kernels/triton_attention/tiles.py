"""Tile sizes by target, dtype and head size, in plain Python.

Triton's autotuner needs a device and a run of every choice; a table needs neither, gives the same
kernel each time, and can be proved: a test compiles the plain calls for their targets, and those with
masks and biases at one head size, and demands no spilled register and shared memory within the limit
below. benchmarks/triton_resources.py compiles every entry.
"""

from __future__ import annotations

from dataclasses import dataclass

KERNELS: tuple[str, ...] = ("forward", "decode", "backward_q", "backward_kv", "backward_bias")

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
    """``m`` query rows and ``n`` keys per tile, ``warps`` per program, ``stages`` of the load pipeline.

    ``chunk``: heads wider than this are multiplied so many channels at a time (0: whole); backward_q and
    backward_bias know how.
    """

    m: int
    n: int
    warps: int = 4
    stages: int = 1
    chunk: int = 0

    def channels(self, d: int, dv: int) -> int:
        """Channels at a time for these head sizes; 0: all."""
        return self.chunk if 0 < self.chunk < max(padded(d), padded(dv)) else 0


@dataclass(frozen=True)
class Split:
    """Batch entries of at most ``rows`` queries are decoded: their keys are split, ``keys`` to a program.

    Neither may depend on what else is in the batch, or an entry's bits would.
    """

    rows: int
    keys: int


#: for Triton's interpreter: smaller than a compiler takes, so that small cases have many tiles and every edge
#: is met, and rows and keys differ, so that a mix-up of the two is seen
INTERPRETED: dict[str, Tile] = {
    "forward": Tile(8, 4),
    "decode": Tile(4, 8),
    "merge": Tile(1, 2),
    "backward_q": Tile(8, 4, chunk=16),
    "backward_kv": Tile(4, 8),
    "backward_bias": Tile(8, 4, chunk=16),
}

#: splits at a time, per row
MERGE = Tile(1, 16)

#: storage -> tiles of decode for head sizes up to 64, 128 and 256; its few rows fit every target
DECODE: dict[str, tuple[Tile, Tile, Tile]] = {
    "half": (Tile(16, 64, 4, 2), Tile(16, 64, 4, 2), Tile(16, 32, 4, 2)),
    "float32": (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2)),
}

#: (target, storage) -> kernel -> tiles for head sizes up to 64, 128 and 256
TABLE: dict[tuple[str, str], dict[str, tuple[Tile, Tile, Tile]]] = {
    ("sm_80", "half"): {
        "forward": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
        "forward featured": (Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        "backward_q": (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        "backward_q featured": (Tile(64, 32, 4, 2), Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
        "backward_kv": (Tile(32, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
        "backward_kv featured": (Tile(32, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
        "backward_bias": (Tile(64, 32, 8, 2), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1, 64)),
    },
    ("sm_80", "float32"): {
        "forward": (Tile(32, 32, 8, 1), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),
        "backward_q": (Tile(32, 16, 8, 1), Tile(32, 16, 8, 2, 32), Tile(16, 16, 8, 2, 32)),
        "backward_kv": (Tile(16, 16, 4, 1), Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
        "backward_kv featured": (Tile(16, 16, 4, 1), Tile(16, 32, 8, 2), Tile(16, 16, 8, 1)),
        "backward_bias": (Tile(32, 32, 8, 1), Tile(16, 32, 8, 2, 32), Tile(16, 32, 8, 2, 32)),
    },
    ("sm_89", "half"): {
        "forward": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
        "forward featured": (Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        "backward_q": (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)),
        "backward_q featured": (Tile(64, 32, 4, 2), Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
        "backward_kv": (Tile(32, 32, 4, 1), Tile(64, 64, 8, 1), Tile(16, 32, 8, 2)),
        "backward_kv featured": (Tile(32, 32, 4, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),
        "backward_bias": (Tile(64, 32, 8, 2), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1, 64)),
    },
    ("sm_89", "float32"): {
        "forward": (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),
        "backward_q": (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2, 32)),
        "backward_kv": (Tile(16, 32, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
        "backward_bias": (Tile(32, 32, 8, 1), Tile(32, 32, 8, 2, 32), Tile(32, 32, 8, 1, 64)),
    },
    ("sm_90", "half"): {
        "forward": (Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 64, 8, 2)),
        "forward featured": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
        "backward_q": (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        "backward_q featured": (Tile(128, 64, 8, 3), Tile(64, 32, 8, 1), Tile(32, 32, 8, 2)),
        "backward_kv": (Tile(64, 128, 8, 1), Tile(64, 64, 8, 1), Tile(32, 32, 8, 2)),
        "backward_kv featured": (Tile(32, 64, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 2)),
        "backward_bias": (Tile(64, 32, 8, 1), Tile(64, 32, 8, 1), Tile(64, 32, 8, 1, 64)),
    },
    ("sm_90", "float32"): {
        "forward": (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),
        "backward_q": (Tile(32, 32, 8, 2), Tile(16, 16, 8, 2), Tile(32, 16, 8, 1, 32)),
        "backward_kv": (Tile(16, 32, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
        "backward_bias": (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1, 64), Tile(16, 16, 8, 2, 32)),
    },
    ("sm_100", "half"): {
        "forward": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 8, 1)),
        "forward featured": (Tile(64, 64, 8, 1), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
        "backward_q": (Tile(128, 64, 8, 1), Tile(128, 128, 8, 1), Tile(64, 64, 8, 1)),
        "backward_q featured": (Tile(64, 64, 8, 1), Tile(64, 64, 8, 1), Tile(64, 32, 8, 2)),
        "backward_kv": (Tile(64, 64, 8, 1), Tile(64, 64, 8, 1), Tile(32, 32, 8, 1)),
        "backward_kv featured": (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 2)),
        "backward_bias": (Tile(64, 32, 8, 1), Tile(64, 32, 8, 1), Tile(16, 32, 4, 1)),
    },
    ("sm_100", "float32"): {
        "forward": (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),
        "backward_q": (Tile(32, 32, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 2, 32)),
        "backward_kv": (Tile(16, 32, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
        "backward_bias": (Tile(16, 32, 8, 2, 32), Tile(16, 32, 8, 2, 32), Tile(16, 32, 8, 2, 32)),
    },
    ("sm_120", "half"): {
        "forward": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
        "forward featured": (Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        "backward_q": (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)),
        "backward_q featured": (Tile(64, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
        "backward_kv": (Tile(32, 32, 4, 1), Tile(64, 64, 8, 1), Tile(16, 32, 8, 2)),
        "backward_kv featured": (Tile(32, 32, 4, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),
        "backward_bias": (Tile(64, 32, 8, 2), Tile(16, 32, 4, 1), Tile(16, 32, 8, 1, 64)),
    },
    ("sm_120", "float32"): {
        "forward": (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),
        "backward_q": (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2, 32)),
        "backward_kv": (Tile(16, 32, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
        "backward_bias": (Tile(32, 32, 8, 1), Tile(16, 32, 8, 2, 32), Tile(16, 32, 8, 2, 32)),
    },
    ("gfx942", "half"): {
        "forward": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 1)),
        "forward featured": (Tile(64, 64, 4, 1), Tile(64, 64, 8, 1), Tile(64, 64, 4, 1)),
        "backward_q": (Tile(128, 64, 8, 2), Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),
        "backward_q featured": (Tile(64, 32, 8, 2), Tile(32, 32, 4, 1), Tile(64, 32, 4, 1)),
        "backward_kv": (Tile(32, 64, 4, 1), Tile(32, 64, 4, 1), Tile(16, 32, 4, 1)),
        "backward_kv featured": (Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1)),
        "backward_bias": (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 16, 4, 1)),
    },
    ("gfx942", "float32"): {
        "forward": (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
        "backward_q": (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 16, 4, 1)),
        "backward_kv": (Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 32, 4, 1)),
        "backward_bias": (Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1)),
    },
    ("gfx950", "half"): {
        "forward": (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 1)),
        "forward featured": (Tile(64, 64, 4, 1), Tile(64, 64, 8, 1), Tile(64, 32, 4, 1)),
        "backward_q": (Tile(128, 64, 8, 1), Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),
        "backward_q featured": (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(64, 32, 4, 1)),
        "backward_kv": (Tile(32, 64, 4, 1), Tile(32, 64, 4, 1), Tile(16, 32, 4, 1)),
        "backward_kv featured": (Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
        "backward_bias": (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 16, 4, 1)),
    },
    ("gfx950", "float32"): {
        "forward": (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
        "backward_q": (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 16, 4, 1)),
        "backward_kv": (Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 32, 4, 1)),
        "backward_bias": (Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1)),
    },
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


def tile(kernel: str, target: str, dtype: str, d: int, dv: int, *, featured: bool = False) -> Tile:
    """The tile of a kernel for a target of the table (or "interpreter"), storage dtype and head sizes.

    ``featured``: a mask, bias, ALiBi or softcap is there, which take registers; the bias gradient always has
    one. A kernel without a row for those has one tile for both. Products of float32 in tf32 have its tiles.
    """
    if target == "interpreter":
        return INTERPRETED[kernel]
    if kernel == "merge":
        return MERGE
    width = max(padded(d), padded(dv))
    storage = "float32" if dtype == "float32" else "half"
    rows = TABLE[target, storage] | {"decode": DECODE[storage]}
    row = rows.get(f"{kernel} featured", rows[kernel]) if featured else rows[kernel]
    return row[0 if width <= 64 else 1 if width <= 128 else 2]


def split_of(target: str) -> Split:
    """How the keys of few queries are split on a target of the table (or "interpreter")."""
    return Split(rows=3, keys=16) if target == "interpreter" else Split(rows=8, keys=512)
