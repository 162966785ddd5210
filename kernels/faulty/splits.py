"""Keys split into parts that are merged by their log-sum-exp: K28, sinks K30, batch variance K36."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...oracle.profile import Profile
from ...oracle.result import Result
from .call import Array, Block, Call, Partial, Tile, blocks
from .kernel import Kernel
from .registry import ALL, fault, profile


class Part(NamedTuple):
    """Attention over a part of the keys: output, and log-sum-exp as maximum and log of the sum, [rows, 1].

    Two numbers, for a log-sum-exp far from 0 has no digits left for the sum.
    """

    o: Array
    m: Array
    log: Array


def split_profile(dtype: str) -> Profile:
    """Weights of the merge are exp(m + log(sum)): one more log, exp and division on the way."""
    usual = profile(dtype)
    return replace(usual, u_exp=8 * usual.u)


class SplitKernel(Kernel):
    """A right kernel that reads the keys in parts and merges them."""

    def count(self, call: Call, b: int) -> int:
        """Parts that the keys are split into, where there are as many blocks."""
        return 2

    def parts(self, call: Call, b: int) -> list[Sequence[Block]]:
        keys = call.k_blocks
        n = max(1, min(self.count(call, b), len(keys)))
        size = -(-len(keys) // n)
        return [keys[at : at + size] for at in range(0, max(len(keys), 1), max(size, 1))]

    def finish_part(self, call: Call, h: int, at: Partial) -> Part:
        divisor = np.where(at.total == 0, 1, at.total)
        return Part(at.acc / divisor, at.m, np.where(at.total == 0, -np.inf, np.log(divisor)))

    def with_sink(self, call: Call, h: int, parts: list[Part]) -> list[Part]:
        assert call.case.sinks is not None
        zeros = np.zeros_like(parts[0].m)
        return [*parts, Part(np.zeros_like(parts[0].o), zeros + call.wide.type(call.case.sinks[h]), zeros)]

    def weigh(self, parts: list[Part]) -> tuple[list[Array], Array]:
        """The weight of each part, and what they are measured from."""
        m = np.maximum.reduce([part.m for part in parts])
        origin = np.where(m == -np.inf, 0, m)
        return [np.exp((part.m - origin) + part.log) for part in parts], m

    def merge(self, call: Call, parts: list[Part]) -> tuple[Array, Array]:
        weights, m = self.weigh(parts)
        total = sum(weights)
        divisor = np.where(total == 0, 1, total)
        o = sum(w * part.o for w, part in zip(weights, parts, strict=True)) / divisor
        return o, np.where(total == 0, -np.inf, m + np.log(divisor))

    def forward_rows(
        self, call: Call, b: int, h: int, rows: Block, q: Array, k: Array, v: Array
    ) -> tuple[Array, Array]:
        found = [
            self.finish_part(call, h, self.attend(call, b, h, rows, q, k, v, keys)) for keys in self.parts(call, b)
        ]
        if call.case.sinks is not None:
            found = self.with_sink(call, h, found)
        return self.merge(call, found)


@fault(
    "B075",
    "K10",
    "parts leave their log-sum-exp in base 2, and the merge takes it for natural",
    ALL,
    profile=split_profile,
)
class BaseTwoMerged(SplitKernel):
    def weigh(self, parts: list[Part]) -> tuple[list[Array], Array]:
        log2e = parts[0].m.dtype.type(math.log2(math.e))
        m = np.maximum.reduce([part.m for part in parts])
        origin = np.where(m == -np.inf, 0, m)
        return [np.exp((part.m - origin + part.log) * log2e) for part in parts], m


@fault(
    "B175", "K28", "who does not ask for the log-sum-exp gets parts merged without it", ("o",),
    profile=split_profile, offers=("o",),
)  # fmt: skip
class PartialLseNotStored(SplitKernel):
    def merge(self, call: Call, parts: list[Part]) -> tuple[Array, Array]:
        if "lse" not in call.want:
            parts = [Part(part.o, np.zeros_like(part.m), np.zeros_like(part.log)) for part in parts]
        return super().merge(call, parts)


@fault("B176", "K28", "the log-sum-exp returned is that of the first part", ("lse",), profile=split_profile)
class LseOfFirstPart(SplitKernel):
    def merge(self, call: Call, parts: list[Part]) -> tuple[Array, Array]:
        call.notes.setdefault("first", []).append(parts[0].m + parts[0].log)
        return super().merge(call, parts)

    def finish(self, call: Call, result: Result) -> Result:
        assert result.lse is not None
        first = call.notes.get("first")
        return result if first is None else replace(result, lse=np.concatenate(first).reshape(result.lse.shape))


@fault(
    "B177",
    "K28",
    "every part empty: the log-sum-exp is +inf and the weights -inf - -inf",
    ("o", "lse"),
    profile=split_profile,
)
class EmptyMergePlusInf(SplitKernel):
    def merge(self, call: Call, parts: list[Part]) -> tuple[Array, Array]:
        o, lse = super().merge(call, parts)
        empty = np.all([part.log == -np.inf for part in parts], axis=0)
        return np.where(empty, np.nan, o), np.where(empty, np.inf, lse)


@fault("B179", "K28", "a part without keys has the weight NaN and poisons the others", ALL, profile=split_profile)
class EmptyPartPoisons(SplitKernel):
    def weigh(self, parts: list[Part]) -> tuple[list[Array], Array]:
        weights, m = super().weigh(parts)
        return [np.where(part.log == -np.inf, np.nan, w) for w, part in zip(weights, parts, strict=True)], m


@fault(
    "B181",
    "K28",
    "the log-sum-exps of the parts are stored [parts, rows] and read [rows, parts]",
    ALL,
    profile=split_profile,
)
class PartialLseTransposed(SplitKernel):
    def merge(self, call: Call, parts: list[Part]) -> tuple[Array, Array]:
        rows = len(parts[0].m)
        m, log = (
            np.stack(stored).reshape(rows, len(parts)).T[..., None]
            for stored in ([part.m for part in parts], [part.log for part in parts])
        )
        return super().merge(call, [Part(part.o, m[n], log[n]) for n, part in enumerate(parts)])


# -- sinks ---------------------------------------------------------------------------------------


@fault("B190", "K30", "the sink is added in each part", ALL, profile=split_profile)
class SinkPerPart(SplitKernel):
    def with_sink(self, call: Call, h: int, parts: list[Part]) -> list[Part]:
        return (
            super().with_sink(call, h, super().with_sink(call, h, parts))
            if len(parts) > 1
            else super().with_sink(call, h, parts)
        )


@fault("B192", "K30", "a tile without keys has the maximum -1e5: the sink beside it overflows, and inf * 0 is NaN", ALL)
class SinkOverPlaceholder(Kernel):
    def step(self, tile: Tile, s: Array, v: Array, so_far: Partial) -> Partial:
        at = super().step(tile, s, v, so_far)
        sinks = tile.call.case.sinks
        if sinks is None:
            return at
        wide = s.dtype.type
        without = (s == -np.inf).all(axis=1, keepdims=True) & (tile.i < self.lengths(tile.call, tile.b)[0])
        beside = np.exp(wide(sinks[tile.h]) - wide(-1e5)) * np.exp(wide(-1e5) - at.m)
        return at._replace(total=np.where(without, at.total + beside, at.total))


@fault("B193", "K30", "the sink is added as exp(sink - m) and takes no part in the maximum", ALL)
class SinkBesideTheMaximum(Kernel):
    def add_sink(self, call: Call, h: int, at: Partial) -> Partial:
        assert call.case.sinks is not None
        return at._replace(total=at.total + np.exp(call.wide.type(call.case.sinks[h]) - at.m))


# -- results that depend on the company ----------------------------------------------------------


class PlainSplit(SplitKernel):
    """One part, as a kernel that may split has it."""

    def count(self, call: Call, b: int) -> int:
        return 1


@fault("B213", "K36", "the number of parts depends on how many batch entries there are", ALL, profile=split_profile)
class PartsByBatch(PlainSplit):
    def count(self, call: Call, b: int) -> int:
        return call.b


@fault("B214", "K36", "the number of parts depends on the keys of the whole batch", ALL, profile=split_profile)
class PartsByCompany(PlainSplit):
    def count(self, call: Call, b: int) -> int:
        return -(-sum(call.k_lengths) // max(call.k_lengths[b], 1))


@fault("B215", "K36", "the size of a tile depends on the mean length of the batch", ALL)
class TilesByMeanLength(Kernel):
    def enter(self, call: Call) -> None:
        if call.b > 1:
            nominal = max(block.stop - block.start + block.missing for block in call.k_blocks) if call.k_blocks else 1
            call.k_blocks = blocks(call.sk, (max(nominal, sum(call.k_lengths) // call.b + 1),))
