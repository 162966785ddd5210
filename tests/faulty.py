"""Wrong kernels: a right one in plain NumPy, and subclasses that each break one step of it.

Most faults re-enact a public bug report; FAULTS says which and what is broken. ``Kernel`` is right,
written head by head for reading, and shares no code with the kernels of the package. ``RIGHT`` is
its candidate: whatever catches a fault must let it pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from attncheck.kernels.candidate import Candidate
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.profile import Profile, default_profile
from attncheck.oracle.result import GRADIENTS, Result

DEFAULT_BLOCK = 4


@dataclass(frozen=True)
class Tile:
    """Where a tile of scores lies: batch entry, query head, row and key indices.

    ``missing`` is how many keys short of a whole block it is, ``backward`` the pass that reads it.
    """

    b: int
    h: int
    rows: np.ndarray
    keys: np.ndarray
    missing: int
    backward: bool


def blocks(size: int, sizes: tuple[int, ...] | None) -> list[tuple[np.ndarray, int]]:
    """The index blocks of an axis, each with the number of elements it is short of its nominal size."""
    sizes, out, start = sizes or (DEFAULT_BLOCK,), [], 0
    while start < size:
        nominal = sizes[min(len(out), len(sizes) - 1)]
        stop = min(size, start + nominal)
        out.append((np.arange(start, stop), nominal - (stop - start)))
        start = stop
    return out


class Kernel:
    """A right blocked kernel. The methods before ``run`` are the steps that faults override."""

    start = -np.inf  # of the running maximum

    def last_key(self, case: Case, tile: Tile) -> np.ndarray:
        """The last key that causality lets each row see."""
        return tile.rows + offset(case, tile.b)

    def sees(self, case: Case, tile: Tile) -> np.ndarray:
        """True where a row sees a key, [rows, keys]."""
        b, i, j = tile.b, tile.rows[:, None], tile.keys
        seen = (i < case.q_length[b]) & (j < case.k_length[b])
        if case.causal is not None:
            seen &= j <= self.last_key(case, tile)[:, None]
        if case.window is not None:
            far = 2 * (case.q.shape[2] + case.k.shape[2])  # no key is further away; integers of numpy end somewhere
            left, right = (far if side is None else min(side, far) for side in case.window)
            middle = i + offset(case, b)
            seen &= (j >= middle - left) & (j <= middle + right)
        if case.mask is not None:
            seen &= part(case.mask, tile)
        if case.bias is not None:
            seen &= part(case.bias, tile).astype(np.float64) > -np.inf
        return seen

    def tanh(self, x: np.ndarray) -> np.ndarray:
        return np.tanh(x)

    def rescale(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """The factor for what was summed under the old maximum."""
        return np.exp(old - new)

    def probabilities(self, s: np.ndarray, lse: np.ndarray) -> np.ndarray:
        """P of the backward pass; an empty row has lse = -inf and must give zeros."""
        return np.exp(s - np.where(lse == -np.inf, np.inf, lse))

    def dlse(self, case: Case, b: int, h: int) -> np.ndarray | float:
        return 0.0 if case.dlse is None else case.dlse[b, h]

    def dq(self, ds: np.ndarray, k: np.ndarray, lse: np.ndarray, delta: np.ndarray, tile: Tile) -> np.ndarray:
        """A tile's contribution to dQ before the scale; lse and delta [rows, 1] are there for a fault to misuse."""
        return ds @ k

    def summed(self, case: Case, h: int) -> bool:
        """Whether query head h is added to dK and dV of its key head."""
        return True

    def finish(self, result: Result, case: Case) -> Result:
        """The last touch on the outputs."""
        return result

    # -- the kernel ------------------------------------------------------------------------

    def run(self, case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        q_blocks = blocks(case.q.shape[2], presentation.q_blocks)
        k_blocks = blocks(case.k.shape[2], presentation.k_blocks)
        with np.errstate(all="ignore"):
            o, lse = self.forward(case, q_blocks, k_blocks)
            if want.isdisjoint(GRADIENTS):
                return self.finish(Result(o=o, lse=lse), case)
            dq, dk, dv, dbias = self.backward(case, o, lse, q_blocks, k_blocks)
            return self.finish(Result(o=o, lse=lse, dq=dq, dk=dk, dv=dv, dbias=dbias), case)

    def scores(self, case: Case, q: np.ndarray, k: np.ndarray, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
        """Scores (-inf where hidden) and the tanh of the capped ones (0 without a cap), [rows, keys]."""
        wide = q.dtype.type
        s = q @ k.T * wide(1 / math.sqrt(q.shape[1]) if case.scale is None else case.scale)
        t = np.zeros_like(s)
        if case.softcap is not None:
            t = self.tanh(s / wide(case.softcap))
            s = t * wide(case.softcap)
        if case.alibi_slopes is not None:
            slope = np.broadcast_to(case.alibi_slopes, case.q.shape[:2])[tile.b, tile.h]
            s -= wide(slope) * abs(tile.rows[:, None] + offset(case, tile.b) - tile.keys).astype(wide)
        if case.bias is not None:
            s += part(case.bias, tile).astype(wide)
        seen = self.sees(case, tile)
        return np.where(seen, s, -np.inf), np.where(seen, t, 0)

    def forward(self, case: Case, q_blocks: list, k_blocks: list) -> tuple[np.ndarray, np.ndarray]:
        wide, dv = case.wide_format.dtype, case.v.shape[3]
        o = np.zeros((*case.q.shape[:3], dv), case.q.dtype)
        lse = np.full(case.q.shape[:3], -np.inf, wide)
        for b, h in np.ndindex(*case.q.shape[:2]):
            g = h // case.group
            q, k, v = case.q[b, h].astype(wide), case.k[b, g].astype(wide), case.v[b, g].astype(wide)
            for rows, _ in q_blocks:
                m = np.full((len(rows), 1), self.start, wide)
                total, acc = np.zeros((len(rows), 1), wide), np.zeros((len(rows), dv), wide)
                for keys, missing in k_blocks:
                    s, _ = self.scores(case, q[rows], k[keys], Tile(b, h, rows, keys, missing, backward=False))
                    new = np.maximum(m, s.max(axis=1, keepdims=True))
                    reached = np.where(new == -np.inf, 0, new)  # no key seen yet: never -inf - -inf
                    p, factor = np.exp(s - reached), self.rescale(m, reached)
                    total, acc, m = total * factor + p.sum(axis=1, keepdims=True), acc * factor + p @ v[keys], new
                divisor = np.where(total == 0, 1, total)
                o[b, h, rows] = acc / divisor
                lse[b, h, rows] = np.where(total == 0, -np.inf, m + np.log(divisor))[:, 0]
        return o, lse

    def backward(
        self, case: Case, o: np.ndarray, lse: np.ndarray, q_blocks: list, k_blocks: list
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        assert case.do is not None
        wide = case.wide_format.dtype
        scale = wide.type(1 / math.sqrt(case.q.shape[3]) if case.scale is None else case.scale)
        dq, dk, dv = (np.zeros(a.shape, wide) for a in (case.q, case.k, case.v))
        dbias = None if case.bias is None else np.zeros((1,) * (4 - case.bias.ndim) + case.bias.shape, wide)
        for b, h in np.ndindex(*case.q.shape[:2]):
            g = h // case.group
            q, k, v = case.q[b, h].astype(wide), case.k[b, g].astype(wide), case.v[b, g].astype(wide)
            do = case.do[b, h].astype(wide)
            delta = ((do * o[b, h].astype(wide)).sum(axis=1) - self.dlse(case, b, h))[:, None]
            for rows, _ in q_blocks:
                for keys, missing in k_blocks:
                    tile = Tile(b, h, rows, keys, missing, backward=True)
                    s, t = self.scores(case, q[rows], k[keys], tile)
                    row_lse = lse[b, h, rows][:, None]
                    p = self.probabilities(s, row_lse)
                    # where p is 0 the pair is hidden or far below the maximum: 0, not 0 * inf
                    ds = np.where(p == 0, 0, p * (do[rows] @ v[keys].T - delta[rows]))
                    if dbias is not None:
                        here = part(dbias, tile)
                        here += sum_to(ds, here.shape)
                    ds = ds * (1 - t * t)
                    dq[b, h, rows] += self.dq(ds, k[keys], row_lse, delta[rows], tile)
                    if self.summed(case, h):
                        dk[b, g, keys] += ds.T @ q[rows]
                        dv[b, g, keys] += p.T @ do[rows]
        dq, dk, dv = ((a * by).astype(case.q.dtype) for a, by in ((dq, scale), (dk, scale), (dv, 1)))
        if dbias is None or case.bias is None:
            return dq, dk, dv, None
        return dq, dk, dv, dbias.reshape(case.bias.shape).astype(case.bias.dtype)


def offset(case: Case, b: int) -> int:
    """What aligns row 0 with a key: 0 top-left, else the last row with the last key."""
    return 0 if case.causal == "top-left" else case.k_length[b] - case.q_length[b]


def part(array: np.ndarray, tile: Tile) -> np.ndarray:
    """A tile of a mask or bias of one to four axes, as a view of [rows or 1, keys or 1]."""
    b, h, i, j = (1,) * (4 - array.ndim) + array.shape
    array = array.reshape(b, h, i, j)[tile.b if b > 1 else 0, tile.h if h > 1 else 0]
    rows = slice(tile.rows[0], tile.rows[-1] + 1) if i > 1 else slice(None)
    keys = slice(tile.keys[0], tile.keys[-1] + 1) if j > 1 else slice(None)
    return array[rows, keys]


def sum_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for axis in (0, 1):
        array = array.sum(axis=axis, keepdims=True) if shape[axis] == 1 else array
    return array


# -- the faults ------------------------------------------------------------------------------


class UnguardedEmptyRow(Kernel):
    def probabilities(self, s: np.ndarray, lse: np.ndarray) -> np.ndarray:
        return np.exp(s - lse)


class BackwardAlwaysCausal(Kernel):
    def sees(self, case: Case, tile: Tile) -> np.ndarray:
        return super().sees(case, tile) & ((tile.keys <= tile.rows[:, None]) | (not tile.backward))


class FiniteStart(Kernel):
    start = -5e4


class NoRescale(Kernel):
    def rescale(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.ones_like(new)


class TailScoresZero(Kernel):
    def dq(self, ds: np.ndarray, k: np.ndarray, lse: np.ndarray, delta: np.ndarray, tile: Tile) -> np.ndarray:
        # the block is filled up with keys of zeros whose score 0 is not hidden: P = exp(0 - lse), dP = 0
        p = np.repeat(self.probabilities(np.zeros_like(lse), lse), tile.missing, axis=1)
        zeros = np.zeros((tile.missing, k.shape[1]), k.dtype)
        return np.hstack([ds, p * (0 - delta)]) @ np.vstack([k, zeros])


class CausalWithoutOffset(Kernel):
    def last_key(self, case: Case, tile: Tile) -> np.ndarray:
        return tile.rows


class LseInBaseTwo(Kernel):
    def finish(self, result: Result, case: Case) -> Result:
        assert result.lse is not None
        return replace(result, lse=result.lse / result.lse.dtype.type(math.log(2)))


class DlseIgnored(Kernel):
    def dlse(self, case: Case, b: int, h: int) -> np.ndarray | float:
        return 0.0


class GroupNotSummed(Kernel):
    def summed(self, case: Case, h: int) -> bool:
        return h % case.group == 0


class TanhOfExponentials(Kernel):
    def tanh(self, x: np.ndarray) -> np.ndarray:
        return (np.exp(x) - np.exp(-x)) / (np.exp(x) + np.exp(-x))


@dataclass(frozen=True)
class OneElementOff(Kernel):
    """The first element of o that is a normal number is off by ``units`` units of its format, relatively."""

    units: int

    def finish(self, result: Result, case: Case) -> Result:
        assert result.o is not None
        o = result.o.copy()
        normal = np.flatnonzero(np.abs(o.astype(np.float64)) >= case.format.tiny)
        if normal.size:
            o.flat[normal[0]] = float(o.flat[normal[0]]) * (1 + self.units * case.format.unit)
        return replace(result, o=o)


def profile(dtype: str) -> Profile:
    """The arithmetic of ``Kernel``: numpy's functions, P and dS never rounded to storage."""
    return replace(default_profile(dtype), u_p=0.0, key_block=DEFAULT_BLOCK)


def absolute_tanh(dtype: str) -> Profile:
    """With e^x and e^-x good to 4 u and three more roundings their ratio is good to
    5 u + 6 u |tanh|, so to 11 u absolutely."""
    usual = profile(dtype)
    return replace(usual, u_tanh=11 * usual.u, tanh_is_absolute=True)


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    ``kind`` and ``report`` name the public report it re-enacts ("sharp" and "" where there is none),
    ``about`` says what is broken, ``outputs`` which outputs it can make wrong, ``dtypes`` where it
    lives, ``profile`` the arithmetic that it truly has beside the fault.
    """

    name: str
    kernel: Kernel
    kind: str
    report: str
    about: str
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...] = tuple(FORMATS)
    profile: Callable[[str], Profile] = profile

    def candidate(self) -> Candidate:
        return _candidate(self.name, self.kernel, self.dtypes, self.profile, self.about)


def _candidate(
    name: str, kernel: Kernel, dtypes: tuple[str, ...], profile_of: Callable[[str], Profile], about: str
) -> Candidate:
    return Candidate(
        name=name,
        run=kernel.run,
        dtypes=dtypes,
        profiles={dtype: profile_of(dtype) for dtype in dtypes},
        takes_blocks=True,
        blocks=(DEFAULT_BLOCK,),
        about=about,
    )


RIGHT = _candidate("right", Kernel(), tuple(FORMATS), profile, "the kernel that the faults are planted in")

_GRADIENTS = ("dq", "dk", "dv", "dbias")
_ALL = ("o", "lse", *_GRADIENTS)

# fmt: off
FAULTS: dict[str, Fault] = {fault.name: fault for fault in (
    Fault("unguarded-empty-row", UnguardedEmptyRow(), "K02", "B014",
          "o of an empty row is repaired, but its gradients see exp(-inf - -inf)", _GRADIENTS),
    Fault("backward-always-causal", BackwardAlwaysCausal(), "K03", "B020",
          "the backward pass hides future keys even where the forward pass did not", _GRADIENTS),
    Fault("finite-start", FiniteStart(), "K05", "B029",
          "the running maximum starts at -5e4: a row with lower scores comes out as if empty", _ALL),
    Fault("no-rescale", NoRescale(), "K06", "B035",
          "old sums are not rescaled when a later block raises the maximum", _ALL),
    Fault("tail-scores-zero", TailScoresZero(), "K07", "B045",
          "a ragged last block is filled with keys that score 0: exp(-lse) * 0 is NaN once exp overflows", ("dq",)),
    Fault("causal-without-offset", CausalWithoutOffset(), "K08", "B053",
          "bottom-right causality tests j <= i and forgets the offset", _ALL),
    Fault("lse-in-base-two", LseInBaseTwo(), "K10", "B074",
          "the log-sum-exp is stored in base 2 under a contract of natural logarithms", ("lse",)),
    Fault("dlse-ignored", DlseIgnored(), "K11", "B083",
          "the upstream gradient of the log-sum-exp is dropped", ("dq", "dk", "dbias")),
    Fault("group-not-summed", GroupNotSummed(), "K12", "B086",
          "dk and dv hold the first query head of each group in place of the group's sum", ("dk", "dv")),
    Fault("tanh-of-exponentials", TanhOfExponentials(), "K21", "B144",
          "tanh as a ratio of exponentials is NaN where exp overflows", _ALL, profile=absolute_tanh),
    Fault("one-element-half", OneElementOff(4), "sharp", "",
          "one element of o is off by four units of its format", ("o",), ("float16", "bfloat16")),
    Fault("one-element-float32", OneElementOff(64), "sharp", "",
          "one element of o is off by 64 units of float32", ("o",), ("float32",)),
)}
# fmt: on
