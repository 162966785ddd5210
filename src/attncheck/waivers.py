"""Waivers: violations that an adopter has settled, in a file of one line each.

    # candidate   | property | condition           | reason, with a link
    my_kernel.py:f | output   | scale<=0 & Sq>Sk    | scale 0 is taken as 1: https://example.org/issues/7
    *              | dq, dk   | bfloat16 & softcap  | the cap's slope is rounded: https://example.org/issues/9

A violation in a case that meets the condition counts as known. A condition is one term or several
joined by &; every term may have a ! before it:

    any                 every case
    causal-square       a feature (``attncheck list features``)
    bfloat16            a dtype
    route=mask          how the case is put; likewise layout=transposed (of q, k, v or do) and poison=nan
    Sq>Sk, D>64, B=2    a size against a size or a number: = != < <= > >=
    scale<0.1           a number of the case against a number: scale, softcap, dropout (false where absent)

The first column is a candidate's name or its TARGET as on the command line, or * for all.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attncheck.kernels.candidate import Candidate, Known
from attncheck.oracle.case import LAYOUTS, POISONS, ROUTES, Case, Presentation
from attncheck.oracle.features import FEATURES, features
from attncheck.oracle.formats import FORMATS

COLUMNS = ("candidate", "property", "condition", "reason")

SIZES: tuple[str, ...] = ("B", "Hq", "Hk", "Sq", "Sk", "D", "Dv")

#: numbers of a case; None where it has none
NUMBERS: dict[str, Callable[[Case], float | None]] = {
    "scale": lambda case: case.q.shape[3] ** -0.5 if case.scale is None else case.scale,
    "softcap": lambda case: case.softcap,
    "dropout": lambda case: case.dropout,
}

WORDS: dict[str, tuple[tuple[str, ...], Callable[[Presentation], tuple[str | None, ...]]]] = {
    "route": (ROUTES, lambda presentation: (presentation.route,)),
    "layout": (LAYOUTS, lambda presentation: presentation.layouts),
    "poison": (POISONS, lambda presentation: (presentation.poison,)),
}

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

ACCEPTED = (
    f"any, a feature (attncheck list features), a dtype ({', '.join(FORMATS)}), "
    f"{', '.join(f'{word}={value}' for word, (values, _) in WORDS.items() for value in values)}, "
    f"or a comparison such as Sq>Sk, D>64, scale<0.1, of {', '.join((*SIZES, *NUMBERS))}"
)

_COMPARISON = re.compile(r"(\w+)\s*(!=|<=|>=|=|<|>)\s*([-+.\w]+)")


class WaiverError(ValueError):
    """A waiver file that cannot be used. One sentence: file, line, field, value, what is accepted."""


Term = Callable[[Case, Presentation], bool]


@dataclass(frozen=True)
class Waiver:
    """One line of a waiver file. ``entry`` is FILE:LINE; ``properties`` are those that ``property`` names."""

    entry: str
    candidate: str
    property: str
    properties: tuple[str, ...]
    condition: str
    reason: str

    def names(self, candidate: str, target: str) -> bool:
        return self.candidate in ("*", candidate, target)

    def known(self) -> Known:
        """The waiver as a declared fault of the candidate it names."""
        return Known(
            properties=self.properties,
            dtypes=tuple(FORMATS),
            when=condition(self.condition),
            reason=self.reason,
            versions="",
            case="",
            entry=self.entry,
        )


def read(path: str) -> tuple[Waiver, ...]:
    """The waivers of a file. Raises WaiverError."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise WaiverError(f"waivers {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise WaiverError(f"waivers {path} is not UTF-8 text; it must hold lines of {' | '.join(COLUMNS)}") from None
    found: list[Waiver] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        waiver = _line(f"{path}:{number}", line)
        same = [w for w in found if replace(waiver, entry=w.entry, reason=w.reason) == w]
        if same:
            raise WaiverError(f"{waiver.entry}: it repeats {same[0].entry}; each waiver is written once")
        found.append(waiver)
    return tuple(found)


def _line(entry: str, line: str) -> Waiver:
    from attncheck.properties.catalogue import PROPERTIES

    columns = [" ".join(column.split()) for column in line.split("|", len(COLUMNS) - 1)]
    if len(columns) < len(COLUMNS):
        raise WaiverError(f"{entry}: it has {len(columns)} of the columns {' | '.join(COLUMNS)}; all must be there")
    for name, column in zip(COLUMNS, columns, strict=True):
        if not column:
            raise WaiverError(f"{entry}: {name} is empty; all of {' | '.join(COLUMNS)} must be there")
    candidate, named, text, reason = columns
    properties = tuple(name.strip() for name in named.split(","))
    if properties == ("*",):
        properties = tuple(PROPERTIES)
    for name in properties:
        if name not in PROPERTIES:
            raise WaiverError(f"{entry}: property is {name!r}; accepted are *, {', '.join(PROPERTIES)}")
    if "://" not in reason:
        raise WaiverError(f"{entry}: reason is {reason!r}; it must hold a link, such as https://example.org/issues/7")
    try:
        condition(text)
    except ValueError as error:
        raise WaiverError(f"{entry}: {error}") from None
    return Waiver(entry, candidate, named, properties, text, reason)


def condition(text: str) -> Term:
    """What a condition says of a case. Raises ValueError naming the term that is none."""
    terms = [_term(term.strip()) for term in text.split("&")]
    return lambda case, presentation: all(term(case, presentation) for term in terms)


def _term(text: str) -> Term:
    if text.startswith("!"):
        term = _term(text[1:].strip())
        return lambda case, presentation: not term(case, presentation)
    if text == "any":
        return lambda case, presentation: True
    if text in FEATURES:
        return lambda case, presentation: text in features(case)
    if text in FORMATS:
        return lambda case, presentation: case.dtype == text
    found = _COMPARISON.fullmatch(text)
    comparison = None if found is None else _comparison(*found.groups())
    if comparison is None:
        raise ValueError(f"condition holds {text!r}; accepted are {ACCEPTED}")
    return comparison


def _comparison(left: str, sign: str, right: str) -> Term | None:
    compare = OPERATORS[sign]
    if left in WORDS:
        values, of = WORDS[left]
        if sign not in ("=", "!=") or right not in values:
            return None
        return lambda case, presentation: (right in of(presentation)) == (sign == "=")
    first, second = _quantity(left), _quantity(right)
    if left not in (*SIZES, *NUMBERS) or second is None or first is None:
        return None

    def met(case: Case, presentation: Presentation) -> bool:
        a, b = first(case), second(case)
        return a is not None and b is not None and compare(a, b)

    return met


def _quantity(text: str) -> Callable[[Case], float | None] | None:
    """A size or number of the case, or a constant."""
    if text in SIZES:
        return lambda case: case.shape[SIZES.index(text)]
    if text in NUMBERS:
        return NUMBERS[text]
    try:
        value = float(text)
    except ValueError:
        return None
    return (lambda case: value) if math.isfinite(value) else None


def waived(candidate: Candidate, target: str, waivers: Sequence[Waiver]) -> Candidate:
    """The candidate, with the waivers that name it as declared faults."""
    mine = tuple(w.known() for w in waivers if w.names(candidate.name, target))
    return replace(candidate, known=candidate.known + mine) if mine else candidate


# -- what became of them --------------------------------------------------------------------

#: what a waiver can be after a run
STATUSES: tuple[str, ...] = ("matched", "unexpected pass", "matched nothing", "not in this run")

#: statuses that ask for the waiver to be looked at
STALE = ("unexpected pass", "matched nothing")


def outcomes(waivers: Sequence[Waiver], candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each waiver as the report shows it: its columns, cases that met its condition (``held`` and
    ``violated``), and its status. ``candidates`` are those of the report."""
    found = []
    for waiver in waivers:
        mine = [c for c in candidates if waiver.names(c["name"], c["target"])]
        rows = [row for c in mine for p in c["properties"] for row in p["dtypes"].values()]
        held, violated = (sum(row.get("waived", {}).get(waiver.entry, (0, 0))[n] for row in rows) for n in (0, 1))
        status = "matched" if violated else "unexpected pass" if held else "matched nothing"
        if not any(p["name"] in waiver.properties for c in mine for p in c["properties"]):
            status = "not in this run"
        found.append(
            {
                "entry": waiver.entry,
                "candidate": waiver.candidate,
                "property": waiver.property,
                "condition": waiver.condition,
                "reason": waiver.reason,
                "held": held,
                "violated": violated,
                "status": status,
            }
        )
    return found
