"""What all formulas of the bounds share: the bound itself, sums, roundings, and the case as they read it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..case import Case
from ..enclosure import Exact
from ..formats import FORMATS, format_of
from ..profile import Profile
from ..visibility import kept, rows_judged, visible

Array = np.ndarray


@dataclass(frozen=True)
class Bound:
    """What is allowed for one output; arrays of its shape.

    ``allowed``     largest |got - exact| of a right kernel, final rounding included.
    ``vacuous``     the bound says nothing here; ``overflow``: because an intermediate may overflow.
    ``structural``  the value is zero by structure or below what the format resolves: judged, but
                    left out of the share of elements where 0 would have been accepted.
    ``must_be_zero``  a right kernel owes an exact 0 (of either sign) here, whatever its arithmetic.
    ``parts``       the named terms that add up to ``allowed``.
    """

    allowed: Array
    vacuous: Array
    overflow: Array
    structural: Array
    must_be_zero: Array
    parts: dict[str, Array]


@dataclass(frozen=True)
class Setup:
    """A sink is one more key, the last, with k = v = 0 and a score of its own: it enters every sum."""

    case: Case
    exact: Exact
    p: Profile
    seen: Array  # [B, Hq, Sq, Sk], with a sink Sk + 1, like logp, raw, k, v and z
    logp: Array
    raw: Array
    q: Array  # float64, like all that follows
    k: Array  # one per query head, like v
    v: Array
    z: Array  # what dropout multiplies each pair by; 1 without
    z_max: float
    z_over: bool  # where that factor itself may overflow what holds P, V or dO
    u_z: float  # relative error of that factor and of its product
    sinks: Array | None  # |sink|, [Hq, 1, 1]
    do: Array  # 0 in rows of padding
    dlse: Array
    scale: float  # its magnitude
    unit: float  # of the storage format
    tiny_u: float  # smallest normal number of the accumulator
    tiny_p: float  # below this P and dS may flush on the way into their matmul
    tiny_in: float  # below this a stored input may be read as 0; 0 where subnormals are kept
    root: float  # of the scale, at least 1: what a flushed pre-scaled operand may be multiplied by
    acc_max: float  # half the accumulator's largest number
    p_max: float  # largest number of the format that dS is rounded to
    gradient_max: float  # largest number of the format in which dQ, dK and dV are summed
    exp_max: float  # exp of more overflows the format that holds P


def prepare(case: Case, exact: Exact, p: Profile) -> Setup:
    def per_query_head(array: Array) -> Array:
        wide = array.astype(np.float64)
        return np.repeat(wide, case.group, axis=1) if case.group > 1 else wide

    wide, storage = FORMATS[p.accumulator], format_of(p.storage)
    stored = p.u_p > 0  # P and dS pass through the storage format only where the profile says so
    b, hq, _, sq, _, d, dv = case.shape
    keep = rows_judged(case)[:, None, :]
    do = np.zeros((b, hq, sq, dv)) if case.do is None else np.where(keep[..., None], case.do.astype(np.float64), 0.0)
    dlse = np.zeros((b, hq, sq)) if case.dlse is None else np.where(keep, case.dlse.astype(np.float64), 0.0)
    k, v, logp, raw, seen = per_query_head(case.k), per_query_head(case.v), exact.logp, exact.raw, visible(case)
    assert logp is not None and raw is not None
    chance = case.dropout or 0.0
    z_max = 1 / (1 - chance)
    z = np.ones((1, 1, 1, 1)) if case.dropout is None else np.where(kept(case), z_max, 0.0)
    if case.sinks is not None:
        sinks = case.sinks.astype(np.float64)[:, None]
        k, v = (np.concatenate([x, np.zeros((b, hq, 1, x.shape[3]))], axis=2) for x in (k, v))
        apart = (sinks - exact.lse.hi) - exact.lse.lo
        logp = np.concatenate([logp, np.where(keep, apart, -np.inf)[..., None]], axis=3)
        raw = np.concatenate([raw, np.zeros((b, hq, sq, 1))], axis=3)
        seen = np.concatenate([seen, np.broadcast_to(keep[..., None], (b, hq, sq, 1))], axis=3)
        if case.dropout is not None:
            z = np.concatenate([z, np.ones((b, hq, sq, 1))], axis=3)
    exp_max = {"float16": 10.0, "float64": 708.0}.get(p.storage if stored else p.accumulator, 87.0)
    p_max = storage.max if stored else wide.max / 2
    most = max(float(np.abs(x).max(initial=0.0)) for x in (v, do))
    scale = float(d) ** -0.5 if case.scale is None else abs(case.scale)
    return Setup(
        case=case,
        exact=exact,
        p=p,
        seen=seen,
        logp=logp,
        raw=raw,
        q=case.q.astype(np.float64),
        k=k,
        v=v,
        z=z,
        z_max=z_max,
        z_over=case.dropout is not None and not (z_max * most <= wide.max / 2 and z_max <= p_max),
        u_z=0.0 if case.dropout is None else _of_dropout(chance, p),
        sinks=None if case.sinks is None else np.abs(case.sinks.astype(np.float64))[:, None, None],
        do=do,
        dlse=dlse,
        scale=scale,
        unit=storage.unit,
        tiny_u=wide.tiny,
        tiny_p=p.tiny if stored else wide.tiny,
        tiny_in=p.tiny if p.tiny > storage.smallest else 0.0,
        root=max(1.0, math.sqrt(scale)),
        acc_max=wide.max / 2,
        p_max=p_max,
        gradient_max=wide.max / 2 if p.grads_in_storage is None else storage.max / 2,
        exp_max=exp_max,
    )


def _of_dropout(chance: float, p: Profile) -> float:
    """Relative error of a product with 1 / (1 - chance). The chance itself is exact; from 1/2 on the
    difference is too (Sterbenz's lemma)."""
    rounded = roundings(1 if chance >= 0.5 else 2, p.u)
    return rounded + max(p.u_exp, p.u) * (1 + rounded)


def growth(profile: Profile, n: Array | int, places: int, *, matmul: bool = True) -> Array:
    """Relative error of a sum of n products against the sum of their magnitudes.

    ``places``: the length of the axis that is summed. A chain is as long as the axis makes it: its
    visible terms may be spread, so that each block or each level of the tree holds one. Sums that
    are no matrix product (row sums, <dO, o>) do not round their operands.
    """
    n = np.asarray(n, dtype=np.float64)
    if profile.chain is None:
        length = n
    elif profile.chain == 0:
        length = np.minimum(n, math.ceil(math.log2(max(places, 1))) + 1)
    else:
        length = np.minimum(n, profile.chain + math.ceil(places / profile.chain))
    operands = (1 + profile.u_in) ** 2 if matmul else 1.0
    return np.asarray(operands * length * profile.u + (operands - 1))


def roundings(k: int, u: float) -> float:
    """Relative error after k roundings, (1 + u)^k - 1 and a little more."""
    return k * u * (1 + k * u)


def stored_bound(
    exact: Array,
    parts: dict[str, Array],
    unit: float,
    vacuous: Array,
    overflow: Array,
    structural: Array,
    must_be_zero: Array,
) -> Bound:
    parts = {name: np.broadcast_to(part, exact.shape) for name, part in parts.items()}
    w = sum(parts.values(), np.zeros(exact.shape))
    parts["storing"] = unit * (np.abs(exact) + w)
    allowed = w + parts["storing"]
    # a bound that is not a number has met 0 * inf on its way: nothing is known
    lost = ~np.isfinite(allowed)
    overflow = np.broadcast_to(overflow, exact.shape) | lost
    return Bound(
        allowed=np.where(np.isnan(allowed), np.inf, allowed),
        vacuous=np.broadcast_to(vacuous, exact.shape) | overflow,
        overflow=overflow,
        structural=np.broadcast_to(structural, exact.shape),
        must_be_zero=np.broadcast_to(must_be_zero, exact.shape),
        parts=parts,
    )


def with_vacuous(bound: Bound, vacuous: Array) -> Bound:
    return Bound(bound.allowed, vacuous, bound.overflow, bound.structural, bound.must_be_zero, bound.parts)


def times(a: Array, b: Array) -> Array:
    """a b for magnitudes, with 0 * inf = inf: an error without bound times a rounded-off 0 is unknown."""
    product = a * b
    return np.where(np.isnan(product), np.inf, product)


def sum_product(a: Array, b: Array) -> Array:
    """matmul of magnitudes, with 0 * inf = inf."""
    product = np.matmul(a, b)
    return np.where(np.isnan(product), np.inf, product)
