"""Right attention kernels whose arithmetic can be chosen, each with the profile it truly has.

They are the other side of the error bounds: whatever a profile admits must stay inside the bound
that is derived from it. A Choices says in which order sums run, what is rounded where, how exp and
tanh are made, and how far they err: NumPy's own functions are better than what a kernel declares,
so an error of the declared size is planted on top, its sign a function of the argument. (exp(0) is 1
in every library, and stays so.)

Per head, unblocked where a choice does not ask for blocks, with mask code of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from attncheck.oracle.case import Case
from attncheck.oracle.formats import FORMATS, Format
from attncheck.oracle.precision import largest_score
from attncheck.oracle.profile import Profile
from attncheck.oracle.result import Result

Array = np.ndarray

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Choices:
    """The arithmetic of one right kernel.

    ``order``        how sums run: BLAS, up, down, pairwise, or in chains of ``chain``.
    ``fma``          products enter an ascending or descending sum unrounded.
    ``accumulator``  None: float32 (float64 for float64).
    ``base2``        where scores turn into base 2: not at all, their pieces before they are added,
                     the score, the argument of exp, or in one FMA with the maximum.
    ``softmax``      "online" with rescaling, "two-pass" (maximum and sum first), and whether P is
                     divided by the sum before its product with V ("normalised").
    ``key_block``    keys per step of the online softmax; None: all.
    ``reciprocal``   multiply by 1 / l.
    ``delta``        D from O, or from P and dP.
    ``kept_p``       the backward pass uses the forward's probabilities, not the log-sum-exp.
    ``prescale``     q, or q and k by the root of the scale, are multiplied before the product;
                     ``prescale_stored``: and stored.
    ``cap``          tanh itself, (1 - E) / (1 + E), or 2 sigmoid(2x) - 1.
    ``slope_from_s`` the cap's slope is taken from the capped score over c.
    ``operands``     matmul operands rounded to tf32, or cut to it.
    ``rounds_p``     P and dS rounded to storage before their products; "cut": towards 0.
    ``flush``        inputs, outputs, products, P and dS below the smallest normal number become 0.
    ``exp_units``, ``tanh_units``  declared errors in units of the accumulator; the planted error
                     fills them. ``sign``: "+", "-" or a number that seeds a sign per argument.
    ``lse``          the log-sum-exp's format; None: the accumulator's wide one.
    ``sink``         a sink is the last key of the last block, a block of its own that comes first or last,
                     or is added at the end as exp(sink - m) with the maximum of the keys alone.
    ``dropout``      1 / (1 - p) multiplies P and dP; or P and dP are divided by 1 - p; or it multiplies V
                     and dO; or O, dV, dQ and dK at the end, with D brought down to dS.
    ``dsink_block``  the sink's gradient is summed in blocks of so many rows first; None: row by row.
    """

    order: Literal["blas", "up", "down", "pairwise", "chain"] = "blas"
    chain: int = 4
    fma: bool = False
    accumulator: Literal["float32", "float64"] | None = None
    base2: Literal["no", "pieces", "scores", "argument", "fma"] = "no"
    softmax: Literal["online", "two-pass", "normalised"] = "online"
    key_block: int | None = None
    reciprocal: bool = False
    delta: Literal["o", "p"] = "o"
    kept_p: bool = False
    prescale: Literal["no", "q", "roots"] = "no"
    prescale_stored: bool = False
    cap: Literal["tanh", "exp", "sigmoid"] = "tanh"
    slope_from_s: bool = False
    operands: Literal["full", "tf32", "tf32 cut"] = "full"
    rounds_p: Literal["no", "nearest", "cut"] = "nearest"
    ds_scaled_first: bool = False
    grads_in_storage: tuple[int, int] | None = None
    bias_stored: bool = False
    flush: bool = False
    exp_units: float = 4.0
    tanh_units: float = 4.0
    sign: str | int = 0
    lse: Literal["float16", "bfloat16"] | None = None
    sink: Literal["within", "first", "last", "end"] = "within"
    dropout: Literal["p", "divided", "v", "end"] = "p"
    dsink_block: int | None = None

    def wide(self, dtype: str) -> Format:
        if self.accumulator is not None and dtype != "float64":
            return FORMATS[self.accumulator]
        return FORMATS["float64" if dtype == "float64" else "float32"]

    @property
    def longest_chain(self) -> int | None:
        """What the profile says of sums. Blocks of keys are added one after the other, whatever the
        order inside them; gradients kept in storage are sums of a third shape."""
        if self.order not in ("pairwise", "chain") or self.grads_in_storage is not None:
            return None
        if self.key_block is not None:
            return self.key_block
        return 0 if self.order == "pairwise" else self.chain

    def profile(self, dtype: str) -> Profile:
        """What a kernel of these choices may declare, and no more."""
        storage, wide = FORMATS[dtype], self.wide(dtype)
        u, narrow = wide.unit, storage.unit > wide.unit
        u_p = {"no": 0.0, "nearest": storage.unit, "cut": 2 * storage.unit}[self.rounds_p] if narrow else 0.0
        prescaled = 0.0
        if self.prescale_stored and narrow:
            prescaled = {"no": 0.0, "q": storage.unit, "roots": 2 * storage.unit + storage.unit**2}[self.prescale]
        absolute = self.cap != "tanh"
        # (1 - E) / (1 + E): E's error counts half, two roundings, a division; the sigmoid alike, twice
        u_tanh = 2 * self.exp_units * u + 4 * u if absolute else self.tanh_units * u
        return Profile(
            storage=dtype,
            u=u,
            u_in={"full": 0.0, "tf32": 2.0**-11, "tf32 cut": 2.0**-10}[self.operands],
            u_p=u_p,
            u_exp=self.exp_units * u,
            u_tanh=u_tanh,
            tanh_is_absolute=absolute,
            lse=self.lse or ("float64" if dtype == "float64" else "float32"),
            tiny=storage.tiny if self.flush or storage.name != "float16" else storage.smallest,
            u_prescale=prescaled,
            u_bias=storage.unit if self.bias_stored and narrow else 0.0,
            chain=self.longest_chain,
            key_block=self.key_block or 1 << 20,
            grads_in_storage=self.grads_in_storage,
            ds_scaled_first=self.ds_scaled_first,
        )


def choices(rng: np.random.Generator, dtype: str) -> Choices:
    """Choices drawn at random, of those that make sense for this storage dtype."""

    def pick(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    half = dtype in ("float16", "bfloat16")
    return Choices(
        order=pick("blas", "up", "down", "pairwise", "chain"),
        chain=pick(2, 3, 4, 8),
        fma=pick(False, True),
        accumulator=pick(None, None, None, None if dtype == "float64" else "float64"),
        base2=pick("no", "no", "pieces", "scores", "argument", "fma"),
        softmax=pick("online", "online", "two-pass", "normalised"),
        key_block=pick(None, 1, 2, 3, 4, 8),
        reciprocal=pick(False, True),
        delta=pick("o", "p"),
        kept_p=pick(False, False, True),
        prescale=pick("no", "no", "q", "roots"),
        prescale_stored=pick(False, True),
        cap=pick("tanh", "tanh", "exp", "sigmoid"),
        slope_from_s=pick(False, True),
        operands=pick("full", "full", "tf32", "tf32 cut") if dtype == "float32" else "full",
        rounds_p=pick("no", "nearest", "nearest", "cut") if half else "no",
        ds_scaled_first=pick(False, False, True),
        grads_in_storage=pick(None, None, None, (int(rng.integers(1, 9)), int(rng.integers(1, 9)))) if half else None,
        bias_stored=pick(False, True),
        flush=pick(False, True),
        exp_units=pick(4.0, 4.0, 64.0, 1.0),
        tanh_units=pick(4.0, 4.0, 2.0, 1024.0),
        sign=pick("+", "-", *(int(n) for n in rng.integers(1, 1 << 30, size=4))),
        lse=pick(None, None, None, "float16", "bfloat16") if half else None,
        sink=pick("within", "first", "last", "end", "end"),
        dropout=pick("p", "divided", "v", "end"),
        dsink_block=pick(None, 1, 2, 3),
    )


# -- the arithmetic -------------------------------------------------------------------------------


class _Unit:
    """Operations in the accumulator's format, as a Choices wants them."""

    def __init__(self, c: Choices, dtype: str) -> None:
        self.c, self.storage, self.wide = c, FORMATS[dtype], c.wide(dtype)
        self.t = self.wide.dtype.type
        self.p = c.profile(dtype)

    def number(self, x: float) -> Any:
        return self.t(x)

    def load(self, array: Array) -> Array:
        """A stored array in the accumulator's format, below the smallest normal number 0 if flushing."""
        x = array.astype(self.t)
        return np.where(np.abs(array.astype(np.float64)) < self.storage.tiny, self.t(0), x) if self.c.flush else x

    def flushed(self, x: Array) -> Array:
        return np.where(np.abs(x) < self.wide.tiny, self.t(0), x) if self.c.flush else x

    def store(self, x: Array, fmt: Format | None = None) -> Array:
        fmt = fmt or self.storage
        stored = _rounded(x, fmt)
        if self.c.flush:
            stored = np.where(np.abs(stored.astype(np.float64)) < fmt.tiny, fmt.dtype.type(0), stored)
        return stored

    def p_rounded(self, x: Array) -> Array:
        """P or dS as it enters its product."""
        if self.p.u_p == 0:
            return x
        if self.c.rounds_p == "cut":
            toward = _rounded(x, self.storage).astype(np.float64)
            past = np.abs(toward) > np.abs(x)
            lower = np.nextafter(_rounded(x, self.storage), self.storage.dtype.type(0)).astype(np.float64)
            y = np.where(past, lower, toward).astype(self.storage.dtype)
        else:
            y = _rounded(x, self.storage)
        return self.load(y)

    def operand(self, x: Array) -> Array:
        """A float32 matmul operand rounded or cut to tf32's eleven bits."""
        if self.c.operands == "full" or self.t is not np.float32:
            return x
        bits = np.ascontiguousarray(x).view(np.uint32)
        if self.c.operands == "tf32":
            bits = bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)

    def matmul(self, a: Array, b: Array) -> Array:
        """[m, n] @ [n, p]."""
        return self._products(self.operand(a), self.operand(b))

    def _products(self, a: Array, b: Array) -> Array:
        if self.c.order == "blas":
            return self.flushed(a @ b)
        if self.c.fma and self.c.order in ("up", "down"):
            total: Array = np.zeros((a.shape[0], b.shape[1]), dtype=np.longdouble)
            for n in range(a.shape[1])[:: 1 if self.c.order == "up" else -1]:
                fused = total + a[:, n, None].astype(np.longdouble) * b[n].astype(np.longdouble)
                total = fused.astype(self.t).astype(np.longdouble)
            return self.flushed(total.astype(self.t))
        return self.flushed(self.total(self.flushed(a.T[:, :, None] * b[:, None, :])))

    def rowdot(self, a: Array, b: Array) -> Array:
        """Sum over the last axis of a * b, elementwise work rather than a matmul."""
        return self.total(np.moveaxis(self.flushed(a * b), -1, 0))

    def total(self, terms: Array) -> Array:
        """Sum over axis 0 in the order chosen; every addition rounds."""
        n = terms.shape[0]
        if n == 0:
            return np.zeros(terms.shape[1:], dtype=self.t)
        if self.c.order == "down":
            terms = terms[::-1]
        if self.c.order == "pairwise":
            while terms.shape[0] > 1:
                odd = terms[-1:] if terms.shape[0] % 2 else terms[:0]
                terms = np.concatenate([terms[:-1:2] + terms[1::2], odd])
            return np.asarray(terms[0])
        if self.c.order == "chain":
            length = self.c.longest_chain or self.c.chain
            chains = [terms[i : i + length] for i in range(0, n, length)]
            terms = np.stack([np.add.accumulate(x, axis=0)[-1] for x in chains])
        return np.asarray(np.add.accumulate(terms, axis=0)[-1])

    # functions that are as wrong as they may be

    def _sign(self, x: Array) -> Array:
        if self.c.sign in ("+", "-"):
            return np.full(x.shape, 1.0 if self.c.sign == "+" else -1.0)
        bits = np.ascontiguousarray(x, dtype=np.float64).view(np.uint64)
        mixed = (bits ^ np.uint64(int(self.c.sign))) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        return np.where((mixed >> np.uint64(40)) & np.uint64(1), 1.0, -1.0)

    def _off(self, exactly: Array, at: Array, units: float) -> Array:
        """A float64 value made wrong by almost ``units`` u, the rounding to come included."""
        spare = (units - (1.0 if self.t is np.float32 else 3.0)) * self.wide.unit * (1 - 1e-6)
        return (exactly * (1 + self._sign(at) * max(spare, 0.0))).astype(self.t)

    def exp(self, x: Array) -> Array:
        """exp of an argument in the unit of the scores."""
        with np.errstate(all="ignore"):
            if self.c.base2 == "argument":
                x = x * self.number(LOG2_E)
            wide = x.astype(np.float64)
            found = np.exp(wide) if self.c.base2 == "no" else np.exp2(wide)
            return self.flushed(np.where(wide == 0, self.t(1), self._off(found, wide, self.c.exp_units)))

    def tanh(self, x: Array) -> Array:
        wide = x.astype(np.float64)
        if self.c.cap == "tanh":
            return self._off(np.tanh(wide), wide, self.c.tanh_units)
        one, two = self.number(1), self.number(2)
        if self.c.cap == "exp":
            e = self._off(np.exp(-2 * np.abs(wide)), wide, self.c.exp_units)
            return np.copysign(self.divide(one - e, one + e), x)
        e = self._off(np.exp(-2 * wide), wide, self.c.exp_units)
        return two * self.divide(one, one + e) - one

    def divide(self, a: Array, b: Array) -> Array:
        if self.c.reciprocal:
            one = self._off(1 / b.astype(np.float64), b.astype(np.float64), self.c.exp_units)
            return self.flushed(a * one)
        wide = a.astype(np.float64) / b.astype(np.float64)
        return self.flushed(self._off(wide, wide, self.c.exp_units))

    def log(self, x: Array, base2: bool) -> Array:
        wide = x.astype(np.float64)
        return self._off(np.log2(wide) if base2 else np.log(wide), wide, self.c.exp_units)


def _rounded(x: Array, fmt: Format) -> Array:
    """Rounded once, also from float64 to bfloat16 (whose cast goes through float32)."""
    if fmt.name == "bfloat16" and x.dtype == np.float64:
        single = x.astype(np.float32)
        wrong = (single.astype(np.float64) != x) & (single.view(np.uint32) % 2 == 0)
        toward = np.where(np.abs(x) > np.abs(single), np.copysign(np.float32(np.inf), single), np.float32(0))
        x = np.where(wrong, np.nextafter(single, toward.astype(np.float32)), single)
    return x.astype(fmt.dtype)


# -- the kernel -----------------------------------------------------------------------------------


def solve(case: Case, c: Choices) -> Result:
    """All outputs of a case."""
    with np.errstate(all="ignore"):
        return _Kernel(case, c).run()


class _Kernel:
    def __init__(self, case: Case, c: Choices) -> None:
        self.case, self.c, self.u = case, c, _Unit(c, case.dtype)
        d = case.q.shape[3]
        self.true_scale = 1 / math.sqrt(d) if case.scale is None else case.scale
        self.scale = self.u.number(self.true_scale)
        self.log2e = self.u.number(LOG2_E)
        self.in_base2 = c.base2 in ("pieces", "scores", "fma")
        self.lse_format = FORMATS[self.u.p.lse]
        one = self.u.number(1)
        self.chance_kept = one - self.u.number(case.dropout or 0.0)
        self.z = self.u.divide(one, self.chance_kept)
        self.late = self.z if case.dropout is not None and c.dropout == "end" else None

    def run(self) -> Result:
        case, u = self.case, self.u
        b, hq, hk, sq, sk, _, dv = case.shape
        o = np.zeros((b, hq, sq, dv), dtype=case.q.dtype)
        lse = np.full((b, hq, sq), -np.inf, dtype=self.lse_format.dtype)
        dq, dk, dvv = (np.zeros_like(x) for x in (case.q, case.k, case.v))
        dbias = None if case.bias is None else np.zeros((b, hq, sq, sk), dtype=u.t)
        dsink = None if case.sinks is None else np.zeros((b, hq, sq), dtype=u.t)
        for entry, group in [(x, y) for x in range(b) for y in range(hk)]:
            parts = []
            for h in range(group * case.group, (group + 1) * case.group):
                head = _Head(self, entry, h, group)
                o[entry, h], lse[entry, h] = head.forward()
                if case.do is not None:
                    parts.append(head.backward(o[entry, h], lse[entry, h]))
                    dq[entry, h] = parts[-1]["dq"]
                    if dbias is not None:
                        dbias[entry, h] = parts[-1]["ds"]
                    if dsink is not None:
                        dsink[entry, h] = parts[-1]["dsink"]
            if parts:
                dk[entry, group], dvv[entry, group] = self.over_group(parts)
        if case.do is None:
            return Result(o=o, lse=lse)
        dsinks = None if dsink is None else self.over_rows(dsink)
        return Result(o=o, lse=lse, dq=dq, dk=dk, dv=dvv, dbias=self.stored_dbias(dbias), dsink=dsinks)

    def over_rows(self, dsink: Array) -> Array:
        """The sinks' gradients, summed over the rows of all batch entries; those of padding are not among them."""
        u, block = self.u, self.c.dsink_block
        rows = np.concatenate(
            [np.zeros((0, dsink.shape[1]), u.t), *(dsink[b, :, :n].T for b, n in enumerate(self.case.q_length))]
        )
        if block is not None and self.c.longest_chain is None and rows.size:
            rows = np.stack([u.total(rows[part]) for part in _steps(rows.shape[0], block)])
        return u.store(u.total(rows), self.case.wide_format)

    def over_group(self, parts: list[dict[str, Array]]) -> tuple[Array, Array]:
        u, c = self.u, self.c
        out = []
        for left, right, scaled in (("ds_in", "q", True), ("p_in", "do", False)):
            if c.grads_in_storage is None:
                a = np.concatenate([x[left] for x in parts]).T
                total = u.matmul(a, np.concatenate([x[right] for x in parts]))
                out.append(u.store(self.scaled(total, "k") if scaled else self.raised(total)))
                continue
            block, whole = c.grads_in_storage[0], None
            for x in parts:
                running = np.zeros((x[left].shape[1], x[right].shape[1]), dtype=u.t)
                for i in range(0, x[left].shape[0], block):
                    part = u.matmul(x[left][i : i + block].T, x[right][i : i + block])
                    running = u.load(u.store(running + (self.scaled(part, "k") if scaled else self.raised(part))))
                whole = running if whole is None else u.load(u.store(whole + running))
            assert whole is not None
            out.append(u.store(whole))
        return out[0], out[1]

    def scaled(self, total: Array, side: str) -> Array:
        """A gradient times what of the scale, and of dropout, is not in it yet ("k": summed over queries)."""
        if self.c.ds_scaled_first or (self.c.prescale == "q" and side == "k"):
            return self.raised(total)
        by = self.u.number(self.root) if self.c.prescale == "roots" else self.scale
        return self.u.flushed(total * (by if self.late is None else by * self.late))

    def raised(self, total: Array) -> Array:
        """What was summed, times the factor of dropout where that waits for the end."""
        return total if self.late is None else self.u.flushed(total * self.late)

    @property
    def root(self) -> float:
        return math.sqrt(abs(self.true_scale))

    def stored_dbias(self, dbias: Array | None) -> Array | None:
        bias = self.case.bias
        if bias is None or dbias is None:
            return None
        shape = (1,) * (4 - bias.ndim) + bias.shape
        axes = [i for i in range(4) if shape[i] == 1 and dbias.shape[i] != 1]
        kept = [i for i in range(4) if i not in axes]
        terms = dbias.transpose(*axes, *kept)
        terms = terms.reshape(math.prod(dbias.shape[i] for i in axes), *(dbias.shape[i] for i in kept))
        total = self.u.total(terms) if axes else terms[0]
        if self.u.p.u_bias:
            total = self.u.load(self.u.store(total))
        return self.u.store(total.reshape(bias.shape), FORMATS[bias.dtype.name])


class _Head:
    """One query head of one batch entry."""

    def __init__(self, kernel: _Kernel, entry: int, h: int, group: int) -> None:
        case, u, c = kernel.case, kernel.u, kernel.c
        self.kernel, self.case, self.u, self.c = kernel, case, u, c
        self.entry, self.h = entry, h
        self.q, self.k, self.v = u.load(case.q[entry, h]), u.load(case.k[entry, group]), u.load(case.v[entry, group])
        self.hidden, self.distance = _hidden(case, entry, h)
        if c.prescale == "q":
            self.q = self.prescaled(self.q, kernel.scale)
        elif c.prescale == "roots":
            self.q = self.prescaled(self.q, u.number(math.copysign(kernel.root, kernel.true_scale)))
            self.k = self.prescaled(self.k, u.number(kernel.root))
        self.s, self.t = self.scores()
        self.rows = (np.arange(self.s.shape[0]) < case.q_length[entry])[:, None]
        keep = True if case.keep is None else np.broadcast_to(case.keep, (*case.q.shape[:3], self.s.shape[1]))[entry, h]
        self.keep = np.broadcast_to(np.asarray(keep), self.s.shape)
        # a sink has a score in every row, and the value 0
        self.sink, self.value = np.zeros((self.s.shape[0], 0), dtype=self.s.dtype), self.v
        if case.dropout is not None and c.dropout == "v":
            self.value = u.flushed(self.v * kernel.z)
        if case.sinks is not None:
            sink = u.number(case.sinks[h])
            if c.base2 == "fma":
                sink = self.s.dtype.type(float(sink) * LOG2_E)
            elif kernel.in_base2:
                sink = sink * kernel.log2e
            self.sink = np.where(self.rows, sink, self.s.dtype.type(-np.inf))

    def dropped(self, pairs: Array) -> Array:
        """P or dP with what dropout does to it before the end."""
        u, c, kernel = self.u, self.c, self.kernel
        if self.case.dropout is None:
            return pairs
        if c.dropout == "p":
            return u.flushed(pairs * np.where(self.keep, kernel.z, u.t(0)))
        if c.dropout == "divided":
            pairs = u.divide(pairs, np.full(pairs.shape, kernel.chance_kept))
        return np.where(self.keep, pairs, u.t(0))

    def prescaled(self, x: Array, by: Any) -> Array:
        y = self.u.flushed(x * by)
        return self.u.load(self.u.store(y)) if self.c.prescale_stored else y

    def scores(self) -> tuple[Array, Array | None]:
        case, u, kernel = self.case, self.u, self.kernel
        s = u.matmul(self.q, self.k.T)
        factor = u.number(1) if self.c.prescale != "no" else kernel.scale
        pieces = self.c.base2 == "pieces"
        if pieces and case.softcap is None:
            factor = factor * kernel.log2e
        if self.c.prescale == "no" or factor != 1:
            s = u.flushed(s * factor)
        t = None
        if case.softcap is not None:
            cap = u.number(case.softcap)
            t = u.tanh(s * (u.number(1) / cap) if self.c.reciprocal else s / cap)
            s = t * (cap * kernel.log2e if pieces else cap)
        added = []
        if case.bias is not None:
            bias = np.broadcast_to(case.bias, case.q.shape[:3] + case.k.shape[2:3])[self.entry, self.h]
            bias = u.load(u.store(bias.astype(np.float64))) if u.p.u_bias else bias.astype(u.t)
            added.append(bias * kernel.log2e if pieces else bias)
        if case.alibi_slopes is not None:
            slope = u.number(np.broadcast_to(case.alibi_slopes, case.q.shape[:2])[self.entry, self.h])
            added.append(-(slope * kernel.log2e if pieces else slope) * self.distance.astype(u.t))
        for x in added if not self.c.fma else added[::-1]:
            s = s + x
        if self.c.base2 == "scores":
            s = s * kernel.log2e
        elif self.c.base2 == "fma":
            s = s.astype(np.float64) * LOG2_E  # the product inside the FMA does not round
        return np.where(self.hidden, s.dtype.type(-np.inf), s), t

    def minus(self, s: Array, m: Array) -> Array:
        """s - m, rounded once; with "fma" s is wider than m."""
        return (s - m).astype(self.u.t)

    def forward(self) -> tuple[Array, Array]:
        u, c = self.u, self.c
        rows, keys = self.s.shape
        m = np.full((rows, 1), -np.inf, dtype=u.t)
        l, acc = np.zeros((rows, 1), dtype=u.t), np.zeros((rows, self.v.shape[1]), dtype=u.t)
        s, places = self.s, keys + (self.sink.shape[1] if c.sink == "within" else 0)
        if c.sink != "end":
            s = np.concatenate([s, self.sink], axis=1)
        blocks = list(_steps(places, c.key_block or max(places, 1)))
        own = [slice(places, s.shape[1])] if s.shape[1] > places else []
        for part in own + blocks if c.sink == "first" else blocks + own:
            new = np.maximum(m, s[:, part].max(axis=1, keepdims=True).astype(u.t))
            origin = np.where(new == -np.inf, u.t(0), new)
            p, alpha = u.exp(self.minus(s[:, part], origin)), u.exp(m - origin)
            l = u.flushed(l * alpha) + u.total(p.T)[:, None]
            if c.softmax == "online":
                acc = u.flushed(acc * alpha) + self.weighed(p, part)
            m = new
        origin = np.where(m == -np.inf, u.t(0), m)
        if c.sink == "end" and self.sink.size:
            l = l + u.exp(self.minus(self.sink, origin))
        empty = l == 0
        divisor = np.where(empty, u.t(1), l)
        p = u.exp(self.minus(self.s, origin))
        self.p_forward = u.divide(p, divisor)
        self.p_sink = u.divide(u.exp(self.minus(self.sink, origin)), divisor) if self.sink.size else self.sink
        if c.softmax == "two-pass":
            acc = self.weighed(p, slice(0, keys))
        o = self.weighed(self.p_forward, slice(0, keys)) if c.softmax == "normalised" else u.divide(acc, divisor)
        o = self.kernel.raised(o)
        if self.kernel.in_base2:
            lse = (origin + u.log(divisor, base2=True)) * u.number(math.log(2))
        else:
            lse = origin + u.log(divisor, base2=False)
        lse = np.where(empty, u.t(-np.inf), lse)
        return u.store(o), u.store(lse, self.kernel.lse_format)[:, 0]

    def weighed(self, p: Array, part: slice) -> Array:
        """Probabilities of some keys, without the sink's, times their values."""
        keys = slice(part.start, min(part.stop, self.s.shape[1]))
        p = p[:, : max(keys.stop - keys.start, 0)]
        if self.case.dropout is not None:
            whole = np.zeros(self.s.shape, dtype=p.dtype)
            whole[:, keys] = p
            p = self.dropped(whole)[:, keys]
        return self.u.matmul(self.u.p_rounded(p), self.value[keys])

    def backward(self, o: Array, lse: Array) -> dict[str, Array]:
        case, u, c = self.case, self.u, self.c
        assert case.do is not None
        do = u.load(case.do[self.entry, self.h])
        do = np.where((np.arange(do.shape[0]) < case.q_length[self.entry])[:, None], do, u.t(0))
        wide = lse.astype(u.t)[:, None]
        if c.kept_p:
            p = self.p_forward
        else:
            at = np.where(wide == -np.inf, u.t(np.inf), wide)
            at = at * self.kernel.log2e if self.kernel.in_base2 else at
            p = u.exp(self.minus(self.s, at))
            self.p_sink = u.exp(self.minus(self.sink, at))
        p = np.where(self.hidden, u.t(0), p)
        raised = u.flushed(do * self.kernel.z) if case.dropout is not None and c.dropout == "v" else do
        dp = self.dropped(u.matmul(raised, self.v.T))
        late = self.kernel.late
        delta = u.rowdot(do, u.load(o)) if c.delta == "o" else u.rowdot(p, dp)
        if late is not None and c.delta == "p":
            delta = u.flushed(delta * late)
        if case.dlse is not None:
            delta = delta - case.dlse[self.entry, self.h].astype(u.t)
        of_sink = -u.flushed(self.p_sink * delta[:, None])
        if late is not None:
            delta = u.flushed(delta * self.kernel.chance_kept)
        ds = np.where(self.hidden, u.t(0), u.flushed(p * (dp - delta[:, None])))
        found = {"ds": self.kernel.raised(ds), "p_in": u.p_rounded(self.dropped(p)), "do": raised, "q": self.q}
        if case.sinks is not None:
            found["dsink"] = of_sink[:, 0]
        if self.t is not None:
            t = self.s_over_cap() if c.slope_from_s else self.t
            ds = np.where(self.hidden, u.t(0), u.flushed(ds * (u.number(1) - t * t)))
        if c.ds_scaled_first:
            by = self.kernel.scale
            if c.prescale == "roots":
                by = u.number(self.kernel.root)
            ds = u.flushed(ds * by)
        ds_in = u.p_rounded(ds)
        found["ds_in"] = ds_in
        if c.ds_scaled_first and c.prescale == "q":
            found["q"] = u.load(case.q[self.entry, self.h])  # dS holds the scale already
        k, root = self.k, c.prescale == "roots"
        if root and case.scale is not None and case.scale < 0:
            k = -k
        if c.grads_in_storage is None:
            found["dq"] = u.store(self.scaled_dq(u.matmul(ds_in, k)))
        else:
            running = np.zeros(self.q.shape, dtype=u.t)
            for part in _steps(k.shape[0], c.grads_in_storage[1]):
                running = u.load(u.store(running + self.scaled_dq(u.matmul(ds_in[:, part], k[part]))))
            found["dq"] = u.store(running)
        return found

    def scaled_dq(self, total: Array) -> Array:
        return self.kernel.scaled(total, "q")

    def s_over_cap(self) -> Array:
        """tanh again, from c tanh."""
        assert self.t is not None and self.case.softcap is not None
        cap = self.u.number(self.case.softcap)
        return (self.t * cap) / cap


def _steps(n: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, n)) for i in range(0, n, size))


def _hidden(case: Case, entry: int, h: int) -> tuple[Array, Array]:
    """True where a row does not see a key, and how far each key lies from its row, [Sq, Sk]."""
    _, _, _, sq, sk, _, _ = case.shape
    rows, keys = case.q_length[entry], case.k_length[entry]
    shift = 0 if case.causal == "top-left" else keys - rows
    i, j = np.arange(sq)[:, None], np.arange(sk)[None, :]
    hidden = (i >= rows) | (j >= keys)
    if case.causal is not None:
        hidden = hidden | (j > i + shift)
    if case.window is not None:
        left, right = case.window
        if left is not None:
            hidden = hidden | (j + left < i + shift)
        if right is not None:
            hidden = hidden | (j - right > i + shift)
    full = (*case.q.shape[:3], sk)
    if case.mask is not None:
        hidden = hidden | ~np.broadcast_to(case.mask, full)[entry, h]
    if case.bias is not None:
        hidden = hidden | np.isneginf(np.broadcast_to(case.bias, full)[entry, h].astype(np.float64))
    return hidden, np.abs(i + shift - j)


def suits(c: Choices, case: Case) -> bool:
    """False where these choices are not right for a case.

    An FMA against a maximum that was rounded alone leaves exp an argument of up to u |m| above 0,
    which overflows with scores of 1e9: such a kernel is right for smaller scores only. So is one that
    leaves the sink out of the maximum: exp(sink - m) must neither overflow nor, where a row sees no
    key, vanish.
    """
    if c.sink == "end" and case.sinks is not None:
        furthest = largest_score(case) + float(np.abs(case.sinks).max())
        if furthest > (80 if c.wide(case.dtype).name == "float32" else 700):
            return False
    return c.base2 != "fma" or largest_score(case) < 1e5


PLAIN = Choices(rounds_p="no", exp_units=4.0)


def varied(c: Choices, rng: np.random.Generator, dtype: str) -> Choices:
    """The same choices but for one to three, drawn again."""
    other = choices(rng, dtype)
    names = rng.choice(list(Choices.__dataclass_fields__), size=int(rng.integers(1, 4)), replace=False)
    return replace(c, **{name: getattr(other, name) for name in names})
