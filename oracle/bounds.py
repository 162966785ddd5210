"""How far a correct kernel may be from the exact answer, element by element.

A forward error bound, evaluated from the exact values and the arithmetic that the kernel declares
(its Profile). Every term is a rounding that a right kernel may commit, named where it is computed;
nothing is fitted. The verdict elsewhere is |got - exact| / allowed.

Throughout, with u the accumulator's unit roundoff (standard model of floating-point arithmetic:
Higham, Accuracy and Stability of Numerical Algorithms, chapters 2 to 4):

- a sum of n products in any order errs by at most n u of the sum of their magnitudes; ``growth``
  adds the rounding of matmul operands and honours a declared shorter chain. Terms that are exactly
  0 (hidden pairs) do not round, so n counts what is visible.
- an absolute error e of a score becomes a factor exp(±e) of its probability.
- a value that is w off before it is stored is w + u_T (|exact| + w) off after rounding to format T.

Where the bound says nothing any more (it passes the natural size of the value, or an intermediate
may overflow) the element is vacuous: it is counted and shown, not judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .case import Case
from .enclosure import Exact
from .formats import FORMATS, format_of
from .profile import Profile
from .visibility import broadcast_mask, distances, rows_judged, visible

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
            o, lse = _forward(setup, rows)
            outs["o"].append(o)
            outs["lse"].append(lse)
            if keys is not None:
                outs["dq"].append(_backward(setup, rows, o, lse, keys))
        found = {name: _joined(pieces) for name, pieces in outs.items() if pieces}
        return found if keys is None else found | keys.finish()


def growth(profile: Profile, n: Array | int) -> Array:
    """Relative error of a sum of n products against the sum of their magnitudes."""
    n = np.asarray(n, dtype=np.float64)
    if profile.chain is None:
        length = n
    elif profile.chain == 0:
        length = np.ceil(np.log2(np.maximum(n, 1.0))) + 1
    else:
        length = np.minimum(n, profile.chain + np.ceil(n / profile.chain))
    return np.asarray(length * profile.u + 2 * profile.u_in + profile.u_in**2)


# -- what all formulas share ------------------------------------------------------------------


@dataclass(frozen=True)
class _Setup:
    case: Case
    exact: Exact
    p: Profile
    seen: Array  # [B, Hq, Sq, Sk]
    q: Array  # float64, like all that follows
    k: Array  # one per query head, like v
    v: Array
    do: Array  # 0 in rows of padding
    dlse: Array
    scale: float  # its magnitude
    unit: float  # of the storage format
    tiny_u: float  # smallest normal number of the accumulator
    tiny_p: float  # below this P and dS may flush on the way into their matmul
    acc_max: float  # half the accumulator's largest number
    p_max: float  # largest number of the format that dS is rounded to
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
    exp_max = {"float16": 10.0, "float64": 708.0}.get(p.storage if stored else p.accumulator, 87.0)
    return _Setup(
        case=case,
        exact=exact,
        p=p,
        seen=visible(case),
        q=case.q.astype(np.float64),
        k=per_query_head(case.k),
        v=per_query_head(case.v),
        do=do,
        dlse=dlse,
        scale=float(d) ** -0.5 if case.scale is None else abs(case.scale),
        unit=storage.unit,
        tiny_u=wide.tiny,
        tiny_p=p.tiny if stored else wide.tiny,
        acc_max=wide.max / 2,
        p_max=storage.max if stored else wide.max / 2,
        exp_max=exp_max,
    )


@dataclass(frozen=True)
class _Rows:
    """One step of query rows: exact facts and error terms that forward and backward share."""

    at: slice
    seen: Array  # [B, Hq, R, Sk]
    q_abs: Array
    raw: Array  # |raw|
    e_raw: Array  # error of the raw score
    slope: Array  # how much of e_raw tanh lets through, at most
    e: Array  # error of the score
    logp: Array
    prob: Array
    x: Array  # distance of the score below the row's maximum
    lam: Array  # [B, Hq, R]; 0 where the row is empty
    count: Array  # visible keys
    row_sum: Array  # relative error of sums over the row, with rescaling
    overflow: Array  # [B, Hq, R]: a score of the row, hidden ones included, may overflow


def _scores(s: _Setup, at: slice) -> _Rows:
    case, p, u = s.case, s.p, s.p.u
    assert s.exact.logp is not None and s.exact.raw is not None
    d = case.shape[5]
    seen, logp, raw = s.seen[:, :, at], s.exact.logp[:, :, at], np.abs(s.exact.raw[:, :, at])
    lam = s.exact.lse.hi[:, :, at]
    lam = np.where(np.isfinite(lam), lam, 0.0)
    count = seen.sum(axis=3)

    # The product q.k: sums, inputs that flush, products that underflow (before and after the scale).
    q_abs, k_abs = np.abs(s.q[:, :, at]), np.abs(s.k)
    qk = q_abs @ k_abs.swapaxes(2, 3)
    q_and_k = q_abs.sum(axis=3)[..., None] + k_abs.sum(axis=3)[:, :, None, :]
    e_raw = s.scale * (growth(p, d) * qk + p.tiny * q_and_k + d * s.tiny_u) + s.tiny_u * qk
    # The scale's own rounding, its product with q, k or q.k (one on each), and a cap's division.
    e_raw = e_raw + (3 if case.softcap is None else 4) * u * raw
    if p.u_prescale:
        # q, or q and k by the scale's root, were stored with the scale already in them.
        e_raw = e_raw + p.u_prescale * s.scale * qk + p.tiny * max(1.0, s.scale**0.5) * q_and_k

    # softcap: tanh contracts; within e_raw of raw its slope stays below 4 exp(-2 |raw|/c + 2 e_raw/c).
    e, slope, capped = e_raw, np.ones_like(raw), raw
    if case.softcap is not None:
        c = case.softcap
        slope = np.minimum(1.0, 4 * np.exp(np.minimum(2 * (e_raw - raw) / c, 0.0)))
        capped = c * np.tanh(raw / c)
        tanh = c * p.u_tanh if p.tanh_is_absolute else p.u_tanh * capped
        e = np.minimum(_times(e_raw, slope) + tanh, 2 * c + c * p.u_tanh)
    # bias and ALiBi: their own rounding and that of each addition (partial sums where there are two).
    added, terms = _bias_magnitude(s, at)
    e = e + (u + p.u_bias) * added + u * np.where(seen, np.abs(logp + lam[..., None]), 0.0)
    if terms > 1:
        e = e + u * (capped + added)

    top = np.where(seen, logp, -np.inf).max(axis=3, initial=-np.inf)
    # Rescales of what was summed before: visible keys may be spread, one to a block.
    steps = np.maximum(np.minimum(count, np.ceil(seen.shape[3] / p.key_block)) - 1, 0)
    # Headroom: hidden pairs are computed too, and before they are scaled.
    over = (np.maximum(qk, s.scale * qk) + added > s.acc_max).any(axis=3)
    if p.u_prescale and case.k.size:
        largest = max(s.scale, s.scale**0.5) * np.maximum(q_abs.max(axis=3), k_abs.max(axis=(2, 3))[..., None])
        over = over | (largest > format_of(p.storage).max)
    return _Rows(
        at=at,
        seen=seen,
        q_abs=q_abs,
        raw=raw,
        e_raw=e_raw,
        slope=slope,
        e=np.where(seen, e, 0.0),
        logp=logp,
        prob=np.exp(logp),
        x=np.where(seen, top[..., None] - logp, 0.0),
        lam=lam,
        count=count,
        row_sum=growth(p, count) + 4 * u + steps * (p.u_exp + 2 * u),
        overflow=over,
    )


def _bias_magnitude(s: _Setup, at: slice) -> tuple[Array, int]:
    """|bias| + |ALiBi| per pair, and how many of the two there are."""
    case, terms = s.case, 0
    added: Array = np.zeros((1, 1, 1, 1))
    if case.bias is not None:
        bias = broadcast_mask(case, np.abs(case.bias.astype(np.float64)))[:, :, at]
        added, terms = np.where(np.isfinite(bias), bias, 0.0), terms + 1
    if case.alibi_slopes is not None:
        slopes = np.broadcast_to(np.abs(case.alibi_slopes.astype(np.float64)), case.q.shape[:2])
        added = added + slopes[..., None, None] * np.abs(distances(case)[:, None, at])
        terms += 1
    return added, terms


# -- forward ------------------------------------------------------------------------------------


def _forward(s: _Setup, r: _Rows) -> tuple[Bound, Bound]:
    p, u = s.p, s.p.u
    o = s.exact.o.hi[:, :, r.at]

    # lambda moves by at most log sum_j p_ij exp(e_ij). (The mean of e is no bound of it.)
    grown = np.where(r.seen, r.prob * np.expm1(np.minimum(r.e, 1.0)), 0.0).sum(axis=3)
    lam_error = np.where(r.e.max(axis=3, initial=0.0) > 1.0, _logsumexp(r.logp + r.e), np.log1p(grown))
    lam_error = np.maximum(lam_error, 0.0)

    # Probabilities: score, row sum, the argument's rounding and exp with the division.
    shift = np.where(r.seen, r.e + lam_error[..., None] + u * (r.x + 4) + p.u_exp, 0.0)
    up = np.where(
        shift < 1.0,
        np.minimum(r.prob * np.expm1(np.minimum(shift, 1.0)), -np.expm1(r.logp)),
        np.exp(np.minimum(r.logp + shift, 0.0)) - r.prob,
    )
    error = np.maximum(up, -r.prob * np.expm1(-shift))
    most = r.prob + error  # the kernel's own probability is at most this

    # Output. The errors of a row's probabilities sum to 0 but for rounding, so they act on v - o.
    spread = np.where(r.seen[..., None], np.abs(s.v[:, :, None] - o[..., None, :]), 0.0)
    by_errors = _sum_product(error[..., None, :], spread)[..., 0, :]
    hull = spread.max(axis=3, initial=0.0)
    conditioning = np.minimum(by_errors, hull)  # no weights can leave the hull of V
    v_abs = np.abs(s.v)
    rounding = (p.u_p + 2 * r.row_sum)[..., None] * (most @ v_abs)
    underflow = np.minimum(most, s.tiny_p) @ v_abs + (p.tiny + r.count * s.tiny_u)[..., None]
    parts = {"errors of the probabilities": conditioning, "rounding of P and of sums": rounding, "underflow": underflow}
    vacuous = (by_errors >= hull) & (hull > rounding + underflow)
    # unnormalised sums: each weight is at most 1
    sums = r.seen.astype(np.float64) @ v_abs > s.acc_max
    empty = r.count == 0
    structural = np.abs(o) < 4 * p.tiny
    o_bound = _bound(o, parts, s.unit, vacuous, r.overflow[..., None] | sums, structural, empty[..., None])

    # Log-sum-exp: exp of each term at its own argument, the sum, the maximum added to the log.
    top = np.where(r.seen, r.logp, -np.inf).max(axis=3, initial=-np.inf)
    top = np.where(empty, 0.0, top) + r.lam
    parts = {
        "errors of the scores": lam_error,
        "exp and sums": np.where(empty, 0.0, r.row_sum + p.u_exp + u * (most * (r.x + 1)).sum(axis=3)),
        "maximum and log": 2 * u * (np.abs(top) + np.abs(r.lam)),
    }
    never = np.zeros(empty.shape, dtype=bool)
    lse_bound = _bound(r.lam, parts, FORMATS[p.lse].unit, never, r.overflow, never, never)
    vacuous = lse_bound.vacuous | (lse_bound.allowed >= np.maximum(1.0, np.abs(r.lam)))
    return o_bound, _replace_vacuous(lse_bound, vacuous)


# -- backward -----------------------------------------------------------------------------------


def _backward(s: _Setup, r: _Rows, o_bound: Bound, lse_bound: Bound, keys: _KeySide) -> Bound:
    """Bound of dq for these rows; what they add to dk, dv and dbias goes into ``keys``."""
    case, p, u = s.case, s.p, s.p.u
    dv = case.shape[6]
    do, dlse, o = s.do[:, :, r.at], s.dlse[:, :, r.at], s.exact.o.hi[:, :, r.at]
    do_abs, k_abs, v_abs = np.abs(do), np.abs(s.k), np.abs(s.v)

    # P again, from the stored log-sum-exp. Nothing normalises it: it may pass 1.
    shift = np.where(
        r.seen, r.e + lse_bound.allowed[..., None] + u * (r.x + np.abs(r.lam[..., None]) + 4) + p.u_exp, 0.0
    )
    error = np.where(shift < 1.0, r.prob * np.expm1(np.minimum(shift, 1.0)), np.exp(r.logp + shift) - r.prob)
    most = r.prob + error
    recompute_over = (shift > s.exp_max - 1).any(axis=3)

    # dP = <dO, v>: sums, flushed inputs, underflow.
    dp = do @ s.v.swapaxes(2, 3)
    dov = do_abs @ v_abs.swapaxes(2, 3)
    dp_error = growth(p, dv) * dov + dv * s.tiny_u
    dp_error = dp_error + p.tiny * (do_abs.sum(axis=3)[..., None] + v_abs.sum(axis=3)[:, :, None, :])
    dp_abs = np.abs(dp)

    # D = <dO, o> from the kernel's own O, or sum_j p_ij dP_ij: a kernel may take either.
    delta = (do * o).sum(axis=3)
    from_o = _sum_product(do_abs[..., None, :], o_bound.allowed[..., None])[..., 0, 0]
    from_o = from_o + growth(p, dv) * (do_abs * np.abs(o)).sum(axis=3) + dv * s.tiny_u
    from_p = (_times(error + r.row_sum[..., None] * most, dp_abs) + _times(most, dp_error)).sum(axis=3)
    from_p = from_p + r.count * s.tiny_u
    delta_error = np.fmax(from_o, from_p)
    delta_abs, dlse_abs = np.abs(delta)[..., None], np.abs(dlse)[..., None]

    # dS = p (dP - D + dlse). Whatever multiplies the kernel's own probability takes its largest.
    gap = np.abs(dp - delta[..., None] + dlse[..., None])
    ds = r.prob * gap
    y = _times(error, gap) + _times(most, dp_error + delta_error[..., None] + 2 * u * (dp_abs + delta_abs + dlse_abs))
    ds_error = y + (p.u_p + 2 * u) * (ds + y) + np.minimum(s.tiny_p, ds + y)
    ds_error = ds_error + np.minimum(s.tiny_p, most) * gap + s.tiny_u
    ds_error = np.where(r.seen, ds_error, 0.0)
    natural = r.prob * (dp_abs + delta_abs + dlse_abs)
    # Headroom: the pieces of dP - D (hidden pairs too), and dS in the format it is stored in.
    reach = np.abs(o) + np.where(np.isfinite(o_bound.allowed), o_bound.allowed, np.inf)
    pieces = dov + _sum_product(do_abs[..., None, :], reach[..., None])[..., 0] + dlse_abs
    row_over = (pieces > s.acc_max).any(axis=3) | (ds + ds_error > s.p_max).any(axis=3)
    row_over = row_over | r.overflow | recompute_over | o_bound.overflow.any(axis=3)

    keys.add_bias(r.at, ds, ds_error, natural, row_over, r.seen)

    if case.softcap is not None:
        # through the cap: 1 - tanh^2 at a score that is e_raw off, and its own rounding
        c = case.softcap
        x = r.raw / c
        slope = np.where(x > 350, 0.0, 1 / np.cosh(np.minimum(x, 350.0)) ** 2)
        moved = 2 * r.e_raw / c
        slope_error = np.minimum(_times(slope, np.expm1(moved)), 1.0)
        slope_error = slope_error + 6 * p.u_tanh * np.where(moved >= 1, r.slope, 1.0)
        ds_error = _times(ds_error, slope + slope_error) + ds * slope_error + u * ds * slope
        ds_error = np.where(r.seen, ds_error + s.tiny_p, 0.0)
        ds, natural = ds * slope, natural * slope
    largest = ds + ds_error

    # dQ = scale dS K
    n = r.count[..., None]
    ds_k = _sum_product(largest, k_abs)
    parts = {
        "errors of dS": s.scale * _sum_product(ds_error, k_abs),
        "sums": s.scale * growth(p, n) * ds_k,
        "underflow": s.scale * n * s.tiny_u + s.tiny_u * ds_k + p.tiny,
    }
    signed = np.where(r.seen, np.sign(dp - delta[..., None] + dlse[..., None]) * ds, 0.0)
    if p.ds_scaled_first:
        parts["dS scaled before it is rounded"] = np.minimum(p.tiny, s.scale * largest) @ k_abs
    if p.grads_in_storage is not None:
        parts["sums kept in storage"] = _in_storage_over_keys(s, signed)
    dq = s.exact.dq.hi[:, :, r.at]  # type: ignore[union-attr]
    size = s.scale * (natural @ k_abs)
    over = row_over[..., None] | (ds_k * max(1.0, s.scale) > s.acc_max)
    keys.add(r, do_abs, do, error, most, ds_error, signed, largest, natural, row_over, recompute_over)
    bound = _bound(dq, parts, s.unit, np.zeros_like(over), over, size < 4 * p.tiny, (r.count == 0)[..., None])
    return _replace_vacuous(bound, bound.vacuous | ((bound.allowed >= size) & ~bound.structural))


def _in_storage_over_keys(s: _Setup, signed: Array) -> Array:
    """dQ rounded to storage after each key block: one rounding of each running sum."""
    assert s.p.grads_in_storage is not None
    block = s.p.grads_in_storage[1]
    running, total = np.zeros(signed.shape[:3] + (s.k.shape[3],)), 0.0
    for start in range(0, s.k.shape[2], block):
        part = slice(start, start + block)
        running = running + s.scale * (signed[..., part] @ s.k[:, :, part])
        total = total + s.unit * np.abs(running) + s.p.tiny
    return np.asarray(total) + np.zeros_like(running)


class _KeySide:
    """Sums over query rows and over the heads of a group: the bounds of dk, dv and dbias."""

    def __init__(self, s: _Setup) -> None:
        self.s = s
        b, hq, hk, _, sk, d, dv = s.case.shape
        zeros = np.zeros
        self.count = s.seen.reshape(b, hk, s.case.group * s.case.shape[3], sk).sum(axis=2)[..., None]
        self.dv = {
            name: zeros((b, hk, sk, dv))
            for name in ("errors of the probabilities", "rounding of P", "total", "natural")
        }
        self.dv["underflow"] = zeros((b, hk, sk, dv))
        self.dk = {name: zeros((b, hk, sk, d)) for name in ("errors of dS", "total", "natural", "scaled first")}
        self.storage = {"dk": zeros((b, hk, sk, d)), "dv": zeros((b, hk, sk, dv))}
        self.running = {"dk": zeros((b, hq, sk, d)), "dv": zeros((b, hq, sk, dv))}
        self.dv_over = zeros((b, hk), dtype=bool)
        self.dk_over = zeros((b, hk), dtype=bool)
        self.bias = None
        if s.case.bias is not None:
            self.bias = {name: zeros(s.case.bias.shape) for name in ("error", "total", "natural", "count", "over")}

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
        self.dv["rounding of P"] += p.u_p * over_rows(most, do_abs)
        self.dv["underflow"] += over_rows(np.minimum(most, s.tiny_p), do_abs)
        self.dv["total"] += over_rows(most, do_abs)
        self.dv["natural"] += over_rows(r.seen.astype(np.float64), do_abs)
        self.dk["errors of dS"] += s.scale * over_rows(ds_error, r.q_abs)
        self.dk["total"] += over_rows(largest, r.q_abs)
        self.dk["natural"] += s.scale * over_rows(natural, r.q_abs)
        if p.ds_scaled_first:
            self.dk["scaled first"] += over_rows(np.minimum(p.tiny, s.scale * largest), r.q_abs)
        self.dv_over |= self._group(r.overflow | recompute_over).any(axis=2)
        self.dk_over |= self._group(row_over).any(axis=2)
        if p.grads_in_storage is not None:
            self._in_storage("dv", r.prob, do, p.grads_in_storage[0])
            self._in_storage("dk", s.scale * signed, s.q[:, :, r.at], p.grads_in_storage[0])

    def _in_storage(self, name: str, pairs: Array, rows: Array, block: int) -> None:
        """One rounding to storage of each head's running sum after each query block."""
        s = self.s
        for start in range(0, pairs.shape[2], block):
            part = slice(start, start + block)
            self.running[name] += pairs[:, :, part].swapaxes(2, 3) @ rows[:, :, part]
            self.storage[name] += self._group(s.unit * np.abs(self.running[name]) + s.p.tiny)

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
        for name, array in pairs.items():
            stored = self.bias[name]
            rows = at if stored.ndim >= 2 and stored.shape[-2] > 1 else slice(None)
            target = stored[..., rows, :] if stored.ndim >= 2 else stored
            target += _sum_to(array, target.shape)

    def finish(self) -> dict[str, Bound]:
        s, p = self.s, self.s.p
        exact, n = s.exact, self.count
        never_seen = n == 0
        found = {}

        parts = {
            "errors of the probabilities": self.dv["errors of the probabilities"],
            "rounding of P": self.dv["rounding of P"],
            "sums": growth(p, n) * self.dv["total"],
            "underflow": self.dv["underflow"] + p.tiny + n * s.tiny_u,
        }
        over = self.dv_over[..., None, None] | (self.dv["total"] > s.acc_max)
        found["dv"] = self._output("dv", exact.dv.hi, parts, self.dv["natural"], over, never_seen)  # type: ignore[union-attr]

        total = self.dk["total"]
        parts = {
            "errors of dS": self.dk["errors of dS"],
            "sums": s.scale * growth(p, n) * total,
            "underflow": s.scale * n * s.tiny_u + s.tiny_u * total + p.tiny,
        }
        if p.u_prescale:
            parts["q stored with the scale"] = s.scale * p.u_prescale * total + p.tiny * total
        if p.ds_scaled_first:
            parts["dS scaled before it is rounded"] = self.dk["scaled first"]
        over = self.dk_over[..., None, None] | (total * max(1.0, s.scale) > s.acc_max)
        found["dk"] = self._output("dk", exact.dk.hi, parts, self.dk["natural"], over, never_seen)  # type: ignore[union-attr]

        if self.bias is not None and s.case.bias is not None:
            bias = self.bias
            parts = {
                "errors of dS": bias["error"],
                "sums": growth(p, bias["count"]) * bias["total"],
                "underflow": np.full_like(bias["error"], p.tiny),
            }
            unit = max(format_of(s.case.bias.dtype).unit, p.u_bias)
            bound = _bound(
                exact.dbias.hi,  # type: ignore[union-attr]
                parts,
                unit,
                np.zeros(bias["over"].shape, dtype=bool),
                bias["over"] > 0,
                bias["natural"] < 4 * p.tiny,
                bias["count"] == 0,
            )
            vacuous = (bound.allowed >= bias["natural"]) & ~bound.structural
            found["dbias"] = _replace_vacuous(bound, bound.vacuous | vacuous)
        return found

    def _output(
        self, name: str, exact: Array, parts: dict[str, Array], natural: Array, over: Array, never_seen: Array
    ) -> Bound:
        p = self.s.p
        if p.grads_in_storage is not None:
            parts["sums kept in storage"] = self.storage[name] + self._over_group(name)
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

    def along_rows(arrays: list[Array]) -> Array:
        return np.concatenate(arrays, axis=2)

    return Bound(
        *(
            along_rows([getattr(x, name) for x in pieces])
            for name in ("allowed", "vacuous", "overflow", "structural", "must_be_zero")
        ),
        parts={name: along_rows([x.parts[name] for x in pieces]) for name in pieces[0].parts},
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
