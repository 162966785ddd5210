"""How far the output and the log-sum-exp may be off."""

from __future__ import annotations

import numpy as np

from ..formats import FORMATS
from .scores import Rows
from .terms import Array, Bound, Setup, growth, roundings, stored_bound, sum_product, times, with_vacuous


def forward(s: Setup, r: Rows) -> tuple[Bound, Bound, Array]:
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
    of_weights = times(np.exp(moved)[..., None], r.prob * np.expm1(np.minimum(r.log_error, 1.0)))
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
    twice = np.where(r.raised > 0, (2 + r.raised) * p.u_exp + roundings(6, u) * r.x, 0.0)
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
    o_bound = stored_bound(o, parts, s.unit, vacuous, r.overflow[..., None] | sums, structural, empty[..., None])

    # Log-sum-exp: the weights, their sum, its log, the maximum brought to base e, the addition.
    log_sum = np.where(empty, 0.0, -np.where(r.seen, r.logp, -np.inf).max(axis=3, initial=-np.inf))
    top = r.lam - log_sum
    sums_and_exp = moved - from_scores + _relative(row_sum) + r.count * s.tiny_u
    lse = FORMATS[p.lse]
    parts = {
        "errors of the scores": from_scores,
        "exp and sums": np.where(empty, 0.0, sums_and_exp),
        "maximum and log": max(p.u_exp, u) * (log_sum + np.abs(r.apart) + moved + sums_and_exp)
        + roundings(3, u) * (np.maximum(np.abs(top), np.abs(top - r.apart)) + np.abs(r.lam)),
        "underflow": np.full(empty.shape, p.tiny if p.lse == p.storage else lse.tiny),
    }
    never = np.zeros(empty.shape, dtype=bool)
    lse_bound = stored_bound(r.lam, parts, lse.unit, never, r.overflow, never, never)
    vacuous = lse_bound.vacuous | (lse_bound.allowed >= np.maximum(1.0, np.abs(r.lam)))
    kept = shift + (_relative(row_sum + twice) + divided)[..., None]
    return o_bound, with_vacuous(lse_bound, vacuous), kept


def _log_mean_exp(r: Rows, error: Array) -> Array:
    """log sum_j p_ij exp(error_ij): by how much errors of the scores may move the log of their sum."""
    grown = np.where(r.seen, r.prob * np.expm1(np.minimum(error, 1.0)), 0.0).sum(axis=3)
    exact = np.where(error.max(axis=3, initial=0.0) > 1.0, _logsumexp(r.logp + error), np.log1p(grown))
    return np.maximum(exact, 0.0)


def _relative(error: Array) -> Array:
    """Relative error of 1/x, and of log x absolutely, where x is relatively ``error`` off."""
    return np.where(error < 1, error / np.maximum(1 - error, 2.0**-53), np.inf)


def _weighted(weights: Array, spread: Array) -> Array:
    """sum_j weights_ij spread_ijc."""
    return sum_product(weights[..., None, :], spread)[..., 0, :]


def _logsumexp(a: Array) -> Array:
    """log of the sum over the last axis of exp; -inf where there is nothing."""
    top = a.max(axis=-1, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0.0)
    total = np.log(np.exp(a - safe[..., None]).sum(axis=-1)) + safe
    return np.where(top == np.inf, np.inf, total)
