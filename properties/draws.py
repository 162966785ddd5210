"""The stream of drawn cases: the same everywhere for a seed, and the same prefix for any number of examples."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.errors import NonInteractiveExampleWarning
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

from ..oracle.case import Case, Presentation
from .strategies import Plan, cases

#: cases generated at a time; a part of the stream's definition, as it decides what Hypothesis draws
CHUNK = 64


class _SameEverywhere(HypothesisProvider):
    """Hypothesis's own choices, without the constants that it collects from the modules of the project
    at hand: those would make the draws depend on who runs them."""

    def _maybe_draw_constant(self, *_: object, **__: object) -> None:
        return None


BACKEND = "attncheck"
AVAILABLE_PROVIDERS[BACKEND] = f"{_SameEverywhere.__module__}.{_SameEverywhere.__name__}"


def drawn(plan: Plan, seed: int) -> Iterator[tuple[Case, Presentation]]:
    """An endless stream of distinct cases for a plan and a seed.

    Hypothesis only generates here (no database, no deadline, no shrinking: that is ``reduce``'s
    work), so what is drawn depends on plan, seed and version alone, not on any verdict.
    """
    met: set[str] = set()
    number = 0
    while True:
        for case, presentation in _chunk(plan, seed, number):
            if case.digest not in met:
                met.add(case.digest)
                yield case, presentation
        number += 1


@lru_cache(maxsize=256)
def _chunk(plan: Plan, seed: int, number: int) -> tuple[tuple[Case, Presentation], ...]:
    found: list[tuple[Case, Presentation]] = []

    # dtypes and needs have draws of their own: the same shapes and masks in each would be met once, not often
    @hypothesis_seed(f"{seed} {number} {plan.dtype} {' '.join(sorted(plan.needs))}")
    @settings(
        backend=BACKEND,
        max_examples=CHUNK,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(plan))
    def collect(pair: tuple[Case, Presentation]) -> None:
        found.append(pair)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonInteractiveExampleWarning)
        collect()
    return tuple(found)
