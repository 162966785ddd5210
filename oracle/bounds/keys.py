"""How far dK, dV, dbias and dsink may be off: sums over query rows, and over the heads of a group."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..formats import format_of
from .scores import Rows
from .terms import Array, Bound, Setup, growth, roundings, stored_bound, sum_product, times, with_vacuous


@dataclass(frozen=True)
class Pairs:
    """What a step of query rows adds to the key side: per pair [B, Hq, R, Sk], but for ``do`` and the flags."""

    do: Array  # [B, Hq, R, Dv]
    error_z: Array  # error of P, times the factor of dropout
    most_z: Array  # the kernel's own P at most, times that factor
    most: Array  # without it
    ds_error: Array
    ds_signed: Array  # the exact dS
    ds_most: Array  # the kernel's own |dS| at most
    natural: Array  # the size of what dS is made of
    dv_over: Array  # [B, Hq, R]: rows that may overflow on the way to dV
    dk_over: Array  # and to dK


class KeySide:
    """Sums over query rows and over the heads of a group: the bounds of dk, dv and dbias."""

    def __init__(self, s: Setup) -> None:
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

    def add(self, r: Rows, pairs: Pairs) -> None:
        s, p = self.s, self.s.p
        do_abs = np.abs(pairs.do)

        def over_rows(of_pairs: Array, rows: Array) -> Array:
            return self._group(sum_product(of_pairs.swapaxes(2, 3), rows))

        self.dv["errors of the probabilities"] += over_rows(pairs.error_z, do_abs)
        z = s.z if s.z.shape[2] == 1 else s.z[:, :, r.at]
        self.dv["rounding of P"] += (p.u_p + s.u_z * (1 + p.u_p)) * over_rows(pairs.most_z, do_abs)
        self.dv["underflow"] += s.z_max * over_rows(np.minimum(pairs.most, s.tiny_p), do_abs)
        self.dv["total"] += over_rows(pairs.most_z, do_abs)
        self.dv["natural"] += over_rows(z * r.seen, do_abs)
        self.mass["dv"] += self._group(pairs.most_z.sum(axis=2)[..., None])
        self.mass["dk"] += self._group(pairs.ds_most.sum(axis=2)[..., None])
        self.dk["errors of dS"] += s.scale * over_rows(pairs.ds_error, r.q_abs)
        self.dk["total"] += over_rows(pairs.ds_most, r.q_abs)
        self.dk["natural"] += s.scale * over_rows(pairs.natural, r.q_abs)
        if p.ds_scaled_first:
            self.dk["scaled first"] += over_rows(np.minimum(s.z_max * s.tiny_p, s.scale * pairs.ds_most), r.q_abs)
        self.dv_over |= self._group(pairs.dv_over).any(axis=2)
        self.dk_over |= self._group(pairs.dk_over).any(axis=2)
        if p.grads_in_storage is not None:
            self._in_storage("dv", z * r.prob, pairs.do, p.grads_in_storage[0])
            self._in_storage("dk", s.scale * pairs.ds_signed, s.q[:, :, r.at], p.grads_in_storage[0])

    def _in_storage(self, name: str, pairs: Array, rows: Array, block: int) -> None:
        """One rounding to storage of each head's running sum after each query block."""
        s = self.s
        for start in range(0, pairs.shape[2], block):
            part = slice(start, start + block)
            self.running[name] += pairs[:, :, part].swapaxes(2, 3) @ rows[:, :, part]
            self.storage[name] += self._group(s.unit * np.abs(self.running[name]) + s.p.tiny)

    def add_sink(self, ds: Array, error: Array, r: Rows, pieces: Array) -> None:
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
            "sums": s.scale * (growth(p, n, places) + roundings(4, p.u)) * total,
            "underflow": underflow_of(s, n, self.mass["dk"], total),
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
            bound = stored_bound(
                exact.dbias.hi,  # type: ignore[union-attr]
                parts,
                unit,
                np.zeros(bias["over"].shape, dtype=bool),
                over,
                bias["natural"] < 4 * p.tiny,
                bias["count"] == 0,
            )
            vacuous = (bound.allowed >= bias["natural"]) & ~bound.structural
            found["dbias"] = with_vacuous(bound, bound.vacuous | vacuous)
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
        bound = stored_bound(exact, parts, stored.unit, np.zeros_like(over), over, structural, sink["count"] == 0)
        return with_vacuous(bound, bound.vacuous | ((bound.allowed >= sink["natural"]) & ~structural))

    def _output(
        self, name: str, exact: Array, parts: dict[str, Array], natural: Array, over: Array, never_seen: Array
    ) -> Bound:
        p = self.s.p
        if p.grads_in_storage is not None:
            running = self.storage[name] + self._over_group(name)
            shape = self.s.case.shape
            steps = -(-shape[3] // p.grads_in_storage[0]) + self.s.case.group
            parts["sums kept in storage"] = kept_in_storage(self.s, parts, running, steps)
        bound = stored_bound(
            exact,
            parts,
            self.s.unit,
            np.zeros_like(over),
            over,
            natural < 4 * p.tiny,
            np.broadcast_to(never_seen, exact.shape),
        )
        return with_vacuous(bound, bound.vacuous | ((bound.allowed >= natural) & ~bound.structural))

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


def underflow_of(s: Setup, n: Array, mass: Array, total: Array) -> Array:
    """What dQ or dK may lose below the formats' ranges. ``mass`` is sum |dS|, ``total`` sum |dS| |k|.

    Operands read as 0, or that the scale makes small; the scale itself; products, before or after the
    scale; the result.
    """
    operands = (s.scale * s.tiny_in + s.root * s.tiny_u) * mass
    return np.asarray(operands + s.tiny_u * total + max(1.0, s.scale) * n * s.z_max * s.tiny_u + s.p.tiny)


def kept_in_storage(s: Setup, parts: dict[str, Array], running: Array, steps: int) -> Array:
    """Error of a sum that is rounded to storage in each of its steps, beyond that of its terms.

    ``running``: the sum over steps of one rounding of the exact running sum. The kernel's own running
    sum is off by what came before, and each later rounding makes that larger: (1 + unit)^steps.
    """
    before = sum(parts.values(), np.zeros(running.shape))
    power = math.expm1(steps * math.log1p(s.unit))
    return np.asarray(running + times(np.asarray(power), before + running))


def _sum_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Sum [B, Hq, R, Sk] over the axes along which an array of this shape broadcasts."""
    full = (1,) * (4 - len(shape)) + shape
    axes = tuple(i for i, n in enumerate(full) if n == 1 and array.shape[i] != 1)
    return array.sum(axis=axes, keepdims=True).reshape(shape) if axes else array.reshape(shape)
