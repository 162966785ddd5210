"""Failing cases become small, and stay the same failure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest

from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.features import features
from attncheck.oracle.visibility import visible
from attncheck.properties.draws import drawn
from attncheck.properties.reduce import cost, reduce
from attncheck.properties.strategies import Plan

Predicate = Callable[[Case, Presentation], bool]


def ascending_scores(case: Case, _: Presentation) -> bool:
    """What a missing rescale needs: a row whose visible scores rise from one key to the next."""
    k = np.repeat(case.k, case.group, axis=1).astype(np.float64)
    s = np.where(visible(case), case.q.astype(np.float64) @ k.swapaxes(2, 3), np.nan)
    if s.shape[3] < 2:
        return False
    with np.errstate(invalid="ignore"):
        return bool((s[..., 1:] > s[..., :-1] + 1).any())


PREDICATES: dict[str, tuple[Predicate, int, int]] = {
    "two queries of one group": (lambda c, p: c.group > 1 and 0 not in c.shape, 2, 1),
    "a ragged key tail": (lambda c, p: c.shape[4] % 4 == 1 and c.shape[4] > 4, 1, 5),
    "an empty row": (lambda c, p: "empty-row" in features(c), 1, 1),
    "ascending scores": (ascending_scores, 1, 2),
    "ragged blocks": (lambda c, p: p.k_blocks is not None and c.shape[4] > 1 and 0 not in c.shape, 1, 2),
    "a hidden key": (lambda c, p: bool((~visible(c)).any()), 1, 2),
}


@pytest.mark.parametrize("name", list(PREDICATES))
def test_drawn_cases_become_small(name: str) -> None:
    fails, heads, keys = PREDICATES[name]
    plan = Plan("float32", needs=frozenset({"backward"}), takes_blocks=True)
    found = [pair for pair in islice(drawn(plan, 2), 120) if fails(*pair)][:8]
    assert found, "no drawn case has it: the test would test nothing"
    for case, presentation in found:
        small, shown = reduce(case, presentation, fails)
        assert fails(small, shown)
        assert cost(small, shown) <= cost(case, presentation)
        b, hq, hk, sq, sk, d, dv = small.shape
        assert (b, hk, dv) == (1, 1, 1) and d <= 2 and hq <= heads and sk <= keys and sq <= 2


def test_numbers_become_simple() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 4, 3)).astype(np.float32) for _ in range(3))
    small, _ = reduce(Case(q, k, v), Presentation(), lambda c, p: bool((c.v > 0.5).any()))
    assert small.q.tolist() == [[[[0.0]]]] and small.k.tolist() == [[[[0.0]]]] and small.v.tolist() == [[[[1.0]]]]


def test_what_the_failure_needs_is_kept() -> None:
    x = np.ones((1, 2, 3, 2), np.float32)
    case = Case(x, x, x, do=x, causal="top-left", softcap=2.0, scale=0.5, bias=np.ones((3, 3), np.float32))
    small, shown = reduce(case, Presentation(route="mask"), lambda c, p: c.causal is not None and p.route == "mask")
    assert small.causal == "top-left" and shown.route == "mask"
    assert small.softcap is None and small.bias is None and small.scale is None


def test_the_number_of_calls_is_bounded() -> None:
    calls = 0

    def never(case: Case, presentation: Presentation) -> bool:
        nonlocal calls
        calls += 1
        return False

    x = np.random.default_rng(0).standard_normal((2, 4, 16, 8)).astype(np.float32)
    reduce(Case(x, x, x, do=x), Presentation(), never, limit=50)
    assert calls <= 50
