"""The convention f(case) -> Result, or f(case, presentation, want) -> Result: anything goes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ...oracle.case import LAYOUTS, Case, Presentation
from ...oracle.result import GRADIENTS, OUTPUTS, Result
from ..candidate import Candidate
from .declared import Declared, LoadError, without_pages


def wrap(function: Callable[..., Any], declared: Declared) -> Candidate:
    """A Candidate around a function of a Case, or of (case, presentation, want) as a Candidate's run.

    The latter is told of layouts, poison and pages, and raises Unsupported where it declines them.
    Raises LoadError where it takes neither.
    """
    whole = _takes(function, 3)
    if not whole and not _takes(function, 1):
        raise LoadError(
            f"{declared.name} does not follow case: it can be called neither with (case) "
            f"nor with (case, presentation, want); its signature is {inspect.signature(function)}"
        )

    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        if not whole:
            without_pages(presentation, "f(case)")
        returned = function(case, presentation, want) if whole else function(case)
        if not isinstance(returned, Result):
            raise TypeError(f"the kernel returned a {type(returned).__name__}; it must return an attncheck Result")
        return returned

    offers = set(OUTPUTS) - (set(GRADIENTS) if declared.forward_only else set())
    return Candidate(
        name=declared.name,
        run=run,
        dtypes=declared.dtypes,
        offers=frozenset(offers),
        lacks=dict(declared.lacks),
        conventions=declared.conventions,
        profiles=declared.profiles,
        known=declared.known,
        takes_layouts=frozenset(LAYOUTS if whole else ("contiguous",)),
        takes_pages=whole,
        takes_packed=whole,
        promises=declared.promises,
        convention="case",
        device=declared.device,
        about=declared.about,
    )


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except ValueError:  # no signature to read: believe the short form
        return arguments == 1
    except TypeError:
        return False
    return True
