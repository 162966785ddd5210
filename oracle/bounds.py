"""How far a correct kernel may be from the exact answer, element by element.

A forward error bound, evaluated from the exact values and the arithmetic that the kernel declares
(its Profile). Every term is a rounding that a right kernel may commit, named where it is computed;
nothing is fitted. The verdict elsewhere is |got - exact| / allowed.

Throughout, with u the accumulator's unit roundoff (standard model of floating-point arithmetic:
Higham, Accuracy and Stability of Numerical Algorithms, chapters 2 to 4):

- a sum of n products in any order errs by at most n u of the sum of their magnitudes; ``growth``
  adds the rounding of matmul operands and honours a declared shorter chain. Terms that are exactly
  0 (hidden pairs) do not round, so n counts what is visible.
- k roundings of one value are k u (1 + k u) of it: ``_roundings``.
- a kernel may hold its scores in base 2 (exp2 is what processors have): log2(e) is a constant that
  was rounded and a product that rounds, two more roundings of whatever it multiplies.
- an absolute error e of a score becomes a factor exp(±e) of its probability.
- a sink enters with the other scores, before or after them, or at the end of a row as exp(sink - m)
  with the maximum m of the keys alone.
- 1 / (1 - p) of dropout multiplies P, V and dO, or what was summed at the end; dS may wait for it too,
  with D brought down to it.
- a value that is w off before it is stored is w + u_T (|exact| + w) off after rounding to format T.

Where the bound says nothing any more (it passes the natural size of the value, or an intermediate
may overflow) the element is vacuous: it is counted and shown, not judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .case import Case
from .enclosure import Exact
from .formats import FORMATS, format_of
from .profile import Profile
from .visibility import broadcast_mask, distances, kept, rows_judged, visible

Array = np.ndarray

#: elements of the largest intermediate; rows are taken in steps where more would be needed
BLOCK_ELEMENTS = 1 << 21


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


def bounds(case: Case, exact: Exact, profile: Profile) -> dict[str, Bound]:
    """What is allowed for o, lse and, where the case has do, dq, dk, dv (and dbias with a bias).

    ``exact`` must carry its pairs. Rows of padding get meaningless entries; they are not judged.
    """
    if exact.logp is None or exact.raw is None:
        raise ValueError("exact was computed without its pairs; the bounds need them")
    with np.errstate(all="ignore"):
        setup = _setup(case, exact, profile)
        b, hq, _, sq, sk, d, dv = case.shape
        step = max(1, BLOCK_ELEMENTS // max(1, b * hq * sk * max(d, dv)))
        if profile.grads_in_storage is not None:
            block = profile.grads_in_storage[0]
            step = -(-step // block) * block
        keys = _KeySide(setup) if case.do is not None else None
        outs: dict[str, list[Bound]] = {"o": [], "lse": [], "dq": []}
        # an empty query axis still yields bounds of the right (empty) shape
        for start in range(0, max(sq, 1), step):
            rows = _scores(setup, slice(start, min(sq, start + step)))
            o, lse, kept = _forward(setup, rows)
            outs["o"].append(o)
            outs["lse"].append(lse)
            if keys is not None:
                outs["dq"].append(_backward(setup, rows, o, lse, kept, keys))
        found = {name: _joined(pieces) for name, pieces in outs.items() if pieces}
        return found if keys is None else found | keys.finish()


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


def _roundings(k: int, u: float) -> float:
    """Relative error after k roundings, (1 + u)^k - 1 and a little more."""
    return k * u * (1 + k * u)


# -- what all formulas share ------------------------------------------------------------------


@dataclass(frozen=True)
class _Setup:
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


def _setup(case: Case, exact: Exact, p: Profile) -> _Setup:
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
    return _Setup(
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
    rounded = _roundings(1 if chance >= 0.5 else 2, p.u)
    return rounded + max(p.u_exp, p.u) * (1 + rounded)


@dataclass(frozen=True)
class _Rows:
    """One step of query rows: exact facts and error terms that forward and backward share."""

    at: slice
    seen: Array  # [B, Hq, R, Sk]
    q_abs: Array
    raw: Array  # |raw|
    e_raw: Array  # error of the raw score
    e: Array  # error of the score
    log_error: Array  # largest log-ratio of the kernel's unnormalised weight and exp(s - max)
    logp: Array
    prob: Array
    x: Array  # distance of the score below the row's maximum
    lam: Array  # [B, Hq, R]; 0 where the row is empty
    count: Array  # visible keys, the sink among them
    keys: Array  # without the sink, which has no value and no key to multiply with
    raised: Array  # [B, Hq, R, Sk]: how often a weight may be rescaled after it was summed
    apart: Array  # [B, Hq, R]: the sink above the maximum of the keys, or above 0 where there are none
    overflow: Array  # [B, Hq, R]: a score of the row, hidden ones included, may overflow


def _scores(s: _Setup, at: slice) -> _Rows:
    case, p, u = s.case, s.p, s.p.u
    d = case.shape[5]
    seen, logp, raw = s.seen[:, :, at], s.logp[:, :, at], np.abs(s.raw[:, :, at])
    lam = s.exact.lse.hi[:, :, at]
    lam = np.where(np.isfinite(lam), lam, 0.0)
    count = seen.sum(axis=3)

    bias, alibi = _added(s, at)
    added, terms = bias + alibi, (case.bias is not None) + (case.alibi_slopes is not None)
    capped = case.softcap is not None

    # The product q.k: sums, inputs that flush, products that underflow (before and after the scale),
    # q or k that underflow when the scale, or its root, is multiplied into them.
    q_abs, k_abs = np.abs(s.q[:, :, at]), np.abs(s.k)
    qk = q_abs @ k_abs.swapaxes(2, 3)
    q_and_k = q_abs.sum(axis=3)[..., None] + k_abs.sum(axis=3)[:, :, None, :]
    e_raw = s.scale * (growth(p, d, d) * qk + s.tiny_in * q_and_k + d * s.tiny_u) + s.tiny_u * (qk + s.root * q_and_k)
    if p.u_prescale:
        # q, or q and k by the scale's root, were stored with the scale already in them.
        e_raw = e_raw + p.u_prescale * s.scale * qk + p.tiny * s.root * q_and_k
    # The scale's own rounding, its product with q, k or q.k, and one more: 1/sqrt(d) in two steps, or
    # log2(e). A cap divides (by 1/c: twice rounded); beside a bias log2(e) rounds the product too.
    n = 4 if capped or terms else 3
    e_raw = e_raw * (1 + _roundings(n, u)) + _roundings(n, u) * raw

    # softcap: tanh contracts; within e_raw of raw its slope stays below 4 exp(-2 |raw|/c + 2 e_raw/c).
    e, largest = e_raw, raw
    if case.softcap is not None:
        c = case.softcap
        slope = np.minimum(1.0, 4 * np.exp(np.minimum(2 * (e_raw - raw) / c, 0.0)))
        largest = c * np.tanh(raw / c)
        tanh = c * p.u_tanh if p.tanh_is_absolute else p.u_tanh * largest
        e = np.minimum(_times(e_raw, slope) + tanh, 2 * c + c * p.u_tanh)
        # the product with c and log2(e); what is last is counted with the score below
        e = e * (1 + 3 * u) + _roundings(3 if terms else 2, u) * largest
    # bias and ALiBi: the bias as the kernel stores it, slope times distance, log2(e), each addition.
    e = e + _roundings(3, u) * added + p.u_bias * bias
    if p.u_bias:
        e = e + p.tiny
    if terms > 1:
        e = e + u * (largest + added)
    e = e * (1 + u) + u * np.where(seen, np.abs(logp + lam[..., None]), 0.0)
    if s.sinks is not None:
        # a sink is stored as a score: log2(e), and one rounding more where it is brought to the maximum
        e[..., -1] = np.broadcast_to(_roundings(2, u) * s.sinks[..., 0], lam.shape)
    e = np.where(seen, e, 0.0)

    top = np.where(seen, logp, -np.inf).max(axis=3, initial=-np.inf)
    x = np.where(seen, top[..., None] - logp, 0.0)
    # Rescales of what was summed before: visible keys may be spread, one to a block, and the sink is a
    # block of its own. exp(0) is 1 and multiplies without rounding, so only a raise of the maximum counts.
    blocks = np.ceil(case.shape[4] / p.key_block) + (s.sinks is not None)
    steps = np.maximum(np.minimum(count, blocks) - 1, 0)
    raised = np.where(seen, np.minimum(_larger(logp, e, seen), steps[..., None]), 0.0)
    # exp at the rounded distance from the maximum so far, and of each later raise of it: together the
    # distances are x. Three roundings: the difference and log2(e), or a maximum that was scaled alone.
    log_error = np.where(seen, e + _roundings(3, u) * x + (1 + raised) * p.u_exp, 0.0)
    apart = np.zeros(lam.shape)
    if s.sinks is not None:
        # at the end of a row the sink is measured from the keys' maximum, unless that overflows
        of_keys = np.where(seen, logp, -np.inf)[..., :-1].max(axis=3, initial=-np.inf)
        apart = np.where(np.isfinite(of_keys), np.maximum(logp[..., -1] - of_keys, 0.0), lam)
        apart = np.where(seen[..., -1] & (np.abs(apart) <= math.log(2 * s.acc_max)), apart, 0.0)
        log_error[..., -1] += _roundings(3, u) * np.abs(apart)
    return _Rows(
        at=at,
        seen=seen,
        q_abs=q_abs,
        raw=raw,
        e_raw=e_raw,
        e=e,
        log_error=log_error,
        logp=logp,
        prob=np.exp(logp),
        x=x,
        lam=lam,
        count=count,
        keys=seen[..., : case.shape[4]].sum(axis=3),
        raised=raised,
        apart=apart,
        overflow=_scores_overflow(s, q_abs, k_abs, qk, bias, added),
    )


def _larger(logp: Array, e: Array, seen: Array) -> Array:
    """How many other scores of the row may come out larger than each: all whose intervals of ±e reach it.

    Whatever order the keys are taken in, the maximum rises no more often than that after a key was
    summed. logp is itself rounded, to float64.
    """
    e = e + np.abs(logp) * 2.0**-52
    high, low = np.where(seen, logp + e, -np.inf), np.where(seen, logp - e, np.inf)
    both = np.concatenate([-np.nan_to_num(high, nan=np.inf), -np.nan_to_num(low, nan=-np.inf)], axis=3)
    order = np.argsort(both, axis=3, kind="stable")  # falling; where they are equal the upper ends first
    before = np.cumsum(order < logp.shape[3], axis=3)
    ranks = np.empty_like(before)
    np.put_along_axis(ranks, order, before, axis=3)
    return np.maximum(ranks[..., logp.shape[3] :] - 1, 0)


def _scores_overflow(s: _Setup, q_abs: Array, k_abs: Array, qk: Array, bias: Array, added: Array) -> Array:
    """Rows [B, Hq, R] in which a score may overflow: hidden pairs are computed too, and before they
    are scaled; the scale may be multiplied into q or k first, or rounded with them into storage."""
    p, most = s.p, format_of(s.p.storage).max
    within = (qk + added <= s.acc_max) & (s.scale * qk + added <= s.acc_max)
    if p.u_bias:
        within = within & (bias <= most)
    over = ~within.all(axis=3)
    if s.case.k.size:
        largest = np.maximum(q_abs.max(axis=3), k_abs.max(axis=(2, 3))[..., None]) * max(s.scale, s.scale**0.5)
        over = over | ~(largest <= (min(most, s.acc_max) if p.u_prescale else s.acc_max))
    return over | s.z_over


def _added(s: _Setup, at: slice) -> tuple[Array, Array]:
    """|bias| and |ALiBi| per pair; what is not there is 0."""
    case = s.case
    bias, alibi = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 1, 1))
    sink = ((0, 0), (0, 0), (0, 0), (0, int(s.sinks is not None)))
    if case.bias is not None:
        found = broadcast_mask(case, np.abs(case.bias.astype(np.float64)))[:, :, at]
        bias = np.pad(np.where(np.isfinite(found), found, 0.0), sink)
    if case.alibi_slopes is not None:
        slopes = np.broadcast_to(np.abs(case.alibi_slopes.astype(np.float64)), case.q.shape[:2])
        alibi = np.pad(slopes[..., None, None] * np.abs(distances(case)[:, None, at]), sink)
    return bias, alibi


# -- forward ------------------------------------------------------------------------------------


def _forward(s: _Setup, r: _Rows) -> tuple[Bound, Bound, Array]:
    """Bounds of o and lse, and how far log p may be off where the backward pass keeps the forward's P."""
    p, u = s.p, s.p.u
    o = s.exact.o.hi[:, :, r.at]
    places = s.seen.shape[3]
    z = s.z if s.z.shape[2] == 1 else s.z[:, :, r.at]

    # The weights w_ij are exp(±log_error) off, so their sum by at most sum_j p_ij exp(log_error), up
    # and down (Cauchy-Schwarz: the two means' product is at least 1). The mean of the errors is no
    # bound of its log.
    from_scores, moved = _log_mean_exp(r, r.e), _log_mean_exp(r, r.log_error)

    # Probabilities w / sum w, which never pass 1.
    shift = np.where(r.seen, r.log_error + moved[..., None], 0.0)
    up = np.where(
        shift < 1.0,
        np.minimum(r.prob * np.expm1(np.minimum(shift, 1.0)), -np.expm1(r.logp)),
        np.exp(np.minimum(r.logp + shift, 0.0)) - r.prob,
    )
    error = np.maximum(up, -r.prob * np.expm1(-shift))
    most = r.prob + error  # the kernel's own probability is at most this

    # Output. Errors of a row's weights act on z v - o: sum (w - p)(z v - o) / sum w. The same holds of the
    # normalised probabilities, whose errors stay small where those of the weights are huge.
    spread = np.where(r.seen[..., None], np.abs(z[..., None] * s.v[:, :, None] - o[..., None, :]), 0.0)
    hull = spread.max(axis=3, initial=0.0)
    of_weights = _times(np.exp(moved)[..., None], r.prob * np.expm1(np.minimum(r.log_error, 1.0)))
    of_weights = np.where(r.log_error.max(axis=3, initial=0.0)[..., None] < 1.0, of_weights, np.inf)
    by_errors = np.fmin(_weighted(of_weights, spread), _weighted(error, spread))
    conditioning = np.minimum(by_errors, hull)  # no weights can leave the hull of V
    # Rounding: P on its way in, the sum with its rescales, the division (or 1/l and a product), which
    # may come before the product with V; and of the row sum, which divides what was summed so far.
    # A kernel that sums the row first weighs each key twice, by other paths where there were rescales.
    v_abs, o_abs = np.abs(s.v), np.abs(o)
    divided = max(p.u_exp, u) + u
    summed = growth(p, r.keys, places) + divided
    row_sum = growth(p, r.count, places, matmul=False) + (most * r.raised).sum(axis=3) * u
    twice = np.where(r.raised > 0, (2 + r.raised) * p.u_exp + _roundings(6, u) * r.x, 0.0)
    twice = (most * twice).sum(axis=3)
    inexact = p.u_p + s.u_z * (1 + p.u_p)
    most_v = (inexact + summed * (1 + inexact))[..., None] * ((z * most) @ v_abs)
    most_v = most_v + u * (1 + inexact) * ((z * most * r.raised) @ v_abs)
    divisor = _relative(row_sum + twice)[..., None]
    rounding = most_v * (1 + divisor) + divisor * (o_abs + conditioning)
    # Underflow: P on its way in, the products, what is rescaled; V that is read as 0; O itself.
    underflow = s.z_max * (np.minimum(most, s.tiny_p) @ v_abs + s.tiny_in * most.sum(axis=3)[..., None]) + p.tiny
    underflow = underflow + ((2 * r.count + 1) * s.tiny_u)[..., None] * (s.z_max + o_abs)
    parts = {"errors of the probabilities": conditioning, "rounding of P and of sums": rounding, "underflow": underflow}
    vacuous = (by_errors >= hull) & (hull > rounding + underflow)
    # unnormalised sums: each weight is at most 1
    sums = (z * r.seen) @ v_abs > s.acc_max
    empty = r.count == 0
    structural = np.abs(o) < 4 * p.tiny
    o_bound = _bound(o, parts, s.unit, vacuous, r.overflow[..., None] | sums, structural, empty[..., None])

    # Log-sum-exp: the weights, their sum, its log, the maximum brought to base e, the addition.
    log_sum = np.where(empty, 0.0, -np.where(r.seen, r.logp, -np.inf).max(axis=3, initial=-np.inf))
    top = r.lam - log_sum
    sums_and_exp = moved - from_scores + _relative(row_sum) + r.count * s.tiny_u
    lse = FORMATS[p.lse]
    parts = {
        "errors of the scores": from_scores,
        "exp and sums": np.where(empty, 0.0, sums_and_exp),
        "maximum and log": max(p.u_exp, u) * (log_sum + np.abs(r.apart) + moved + sums_and_exp)
        + _roundings(3, u) * (np.maximum(np.abs(top), np.abs(top - r.apart)) + np.abs(r.lam)),
        "underflow": np.full(empty.shape, p.tiny if p.lse == p.storage else lse.tiny),
    }
    never = np.zeros(empty.shape, dtype=bool)
    lse_bound = _bound(r.lam, parts, lse.unit, never, r.overflow, never, never)
    vacuous = lse_bound.vacuous | (lse_bound.allowed >= np.maximum(1.0, np.abs(r.lam)))
    kept = shift + (_relative(row_sum + twice) + divided)[..., None]
    return o_bound, _replace_vacuous(lse_bound, vacuous), kept


def _log_mean_exp(r: _Rows, error: Array) -> Array:
    """log sum_j p_ij exp(error_ij): by how much errors of the scores may move the log of their sum."""
    grown = np.where(r.seen, r.prob * np.expm1(np.minimum(error, 1.0)), 0.0).sum(axis=3)
    exact = np.where(error.max(axis=3, initial=0.0) > 1.0, _logsumexp(r.logp + error), np.log1p(grown))
    return np.maximum(exact, 0.0)


def _relative(error: Array) -> Array:
    """Relative error of 1/x, and of log x absolutely, where x is relatively ``error`` off."""
    return np.where(error < 1, error / np.maximum(1 - error, 2.0**-53), np.inf)


def _weighted(weights: Array, spread: Array) -> Array:
    """sum_j weights_ij spread_ijc."""
    return _sum_product(weights[..., None, :], spread)[..., 0, :]


# -- backward -----------------------------------------------------------------------------------


def _backward(s: _Setup, r: _Rows, o_bound: Bound, lse_bound: Bound, kept: Array, keys: _KeySide) -> Bound:
    """Bound of dq for these rows; what they add to dk, dv and dbias goes into ``keys``."""
    case, p, u = s.case, s.p, s.p.u
    dv, places = case.shape[6], s.seen.shape[3]
    z = s.z if s.z.shape[2] == 1 else s.z[:, :, r.at]
    do, dlse, o = s.do[:, :, r.at], s.dlse[:, :, r.at], s.exact.o.hi[:, :, r.at]
    do_abs, k_abs, v_abs = np.abs(do), np.abs(s.k), np.abs(s.v)

    # P again, from the stored log-sum-exp (nothing normalises it: it may pass 1), or the forward's.
    # Its argument: the difference, whose size is -log p, and log2(e) on it or on the log-sum-exp.
    lam_abs, logp_abs = np.abs(r.lam)[..., None], np.where(r.seen, np.abs(r.logp), 0.0)
    again = r.e + lse_bound.allowed[..., None] + _roundings(3, u) * logp_abs + _roundings(2, u) * lam_abs + p.u_exp
    again = np.where(r.seen, again, 0.0)
    shift = np.where(r.seen, np.fmax(again, kept), 0.0)
    error = np.where(shift < 1.0, r.prob * np.expm1(np.minimum(shift, 1.0)), np.exp(r.logp + shift) - r.prob)
    most = r.prob + error
    recompute_over = ~(again <= s.exp_max - 1).all(axis=3)
    recompute_over = recompute_over | _may_overflow(r.lam, lse_bound, FORMATS[p.lse].max)

    # dP = z <dO, v>: sums, flushed inputs, underflow, the factor of dropout.
    dp = z * (do @ s.v.swapaxes(2, 3))
    dov = do_abs @ v_abs.swapaxes(2, 3)
    dp_error = growth(p, dv, dv) * dov + dv * s.tiny_u
    dp_error = dp_error + s.tiny_in * (do_abs.sum(axis=3)[..., None] + v_abs.sum(axis=3)[:, :, None, :])
    # the factor of dropout may have been multiplied into dO or V
    dp_error = z * (dp_error * (1 + s.u_z) + s.u_z * dov)
    dp_abs, dov = np.abs(dp), s.z_max * dov

    # D = <dO, o> from the kernel's own O, or sum_j p_ij dP_ij: a kernel may take either.
    delta = (do * o).sum(axis=3)
    reach = np.abs(o) + np.where(np.isfinite(o_bound.allowed), o_bound.allowed, np.inf)
    from_o = _times(do_abs, o_bound.allowed).sum(axis=3) + dv * s.tiny_u
    from_o = from_o + (growth(p, dv, dv, matmul=False)[..., None] * do_abs * reach + s.tiny_in * reach).sum(axis=3)
    row_sum = growth(p, r.keys, places, matmul=False)[..., None] * most
    from_p = (_times(error + row_sum, dp_abs + dp_error) + r.prob * dp_error).sum(axis=3)
    from_p = from_p + r.count * s.tiny_u
    delta_error = np.fmax(from_o, from_p)
    delta_abs, dlse_abs = np.abs(delta)[..., None], np.abs(dlse)[..., None]

    # dS = p (dP - D + dlse). Whatever multiplies the kernel's own probability takes its largest.
    gap = np.abs(dp - delta[..., None] + dlse[..., None])
    ds = r.prob * gap
    pieces = dp_abs + dp_error + delta_abs + delta_error[..., None] + dlse_abs
    dp_delta = dp_error + delta_error[..., None] + _roundings(2, u) * pieces + 2 * s.z_max * s.tiny_u
    if s.u_z:
        # D and dlse brought down by 1 - p, and all of dS up again at the end
        dp_delta = dp_delta + (s.u_z + u) * (delta_abs + delta_error[..., None] + dlse_abs)
    y = _times(error, gap) + _times(most, dp_delta)
    ds_error = y + (p.u_p + u * (1 + p.u_p)) * (ds + y) + np.minimum(s.z_max * s.tiny_p, ds + y)
    ds_error = ds_error + np.minimum(s.tiny_p, most) * gap + s.z_max * s.tiny_u
    ds_error = np.where(r.seen, ds_error, 0.0)
    if s.sinks is not None:
        keys.add_sink(ds[..., -1], ds_error[..., -1], r, delta_abs + dlse_abs)
    natural = r.prob * (dp_abs + delta_abs + dlse_abs)
    # Headroom: the pieces of dP - D (hidden pairs too), O as it is stored, dS in the format it is
    # stored in, the scale multiplied into it or not.
    pieces = dov + _sum_product(do_abs[..., None, :], reach[..., None])[..., 0] + dlse_abs
    dsmost = (ds + ds_error) * (max(1.0, s.scale) if p.ds_scaled_first else 1.0)
    row_over = ~(pieces <= s.acc_max).all(axis=3) | (r.seen & ~(dsmost <= s.p_max)).any(axis=3)
    row_over = row_over | r.overflow | recompute_over | o_bound.overflow.any(axis=3)
    row_over = row_over | _may_overflow(o, o_bound, format_of(p.storage).max).any(axis=3)

    keys.add_bias(r.at, ds, ds_error, natural, row_over, r.seen)
    if s.sinks is not None:
        keys.sink_over |= row_over.any(axis=(0, 2))

    if case.softcap is not None:
        # through the cap: 1 - tanh^2 at a score that is e_raw off, and its own rounding
        c = case.softcap
        x = r.raw / c
        slope = np.where(x > 350, 0.0, 1 / np.cosh(np.minimum(x, 350.0)) ** 2)  # of a sink: nobody asks
        moved = 2 * r.e_raw / c
        slope_error = np.minimum(_times(slope, np.expm1(moved)), 1.0)
        # tanh's own error counts twice in its square; tanh may come from the score over c (twice two
        # roundings), the square and the difference round
        slope_error = slope_error + 2 * p.u_tanh * (1 + p.u_tanh) + _roundings(6, u)
        ds_error = _times(ds_error, slope + slope_error) + ds * slope_error
        through = ds * slope + ds_error
        ds_error = ds_error + u * through + np.minimum(s.z_max * s.tiny_p, through)
        ds_error = np.where(r.seen, ds_error, 0.0)
        ds, natural = ds * slope, natural * slope
    largest = ds + ds_error

    # dQ = scale dS K. The scale, or its root twice, is rounded and multiplied: four roundings.
    n, mass = r.keys[..., None], largest[..., : case.shape[4]].sum(axis=3)[..., None]
    ds_k = _sum_product(largest, k_abs)
    parts = {
        "errors of dS": s.scale * _sum_product(ds_error, k_abs),
        "sums": s.scale * (growth(p, n, places) + _roundings(4, u)) * ds_k,
        "underflow": _underflow(s, n, mass, ds_k),
    }
    if p.u_prescale:
        parts["k stored with the scale"] = p.u_prescale * s.scale * ds_k + p.tiny * s.root * mass
    signed = np.where(r.seen, np.sign(dp - delta[..., None] + dlse[..., None]) * ds, 0.0)
    if p.ds_scaled_first:
        parts["dS scaled before it is rounded"] = np.minimum(s.z_max * s.tiny_p, s.scale * largest) @ k_abs
    if p.grads_in_storage is not None:
        blocks = -(-case.shape[4] // p.grads_in_storage[1])
        parts["sums kept in storage"] = _kept_in_storage(s, parts, _in_storage_over_keys(s, signed), blocks)
    dq = s.exact.dq.hi[:, :, r.at]  # type: ignore[union-attr]
    size = s.scale * (natural @ k_abs)
    over = row_over[..., None] | ~(ds_k * max(1.0, s.scale) <= s.gradient_max)
    keys.add(r, do_abs, do, z * error, z * most, most, ds_error, signed, largest, natural, row_over, recompute_over)
    bound = _bound(dq, parts, s.unit, np.zeros_like(over), over, size < 4 * p.tiny, (r.count == 0)[..., None])
    return _replace_vacuous(bound, bound.vacuous | ((bound.allowed >= size) & ~bound.structural))


def _underflow(s: _Setup, n: Array, mass: Array, total: Array) -> Array:
    """What dQ or dK may lose below the formats' ranges. ``mass`` is sum |dS|, ``total`` sum |dS| |k|.

    Operands read as 0, or that the scale makes small; the scale itself; products, before or after the
    scale; the result.
    """
    operands = (s.scale * s.tiny_in + s.root * s.tiny_u) * mass
    return np.asarray(operands + s.tiny_u * total + max(1.0, s.scale) * n * s.z_max * s.tiny_u + s.p.tiny)


def _may_overflow(exact: Array, bound: Bound, most: float) -> Array:
    """Where a value that is stored on the way may be infinite."""
    return ~(np.abs(exact) + bound.allowed <= most)


def _kept_in_storage(s: _Setup, parts: dict[str, Array], running: Array, steps: int) -> Array:
    """Error of a sum that is rounded to storage in each of its steps, beyond that of its terms.

    ``running``: the sum over steps of one rounding of the exact running sum. The kernel's own running
    sum is off by what came before, and each later rounding makes that larger: (1 + unit)^steps.
    """
    before = sum(parts.values(), np.zeros(running.shape))
    power = math.expm1(steps * math.log1p(s.unit))
    return np.asarray(running + _times(np.asarray(power), before + running))


def _in_storage_over_keys(s: _Setup, signed: Array) -> Array:
    """dQ rounded to storage after each key block: one rounding of each running sum."""
    assert s.p.grads_in_storage is not None
    block, keys = s.p.grads_in_storage[1], s.case.shape[4]
    running, total = np.zeros(signed.shape[:3] + (s.k.shape[3],)), 0.0
    for start in range(0, keys, block):
        part = slice(start, min(start + block, keys))
        running = running + s.scale * (signed[..., part] @ s.k[:, :, part])
        total = total + s.unit * np.abs(running) + s.p.tiny
    return np.asarray(total) + np.zeros_like(running)


class _KeySide:
    """Sums over query rows and over the heads of a group: the bounds of dk, dv and dbias."""

    def __init__(self, s: _Setup) -> None:
        self.s = s
        b, hq, hk, _, _, d, dv = s.case.shape
        sk, zeros = s.seen.shape[3], np.zeros
        self.count = s.seen.reshape(b, hk, s.case.group * s.case.shape[3], sk).sum(axis=2)[..., None]
        self.dv = {
            name: zeros((b, hk, sk, dv))
            for name in ("errors of the probabilities", "rounding of P", "total", "natural")
        }
        self.dv["underflow"] = zeros((b, hk, sk, dv))
        self.mass = {name: zeros((b, hk, sk, 1)) for name in ("dk", "dv")}
        self.dk = {name: zeros((b, hk, sk, d)) for name in ("errors of dS", "total", "natural", "scaled first")}
        self.storage = {"dk": zeros((b, hk, sk, d)), "dv": zeros((b, hk, sk, dv))}
        self.running = {"dk": zeros((b, hq, sk, d)), "dv": zeros((b, hq, sk, dv))}
        self.dv_over = zeros((b, hk), dtype=bool)
        self.dk_over = zeros((b, hk), dtype=bool)
        self.bias: dict[str, Array] | None = None
        if s.case.bias is not None:
            self.bias = {name: zeros(s.case.bias.shape) for name in ("error", "total", "natural", "count", "over")}
        self.sink = {name: zeros((hq,)) for name in ("error", "total", "natural", "count")}
        self.sink_over = zeros((hq,), dtype=bool)

    def _group(self, array: Array) -> Array:
        """Sum over the query heads that share a key head, axis 1."""
        b, hk = self.count.shape[:2]
        return np.asarray(array.reshape(b, hk, self.s.case.group, *array.shape[2:]).sum(axis=2))

    def add(
        self,
        r: _Rows,
        do_abs: Array,
        do: Array,
        error: Array,
        most_z: Array,
        most: Array,
        ds_error: Array,
        signed: Array,
        largest: Array,
        natural: Array,
        row_over: Array,
        recompute_over: Array,
    ) -> None:
        s, p = self.s, self.s.p

        def over_rows(pairs: Array, rows: Array) -> Array:
            return self._group(_sum_product(pairs.swapaxes(2, 3), rows))

        self.dv["errors of the probabilities"] += over_rows(error, do_abs)
        z = s.z if s.z.shape[2] == 1 else s.z[:, :, r.at]
        self.dv["rounding of P"] += (p.u_p + s.u_z * (1 + p.u_p)) * over_rows(most_z, do_abs)
        self.dv["underflow"] += s.z_max * over_rows(np.minimum(most, s.tiny_p), do_abs)
        self.dv["total"] += over_rows(most_z, do_abs)
        self.dv["natural"] += over_rows(z * r.seen, do_abs)
        self.mass["dv"] += self._group(most_z.sum(axis=2)[..., None])
        self.mass["dk"] += self._group(largest.sum(axis=2)[..., None])
        self.dk["errors of dS"] += s.scale * over_rows(ds_error, r.q_abs)
        self.dk["total"] += over_rows(largest, r.q_abs)
        self.dk["natural"] += s.scale * over_rows(natural, r.q_abs)
        if p.ds_scaled_first:
            self.dk["scaled first"] += over_rows(np.minimum(s.z_max * s.tiny_p, s.scale * largest), r.q_abs)
        self.dv_over |= self._group(r.overflow | recompute_over).any(axis=2)
        self.dk_over |= self._group(row_over).any(axis=2)
        if p.grads_in_storage is not None:
            self._in_storage("dv", z * r.prob, do, p.grads_in_storage[0])
            self._in_storage("dk", s.scale * signed, s.q[:, :, r.at], p.grads_in_storage[0])

    def _in_storage(self, name: str, pairs: Array, rows: Array, block: int) -> None:
        """One rounding to storage of each head's running sum after each query block."""
        s = self.s
        for start in range(0, pairs.shape[2], block):
            part = slice(start, start + block)
            self.running[name] += pairs[:, :, part].swapaxes(2, 3) @ rows[:, :, part]
            self.storage[name] += self._group(s.unit * np.abs(self.running[name]) + s.p.tiny)

    def add_sink(self, ds: Array, error: Array, r: _Rows, pieces: Array) -> None:
        """Sums over batch entries and rows of the sink's own dS, [B, Hq, R]."""
        rows = {"error": error, "total": ds + error, "natural": r.prob[..., -1] * pieces[..., 0]}
        for name, array in {**rows, "count": r.seen[..., -1].astype(np.float64)}.items():
            self.sink[name] += array.sum(axis=(0, 2))

    def add_bias(self, at: slice, ds: Array, error: Array, natural: Array, over: Array, seen: Array) -> None:
        if self.bias is None:
            return
        pairs = {
            "error": error,
            "total": ds + error,
            "natural": natural,
            "count": seen.astype(np.float64),
            "over": np.broadcast_to(over[..., None], seen.shape).astype(np.float64),
        }
        for name, pair in pairs.items():
            array, stored = pair[..., : self.s.case.shape[4]], self.bias[name]
            rows = at if stored.ndim >= 2 and stored.shape[-2] > 1 else slice(None)
            target = stored[..., rows, :] if stored.ndim >= 2 else stored
            target += _sum_to(array, target.shape)

    def finish(self) -> dict[str, Bound]:
        s, p = self.s, self.s.p
        keys = s.case.shape[4]  # what a sink added as one more key is of no interest here
        for side in (self.dv, self.dk, self.mass, self.storage):
            side.update({name: array[:, :, :keys] for name, array in side.items()})
        self.running = {name: array[:, :, :keys] for name, array in self.running.items()}
        self.count = self.count[:, :, :keys]
        exact, n = s.exact, self.count
        never_seen = n == 0
        places = s.case.group * s.case.shape[3]
        found = {}

        parts = {
            "errors of the probabilities": self.dv["errors of the probabilities"],
            "rounding of P": self.dv["rounding of P"],
            "sums": growth(p, n, places) * self.dv["total"] * (1 + p.u_p) * (1 + s.u_z),
            "underflow": self.dv["underflow"] + s.tiny_in * self.mass["dv"] + p.tiny + n * s.z_max * s.tiny_u,
        }
        over = self.dv_over[..., None, None] | ~(self.dv["total"] <= s.gradient_max)
        found["dv"] = self._output("dv", exact.dv.hi, parts, self.dv["natural"], over, never_seen)  # type: ignore[union-attr]

        total = self.dk["total"]
        parts = {
            "errors of dS": self.dk["errors of dS"],
            "sums": s.scale * (growth(p, n, places) + _roundings(4, p.u)) * total,
            "underflow": _underflow(s, n, self.mass["dk"], total),
        }
        if p.u_prescale:
            parts["q stored with the scale"] = s.scale * p.u_prescale * total + p.tiny * s.root * self.mass["dk"]
        if p.ds_scaled_first:
            parts["dS scaled before it is rounded"] = self.dk["scaled first"]
        over = self.dk_over[..., None, None] | ~(total * max(1.0, s.scale) <= s.gradient_max)
        found["dk"] = self._output("dk", exact.dk.hi, parts, self.dk["natural"], over, never_seen)  # type: ignore[union-attr]

        if self.bias is not None and s.case.bias is not None:
            bias = self.bias
            parts = {
                "errors of dS": bias["error"],
                "sums": growth(p, bias["count"], self._places_of_bias(), matmul=False) * bias["total"],
                "underflow": np.full_like(bias["error"], p.tiny),
            }
            # a kernel that stores the bias in its own format does so with the bias's gradient too
            unit = max(format_of(s.case.bias.dtype).unit, p.u_bias)
            over = (bias["over"] > 0) | ~(bias["total"] <= (format_of(p.storage).max if p.u_bias else s.acc_max))
            bound = _bound(
                exact.dbias.hi,  # type: ignore[union-attr]
                parts,
                unit,
                np.zeros(bias["over"].shape, dtype=bool),
                over,
                bias["natural"] < 4 * p.tiny,
                bias["count"] == 0,
            )
            vacuous = (bound.allowed >= bias["natural"]) & ~bound.structural
            found["dbias"] = _replace_vacuous(bound, bound.vacuous | vacuous)
        if s.sinks is not None:
            found["dsink"] = self._of_sinks()
        return found

    def _of_sinks(self) -> Bound:
        s, p, sink, stored = self.s, self.s.p, self.sink, self.s.case.wide_format
        b, _, _, sq, _, _, _ = s.case.shape
        parts = {
            "errors of dS": sink["error"],
            "sums": growth(p, sink["count"], b * sq, matmul=False) * sink["total"],
            "underflow": np.full_like(sink["error"], stored.tiny),
        }
        over = self.sink_over | ~(sink["total"] <= s.acc_max)
        structural = sink["natural"] < 4 * stored.tiny
        exact = s.exact.dsink.hi  # type: ignore[union-attr]
        bound = _bound(exact, parts, stored.unit, np.zeros_like(over), over, structural, sink["count"] == 0)
        return _replace_vacuous(bound, bound.vacuous | ((bound.allowed >= sink["natural"]) & ~structural))

    def _output(
        self, name: str, exact: Array, parts: dict[str, Array], natural: Array, over: Array, never_seen: Array
    ) -> Bound:
        p = self.s.p
        if p.grads_in_storage is not None:
            running = self.storage[name] + self._over_group(name)
            shape = self.s.case.shape
            steps = -(-shape[3] // p.grads_in_storage[0]) + self.s.case.group
            parts["sums kept in storage"] = _kept_in_storage(self.s, parts, running, steps)
        bound = _bound(
            exact,
            parts,
            self.s.unit,
            np.zeros_like(over),
            over,
            natural < 4 * p.tiny,
            np.broadcast_to(never_seen, exact.shape),
        )
        return _replace_vacuous(bound, bound.vacuous | ((bound.allowed >= natural) & ~bound.structural))

    def _places_of_bias(self) -> int:
        """How many pairs one element of the stored bias is added to, hidden ones included."""
        assert self.s.case.bias is not None
        b, hq, _, sq, sk, _, _ = self.s.case.shape
        return b * hq * sq * sk // max(1, self.s.case.bias.size)

    def _over_group(self, name: str) -> Array:
        """One more rounding to storage for each head that is added to its group's sum."""
        b, hk = self.count.shape[:2]
        heads = self.running[name].reshape(b, hk, self.s.case.group, *self.running[name].shape[2:])
        if heads.shape[2] == 1:
            return np.zeros_like(heads[:, :, 0])
        return np.asarray(self.s.unit * np.abs(np.cumsum(heads, axis=2)).sum(axis=2))


# -- small arithmetic ---------------------------------------------------------------------------


def _bound(
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


def _replace_vacuous(bound: Bound, vacuous: Array) -> Bound:
    return Bound(bound.allowed, vacuous, bound.overflow, bound.structural, bound.must_be_zero, bound.parts)


def _joined(pieces: list[Bound]) -> Bound:
    if len(pieces) == 1:
        return pieces[0]

    def along_rows(name: str) -> Array:
        return np.concatenate([getattr(piece, name) for piece in pieces], axis=2)

    return Bound(
        allowed=along_rows("allowed"),
        vacuous=along_rows("vacuous"),
        overflow=along_rows("overflow"),
        structural=along_rows("structural"),
        must_be_zero=along_rows("must_be_zero"),
        parts={name: np.concatenate([x.parts[name] for x in pieces], axis=2) for name in pieces[0].parts},
    )


def _times(a: Array, b: Array) -> Array:
    """a b for magnitudes, with 0 * inf = inf: an error without bound times a rounded-off 0 is unknown."""
    product = a * b
    return np.where(np.isnan(product), np.inf, product)


def _sum_product(a: Array, b: Array) -> Array:
    """matmul of magnitudes, with 0 * inf = inf."""
    product = np.matmul(a, b)
    return np.where(np.isnan(product), np.inf, product)


def _logsumexp(a: Array) -> Array:
    """log of the sum over the last axis of exp; -inf where there is nothing."""
    top = a.max(axis=-1, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0.0)
    total = np.log(np.exp(a - safe[..., None]).sum(axis=-1)) + safe
    return np.where(top == np.inf, np.inf, total)


def _sum_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Sum [B, Hq, R, Sk] over the axes along which an array of this shape broadcasts."""
    full = (1,) * (4 - len(shape)) + shape
    axes = tuple(i for i, n in enumerate(full) if n == 1 and array.shape[i] != 1)
    return array.sum(axis=axes, keepdims=True).reshape(shape) if axes else array.reshape(shape)
