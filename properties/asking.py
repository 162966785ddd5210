"""Putting a case to a candidate: what to ask for, what it declines by declaration, what came back."""

from __future__ import annotations

from dataclasses import replace

from ..kernels.candidate import Candidate
from ..oracle.case import Case, Presentation
from ..oracle.features import FEATURES, features
from ..oracle.result import GRADIENTS
from . import runs
from .judge import TITLES, violated
from .verdict import Outcome, Verdict

FORWARD = ("o", "lse")
BACKWARD = ("dq", "dk", "dv")

#: violations that leave nothing to judge
NO_RESULT = ("raised", "missing", "died")


def declined(candidate: Candidate, case: Case, want: frozenset[str]) -> str | None:
    """Why a candidate declines a case by what it declares; None where it does not."""
    if case.dtype not in candidate.dtypes:
        return f"it does not take {case.dtype}"
    used = features(case)
    if not want & set(GRADIENTS):
        used = used - {"backward", "dlse"}
    if "empty-row" in used and candidate.conventions.empty_row == "rejects":
        return "it rejects rows that see no key"
    for feature in FEATURES:
        if feature in used and feature in candidate.lacks:
            return candidate.lacks[feature]
    return None


def wanted(candidate: Candidate, case: Case, outputs: tuple[str, ...]) -> frozenset[str]:
    """What to ask for: the forward pass, or all gradients together, as users call kernels."""
    offers = set(candidate.offers)
    want: set[str] = set()
    for output, given in (("dbias", case.bias), ("dsink", case.sinks)):
        if output in outputs and case.do is not None and given is not None:
            want |= {output, *FORWARD, *BACKWARD}
    if case.do is not None and set(outputs) & set(BACKWARD):
        want |= {*FORWARD, *BACKWARD}
    if set(outputs) & set(FORWARD):
        want |= set(FORWARD)
    return frozenset(want & offers)


def all_outputs(candidate: Candidate, case: Case) -> tuple[str, ...]:
    """The outputs that this case has and the candidate offers."""
    names = [*FORWARD, *(BACKWARD if case.do is not None else ())]
    if case.do is not None:
        names += [name for name, given in (("dbias", case.bias), ("dsink", case.sinks)) if given is not None]
    return tuple(name for name in names if name in candidate.offers)


def ask(
    candidate: Candidate, case: Case, presentation: Presentation, outputs: tuple[str, ...], *, again: bool = False
) -> runs.Outcome | Verdict:
    """The candidate's outcome, or the verdict where there is no result to judge.

    ``again``: call it now, even where it was called before.
    """
    want = wanted(candidate, case, outputs)
    if not want:
        return Verdict(Outcome.DECLINED, f"it offers no {' or '.join(TITLES[x] for x in outputs)}")
    reason = declined(candidate, case, want) or candidate.refuses(presentation)
    if reason is not None:
        return Verdict(Outcome.DECLINED, reason)
    # without gradients to compute, the upstream ones are not part of the call
    asked = case if want & set(GRADIENTS) else replace(case, do=None, dlse=None)
    outcome = (runs.call_again if again else runs.call)(candidate, asked, presentation, want)
    if outcome.declined is not None:
        return Verdict(Outcome.DECLINED, outcome.declined)
    if outcome.raised is not None:
        return violated("raised", f"it raised {outcome.raised}")
    if outcome.died is not None:
        return violated("died", f"it {outcome.died}")
    return outcome
