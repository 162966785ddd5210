"""Save a failure so that anyone can replay it, and replay what was saved."""

from __future__ import annotations

import platform
from importlib import metadata

import numpy as np

from ..fixtures import Record
from ..fixtures.record import output_shapes
from ..kernels.candidate import Candidate
from ..oracle.case import Case
from . import runs
from .catalogue import PROPERTIES, judge_output
from .verdict import Outcome, Tally, Verdict

#: digits saved of each exact value: what hi + lo can hold
DIGITS = 32

#: packages whose versions a reader of a saved failure needs
PACKAGES = ("attncheck", "numpy", "torch", "triton", "jax")


def make_record(candidate: Candidate, tally: Tally) -> Record:
    """What is saved of a failure: case and presentation, the exact values, and what was seen.

    Raises ValueError where the tally holds no failure.
    """
    failure = tally.failure
    if failure is None:
        raise ValueError(f"property {tally.property} of {tally.candidate} holds; there is no failure to save")
    worst = failure.verdict.worst
    seen: dict[str, object] = {
        "candidate": candidate.name,
        "convention": candidate.convention,
        "device": candidate.device,
        "property": tally.property,
        "kind": failure.verdict.kind,
        "sentence": failure.verdict.sentence,
        "violated": "by many cases together"
        if failure.verdict.kind == "bias"
        else f"{failure.seen} of {failure.calls} calls",
        "drawn as": failure.first,
        "versions": versions(),
    }
    if worst is not None:
        seen["worst"] = {
            "output": worst.output,
            "index": list(worst.index),
            "got": worst.got,
            "exact": worst.exact,
            "allowed": worst.allowed,
            "ratio": worst.ratio,
            "parts": dict(worst.parts),
        }
    return Record(failure.case, failure.presentation, expected_values(failure.case), seen)


def expected_values(case: Case) -> dict[str, np.ndarray | None]:
    """The exact values of every output, as decimal strings."""
    exact = runs.answer(case)
    found: dict[str, np.ndarray | None] = {}
    for name, shape in output_shapes(case).items():
        balls = getattr(exact, name)
        if shape is None or balls is None or not _printable(name, balls.hi).all():
            found[name] = None
            continue
        strings = np.empty(shape, dtype=object)
        for at in np.ndindex(shape):
            strings[at] = balls.decimal(at, DIGITS)
        found[name] = strings
    return found


def _printable(name: str, hi: np.ndarray) -> np.ndarray:
    """Where a value lies in float64's range; the log-sum-exp of an empty row is -inf and may be printed."""
    return np.asarray(np.isfinite(hi) | (np.isneginf(hi) if name == "lse" else False))


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages among PACKAGES."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def replay(record: Record, candidate: Candidate) -> Verdict:
    """Judge a saved case: the property it was saved for, or every output where it names none."""
    name = record.seen.get("property")
    if isinstance(name, str) and name in PROPERTIES:
        return PROPERTIES[name].judge(candidate, record.case, record.presentation)
    verdicts = [
        judge_output(candidate, record.case, record.presentation, output) for output in _outputs(record, candidate)
    ]
    for outcome in (Outcome.VIOLATED, Outcome.HOLDS, Outcome.VACUOUS, Outcome.DECLINED):
        for verdict in verdicts:
            if verdict.outcome is outcome:
                return verdict
    return Verdict(Outcome.DECLINED, f"{candidate.name} offers no output of this case")


def _outputs(record: Record, candidate: Candidate) -> list[str]:
    return [
        name for name, shape in output_shapes(record.case).items() if shape is not None and name in candidate.offers
    ]
