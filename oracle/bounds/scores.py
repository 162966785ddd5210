"""How far the scores of a step of query rows may be off, and the weights that are made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..formats import format_of
from ..visibility import broadcast_mask, distances
from .terms import Array, Setup, growth, roundings, times


@dataclass(frozen=True)
class Rows:
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


def scores(s: Setup, at: slice) -> Rows:
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
    e_raw = e_raw * (1 + roundings(n, u)) + roundings(n, u) * raw

    # softcap: tanh contracts; within e_raw of raw its slope stays below 4 exp(-2 |raw|/c + 2 e_raw/c).
    e, largest = e_raw, raw
    if case.softcap is not None:
        c = case.softcap
        slope = np.minimum(1.0, 4 * np.exp(np.minimum(2 * (e_raw - raw) / c, 0.0)))
        largest = c * np.tanh(raw / c)
        tanh = c * p.u_tanh if p.tanh_is_absolute else p.u_tanh * largest
        e = np.minimum(times(e_raw, slope) + tanh, 2 * c + c * p.u_tanh)
        # the product with c and log2(e); what is last is counted with the score below
        e = e * (1 + 3 * u) + roundings(3 if terms else 2, u) * largest
    # bias and ALiBi: the bias as the kernel stores it, slope times distance, log2(e), each addition.
    e = e + roundings(3, u) * added + p.u_bias * bias
    if p.u_bias:
        e = e + p.tiny
    if terms > 1:
        e = e + u * (largest + added)
    e = e * (1 + u) + u * np.where(seen, np.abs(logp + lam[..., None]), 0.0)
    if s.sinks is not None:
        # a sink is stored as a score: log2(e), and one rounding more where it is brought to the maximum
        e[..., -1] = np.broadcast_to(roundings(2, u) * s.sinks[..., 0], lam.shape)
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
    log_error = np.where(seen, e + roundings(3, u) * x + (1 + raised) * p.u_exp, 0.0)
    apart = np.zeros(lam.shape)
    if s.sinks is not None:
        # at the end of a row the sink is measured from the keys' maximum, unless that overflows
        of_keys = np.where(seen, logp, -np.inf)[..., :-1].max(axis=3, initial=-np.inf)
        apart = np.where(np.isfinite(of_keys), np.maximum(logp[..., -1] - of_keys, 0.0), lam)
        apart = np.where(seen[..., -1] & (np.abs(apart) <= math.log(2 * s.acc_max)), apart, 0.0)
        log_error[..., -1] += roundings(3, u) * np.abs(apart)
    return Rows(
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


def _scores_overflow(s: Setup, q_abs: Array, k_abs: Array, qk: Array, bias: Array, added: Array) -> Array:
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


def _added(s: Setup, at: slice) -> tuple[Array, Array]:
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
