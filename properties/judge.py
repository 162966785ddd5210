"""The judge: one output of a kernel against the exact answer and its bound.

Order of judgement: there at all, shape, dtype, NaN and infinity pattern, exact contracts, and only
then the ratio |got - exact| / allowed. The first that fails is the verdict.
"""

from __future__ import annotations

import math

import numpy as np

from ..oracle.bounds import Bound
from ..oracle.case import Case
from ..oracle.enclosure import Enclosed, Exact
from ..oracle.formats import FORMATS
from ..oracle.profile import Conventions, Profile
from ..oracle.visibility import empty_rows, keys_valid, rows_judged
from .verdict import Outcome, Verdict, Worst

Array = np.ndarray

TITLES: dict[str, str] = {
    "o": "output",
    "lse": "log-sum-exp",
    "dq": "dQ",
    "dk": "dK",
    "dv": "dV",
    "dbias": "dbias",
    "dsink": "dsink",
}

#: relative error of forming |got - hi - lo| in float64; added to one side and taken from the other
FORMING = 4 * 2.0**-53


class Undecided(Exception):
    """The enclosure is too wide to tell which side of the bound a value lies on."""


def violated(kind: str, sentence: str, **facts: object) -> Verdict:
    return Verdict(Outcome.VIOLATED, sentence, kind, **facts)  # type: ignore[arg-type]


def expected_shape(case: Case, output: str) -> tuple[int, ...]:
    """The shape that an output must have."""
    b, hq, _, sq, _, _, dv = case.shape
    shapes = {"o": (b, hq, sq, dv), "lse": (b, hq, sq), "dq": case.q.shape, "dk": case.k.shape, "dv": case.v.shape}
    for name, given in (("dbias", case.bias), ("dsink", case.sinks)):
        if output == name:
            assert given is not None
            return given.shape
    return shapes[output]


def expected_dtype(case: Case, output: str, profile: Profile) -> np.dtype:
    """The dtype that an output must have: storage, the declared one for lse, the bias's own for dbias."""
    if output == "lse":
        return FORMATS[profile.lse].dtype
    if output == "dsink":
        return case.wide_format.dtype
    if output == "dbias":
        assert case.bias is not None
        return case.bias.dtype
    return case.q.dtype


def check_form(case: Case, output: str, got: object, profile: Profile) -> Verdict | None:
    """A violation where an output is missing or has the wrong shape or dtype; None where it is well formed."""
    title = TITLES[output]
    if got is None:
        return violated("missing", f"{title}: the candidate offers it but returned None")
    if not isinstance(got, np.ndarray):
        return violated("dtype", f"{title}: got a {type(got).__name__}, wanted an array")
    shape = expected_shape(case, output)
    if got.shape != shape:
        return violated("shape", f"{title}: got shape {list(got.shape)}, wanted {list(shape)}")
    dtype = expected_dtype(case, output, profile)
    if got.dtype != dtype:
        return violated("dtype", f"{title}: got dtype {got.dtype}, wanted {dtype}")
    return None


def judged_elements(case: Case, output: str) -> Array:
    """Where an output is judged at all: not in rows of padding."""
    shape = expected_shape(case, output)
    if output not in ("o", "lse", "dq"):
        return np.ones(shape, dtype=bool)
    rows = rows_judged(case)[:, None, :]
    return np.broadcast_to(rows if output == "lse" else rows[..., None], shape)


def empty_elements(case: Case, output: str) -> Array:
    """Where an output belongs to a judged row that sees no key (o, lse and dq)."""
    empty = empty_rows(case)
    return np.broadcast_to(empty if output == "lse" else empty[..., None], expected_shape(case, output))


def judge(
    case: Case, output: str, got: Array, exact: Exact, bound: Bound, conventions: Conventions, profile: Profile
) -> Verdict:
    """The verdict on one output. Raises Undecided where the enclosure is too wide to give one."""
    wrong = check_form(case, output, got, profile)
    if wrong is not None:
        return wrong
    truth: Enclosed | None = getattr(exact, output)
    assert truth is not None
    wide = got.astype(np.float64)
    if output == "lse" and conventions.lse_base == "2":
        wide = wide * math.log(2)
    elements = judged_elements(case, output)
    # where a value is judged, and where it must be finite: also where any value would do, unless an
    # intermediate may overflow on the way to it
    live, finite = elements & ~bound.vacuous, elements & ~bound.overflow

    # Rows that see no key: what the candidate declares, exactly.
    contract = bound.must_be_zero & elements & ~bound.overflow
    declared = np.zeros_like(elements)
    if output in ("o", "lse", "dq"):
        empty = empty_elements(case, output)
        live, finite = live & ~empty, finite & ~empty
        if output != "dq" and empty.any():
            wrong = _judge_empty(case, output, got, wide, empty & ~bound.overflow, conventions, profile)
            if wrong is not None:
                return wrong
            declared = empty & ~bound.overflow
            contract = contract & ~empty
    if conventions.empty_row != "zero" and output in GRADIENTS_OVER_ROWS:
        # a NaN or a mean in an empty row reaches the gradients; what they hold there is not judged
        poisoned = reached_by_empty_rows(case, output)
        live, finite, contract = live & ~poisoned, finite & ~poisoned, contract & ~poisoned

    bad = np.isnan(wide) & (finite | contract)
    if bad.any():
        return _non_finite(output, got, truth, bound, bad)
    inf_is_right = _may_be_infinite(wide, truth, bound, FORMATS[got.dtype.name].max, FORMATS[got.dtype.name].unit)
    bad = np.isinf(wide) & finite & ~inf_is_right
    if bad.any():
        return _non_finite(output, got, truth, bound, bad)
    inf_is_right, live = inf_is_right & live, live & ~np.isinf(wide)

    bad = contract & (wide != 0)
    if bad.any():
        return _contract(output, got, bad)
    return _judge_ratio(output, got, wide, truth, bound, live, int((contract | inf_is_right | declared).sum()))


GRADIENTS_OVER_ROWS = ("dq", "dk", "dv", "dbias", "dsink")


def _judge_ratio(
    output: str, got: Array, wide: Array, truth: Enclosed, bound: Bound, live: Array, others: int
) -> Verdict:
    count = int(live.sum())
    if count == 0 and others == 0:
        return Verdict(Outcome.VACUOUS, _why_vacuous(output, bound))
    if count == 0:
        return Verdict(Outcome.HOLDS, judged=others)
    with np.errstate(all="ignore"):
        off = np.abs((wide - truth.hi) - truth.lo)
        most = np.where(live, (off * (1 + FORMING) + truth.rad) / bound.allowed, 0.0)
        least = np.where(live, (off * (1 - FORMING) - truth.rad) / bound.allowed, 0.0)
    at = _index(np.argmax(most), most.shape)
    if most[at] > 1 and not (least > 1).any():
        raise Undecided
    if most[at] > 1:
        at = _index(np.argmax(least), least.shape)
    worst = _worst(output, got, truth, bound, at, float(most[at]))
    stakes = live & ~bound.structural & (np.abs(truth.hi) > truth.rad)  # certainly not 0
    zeros = stakes & (np.abs(truth.hi) <= bound.allowed)
    facts = {
        "worst": worst,
        "judged": count + others,
        "median": float(np.median(most[live])),
        "at_stake": int(stakes.sum()),
        "zeros": int(zeros.sum()),
    }
    if worst.ratio <= 1:
        return Verdict(Outcome.HOLDS, **facts)  # type: ignore[arg-type]
    sentence = (
        f"{TITLES[output]}: got {worst.got}, exact {worst.exact}, allowed ±{worst.allowed:.2g}, "
        f"at {list(worst.index)} (ratio {worst.ratio:.2g})"
    )
    return violated("bound", sentence, **facts)


def _short(text: str) -> str:
    """A decimal string without the zeros at its end."""
    mantissa, e, exponent = text.partition("e")
    return (mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa) + e + exponent


def _index(flat: np.intp, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(n) for n in np.unravel_index(int(flat), shape))


def _worst(output: str, got: Array, truth: Enclosed, bound: Bound, at: tuple[int, ...], ratio: float) -> Worst:
    return Worst(
        output=output,
        index=at,
        got=str(got[at]),
        exact=_short(truth.decimal(at)),
        allowed=float(bound.allowed[at]),
        ratio=ratio,
        parts=tuple((name, float(part[at])) for name, part in bound.parts.items()),
    )


def _may_be_infinite(wide: Array, truth: Enclosed, bound: Bound, largest: float, unit: float) -> Array:
    """Where an infinity is what rounding to the output's format may rightly give."""
    with np.errstate(all="ignore"):
        # towards got's side: beside an exact value near 0 the bound may reach both ends of the format
        reaches = np.sign(wide) * truth.hi + bound.allowed >= largest * (1 + unit / 2)
    return np.isinf(wide) & reaches


def _judge_empty(
    case: Case, output: str, got: Array, wide: Array, empty: Array, conventions: Conventions, profile: Profile
) -> Verdict | None:
    """Rows that see no key, by the declared convention; None where they are as declared."""
    if output == "lse":
        wanted, right = (
            conventions.empty_lse,
            {
                "-inf": np.isneginf(wide),
                "+inf": np.isposinf(wide),
                "nan": np.isnan(wide),
                "0": wide == 0,
            }[conventions.empty_lse],
        )
    elif conventions.empty_row == "mean":
        wanted, right = "the mean of V", _is_mean(case, wide, profile)
    else:
        wanted, right = ("NaN", np.isnan(wide)) if conventions.empty_row == "nan" else ("0", wide == 0)
    bad = empty & ~right
    if not bad.any():
        return None
    at = tuple(int(n) for n in np.argwhere(bad)[0])
    return violated(
        "contract", f"{TITLES[output]}: got {got[at]}, wanted {wanted} at {list(at)}, a row that sees no key"
    )


def _is_mean(case: Case, wide: Array, profile: Profile) -> Array:
    """Where O is the mean of V over the keys that are not padding, to the rounding of such a sum."""
    valid = keys_valid(case)[:, None, :, None]
    v = np.where(valid, case.v.astype(np.float64), 0.0)
    n = np.maximum(valid.sum(axis=2), 1)
    mean, size = v.sum(axis=2) / n, np.abs(v).sum(axis=2) / n
    # n additions, a division and exp's own error, twice over for the float64 mean it is compared with
    allowed = 2 * (n + 4) * profile.u * size + (profile.u_p + profile.u_exp) * size
    allowed = allowed + FORMATS[profile.storage].unit * (np.abs(mean) + allowed) + profile.tiny
    mean, allowed = (np.repeat(x, case.group, axis=1)[:, :, None] for x in (mean, allowed))
    return np.asarray(np.abs(wide - mean) <= allowed)


def reached_by_empty_rows(case: Case, output: str) -> Array:
    """Where an empty row's own value (NaN, mean) would enter a gradient."""
    empty = empty_rows(case)
    shape = expected_shape(case, output)
    if output == "dq":
        return np.broadcast_to(empty[..., None], shape)
    if output in ("dbias", "dsink"):
        return np.full(shape, bool(empty.any()))
    b, hk = case.k.shape[:2]
    reached = np.asarray(empty.reshape(b, hk, case.group * case.shape[3]).any(axis=2))
    return np.broadcast_to(reached[..., None, None], shape)


def _non_finite(output: str, got: Array, truth: Enclosed, bound: Bound, bad: Array) -> Verdict:
    at = tuple(int(n) for n in np.argwhere(bad)[0])
    exact = _short(truth.decimal(at))
    sentence = f"{TITLES[output]}: got {got[at]}, exact {exact}, at {list(at)}"
    return violated("non-finite", sentence)


def _contract(output: str, got: Array, bad: Array) -> Verdict:
    at = tuple(int(n) for n in np.argwhere(bad)[0])
    return violated(
        "contract", f"{TITLES[output]}: got {got[at]}, wanted exactly 0 at {list(at)}: nothing visible reaches it"
    )


def _why_vacuous(output: str, bound: Bound) -> str:
    if bound.vacuous.size == 0:
        return f"{TITLES[output]} has no elements"
    if bound.overflow.any():
        return "an intermediate may overflow"
    if bound.vacuous.any():
        return "the bound is as large as the values"
    return f"no element of {TITLES[output]} is judged"
