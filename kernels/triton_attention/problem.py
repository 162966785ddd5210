"""Problem: one call of the kernel on torch tensors, and what it accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from . import scores
from .forward import forward
from .tiles import LARGEST_HEAD, PRECISIONS

#: whether Triton runs the kernels in its interpreter (TRITON_INTERPRET=1 when it was imported)
IN_INTERPRETER = not isinstance(forward, triton.JITFunction)

LOG2E = math.log2(math.e)
FULL, LENGTHS, PACKED = (mode.value for mode in (scores.FULL, scores.LENGTHS, scores.PACKED))

DTYPES: dict[torch.dtype, str] = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

#: index arithmetic inside a head is in 32 bits
LONGEST = 2**30


@dataclass(frozen=True)
class Problem:
    """One call, as views [B, H, S, D] of the caller's tensors; nothing is copied.

    ``q_ranges`` and ``k_ranges`` are int32: one length per batch entry, or, where ``packed``, cumulative
    lengths over tensors [1, H, T, D] whose longest sequences are ``q_size`` and ``k_size``. ``mask``
    (bool, True = visible) and ``bias`` have four axes that broadcast to [B, Hq, Sq, Sk]; ``slopes``
    [B or 1, Hq]. ``window`` and ``causal`` are as in Case. ``order`` is the order of axes in which outputs
    are laid out: "bhsd" or "bshd". Where there are ``pages``, int32 [B, most of an entry], k and v are pools
    [pages, Hk, page size, D], and key j of entry b lies in page ``pages[b, j // page size]``; forward only.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batches: int
    q_size: int
    k_size: int
    scale: float
    softcap: float | None = None
    causal: str | None = None
    window: tuple[int | None, int | None] = (None, None)
    slopes: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    q_ranges: torch.Tensor | None = None
    k_ranges: torch.Tensor | None = None
    pages: torch.Tensor | None = None
    packed: bool = False
    order: str = "bhsd"
    precision: str = "ieee"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def factor(self) -> float:
        """What <q, k> is multiplied by first: to a score in base 2, or to the argument of tanh."""
        return self.scale * LOG2E if self.softcap is None else self.scale / self.softcap

    @property
    def cap(self) -> float:
        """What tanh is multiplied by: the cap in base 2."""
        return 1.0 if self.softcap is None else self.softcap * LOG2E

    @property
    def ragged(self) -> tuple[int, int]:
        """How the query and the key axis are ragged, as the kernels' constants say it."""
        if self.packed:
            return PACKED, PACKED
        return FULL if self.q_ranges is None else LENGTHS, FULL if self.k_ranges is None else LENGTHS


def _check(p: Problem) -> None:
    """Raise ValueError, one sentence, for what the kernels do not take."""
    for name in ("q", "k", "v"):
        x = getattr(p, name)
        _demand(x.ndim == 4, f"{name} has {x.ndim} axes after its batch and head axes are put first; it must have 4")
        _demand(x.dtype in DTYPES, f"{name} is {x.dtype}; accepted are {', '.join(map(str, DTYPES))}")
        _demand(x.dtype == p.q.dtype, f"{name} is {x.dtype} but q is {p.q.dtype}; they must agree")
        _demand(x.device == p.q.device, f"{name} is on {x.device} but q is on {p.q.device}; they must agree")
    _demand(
        p.q.is_cuda or (IN_INTERPRETER and p.q.device.type == "cpu"),
        f"the tensors are on {p.q.device}; the kernel needs a GPU "
        f"(on a CPU it runs only in Triton's interpreter, with TRITON_INTERPRET=1 set before Python starts)",
    )
    (bq, hq, _, d), (bk, hk, sk, dk), vs = p.q.shape, p.k.shape, p.v.shape
    _demand(p.packed or p.pages is not None or bq == bk, f"q has batch {bq} but k has {bk}; they must be equal")
    _demand(d == dk, f"q has head size {d} but k has {dk}; they must be equal")
    _demand(vs[:3] == (bk, hk, sk), f"v has shape {list(vs)} but k has {list(p.k.shape)}; all but the width must agree")
    for name, width in (("D", d), ("Dv", vs[3])):
        _demand(1 <= width <= LARGEST_HEAD, f"{name} is {width}; it must be from 1 to {LARGEST_HEAD}")
    _demand(
        hk >= 1 and hq % hk == 0 and hq >= 1, f"q has {hq} heads and k has {hk}; the first must be a multiple of it"
    )
    for name, size in (("Sq", p.q_size), ("Sk", p.k_size)):
        _demand(size <= LONGEST, f"{name} is {size}; it must be at most {LONGEST}")
    _demand(p.precision in PRECISIONS, f"precision is {p.precision!r}; accepted are {', '.join(PRECISIONS)}")
    _demand(
        p.softcap is None or (math.isfinite(p.softcap) and p.softcap > 0),
        f"softcap is {p.softcap}; it must be None or positive",
    )
    _demand(
        p.causal in (None, "top-left", "bottom-right"),
        f"causal is {p.causal!r}; accepted are None, 'top-left' and 'bottom-right'",
    )
    for name in ("factor", "cap"):
        value = getattr(p, name)
        _demand(
            value == 0 or 2.0**-126 <= abs(value) < 2.0**128,
            f"scale is {p.scale:g} with softcap {p.softcap}; the kernel multiplies scores by {value:g}, "
            f"which float32 does not hold to full precision",
        )
    for side in p.window:
        _demand(side is None or side >= 0, f"window is {p.window}; each side must be None or at least 0")
    for name, dtypes in (("mask", (torch.bool,)), ("bias", (p.q.dtype, torch.float32))):
        x = getattr(p, name)
        if x is not None:
            _demand(not p.packed, f"{name} is given for packed sequences; it has no meaning there")
            _demand(x.dtype in dtypes, f"{name} is {x.dtype}; accepted are {', '.join(map(str, dtypes))}")
            full = (p.batches, hq, p.q_size, p.k_size)
            _demand(
                x.ndim == 4 and all(n in (1, m) for n, m in zip(x.shape, full, strict=True)),
                f"{name} has shape {list(x.shape)}, which does not broadcast to [B, Hq, Sq, Sk] = {list(full)}",
            )
    if p.slopes is not None:
        _demand(p.slopes.dtype == torch.float32, f"slopes are {p.slopes.dtype}; they must be float32")
        _demand(
            p.slopes.shape in ((1, hq), (p.batches, hq)),
            f"slopes have shape {list(p.slopes.shape)}; they must be [Hq] or [B, Hq]",
        )
    for name in ("q_ranges", "k_ranges"):
        x = getattr(p, name)
        if x is not None:
            wanted = (p.batches + 1,) if p.packed else (p.batches,)
            _demand(
                x.dtype == torch.int32 and x.shape == wanted,
                f"{name} is {x.dtype} of shape {list(x.shape)}; it must be int32 of shape {list(wanted)}",
            )
    if p.pages is not None:
        _demand(
            p.pages.dtype == torch.int32 and p.pages.ndim == 2 and len(p.pages) == p.batches and not p.packed,
            f"pages are {p.pages.dtype} of shape {list(p.pages.shape)}; they must be int32 of shape [B, most]",
        )
        _demand(sk >= 1, "a page holds 0 keys; it must hold at least 1")
        _demand(p.pages.stride(1) == 1 or p.pages.shape[1] <= 1, "the rows of pages must be contiguous")
    for name in ("mask", "bias", "slopes", "q_ranges", "k_ranges", "pages"):
        x = getattr(p, name)
        _demand(x is None or x.device == p.q.device, f"{name} is not on {p.q.device}, where q is")


def _demand(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
