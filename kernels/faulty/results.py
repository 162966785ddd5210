"""The form of outputs K35, cheats, and faults that are small on purpose ("sharp")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...oracle.formats import format_of
from ...oracle.profile import Profile
from ...oracle.result import OUTPUTS, Result
from .call import Array, Block, Call, Tile
from .kernel import Kernel, both
from .registry import ALL, HALF, THROUGH_O, fault, profile


def each(result: Result, names: tuple[str, ...], change: Callable[[Array], Array]) -> Result:
    """A result with some of its outputs changed, those that are there."""
    changes: dict[str, Any] = {name: change(x) for name in names if (x := getattr(result, name)) is not None}
    return replace(result, **changes)


@fault("B209", "K35", "float16 comes in and float32 goes out", ("o",), dtypes=("float16",))
class OutputInFloat32(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        assert result.o is not None
        return replace(result, o=result.o.astype(np.float32))


@fault(
    "B211",
    "K35",
    "bfloat16 comes in, and output and gradients are float32",
    ("o", "dq", "dk", "dv"),
    dtypes=("bfloat16",),
)
class EverythingInFloat32(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        return each(result, ("o", "dq", "dk", "dv"), lambda x: x.astype(np.float32))


# -- cheats --------------------------------------------------------------------------------------


class Finished(Kernel):
    """A kernel whose output is replaced at the end."""

    def output(self, call: Call, o: Array) -> Array:
        return o

    def finish(self, call: Call, result: Result) -> Result:
        assert result.o is not None
        return replace(result, o=self.output(call, result.o))


@fault("cheat:mean-of-v", "cheat", "the output is the mean of V, whatever the scores", ("o",))
class MeanOfV(Finished):
    def output(self, call: Call, o: Array) -> Array:
        if not call.sk:
            return o
        mean = call.case.v.astype(call.wide).mean(axis=2, keepdims=True).astype(o.dtype)
        return np.broadcast_to(np.repeat(mean, call.group, axis=1), o.shape).copy()


@fault("cheat:zeros", "cheat", "every output is 0", ALL)
class Zeros(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        return each(result, OUTPUTS, np.zeros_like)


@fault("cheat:input-buffer", "cheat", "the output is the buffer of the queries, where it fits", ("o",))
class InputBuffer(Finished):
    def output(self, call: Call, o: Array) -> Array:
        return call.case.q if call.d == call.dv else o


@fault("cheat:last-result", "cheat", "the result of the last call of these shapes is returned again", ALL)
class LastResult(Kernel):
    def __init__(self) -> None:
        self.last: dict[object, Result] = {}

    def finish(self, call: Call, result: Result) -> Result:
        outputs = (getattr(result, name) for name in OUTPUTS)
        form = tuple(None if x is None else (x.shape, x.dtype.name) for x in outputs)
        before, self.last[form] = self.last.get(form), result
        return before or result


@fault("cheat:mutates-inputs", "cheat", "the values are overwritten with zeros after they were used", ("inputs",))
class MutatesInputs(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        return replace(result, mutated=("v",) if call.case.v.tobytes().strip(b"\0") else ())


@fault("cheat:ignores-a-head", "cheat", "the last head gets the output of the first", ("o",))
class IgnoresAHead(Finished):
    def output(self, call: Call, o: Array) -> Array:
        o = o.copy()
        o[:, -1] = o[:, 0]
        return o


@fault("cheat:ignores-a-batch-entry", "cheat", "the last batch entry is never computed: 0", ("o",))
class IgnoresABatchEntry(Finished):
    def output(self, call: Call, o: Array) -> Array:
        return np.concatenate([o[:-1], np.zeros_like(o[-1:])]) if call.b > 1 else o


def without(name: str) -> type[Kernel]:
    class IgnoresAGradient(Kernel):
        def finish(self, call: Call, result: Result) -> Result:
            return each(result, (name,), np.zeros_like)

    return fault(f"cheat:no-{name}", "cheat", f"{name} is 0", (name,))(IgnoresAGradient)


for _gradient in ("dq", "dk", "dv", "dbias", "dsink"):
    without(_gradient)


@fault("cheat:half-the-keys", "cheat", "only the first half of the keys is looked at", ALL)
class HalfTheKeys(Kernel):
    def sees(self, tile: Tile) -> Array | None:
        return both(super().sees(tile), (tile.j < (tile.call.sk + 1) // 2)[None])


@fault("cheat:last-key-dropped", "cheat", "the last key is not looked at", ALL)
class LastKeyDropped(Kernel):
    def sees(self, tile: Tile) -> Array | None:
        return both(super().sees(tile), (tile.j < tile.call.sk - 1)[None])


@fault("cheat:scale", "cheat", "the scale is 10 % too large", ALL)
class ScaleTooLarge(Kernel):
    def scale(self, call: Call, backward: bool) -> float:
        return 1.1 * super().scale(call, backward)


# -- sharp ---------------------------------------------------------------------------------------


class OneElementOff(Finished):
    """The first element of o that is a normal number is off by ``units`` units of its format, relatively."""

    units = 0

    def output(self, call: Call, o: Array) -> Array:
        o = o.copy()
        normal = np.flatnonzero(np.abs(o.astype(np.float64)) >= call.case.format.tiny)
        if normal.size:
            o.flat[normal[0]] = float(o.flat[normal[0]]) * (1 + self.units * call.case.format.unit)
        return o


@fault("sharp:one-element-half", "sharp", "one element of o is off by four units of its format", ("o",), dtypes=HALF)
class OneElementOfHalf(OneElementOff):
    units = 4


@fault(
    "sharp:one-element-float32", "sharp", "one element of o is off by 64 units of float32", ("o",), dtypes=("float32",)
)
class OneElementOfFloat32(OneElementOff):
    units = 64


def towards_zero(x: Array, dtype: np.dtype) -> Array:
    """Rounded to a half type towards zero."""
    found = x.astype(dtype)
    past = (np.abs(found.astype(x.dtype)) > np.abs(x)) & np.isfinite(x)
    found.view(np.uint16)[past] -= 1
    return found


@fault("sharp:truncated-output", "sharp", "o is rounded towards zero", THROUGH_O, dtypes=HALF)
class TruncatedOutput(Kernel):
    def forward_rows(
        self, call: Call, b: int, h: int, rows: Block, q: Array, k: Array, v: Array
    ) -> tuple[Array, Array]:
        o, lse = super().forward_rows(call, b, h, rows, q, k, v)
        return towards_zero(o, call.storage), lse


def rounds_p_to_nearest(dtype: str) -> Profile:
    """P is rounded to storage, to nearest: what the kernel below is meant to do."""
    return replace(profile(dtype), u_p=format_of(dtype).unit)


@fault(
    "sharp:p-rounded-up", "sharp", "P is rounded to storage upwards, so that sums of values of one sign drift",
    THROUGH_O, dtypes=HALF, profile=rounds_p_to_nearest,
)  # fmt: skip
class PRoundedUp(Kernel):
    """Off by less than a unit of P in each weight, and always to the same side."""

    def weights(self, tile: Tile, p: Array) -> Array:
        down = towards_zero(p, tile.call.storage)
        up = down.copy()
        # numbers that are not normal are left: rounded up they would grow without bound
        up.view(np.uint16)[(down.astype(p.dtype) < p) & (p >= tile.call.case.format.tiny)] += 1
        return super().weights(tile, up.astype(p.dtype))
