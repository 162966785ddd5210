"""The Python interface."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attncheck
from attncheck import Candidate, Case, Profile

Q = np.array([[[[1.0]]]], dtype=np.float32)
K = np.array([[[[0.0], [1.0]]]], dtype=np.float32)
CASE = Case(q=Q, k=K, v=K, do=Q, scale=1.0)


def test_verify_judges_a_callable_in_this_process(tmp_path: Path) -> None:
    def no_softmax(q, k, v, *, scale=None, mask=None, bias=None):  # type: ignore[no-untyped-def]
        return np.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype)

    report = attncheck.verify(
        no_softmax, like="numpy", dtypes=["float32"], properties=["output"], examples=20, save=str(tmp_path)
    )
    assert not report.passed
    assert report.exit_code == 1
    assert "output violated" in str(report)
    assert len(list(tmp_path.glob("output-*.json"))) == 1


def test_verify_takes_a_candidate_and_a_target(tmp_path: Path) -> None:
    from attncheck.kernels.numpy_blocked import NUMPY_BLOCKED

    for candidate in (NUMPY_BLOCKED, "numpy-blocked"):
        report = attncheck.verify(candidate, dtypes=["float32"], properties=["output"], examples=8, save=str(tmp_path))
        assert report.passed, str(report)
    assert list(tmp_path.iterdir()) == []


def test_seconds_share_a_deadline_out_and_lift_the_number_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    from attncheck.properties import campaign
    from attncheck.properties.verdict import Tally
    from attncheck.selection import DEFAULT_EXAMPLES

    asked = []

    def check(candidate: Candidate, name: str, dtype: str, **options: Any) -> Tally:
        asked.append((options["examples"], options["deadline"] - time.monotonic()))
        return Tally(candidate.name, name, dtype)

    monkeypatch.setattr(campaign, "check", check)
    attncheck.verify("numpy-blocked", properties=["output", "lse"], dtypes=["float32"], seconds=3000.0)
    assert len(asked) == 2
    for examples, left in asked:
        assert examples > 100 * DEFAULT_EXAMPLES
        assert 1000 < left <= 1500
    attncheck.verify("numpy-blocked", properties=["output"], dtypes=["float32"], seconds=3000.0, examples=7)
    assert asked[-1][0] == 7


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"like": "torch"}, "known conventions are sdpa"),
        ({}, "say with --like"),
        ({"like": "case", "examples": 0}, "--examples is 0"),
        ({"like": "case", "dtypes": ["int8"]}, "int8"),
    ],
)
def test_verify_refuses_what_it_cannot_do(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        attncheck.verify(lambda case: None, **options)  # type: ignore[arg-type]


def test_exact_encloses_the_answer() -> None:
    # o = e / (1 + e), and dQ = o (1 - o)
    answer = attncheck.exact(CASE)
    assert answer.o.decimal((0, 0, 0, 0), 12) == "0.731058578630"
    assert answer.dq is not None
    assert answer.dq.decimal((0, 0, 0, 0), 12) == "0.196611933241"


def test_assert_close_accepts_what_is_exact_to_rounding_and_names_what_is_not() -> None:
    o = np.array([[[[0.73105858]]]], dtype=np.float32)
    dq = np.array([[[[0.19661193]]]], dtype=np.float32)
    attncheck.assert_close(CASE, o=o, dq=dq)
    with pytest.raises(
        AssertionError, match=r"dQ: got 0\.0, exact 0\.196611933241\d+, allowed ±\S+, at \[0, 0, 0, 0\]"
    ):
        attncheck.assert_close(CASE, o=o, dq=np.zeros_like(dq))
    with pytest.raises(AssertionError, match="shape"):
        attncheck.assert_close(CASE, o=o[0])


def test_assert_close_judges_by_the_profile_that_is_given() -> None:
    off = np.array([[[[0.7312]]]], dtype=np.float32)
    with pytest.raises(AssertionError, match="output"):
        attncheck.assert_close(CASE, o=off)
    attncheck.assert_close(CASE, o=off, profile=Profile(storage="float32", u=2.0**-24, u_exp=2.0**-12))


def test_assert_close_says_when_it_judged_nothing() -> None:
    with pytest.raises(ValueError, match="give at least one of"):
        attncheck.assert_close(CASE)
    forward = Case(q=Q, k=K, v=K)
    with pytest.raises(ValueError, match="dq was not judged"):
        attncheck.assert_close(forward, dq=np.zeros_like(Q))


def test_everything_public_can_be_imported_and_nothing_else() -> None:
    for name in attncheck.__all__:
        assert getattr(attncheck, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        attncheck.nothing  # noqa: B018
