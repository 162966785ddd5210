"""Case: one attention problem, complete and bit-exact. Presentation: how it is put to a kernel."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from .formats import FORMATS, Format, format_of

Causal = Literal["top-left", "bottom-right"]
CAUSAL_ALIGNMENTS: tuple[Causal, ...] = ("top-left", "bottom-right")


class CaseError(ValueError):
    """A Case or Presentation that is not a well-posed problem. The message names field and value."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise CaseError(message)


def _frozen(array: np.ndarray) -> np.ndarray:
    array = np.array(array, order="C", copy=True)
    array.flags.writeable = False
    return array


def _wide(array: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a signalling NaN is told by a sentence, not by a warning
        return array.astype(np.float64)


def _float32_representable(value: float) -> bool:
    with np.errstate(over="ignore"):
        return math.isfinite(value) and float(np.float32(value)) == value


@dataclass(frozen=True, eq=False)
class Case:
    """One attention problem. Everything that decides the right answer is here, and nothing else.

    Shapes: ``q [B, Hq, Sq, D]``, ``k [B, Hk, Sk, D]``, ``v [B, Hk, Sk, Dv]``, with Hq a multiple
    of Hk (query head h reads key head ``h // (Hq // Hk)``). B, Sq and Sk may be 0. ``do
    [B, Hq, Sq, Dv]`` is the upstream gradient of the output and asks for gradients; ``dlse
    [B, Hq, Sq]`` is the upstream gradient of the log-sum-exp and needs ``do`` beside it.
    q, k, v and do share one storage dtype and are finite.

    ``scale``        None (1/sqrt(D), exactly) or a finite float32 number; 0 and negatives included.
    ``softcap``      None or c > 0: scores become c tanh(raw / c).
    ``causal``       None, "top-left" or "bottom-right": key j visible to row i iff j <= i + offset,
                     with offset 0 or k_length - q_length of the batch entry.
    ``window``       None or (left, right), each None (unlimited) or >= 0:
                     i + offset - left <= j <= i + offset + right; offset as causal's, and
                     bottom-right where causal is None.
    ``alibi_slopes`` None or [Hq] or [B, Hq]: adds -slope |i + offset - j|, offset as the window's.
    ``q_lengths``, ``k_lengths``  None (full) or one length per batch entry. Rows past q_length are
                     padding: not judged, their do not used. Keys past k_length are never visible.
    ``mask``         bool, True = visible; ``bias`` added to the scores, finite or -inf (-inf hides
                     the key). Both: one to four axes, left-padded with 1 and broadcast to
                     [B, Hq, Sq, Sk]. bias is in the storage dtype or float32.
    ``sinks``        None or [Hq]: one more key per head with this score and value 0, seen by every
                     row, so that no row is empty.
    ``dropout``, ``keep``  given together: a probability p, 0 <= p < 1, and the bool keep mask
                     (shaped like mask). Kept probabilities are multiplied by 1 / (1 - p), others by 0;
                     the log-sum-exp does not see it.

    dlse, alibi_slopes and sinks are float32 (float64 for float64 cases). Raises CaseError, naming field,
    value and what is accepted.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray | None = None
    dlse: np.ndarray | None = None
    scale: float | None = None
    softcap: float | None = None
    causal: Causal | None = None
    window: tuple[int | None, int | None] | None = None
    alibi_slopes: np.ndarray | None = None
    q_lengths: tuple[int, ...] | None = None
    k_lengths: tuple[int, ...] | None = None
    mask: np.ndarray | None = None
    bias: np.ndarray | None = None
    sinks: np.ndarray | None = None
    dropout: float | None = None
    keep: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k", "v", "do", "dlse", "alibi_slopes", "mask", "bias", "sinks", "keep"):
            array = getattr(self, name)
            if array is not None or name in ("q", "k", "v"):
                _check(isinstance(array, np.ndarray), f"{name} is a {type(array).__name__}; it must be a numpy array")
                object.__setattr__(self, name, _frozen(array))
        self._check_shapes()
        self._check_dtypes()
        self._check_numbers()
        self._check_visibility_fields()

    # -- validation -------------------------------------------------------------------------

    def _check_shapes(self) -> None:
        for name in ("q", "k", "v"):
            array = getattr(self, name)
            _check(array.ndim == 4, f"{name} has shape {array.shape}; it must have four axes [B, H, S, D]")
        b, hq, sq, d = self.q.shape
        bk, hk, sk, dk = self.k.shape
        _check(bk == b, f"k has batch {bk} but q has {b}; they must be equal")
        _check(dk == d, f"k has head dimension {dk} but q has {d}; they must be equal")
        _check(
            self.v.shape[:3] == self.k.shape[:3],
            f"v has shape {self.v.shape} but k has {self.k.shape}; all but the last axis must agree",
        )
        for axis, size in (("Hq", hq), ("Hk", hk), ("D", d), ("Dv", self.v.shape[3])):
            _check(size >= 1, f"{axis} is {size}; it must be at least 1")
        _check(hq % hk == 0, f"Hq is {hq}, which is not a multiple of Hk = {hk}")
        expected = {"do": (b, hq, sq, self.v.shape[3]), "dlse": (b, hq, sq)}
        for name, shape in expected.items():
            array = getattr(self, name)
            if array is not None:
                _check(array.shape == shape, f"{name} has shape {array.shape}; it must be {shape}")
        _check(self.dlse is None or self.do is not None, "dlse is given without do; give do (zeros if need be)")
        if self.alibi_slopes is not None:
            _check(
                self.alibi_slopes.shape in ((hq,), (b, hq)),
                f"alibi_slopes has shape {self.alibi_slopes.shape}; it must be {(hq,)} or {(b, hq)}",
            )
        if self.sinks is not None:
            _check(self.sinks.shape == (hq,), f"sinks has shape {self.sinks.shape}; it must be {(hq,)}")
        full = (b, hq, sq, sk)
        for name in ("mask", "bias", "keep"):
            array = getattr(self, name)
            if array is not None:
                padded = (1,) * (4 - array.ndim) + array.shape
                fits = 1 <= array.ndim <= 4 and all(n in (1, m) for n, m in zip(padded, full, strict=True))
                _check(fits, f"{name} has shape {array.shape}, which does not broadcast to [B, Hq, Sq, Sk] = {full}")

    def _check_dtypes(self) -> None:
        try:
            storage = format_of(self.q.dtype)
        except ValueError as error:
            raise CaseError(f"q: {error}") from None
        for name in ("k", "v", "do"):
            array = getattr(self, name)
            if array is not None:
                _check(
                    array.dtype == storage.dtype, f"{name} is {array.dtype} but q is {storage.name}; they must agree"
                )
        wide = self.wide_format
        for name in ("dlse", "alibi_slopes", "sinks"):
            array = getattr(self, name)
            if array is not None:
                _check(
                    array.dtype == wide.dtype, f"{name} is {array.dtype}; with {storage.name} it must be {wide.name}"
                )
        for name, meaning in (("mask", "visible"), ("keep", "kept")):
            array = getattr(self, name)
            if array is not None:
                _check(array.dtype == np.bool_, f"{name} is {array.dtype}; it must be bool (True = {meaning})")
        if self.bias is not None:
            accepted = {storage.name, wide.name}
            _check(
                self.bias.dtype.name in accepted,
                f"bias is {self.bias.dtype}; with {storage.name} it must be {' or '.join(sorted(accepted))}",
            )

    def _check_numbers(self) -> None:
        for name in ("q", "k", "v", "do", "dlse", "alibi_slopes", "sinks"):
            array = getattr(self, name)
            if array is not None and not (finite := np.isfinite(_wide(array))).all():
                where, value = _first(array, ~finite)
                raise CaseError(f"{name} holds {value} at {where}; it must be finite")
        if self.bias is not None:
            wide = _wide(self.bias)
            bad = np.isnan(wide) | (wide == np.inf)
            if bad.any():
                where, value = _first(self.bias, bad)
                raise CaseError(f"bias holds {value} at {where}; it must be finite or -inf")
        if self.scale is not None:
            _check(
                isinstance(self.scale, (int, float)) and _float32_representable(self.scale),
                f"scale is {self.scale!r}; it must be None or a finite number that float32 represents",
            )
            object.__setattr__(self, "scale", float(self.scale))
        if self.softcap is not None:
            _check(
                isinstance(self.softcap, (int, float)) and _float32_representable(self.softcap) and self.softcap > 0,
                f"softcap is {self.softcap!r}; it must be None or a positive number that float32 represents",
            )
            object.__setattr__(self, "softcap", float(self.softcap))
        _check(
            (self.dropout is None) == (self.keep is None),
            "dropout and keep are given together: a probability and the mask of what it kept",
        )
        if self.dropout is not None:
            _check(
                isinstance(self.dropout, (int, float))
                and _float32_representable(self.dropout)
                and 0 <= self.dropout < 1,
                f"dropout is {self.dropout!r}; it must be None or a probability >= 0 and < 1 that float32 represents",
            )
            object.__setattr__(self, "dropout", float(self.dropout))

    def _check_visibility_fields(self) -> None:
        _check(
            self.causal is None or self.causal in CAUSAL_ALIGNMENTS,
            f"causal is {self.causal!r}; accepted are None, 'top-left' and 'bottom-right'",
        )
        if self.window is not None:
            ok = (
                isinstance(self.window, (tuple, list))
                and len(self.window) == 2
                and all(
                    w is None or (isinstance(w, (int, np.integer)) and not isinstance(w, bool) and w >= 0)
                    for w in self.window
                )
            )
            _check(ok, f"window is {self.window!r}; it must be (left, right), each None or an integer >= 0")
            left, right = self.window
            object.__setattr__(
                self, "window", (None if left is None else int(left), None if right is None else int(right))
            )
        for name, size in (("q_lengths", self.q.shape[2]), ("k_lengths", self.k.shape[2])):
            lengths = getattr(self, name)
            if lengths is None:
                continue
            _check(
                isinstance(lengths, (tuple, list)) and len(lengths) == self.q.shape[0],
                f"{name} is {lengths!r}; it must hold one length for each of the {self.q.shape[0]} batch entries",
            )
            for n in lengths:
                _check(
                    isinstance(n, (int, np.integer)) and not isinstance(n, bool) and 0 <= n <= size,
                    f"{name} holds {n!r}; lengths must be integers from 0 to {size}",
                )
            object.__setattr__(self, name, tuple(int(n) for n in lengths))

    # -- derived facts ----------------------------------------------------------------------

    @property
    def format(self) -> Format:
        """The storage format of q, k, v and do."""
        return format_of(self.q.dtype)

    @property
    def dtype(self) -> str:
        """The storage format's name, e.g. "bfloat16"."""
        return self.format.name

    @property
    def wide_format(self) -> Format:
        """The format of dlse and alibi_slopes: float32, or float64 for float64 cases."""
        return FORMATS["float64" if self.q.dtype == np.float64 else "float32"]

    @property
    def shape(self) -> tuple[int, int, int, int, int, int, int]:
        """(B, Hq, Hk, Sq, Sk, D, Dv)."""
        b, hq, sq, d = self.q.shape
        return b, hq, self.k.shape[1], sq, self.k.shape[2], d, self.v.shape[3]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def q_length(self) -> tuple[int, ...]:
        """Query rows of each batch entry that are not padding."""
        return self.q_lengths if self.q_lengths is not None else (self.q.shape[2],) * self.q.shape[0]

    @property
    def k_length(self) -> tuple[int, ...]:
        """Keys of each batch entry that are not padding."""
        return self.k_lengths if self.k_lengths is not None else (self.k.shape[2],) * self.k.shape[0]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over every field, bit for bit; equal cases have equal digests."""
        hasher = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                hasher.update(f"{field.name}:{value.dtype.name}:{value.shape}:".encode())
                hasher.update(value.tobytes())
            else:
                text = value.hex() if isinstance(value, float) else repr(value)
                hasher.update(f"{field.name}={text};".encode())
        return hasher.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Case) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def _first(array: np.ndarray, bad: np.ndarray) -> tuple[list[int], Any]:
    where = tuple(int(n) for n in np.argwhere(bad)[0])
    return list(where), array[where]


ROUTES: tuple[str, ...] = ("flags", "mask")
LAYOUTS: tuple[str, ...] = ("contiguous", "transposed", "sliced", "expanded")
POISONS: tuple[str, ...] = ("nan", "inf", "huge")


@dataclass(frozen=True)
class Presentation:
    """How a case is put to a kernel without changing the answer.

    ``route``: "flags" puts causal and window through the kernel's own flags where it has them,
    "mask" puts them as an explicit mask. ``q_blocks``, ``k_blocks``: None (the kernel's choice) or
    block sizes, ragged allowed: the partition of the query rows or keys is these sizes in order,
    the last one repeated until the axis is covered.

    ``layouts``: how q, k, v and do lie in memory: "contiguous"; "transposed" (the last two axes
    swapped in memory); "sliced" (cut out of a larger buffer); "expanded" (stride 0 along each axis
    whose values are all equal, contiguous where none are). ``poison``: what fills memory that nobody
    may read: padded rows and keys, what surrounds a slice, unused pages, fresh output buffers; "nan",
    "inf" or "huge", None for zeros (padding stays as the case has it). ``poison_hidden``: the poison
    also fills the keys and values that no row of any of their query heads sees. ``page_size``: keys
    and values come in pages of this many keys, in a pool whose order is not theirs. ``packed``: the
    batch entries lie one after another without padding, as cumulative lengths say. Raises CaseError.
    """

    route: str = "flags"
    q_blocks: tuple[int, ...] | None = None
    k_blocks: tuple[int, ...] | None = None
    layouts: tuple[str, str, str, str] = ("contiguous", "contiguous", "contiguous", "contiguous")
    poison: str | None = None
    page_size: int | None = None
    poison_hidden: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        _check(isinstance(self.packed, bool), f"packed is {self.packed!r}; it must be a bool")
        ok = isinstance(self.layouts, (tuple, list)) and len(self.layouts) == 4
        ok = ok and all(layout in LAYOUTS for layout in self.layouts)
        _check(ok, f"layouts is {self.layouts!r}; it must hold one of {', '.join(LAYOUTS)} for each of q, k, v and do")
        object.__setattr__(self, "layouts", tuple(self.layouts))
        _check(
            self.poison is None or self.poison in POISONS,
            f"poison is {self.poison!r}; accepted are None, {', '.join(map(repr, POISONS))}",
        )
        _check(
            isinstance(self.poison_hidden, bool) and (self.poison is not None or not self.poison_hidden),
            f"poison_hidden is {self.poison_hidden!r}; it must be a bool, and False where poison is None",
        )
        size = self.page_size
        _check(
            size is None or (isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size >= 1),
            f"page_size is {size!r}; it must be None or an integer >= 1",
        )
        _check(self.route in ROUTES, f"route is {self.route!r}; accepted are {', '.join(map(repr, ROUTES))}")
        for name in ("q_blocks", "k_blocks"):
            blocks = getattr(self, name)
            if blocks is None:
                continue
            ok = (
                isinstance(blocks, (tuple, list))
                and len(blocks) > 0
                and all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= 1 for n in blocks)
            )
            _check(ok, f"{name} is {blocks!r}; it must be None or a non-empty tuple of sizes >= 1")
            object.__setattr__(self, name, tuple(int(n) for n in cast("tuple[int, ...]", blocks)))


def partition(size: int, blocks: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """``blocks`` laid over ``range(size)`` as (start, stop) pairs; None is one block.

    ``blocks`` are sizes >= 1, as a Presentation holds them.
    """
    if blocks is None:
        return [(0, size)] if size else []
    bounds, start, n = [], 0, 0
    while start < size:
        stop = min(size, start + max(1, blocks[min(n, len(blocks) - 1)]))
        bounds.append((start, stop))
        start, n = stop, n + 1
    return bounds
