"""Systematic error: a lean of a kernel's results that is too small for any single element to show.

Beside the worst element, every case gives the share of its elements that lie above the correctly
rounded exact value, minus the share that lie below it. Where a kernel rounds to nearest, what pushes a
result off that value has no side, and in the mean over the cases the two shares are alike. Storing by
truncation, a truncated P or dS and a factor that is a unit too large stay inside every bound and have a
side: the shares differ by 0.4 and more.

Above and below are taken in several directions, as faults differ in what they follow:

- "up": towards +infinity.
- "out": away from 0, so that truncation is -.
- "rest" (O): where the keys below the row's largest score push O; elements that owe them at least half
  of their size. A kernel's own P is exactly 1 at the largest score, so its roundings are in the rest.
- "tied" (O): where the keys that share a row's largest score, several of them, push O; alike.

**What is tested.** Let z be a case's difference of shares, at most 1 in size. The hypothesis is that,
whatever came before, its expectation is at most MARGIN + L to either side. L is what the accumulator
alone may do: all that is not a rounding to storage (sums, exp, tanh, the scale, tf32 operands) may lean
as far as its bound w, and moves a result past a rounding boundary in a share w / (u |exact|) of the
elements at most, as boundaries lie further apart than u |exact| and exact values anywhere between
them; L is the mean of that. Roundings of P, dS, O and of gradients to storage must not lean, unless the
profile declares a u_p beyond the storage type's unit, which says that P is truncated. MARGIN is for
numbers that are the same in many cases and round the same way in all of them (thirds, exp(-1)): right
kernels were seen to lean by up to 0.035 over 3,000 cases of the usual draws.

**How.** A bet against the hypothesis: the wealth of one who puts the share f on z in each case,

    W_n = prod (1 + f (± z_i - a_i) / (1 + a_i)),   a_i = MARGIN + L_i,   0 < f < 1,

has factors that are positive, and under the hypothesis expectations of at most 1: it is a nonnegative
supermartingale. So is the mean W of such wealths over a few f, both signs and all directions; by
Ville's inequality P(W_n >= 1 / r for any n) <= r (Ville, 1939; Waudby-Smith and Ramdas, Estimating
means of bounded random variables by betting, 2024, section 4). A lean is reported when W reaches
1 / RATE, at whatever case that is: a kernel of which the hypothesis is true is accused with probability
at most RATE per output and dtype, for any number of cases and whatever their law. Cases count, not
elements: elements of one case depend on one another.

**What it does not see.** Where results are stored in the accumulator's own format (float32 and float64
kernels, most log-sum-exps) there is no rounding to storage to look at, and what the profile lets
sums and exp do is far more than a unit. Such outputs have no lean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..oracle.bounds import Bound
from ..oracle.case import Case
from ..oracle.enclosure import Enclosed, Exact
from ..oracle.formats import FORMATS, Format
from ..oracle.profile import Profile
from .verdict import Lean

Array = np.ndarray

#: probability of accusing a right kernel, per output and dtype
RATE = 1e-6
#: a difference of shares that right kernels may have in the mean
MARGIN = 0.1
#: an element is looked at where the accumulator may move it by this share of u |exact| at most,
ACCUMULATED = 0.25
#: and where its whole bound is at most this many u |exact|: beyond, its own rounding is lost in noise
NOISE = 16
#: what a bet puts on each case
STAKES = (0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
#: scores closer than this (float64, from logarithms) are one score
SAME = 1e-9

_REST, _TIED = "the keys below each row's largest score", "the keys that share their row's largest score"
#: direction -> what the side "+" and the side "-" of it are called
DIRECTIONS: dict[str, tuple[str, str]] = {
    "up": ("upwards", "downwards"),
    "out": ("away from 0", "towards 0"),
    "rest": (f"towards {_REST}", f"away from {_REST}"),
    "tied": (f"towards {_TIED}", f"away from {_TIED}"),
}


def leaning_profile(profile: Profile, stored: Format) -> Profile | None:
    """The arithmetic that may lean: the profile without its roundings to nearest to storage.

    ``stored`` is the output's format. None where that is the accumulator's own, or as good.
    """
    if profile.u * 64 > stored.unit:
        return None
    u_p = 0.0 if profile.u_p <= FORMATS[profile.storage].unit else profile.u_p
    return replace(profile, storage=profile.accumulator, u_p=u_p, grads_in_storage=None)


def leans(
    case: Case, output: str, got: Array, exact: Exact, bound: Bound, leaning: Bound, elements: Array
) -> tuple[Lean, ...]:
    """A case's lean in each direction in which it has elements to show one.

    ``leaning`` is the bound under ``leaning_profile``, ``elements`` says where the output is judged.
    """
    truth: Enclosed = getattr(exact, output)
    stored = FORMATS[got.dtype.name]
    wide, hi = got.astype(np.float64), truth.hi
    with np.errstate(all="ignore"):
        unit = stored.unit * np.abs(hi)
        moved = (leaning.allowed - leaning.parts["storing"]) / unit
        looked = elements & ~bound.vacuous & ~bound.must_be_zero & ~bound.structural & np.isfinite(wide)
        looked = looked & (np.abs(hi) >= 8 * stored.tiny) & (np.abs(hi) <= stored.max / 2)
        looked = looked & (moved <= ACCUMULATED) & (bound.allowed <= NOISE * unit)
    if not looked.any():
        return ()
    # elsewhere there may be infinities
    wide, hi, nearest = (np.where(looked, x, 0.0) for x in (wide, hi, rounded(truth, stored)))
    side, sign = np.sign(wide - nearest), np.sign(hi)
    inexact = looked & (nearest != hi)  # what the format holds exactly, truncation leaves alone
    found = [_lean("up", side, inexact, moved), _lean("out", side * sign, inexact, moved)]
    if output == "o":
        of_largest, several = _by_largest(case, exact)
        rest = hi - of_largest
        found.append(_lean("rest", side * np.sign(rest), inexact & (2 * np.abs(rest) >= np.abs(hi)), moved))
        tied = looked & several[..., None] & (2 * np.abs(of_largest) >= np.abs(hi))
        found.append(_lean("tied", side * np.sign(of_largest), tied, moved))
    return tuple(lean for lean in found if lean is not None)


def _lean(direction: str, side: Array, where: Array, moved: Array) -> Lean | None:
    if not where.any():
        return None
    return Lean(direction, float(side[where].mean()), float(moved[where].mean()), int(where.sum()))


def rounded(truth: Enclosed, stored: Format) -> Array:
    """The exact values rounded to nearest in a format, ties to even, as float64; for normal numbers."""
    hi = truth.hi
    # a remainder decides where hi lies on the boundary of two; one within the radius is none
    with np.errstate(all="ignore"):
        beside = np.where(np.abs(truth.lo) > truth.rad, np.nextafter(hi, np.copysign(np.inf, truth.lo)), hi)
        step = np.ldexp(stored.unit, np.frexp(hi)[1])
        return np.asarray(np.rint(beside / step) * step)


def _by_largest(case: Case, exact: Exact) -> tuple[Array, Array]:
    """What of O comes from the keys with a row's largest score, and where there are several of them."""
    assert exact.logp is not None
    logp = exact.logp
    largest = np.isfinite(logp) & (logp >= logp.max(axis=3, keepdims=True, initial=-np.inf) - SAME)
    p = np.where(largest, np.exp(logp), 0.0)
    if case.keep is not None:
        p = p * case.keep / (1 - (case.dropout or 0.0))
    v = np.repeat(case.v.astype(np.float64), case.group, axis=1)
    return p @ v, largest.sum(axis=3) > 1


@dataclass
class Bets:
    """The bets of one output in one dtype, case after case. ``rate``: see RATE."""

    rate: float = RATE
    wealth: dict[tuple[str, int], Array] = field(default_factory=dict)  # logs, one per stake
    sums: dict[str, tuple[int, float]] = field(default_factory=dict)  # direction -> cases, sum of shares
    most: dict[tuple[str, int], tuple[float, int, Any]] = field(default_factory=dict)

    def add(self, found: tuple[Lean, ...], of: Any = None) -> bool:
        """Bet on a case. True where the hypothesis is lost.

        ``of`` is what to remember the case by if it turns out to lean the most.
        """
        for lean in found:
            cases, total = self.sums.get(lean.direction, (0, 0.0))
            self.sums[lean.direction] = cases + 1, total + lean.share
            fair = MARGIN + lean.allowed
            for side in (1, -1):
                key = lean.direction, side
                won = (side * lean.share - fair) / (1 + fair)
                self.wealth[key] = self.wealth.get(key, np.zeros(len(STAKES))) + np.log1p(np.array(STAKES) * won)
                if key not in self.most or (side * lean.share, lean.elements) > self.most[key][:2]:
                    self.most[key] = side * lean.share, lean.elements, of
        return bool(self.log_wealth >= -math.log(self.rate))

    @property
    def log_wealth(self) -> float:
        """Log of the mean wealth over directions, sides and stakes; those without a case still hold 1."""
        logs = np.zeros((2 * len(DIRECTIONS), len(STAKES)))
        for row, log in enumerate(self.wealth.values()):
            logs[row] = log
        top = logs.max()
        return float(top + np.log(np.exp(logs - top).mean()))

    @property
    def strongest(self) -> tuple[str, int]:
        """Direction and side of the bet that won the most."""
        return max(self.wealth, key=lambda key: float(self.wealth[key].max()))

    def means(self) -> dict[str, tuple[int, float]]:
        """direction -> cases, mean difference of shares."""
        return {name: (cases, total / cases) for name, (cases, total) in self.sums.items()}

    def sentence(self, title: str) -> str:
        """What a person reads of a lean that was found."""
        direction, side = self.strongest
        cases, mean = self.means()[direction]
        return (
            f"{title}: leans {DIRECTIONS[direction][side < 0]}, although no element is outside its bound: in the mean "
            f"of {cases} cases {abs(mean):.0%} more of the elements lie on that side of the correctly rounded exact "
            f"value than on the other, and roundings to nearest make less than {MARGIN:.0%} (a right kernel would be "
            f"accused once in {1 / self.rate:,.0f} campaigns); shown is the case that leans the most"
        )
