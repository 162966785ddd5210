"""Make a failing case small: delta debugging on the case itself.

Hypothesis shrinks the choices that drew a case; here the case is what is shrunk, axis by axis and
number by number, so a case from anywhere (a draw, a file, somebody's model) comes out as small. A
step is kept when the case still fails in the same way and is simpler by ``cost``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..oracle.case import Case, CaseError, Presentation
from . import transform

Array = np.ndarray
Pair = tuple[Case, Presentation]
Shrink = Callable[[Case, Presentation], Iterator[Any]]

ARRAYS = ("q", "k", "v", "do", "dlse", "bias", "alibi_slopes", "sinks")
OPTIONS = (
    "alibi_slopes",
    "sinks",
    "keep",
    "softcap",
    "bias",
    "mask",
    "window",
    "causal",
    "k_lengths",
    "q_lengths",
    "dlse",
    "scale",
)

#: what a step may change of the presentation; all else belongs to the case
PRESENTED = ("route", "q_blocks", "k_blocks", "layouts", "poison", "poison_hidden", "page_size", "packed")

#: arrays with more elements than this are simplified as a whole, not number by number
ELEMENTWISE = 48


def reduce(
    case: Case, presentation: Presentation, fails: Callable[[Case, Presentation], bool], limit: int = 800
) -> Pair:
    """The smallest case found that still fails, at most ``limit`` calls of ``fails`` later."""
    best: Pair = (case, presentation)
    lowest, calls = cost(*best), 0
    met = {(case.digest, presentation)}
    improved = True
    while improved:
        improved = False
        for shrink in (_entries, _heads, _options, _keys, _queries, _channels, _presented, _whole_arrays, _numbers):
            going = True
            while going:
                going = False
                for candidate in _valid(shrink, best):
                    weight = cost(*candidate)
                    if weight >= lowest or (candidate[0].digest, candidate[1]) in met:
                        continue
                    met.add((candidate[0].digest, candidate[1]))
                    calls += 1
                    if calls > limit:
                        return best
                    if fails(*candidate):
                        best, lowest, going, improved = candidate, weight, True, True
                        break
    return best


def cost(case: Case, presentation: Presentation) -> tuple[int, int, int]:
    """What "simpler" means: fewer numbers, then fewer options, then simpler numbers."""
    b, hq, hk, sq, sk, d, dv = case.shape
    elements = b * (hq * sq * (d + dv) + hk * sk * (d + dv)) + 3 * (hq - 1) + sq + 3 * sk
    options = sum(getattr(case, name) is not None for name in OPTIONS)
    options += sum(x is not None for x in (presentation.q_blocks, presentation.k_blocks)) + (
        presentation.route != "flags"
    )
    options += sum(len(x) for x in (presentation.q_blocks, presentation.k_blocks) if x is not None)
    options += sum(layout != "contiguous" for layout in presentation.layouts)
    options += sum(getattr(presentation, name) is not None for name in ("poison", "page_size"))
    numbers = sum(_array_cost(getattr(case, name)) for name in ARRAYS)
    numbers += sum(getattr(case, name) not in (None, 1.0) for name in ("scale", "softcap"))
    options += presentation.packed
    numbers += (presentation.page_size or 0) + presentation.poison_hidden
    numbers += {None: 0, 0.0: 0, 0.5: 1}.get(case.dropout, 2)
    numbers += sum(1 + side for side in case.window or () if side is not None)
    for mask in (case.mask, case.keep):
        if mask is not None:
            numbers += int((~mask).sum()) + mask.ndim
    if case.bias is not None:
        numbers += case.bias.ndim
    return elements, options, numbers


def _array_cost(array: Array | None) -> int:
    """0 for 0, 1 for 1, 2 for other small integers, more for numbers with more bits."""
    if array is None or array.size == 0:
        return 0
    wide = np.abs(array.astype(np.float64))
    finite = np.where(np.isfinite(wide), wide, 0.0)
    mantissa, exponent = np.frexp(finite)
    bits = np.zeros(wide.shape)
    for n in (1, 2, 4, 8, 16, 24):
        bits += np.round(mantissa * 2.0**n) != mantissa * 2.0**n
    costs = np.select([finite == 0, finite == 1, (finite <= 9) & (finite % 1 == 0)], [0, 2, 3], 4 + 2 * bits)
    costs = costs + (finite > 9) * np.minimum(np.abs(exponent), 40) / 10 + ((array < 0) & (finite > 0))
    return int(np.ceil(costs.sum()))


def _valid(shrink: Shrink, pair: Pair) -> Iterator[Pair]:
    """The well-posed cases among what a step proposes: a case, or the fields that change, of the presentation too."""
    case, presentation = pair
    for changes in shrink(case, presentation):
        if isinstance(changes, Case):
            yield changes, presentation
            continue
        shown = {name: changes.pop(name) for name in PRESENTED if name in changes}
        try:
            yield replace(case, **changes), replace(presentation, **shown)
        except (CaseError, ValueError):
            continue  # e.g. a softcap of 0: not a problem that could be posed


# -- fewer entries, heads, keys, queries, channels --------------------------------------------------


def _entries(case: Case, _: Presentation) -> Iterator[Case]:
    if case.q.shape[0] > 1:
        yield from (transform.entries(case, [n]) for n in range(case.q.shape[0]))


def _heads(case: Case, _: Presentation) -> Iterator[Case]:
    """One key head with its group; then fewer query heads of the group."""
    hq, hk = case.q.shape[1], case.k.shape[1]
    group = case.group
    choices: list[tuple[list[int], list[int]]] = []
    if hk > 1:
        choices += [([g], list(range(g * group, (g + 1) * group))) for g in range(hk)]
        choices += [(list(range(hk)), [g * group + n for g in range(hk)]) for n in range(group) if group > 1]
        if hk > 2:
            choices += [([g, g + 1], list(range(g * group, (g + 2) * group))) for g in range(hk - 1)]
    elif hq > 1:
        choices += [([0], [h]) for h in range(hq)]
        choices += [([0], [h, h + 1]) for h in range(hq - 1) if hq > 2]
    yield from (transform.heads(case, queries, keys) for keys, queries in choices)


def _subsets(n: int) -> Iterator[list[int]]:
    """Ever smaller cuts of range(n): one, halves, quarters, and all but one."""
    if n <= 1:
        return
    indices = list(range(n))
    for k in sorted({0, n - 1}):
        yield [k]
    size = n // 2
    while size >= 1:
        for start in range(0, n, size):
            kept = indices[:start] + indices[start + size :]
            if kept:
                yield kept
        size //= 2


def _keys(case: Case, _: Presentation) -> Iterator[Case]:
    yield from (transform.keys(case, keep) for keep in _subsets(case.k.shape[2]))


def _queries(case: Case, _: Presentation) -> Iterator[Case]:
    yield from (transform.queries(case, keep) for keep in _subsets(case.q.shape[2]))


def _channels(case: Case, _: Presentation) -> Iterator[dict[str, Any]]:
    for keep in _subsets(case.q.shape[3]):
        yield {"q": case.q[..., keep], "k": case.k[..., keep]}
    for keep in _subsets(case.v.shape[3]):
        yield {"v": case.v[..., keep], "do": None if case.do is None else case.do[..., keep]}


# -- fewer options, simpler presentation ------------------------------------------------------------


def _options(case: Case, _: Presentation) -> Iterator[dict[str, Any]]:
    for name in OPTIONS:
        if getattr(case, name) is not None:
            yield {name: None, "dropout": None} if name == "keep" else {name: None}
    for name in ("mask", "bias", "keep"):
        array = getattr(case, name)
        if array is not None and array.ndim > 1:
            yield {name: array[0]}
    if case.window is not None:
        left, right = case.window
        yield from ({"window": (side, right)} for side in (None, 0, left and left - 1))
        yield from ({"window": (left, side)} for side in (None, 0, right and right - 1))
    for name in ("scale", "softcap"):
        if getattr(case, name) is not None:
            yield {name: 1.0}
    if case.dropout:
        yield from ({"dropout": p} for p in (0.0, 0.5) if p != case.dropout)


def _presented(case: Case, presentation: Presentation) -> Iterator[dict[str, Any]]:
    if presentation.route != "flags":
        yield {"route": "flags"}
    if presentation.poison is not None:
        yield {"poison": None, "poison_hidden": False}
    if presentation.poison_hidden:
        yield {"poison_hidden": False}
    if presentation.page_size is not None:
        yield {"page_size": None}
    if presentation.packed:
        yield {"packed": False}
    if (presentation.page_size or 1) > 1:
        yield {"page_size": 1}
    for n, layout in enumerate(presentation.layouts):
        if layout != "contiguous":
            yield {"layouts": (*presentation.layouts[:n], "contiguous", *presentation.layouts[n + 1 :])}
    for name in ("q_blocks", "k_blocks"):
        blocks = getattr(presentation, name)
        if blocks is not None:
            yield {name: None}
            yield from ({name: (n,)} for n in sorted(set(blocks)) if len(blocks) > 1)


# -- simpler numbers --------------------------------------------------------------------------------


def _whole_arrays(case: Case, _: Presentation) -> Iterator[dict[str, Any]]:
    for name in ARRAYS:
        array = getattr(case, name)
        if array is None or array.size == 0:
            continue
        wide = array.astype(np.float64)
        finite = np.where(np.isfinite(wide), wide, 0.0)
        for simpler in _simpler(finite):
            yield {name: _stored(np.where(np.isfinite(wide), simpler, wide), array.dtype)}
    for name, mask in (("mask", case.mask), ("keep", case.keep)):
        if mask is not None:
            yield {name: np.ones_like(mask)}


def _simpler(x: Array) -> tuple[Array, ...]:
    return np.zeros_like(x), np.ones_like(x), np.sign(x), np.round(x), _rounded(x, 2), _rounded(x, 5)


def _numbers(case: Case, _: Presentation) -> Iterator[dict[str, Any]]:
    for name in (*ARRAYS, "mask", "keep"):
        array = getattr(case, name)
        if array is None or array.size > ELEMENTWISE:
            continue
        for at in np.ndindex(array.shape):
            x = array[at].astype(np.float64)
            if array.dtype == np.bool_:
                choices: list[Any] = [] if array[at] else [True]
            elif not np.isfinite(x):
                choices = [0.0]
            else:
                choices = [c for c in (0.0, 1.0, -1.0, np.round(x), _rounded(x, 1), _rounded(x, 2)) if c != x]
            for choice in choices:
                changed = array.copy()
                changed[at] = _stored(choice, array.dtype)
                yield {name: changed}


def _stored(x: Any, dtype: np.dtype) -> Array:
    """In a format; what rounds past its end is infinite, which Case does not take."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype)


def _rounded(x: Any, bits: int) -> Any:
    """x to this many significant bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent)
