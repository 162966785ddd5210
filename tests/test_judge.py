"""The judge: order of judgement, contracts, conventions; and that each of its checks can fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attncheck.oracle.bounds import bounds
from attncheck.oracle.case import Case
from attncheck.oracle.enclosure import Enclosed, exact
from attncheck.oracle.profile import Conventions, default_profile
from attncheck.properties.judge import Undecided, judge
from attncheck.properties.verdict import Outcome, Verdict, Worst


def example(dtype: str = "float32", **fields: Any) -> Case:
    rng = np.random.default_rng(1)
    q, k, v, do = (rng.standard_normal((1, 1, 3, 2)).astype(dtype) for _ in range(4))
    return Case(q=q, k=k, v=v, do=do, **fields)


def verdict(case: Case, output: str, got: Any, conventions: Conventions | None = None) -> Verdict:
    profile, truth = default_profile(case.dtype), exact(case)
    bound = bounds(case, truth, profile)[output]
    return judge(case, output, got, truth, bound, conventions or Conventions(), profile)


def right(case: Case, output: str) -> np.ndarray:
    dtype = case.wide_format.dtype if output == "lse" else case.q.dtype
    return getattr(exact(case), output).hi.astype(dtype)


EMPTY = np.array([[True, True, False], [False, False, False], [True, True, True]])


@pytest.mark.parametrize("output", ["o", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_exact_value_rounded_holds(output: str, dtype: str) -> None:
    case = example(dtype)
    found = verdict(case, output, right(case, output))
    assert found.outcome is Outcome.HOLDS and found.worst is not None and found.worst.ratio < 1
    assert found.worst.parts and abs(sum(x for _, x in found.worst.parts) / found.worst.allowed - 1) < 1e-12


def test_shape_comes_before_dtype_and_dtype_before_values() -> None:
    case = example()
    got = right(case, "o")
    assert verdict(case, "o", got[:, :, :2].astype(np.float64)).kind == "shape"
    assert verdict(case, "o", (got * np.nan).astype(np.float64)).kind == "dtype"
    assert verdict(case, "o", None).kind == "missing"
    assert verdict(case, "o", "text").kind == "dtype"


def test_the_sentence_names_what_got_wanted_allowed_and_where() -> None:
    case = example()
    got = right(case, "o")
    got[0, 0, 1, 1] += 1
    found = verdict(case, "o", got)
    assert found.kind == "bound" and found.worst is not None and found.worst.index == (0, 0, 1, 1)
    assert found.sentence.startswith(f"output: got {got[0, 0, 1, 1]!s}, exact 0.1203396")
    assert "allowed ±" in found.sentence and "at [0, 0, 1, 1]" in found.sentence and "(ratio " in found.sentence


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_is_never_skipped(bad: float) -> None:
    case = example()
    got = right(case, "dv")
    got[0, 0, 2, 0] = bad
    found = verdict(case, "dv", got)
    assert found.kind == "non-finite" and "at [0, 0, 2, 0]" in found.sentence


def test_infinity_is_right_where_rounding_gives_it_and_only_with_its_sign() -> None:
    top = np.full((1, 1, 1, 1), 65504, np.float16)
    # dV = p dO = 65504 with one key: the bound reaches past the largest float16
    case = Case(q=top * 0, k=top * 0, v=top * 0, do=top)
    for value, kind in ((65504, None), (np.inf, None), (-np.inf, "non-finite"), (np.nan, "non-finite")):
        assert verdict(case, "dv", np.full((1, 1, 1, 1), value, np.float16)).kind == kind


def test_empty_rows_owe_what_is_declared_exactly() -> None:
    case = example(mask=EMPTY)
    zero, nan = right(case, "o"), right(case, "o")
    nan[0, 0, 1] = np.nan
    mean = right(case, "o")
    mean[0, 0, 1] = case.v[0, 0].mean(axis=0)
    for got, convention, kind in (
        (zero, "zero", None),
        (nan, "zero", "contract"),
        (mean, "zero", "contract"),
        (nan, "nan", None),
        (zero, "nan", "contract"),
        (mean, "mean", None),
        (zero, "mean", "contract"),
    ):
        assert verdict(case, "o", got, Conventions(empty_row=convention)).kind == kind, (convention, kind)
    tiny = zero.copy()
    tiny[0, 0, 1, 0] = 1e-45
    assert verdict(case, "o", tiny).kind == "contract"


@pytest.mark.parametrize(("value", "declared"), [(-np.inf, "-inf"), (np.inf, "+inf"), (np.nan, "nan")])
def test_lse_of_an_empty_row(value: float, declared: str) -> None:
    case = example(mask=EMPTY)
    got = right(case, "lse")
    got[0, 0, 1] = value
    assert verdict(case, "lse", got, Conventions(empty_lse=declared)).outcome is Outcome.HOLDS
    got[0, 0, 1] = -49994.0
    assert verdict(case, "lse", got, Conventions(empty_lse=declared)).kind == "contract"


def test_gradients_of_empty_rows_and_hidden_keys_are_exactly_zero() -> None:
    mask = EMPTY & np.array([True, False, True])
    case = example(mask=mask)
    for output, at in (("dq", (0, 0, 1, 0)), ("dk", (0, 0, 1, 0)), ("dv", (0, 0, 1, 1))):
        got = right(case, output)
        assert verdict(case, output, got).outcome is Outcome.HOLDS
        got[at] = -0.0
        assert verdict(case, output, got).outcome is Outcome.HOLDS
        got[at] = 1e-40
        assert verdict(case, output, got).kind == "contract"
        got[at] = np.nan
        assert verdict(case, output, got).kind == "non-finite"


def test_under_a_nan_convention_what_nan_rows_reach_is_not_judged() -> None:
    case = example(mask=EMPTY)
    poisoned = right(case, "dk") * np.nan
    assert verdict(case, "dk", poisoned, Conventions(empty_row="nan")).outcome is Outcome.VACUOUS
    assert verdict(case, "dk", poisoned).kind == "non-finite"


def test_lse_in_base_two_must_be_declared() -> None:
    case = example()
    got = (right(case, "lse") / np.log(2)).astype(np.float32)
    assert verdict(case, "lse", got).kind == "bound"
    assert verdict(case, "lse", got, Conventions(lse_base="2")).outcome is Outcome.HOLDS
    assert verdict(case, "lse", right(case, "lse"), Conventions(lse_base="2")).kind == "bound"


def test_padding_is_not_judged() -> None:
    case = example(q_lengths=(2,))
    got = right(case, "o")
    got[0, 0, 2] = np.nan
    assert verdict(case, "o", got).outcome is Outcome.HOLDS
    got[0, 0, 1] = np.nan
    assert verdict(case, "o", got).kind == "non-finite"


def test_zero_where_it_would_be_accepted_is_counted() -> None:
    """V cancels to far below its own size: 0 would be accepted, and the verdict says how often."""
    x = np.zeros((1, 1, 1, 1), np.float32)
    k = np.zeros((1, 1, 2, 1), np.float32)
    case = Case(q=x, k=k, v=np.array([[[[1.0], [-1.0 + 2.0**-23]]]], np.float32))
    found = verdict(case, "o", right(case, "o"))
    assert (found.at_stake, found.zeros) == (1, 1)


def test_no_elements_is_vacuous_never_a_pass() -> None:
    empty = np.zeros((1, 1, 0, 2), np.float32)
    case = Case(q=empty, k=np.zeros((1, 1, 2, 2), np.float32), v=np.zeros((1, 1, 2, 2), np.float32))
    found = verdict(case, "o", empty)
    assert found.outcome is Outcome.VACUOUS and "no elements" in found.sentence


def test_an_enclosure_that_cannot_tell_asks_for_more_bits() -> None:
    case, profile = example(), default_profile("float32")
    truth = exact(case)
    bound = bounds(case, truth, profile)["o"]
    wide = replace(truth, o=Enclosed(truth.o.hi, truth.o.lo, bound.allowed * 1.5))
    with pytest.raises(Undecided):
        judge(case, "o", right(case, "o"), wide, bound, Conventions(), profile)


def test_float64_is_not_judged_against_a_rounded_double() -> None:
    """One unit in the last place of float64 is visible: the exact value has 106 bits."""
    one = np.ones((1, 1, 1, 1))
    case = Case(q=one, k=one, v=one / 3)
    got = one / 3
    assert verdict(case, "o", got).worst.ratio == 0  # type: ignore[union-attr]
    ratio = verdict(case, "o", np.nextafter(got, 1)).worst.ratio  # type: ignore[union-attr]
    bound = bounds(case, exact(case), default_profile("float64"))["o"].allowed[0, 0, 0, 0]
    assert ratio == pytest.approx(2.0**-54 / bound, rel=2**-40)


@pytest.mark.parametrize(
    "wrong",
    [
        {"outcome": Outcome.HOLDS},  # nothing judged
        {"outcome": Outcome.HOLDS, "judged": 1, "sentence": "but"},
        {"outcome": Outcome.HOLDS, "judged": 1, "worst": Worst("o", (0,), "1", "2", 0.1, 10.0)},
        {"outcome": Outcome.HOLDS, "judged": 1, "worst": Worst("o", (0,), "1", "2", 0.1, float("nan"))},
        {"outcome": Outcome.VIOLATED, "sentence": "x"},
        {"outcome": Outcome.VIOLATED, "sentence": "x", "kind": "unheard of"},
        {"outcome": Outcome.VIOLATED, "kind": "bound"},
        {"outcome": Outcome.DECLINED},
        {"outcome": Outcome.VACUOUS, "sentence": "x", "kind": "bound"},
        {"outcome": Outcome.VACUOUS, "sentence": "x", "worst": Worst("o", (0,), "1", "2", 0.1, 0.5)},
    ],
)
def test_an_inconsistent_verdict_cannot_be_built(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="verdict"):
        Verdict(**wrong)
