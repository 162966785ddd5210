"""How far dQ may be off, and what a step of query rows adds to the sums of the key side."""

from __future__ import annotations

import numpy as np

from ..formats import FORMATS, format_of
from .keys import KeySide, Pairs, kept_in_storage, underflow_of
from .scores import Rows
from .terms import Array, Bound, Setup, growth, roundings, stored_bound, sum_product, times, with_vacuous


def backward(s: Setup, r: Rows, o_bound: Bound, lse_bound: Bound, kept: Array, keys: KeySide) -> Bound:
    """Bound of dq for these rows; what they add to dk, dv and dbias goes into ``keys``."""
    case, p, u = s.case, s.p, s.p.u
    dv, places = case.shape[6], s.seen.shape[3]
    z = s.z if s.z.shape[2] == 1 else s.z[:, :, r.at]
    do, dlse, o = s.do[:, :, r.at], s.dlse[:, :, r.at], s.exact.o.hi[:, :, r.at]
    do_abs, k_abs, v_abs = np.abs(do), np.abs(s.k), np.abs(s.v)

    # P again, from the stored log-sum-exp (nothing normalises it: it may pass 1), or the forward's.
    # Its argument: the difference, whose size is -log p, and log2(e) on it or on the log-sum-exp.
    lam_abs, logp_abs = np.abs(r.lam)[..., None], np.where(r.seen, np.abs(r.logp), 0.0)
    again = r.e + lse_bound.allowed[..., None] + roundings(3, u) * logp_abs + roundings(2, u) * lam_abs + p.u_exp
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
    from_o = times(do_abs, o_bound.allowed).sum(axis=3) + dv * s.tiny_u
    from_o = from_o + (growth(p, dv, dv, matmul=False)[..., None] * do_abs * reach + s.tiny_in * reach).sum(axis=3)
    row_sum = growth(p, r.keys, places, matmul=False)[..., None] * most
    from_p = (times(error + row_sum, dp_abs + dp_error) + r.prob * dp_error).sum(axis=3)
    from_p = from_p + r.count * s.tiny_u
    delta_error = np.fmax(from_o, from_p)
    delta_abs, dlse_abs = np.abs(delta)[..., None], np.abs(dlse)[..., None]

    # dS = p (dP - D + dlse). Whatever multiplies the kernel's own probability takes its largest.
    gap = np.abs(dp - delta[..., None] + dlse[..., None])
    ds = r.prob * gap
    pieces = dp_abs + dp_error + delta_abs + delta_error[..., None] + dlse_abs
    dp_delta = dp_error + delta_error[..., None] + roundings(2, u) * pieces + 2 * s.z_max * s.tiny_u
    if s.u_z:
        # D and dlse brought down by 1 - p, and all of dS up again at the end
        dp_delta = dp_delta + (s.u_z + u) * (delta_abs + delta_error[..., None] + dlse_abs)
    y = times(error, gap) + times(most, dp_delta)
    ds_error = y + (p.u_p + u * (1 + p.u_p)) * (ds + y) + np.minimum(s.z_max * s.tiny_p, ds + y)
    ds_error = ds_error + np.minimum(s.tiny_p, most) * gap + s.z_max * s.tiny_u
    ds_error = np.where(r.seen, ds_error, 0.0)
    if s.sinks is not None:
        keys.add_sink(ds[..., -1], ds_error[..., -1], r, delta_abs + dlse_abs)
    natural = r.prob * (dp_abs + delta_abs + dlse_abs)
    # Headroom: the pieces of dP - D (hidden pairs too), O as it is stored, dS in the format it is
    # stored in, the scale multiplied into it or not.
    pieces = dov + sum_product(do_abs[..., None, :], reach[..., None])[..., 0] + dlse_abs
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
        slope_error = np.minimum(times(slope, np.expm1(moved)), 1.0)
        # tanh's own error counts twice in its square; tanh may come from the score over c (twice two
        # roundings), the square and the difference round
        slope_error = slope_error + 2 * p.u_tanh * (1 + p.u_tanh) + roundings(6, u)
        ds_error = times(ds_error, slope + slope_error) + ds * slope_error
        through = ds * slope + ds_error
        ds_error = ds_error + u * through + np.minimum(s.z_max * s.tiny_p, through)
        ds_error = np.where(r.seen, ds_error, 0.0)
        ds, natural = ds * slope, natural * slope
    largest = ds + ds_error

    # dQ = scale dS K. The scale, or its root twice, is rounded and multiplied: four roundings.
    n, mass = r.keys[..., None], largest[..., : case.shape[4]].sum(axis=3)[..., None]
    ds_k = sum_product(largest, k_abs)
    parts = {
        "errors of dS": s.scale * sum_product(ds_error, k_abs),
        "sums": s.scale * (growth(p, n, places) + roundings(4, u)) * ds_k,
        "underflow": underflow_of(s, n, mass, ds_k),
    }
    if p.u_prescale:
        parts["k stored with the scale"] = p.u_prescale * s.scale * ds_k + p.tiny * s.root * mass
    signed = np.where(r.seen, np.sign(dp - delta[..., None] + dlse[..., None]) * ds, 0.0)
    if p.ds_scaled_first:
        parts["dS scaled before it is rounded"] = np.minimum(s.z_max * s.tiny_p, s.scale * largest) @ k_abs
    if p.grads_in_storage is not None:
        blocks = -(-case.shape[4] // p.grads_in_storage[1])
        parts["sums kept in storage"] = kept_in_storage(s, parts, _in_storage_over_keys(s, signed), blocks)
    dq = s.exact.dq.hi[:, :, r.at]  # type: ignore[union-attr]
    size = s.scale * (natural @ k_abs)
    over = row_over[..., None] | ~(ds_k * max(1.0, s.scale) <= s.gradient_max)
    keys.add(
        r,
        Pairs(
            do=do,
            error_z=z * error,
            most_z=z * most,
            most=most,
            ds_error=ds_error,
            ds_signed=signed,
            ds_most=largest,
            natural=natural,
            dv_over=r.overflow | recompute_over,
            dk_over=row_over,
        ),
    )
    bound = stored_bound(dq, parts, s.unit, np.zeros_like(over), over, size < 4 * p.tiny, (r.count == 0)[..., None])
    return with_vacuous(bound, bound.vacuous | ((bound.allowed >= size) & ~bound.structural))


def _may_overflow(exact: Array, bound: Bound, most: float) -> Array:
    """Where a value that is stored on the way may be infinite."""
    return ~(np.abs(exact) + bound.allowed <= most)


def _in_storage_over_keys(s: Setup, signed: Array) -> Array:
    """dQ rounded to storage after each key block: one rounding of each running sum."""
    assert s.p.grads_in_storage is not None
    block, keys = s.p.grads_in_storage[1], s.case.shape[4]
    running, total = np.zeros(signed.shape[:3] + (s.k.shape[3],)), 0.0
    for start in range(0, keys, block):
        part = slice(start, min(start + block, keys))
        running = running + s.scale * (signed[..., part] @ s.k[:, :, part])
        total = total + s.unit * np.abs(running) + s.p.tiny
    return np.asarray(total) + np.zeros_like(running)
