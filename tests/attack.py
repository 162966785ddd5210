"""The attack on the error bounds: right kernels, and cases bent until they come close to a bound.

Shared by the tests and by the long search in benchmarks/search_bounds.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np

from attncheck.oracle.bounds import Bound, bounds
from attncheck.oracle.case import Case, CaseError
from attncheck.oracle.enclosure import Exact, exact
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.profile import Conventions
from attncheck.oracle.result import Result
from attncheck.properties.draws import drawn
from attncheck.properties.judge import Undecided, judge, judged_elements
from attncheck.properties.strategies import Plan
from attncheck.properties.verdict import Outcome, Verdict

from .right import Choices, choices, solve, suits, varied

Array = np.ndarray

#: what the attack draws: every feature, gradients, with and without bias and an upstream of the log-sum-exp,
#: and sinks and dropout more often than by chance
PLANS: tuple[frozenset[str], ...] = (
    frozenset({"backward"}),
    frozenset({"backward", "dlse", "bias"}),
    frozenset({"backward", "sinks"}),
    frozenset({"backward", "dropout"}),
    frozenset({"backward", "dlse", "sinks", "dropout"}),
)


def verdicts(case: Case, c: Choices) -> dict[str, Verdict]:
    """The judge's verdict on each output of a right kernel; outputs that it cannot decide are left out."""
    profile = c.profile(case.dtype)
    answer = exact(case)
    got = solve(case, c)
    found = {}
    for name, bound in bounds(case, answer, profile).items():
        try:
            found[name] = judge(case, name, getattr(got, name), answer, bound, Conventions(), profile)
        except Undecided:
            continue
    return found


def ratio(verdict: Verdict | None) -> float:
    """How close a verdict is to a violation; infinite where there is one that has no ratio."""
    if verdict is None:
        return 0.0
    if verdict.worst is not None:
        return verdict.worst.ratio
    return math.inf if verdict.outcome is Outcome.VIOLATED else 0.0


def errors(case: Case, output: str, got: Result, answer: Exact, bound: Bound) -> Array:
    """|got - exact| less what the enclosure leaves open, 0 where nothing is judged or got is infinite."""
    truth = getattr(answer, output)
    with np.errstate(all="ignore"):
        off = np.abs((getattr(got, output).astype(np.float64) - truth.hi) - truth.lo) * (1 - 2.0**-50) - truth.rad
    return np.where(judged_elements(case, output) & ~bound.vacuous & np.isfinite(off), off, 0.0)


def pairs(dtype: str, seed: int) -> Iterator[tuple[Case, Choices]]:
    """An endless stream of drawn cases, each with a right kernel drawn for it."""
    rng = np.random.default_rng(seed)
    streams = [drawn(Plan(dtype, needs), seed) for needs in PLANS]
    for n in count():
        case = next(streams[n % len(streams)])[0]
        c = choices(rng, dtype)
        if suits(c, case):
            yield case, c


# -- bending a case -------------------------------------------------------------------------------


def climb(case: Case, c: Choices, output: str, rng: np.random.Generator, steps: int) -> tuple[float, Case, Choices]:
    """The largest ratio of one output that ``steps`` changes of numbers and choices led to."""
    best = ratio(verdicts(case, c).get(output))
    for _ in range(steps):
        other, d = case, c
        if rng.random() < 0.35:
            d = varied(c, rng, case.dtype)
        if d == c or rng.random() < 0.5:
            other = bent(case, rng)
        if not suits(d, other):
            continue
        found = ratio(verdicts(other, d).get(output))
        if found >= best:
            best, case, c = found, other, d
        if best > 1:
            break
    return best, case, c


@np.errstate(all="ignore")
def bent(case: Case, rng: np.random.Generator) -> Case:
    """The case with some of its numbers changed; the same case where the change makes none."""
    arrays = ("q", "k", "v", "do", "dlse", "bias", "sinks", "sinks")
    names = [n for n in arrays if getattr(case, n) is not None and getattr(case, n).size]
    if case.softcap is not None:
        names.append("softcap")
    if case.keep is not None and case.keep.size:
        names += ["dropout", "keep"]
    if not names or rng.random() < 0.05:
        return replace(case, scale=float(rng.choice([0.5, 1.0, 2.0, 3.0, -1.0, 0.75, 2.0**-20, 2.0**12])))
    name = str(rng.choice(names))
    if name == "softcap":
        return replace(case, softcap=float(rng.choice([0.5, 1.0, 2.0, 3.0, 10.0, 30.0, 1000.0])))
    if name == "dropout":
        return replace(case, dropout=float(np.float32(rng.choice([0.0, 0.1, 0.3, 0.5, 0.6, 0.75, 0.9, 0.999, 2**-20]))))
    array = getattr(case, name)
    if name == "keep":
        flipped = array.copy()
        flipped[tuple(rng.integers(n) for n in array.shape)] ^= True
        return replace(case, keep=flipped)
    fmt = FORMATS[array.dtype.name]
    x = array.astype(np.float64)
    at = tuple(rng.integers(n) for n in x.shape)
    kind = rng.integers(9)
    if kind == 0:
        x[at] *= 2.0 ** rng.integers(-4, 5)
    elif kind == 1:
        x[at] = rng.choice([0.0, 1.0, -1.0, 1 + 2 * fmt.unit, 3.0, fmt.tiny, -fmt.smallest, 0.3])
    elif kind == 2:
        x[at] *= 1 + 2 * fmt.unit * rng.integers(-2, 3)
    elif kind == 3:
        x = x * 2.0 ** rng.integers(-3, 4)
    elif kind == 4:
        x[..., :] = x[at[:-1]]
    elif kind == 5:
        x[at] *= -1
    elif kind == 6:
        x = x * 2.0 ** rng.choice([-60, -20, -8, 8, 20, 60])
    elif kind == 7:
        x[at] = rng.standard_normal() * 2.0 ** rng.integers(-2, 3)
    else:
        x = np.where(rng.random(x.shape) < 0.5, x, np.round(x))
    with np.errstate(all="ignore"):
        y = x.astype(array.dtype)
    try:
        return replace(case, **{name: np.where(np.isneginf(array.astype(np.float64)), array, y)})
    except CaseError:  # a number passed the end of its format
        return case
