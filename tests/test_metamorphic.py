"""Properties that compare a kernel with itself: right kernels hold, and each catches a wrong one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from attncheck.kernels.candidate import Candidate
from attncheck.kernels.numpy_blocked import NUMPY_BLOCKED, candidate
from attncheck.kernels.presenting import present
from attncheck.kernels.torch_sdpa import FLASH, MATH
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.result import GRADIENTS, Result
from attncheck.properties import runs, transform
from attncheck.properties.campaign import check, known_fault, plan_for
from attncheck.properties.catalogue import PROPERTIES, applies
from attncheck.properties.draws import drawn
from attncheck.properties.verdict import Outcome, Verdict

from .faulty import FAULTS, RIGHT

NAMES = [name for name, prop in PROPERTIES.items() if prop.every > 1]

#: least share of the drawn cases on which a property must be judged, of a kernel that promises everything
SHARES = dict.fromkeys(NAMES, 0.6) | {"ones": 0.5, "one-key": 0.5, "shift": 0.5, "packed": 0.3}


PLAIN = replace(RIGHT, lacks={"sinks": "it has none", "dropout": "it has none"})


def cases(of: Candidate, dtype: str, count: int, seed: int) -> Iterator[tuple[Case, Presentation]]:
    return islice(drawn(plan_for(of, PROPERTIES["output"], dtype), seed), count)


def verdicts(of: Candidate, name: str, dtype: str, count: int, seed: int = 5) -> Iterator[Verdict]:
    for case, presentation in cases(of, dtype, count, seed):
        verdict = PROPERTIES[name].judge(of, case, presentation)
        if known_fault(of, name, case, presentation) is None:
            yield verdict


# -- right kernels --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(FORMATS))
@pytest.mark.parametrize(
    ("right", "count"),
    [(NUMPY_BLOCKED, 20), (candidate(round_p=True, name="rounds p"), 8), (PLAIN, 8), (MATH, 8), (FLASH, 8)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_right_kernels_hold_and_are_judged(right: Candidate, count: int, dtype: str) -> None:
    for name in NAMES:
        if not applies(PROPERTIES[name], right):
            continue
        outcomes = Counter()
        for verdict in verdicts(right, name, dtype, count):
            assert verdict.outcome is not Outcome.VIOLATED, f"{name}: {verdict.sentence}"
            outcomes[verdict.outcome] += 1
        if right is NUMPY_BLOCKED:
            assert outcomes[Outcome.HOLDS] >= SHARES[name] * count, (name, outcomes)


def on_the_edge(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
    """As far from the exact answer as the bounds of NUMPY_BLOCKED let a right kernel be, with signs at random.

    What is owed exactly (zeros) and what the bounds say nothing of is the kernel's own.
    """
    result = NUMPY_BLOCKED.run(case, presentation, want)
    exact, bounds = runs.answer(case), runs.allowed(case, NUMPY_BLOCKED.profile(case.dtype, presentation))
    rng = np.random.default_rng(int(case.digest[:8], 16))
    changes = {}
    for name in want & set(bounds):
        got, bound, truth = getattr(result, name), bounds[name], getattr(exact, name)
        if got is None:
            continue
        storing = bound.parts["storing"]
        with np.errstate(all="ignore"):
            # the last rounding takes its part of the bound
            far = truth.hi + rng.choice([-1.0, 1.0], got.shape) * 0.98 * (bound.allowed - storing)
            stored = far.astype(got.dtype)
            off = np.abs(stored.astype(np.float64) - truth.hi)
        take = ~bound.vacuous & ~bound.must_be_zero & np.isfinite(stored.astype(np.float64)) & (off <= bound.allowed)
        changes[name] = np.where(take, stored, got)
    return replace(result, **changes)


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_a_kernel_at_the_edge_of_its_bounds_is_not_accused(dtype: str) -> None:
    """The sums of bounds, and what merging and summing make of them, are no tighter than they may be."""
    edge = replace(NUMPY_BLOCKED, name="edge", run=on_the_edge, promises=frozenset())
    # errors of this kernel's O are not those of weights, its zeros not those of products with 0
    exact = {"hull", "zero-do", "dropout-mask"}
    close = 0.0
    for name in NAMES:
        if name in exact:
            continue
        for verdict in verdicts(edge, name, dtype, 10, seed=9):
            assert verdict.outcome is not Outcome.VIOLATED, f"{name}: {verdict.sentence}"
            if verdict.worst is not None:
                close = max(close, verdict.worst.ratio)
    assert close > 0.8, "the edge was not reached"


# -- wrong kernels --------------------------------------------------------------------------------

Run = Callable[[Case, Presentation, frozenset[str]], Result]


def blocked(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
    return NUMPY_BLOCKED.run(case, presentation, want)


def touched(**touch: Callable[[np.ndarray, Case, Presentation], object]) -> Run:
    """The right kernel with some of its outputs passed through a function of (array, case, presentation)."""

    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        result = blocked(case, presentation, want)
        changes = {}
        for name, function in touch.items():
            array = getattr(result, name)
            if array is not None:
                with np.errstate(all="ignore"):
                    changes[name] = np.asarray(function(array, case, presentation)).astype(array.dtype)
        return replace(result, **changes)

    return run


def on(change: Callable[[Case, Presentation], Case]) -> Run:
    """The right kernel on another case."""
    return lambda case, presentation, want: blocked(change(case, presentation), presentation, want)


def last_value_lost(case: Case, presentation: Presentation) -> Case:
    v = case.v.copy()
    v[:, :, -1:] = 0
    return replace(case, v=v)


def heads_tiled(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
    """Query head h reads key head h mod Hk."""
    b, hk = case.k.shape[:2]
    heads = np.arange(case.q.shape[1]) % hk
    result = blocked(replace(case, k=case.k[:, heads], v=case.v[:, heads]), presentation, want)
    if result.dk is None or result.dv is None:
        return result
    dk, dv = (x.reshape(b, case.group, hk, *x.shape[2:]).sum(axis=1) for x in (result.dk, result.dv))
    return replace(result, dk=dk, dv=dv)


def stepped(name: str) -> Run:
    """An input rounded to multiples of 2^-12 of its own, as a fixed-point format would."""

    def change(case: Case, presentation: Presentation) -> Case:
        array = getattr(case, name)
        if array is None:
            return case
        return replace(case, **{name: (np.round(array.astype(np.float64) * 64) / 64).astype(array.dtype)})

    return on(change)


def other_mask_backward(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
    """The mask of dropout is drawn anew in the backward pass."""
    result = blocked(case, presentation, want)
    if case.keep is None or result.dv is None:
        return result
    again = blocked(replace(case, keep=~case.keep), presentation, want)
    return replace(result, dq=again.dq, dk=again.dk, dv=again.dv)


def first_entry_for_all(case: Case, presentation: Presentation) -> Case:
    return replace(case, v=np.repeat(case.v[:1], case.v.shape[0], axis=0))


def strides_ignored(case: Case, presentation: Presentation) -> Case:
    if presentation.layouts[1] != "transposed":
        return case
    k = np.ascontiguousarray(case.k.swapaxes(-1, -2)).reshape(case.k.shape)
    return replace(case, k=k)


def stride_of_do_ignored(array: np.ndarray, case: Case, presentation: Presentation) -> object:
    """dV of a dO of stride 0, read as if its rows followed each other: what lies behind it is not there."""
    return array * 0 if presentation.layouts[3] == "expanded" else array


def causal_when_packed(case: Case, presentation: Presentation) -> Case:
    """A packed batch is causal, whatever was asked for."""
    return replace(case, causal="top-left") if presentation.packed else case


def in_training(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
    """A forward pass of its own where gradients are wanted, which knows no softcap."""
    other = replace(case, softcap=None) if want & set(GRADIENTS) else case
    return blocked(other, presentation, want)


def times_zero(array: np.ndarray, case: Case, presentation: Presentation) -> object:
    """Reads what it hides, and multiplies it by 0."""
    v = present(case, presentation).v.astype(np.float64)
    if presentation.page_size is not None or not v.size:
        return array
    return array + 0 * v.sum()


def buffer_shows(array: np.ndarray, case: Case, presentation: Presentation) -> object:
    """The last row of an odd number of them is never written."""
    if presentation.poison is None or case.q.shape[2] % 2 == 0:
        return array
    out = array.copy()
    out[:, :, -1:] = np.nan
    return out


def in_turn() -> Run:
    """A kernel whose sums run in an order of their own: the last bit of O is not always the same."""
    calls = 0

    def nudged(array: np.ndarray, case: Case, presentation: Presentation) -> object:
        nonlocal calls
        calls += 1
        return np.nextafter(array.astype(np.float32), np.inf) if calls % 2 else array

    return touched(o=nudged)


def bits_of_company(array: np.ndarray, case: Case, presentation: Presentation) -> object:
    return np.nextafter(array.astype(np.float32), np.inf) if case.q.shape[0] > 1 else array


WRONG: dict[str, tuple[str, Run]] = {
    "mass lost": ("ones", touched(o=lambda o, *_: o.astype(np.float64) * 0.99)),
    "mean of V": ("one-key", touched(o=lambda o, c, p: o * 0 + c.v.astype(np.float64).mean())),
    "gradient of one key": ("one-key", touched(dq=lambda x, *_: x.astype(np.float64) + 1e-2)),
    "out of the hull": ("hull", touched(o=lambda o, *_: 1.05 * o.astype(np.float64) + 0.05)),
    "LSE clamped": ("shift", touched(lse=lambda x, *_: np.clip(x, -20, 20))),
    "scores clamped": ("shift", on(lambda c, p: replace(c, softcap=c.softcap or 10.0))),
    "last key lost": ("key-order", on(last_value_lost)),
    "dK in another order": ("key-order", touched(dk=lambda x, *_: np.sort(x.astype(np.float64), axis=2))),
    "last block lost": ("block-sizes", on(lambda c, p: last_value_lost(c, p) if p.k_blocks == (3, 1) else c)),
    "LSE in base 2": ("split-keys", touched(lse=lambda x, *_: x / math.log(2))),
    "heads tiled": ("grouped-heads", heads_tiled),
    "padding seen": ("ragged", on(lambda c, p: replace(c, k_lengths=None))),
    "V in fixed point": ("scaled-v", stepped("v")),
    "tiny added": ("scaled-v", touched(o=lambda o, *_: o.astype(np.float64) + 1e-7)),
    "dO in fixed point": ("scaled-do", stepped("do")),
    "gradient of nothing": ("zero-do", touched(dv=lambda x, *_: np.where(x == 0, 1e-6, x))),
    "delta missing": ("ds-sum", touched(dbias=lambda x, *_: x.astype(np.float64) + 0.01)),
    "dK off": ("dk-sum", touched(dk=lambda x, *_: x.astype(np.float64) + 0.01)),
    "no scaling of dropout": (
        "dropout-mask",
        touched(o=lambda o, c, p: o.astype(np.float64) * (1 - (c.dropout or 0))),
    ),
    "another mask backward": ("dropout-mask", other_mask_backward),
    "order of sums": ("twice", in_turn()),
    "first entry for all": ("company", on(first_entry_for_all)),
    "bits of company": ("company", touched(o=bits_of_company)),
    "strides ignored": ("layouts", on(strides_ignored)),
    "stride of dO ignored": ("layouts", touched(dv=stride_of_do_ignored)),
    "causal when packed": ("packed", on(causal_when_packed)),
    "another cap in training": ("with-gradients", in_training),
    "padding times 0": ("padding", touched(o=times_zero)),
    "mask ignored": ("masked", on(lambda c, p: replace(c, mask=None))),
    "hidden times 0": ("masked-poison", touched(o=times_zero)),
    "row not written": ("outputs-written", touched(o=buffer_shows)),
}


@pytest.mark.parametrize(("name", "run"), WRONG.values(), ids=list(WRONG))
def test_wrong_kernels_are_caught(name: str, run: Run) -> None:
    wrong = replace(NUMPY_BLOCKED, name="wrong", run=run)
    found = (v for v in verdicts(wrong, name, "float32", 100) if v.outcome is Outcome.VIOLATED)
    verdict = next(found, None)
    assert verdict is not None and verdict.kind in ("bound", "contract", "non-finite"), verdict


def test_every_property_has_a_wrong_kernel() -> None:
    assert {name for name, _ in WRONG.values()} == set(NAMES)


@pytest.mark.parametrize("label", ["last key lost", "heads tiled", "LSE in base 2", "another mask backward"])
def test_failures_shrink_and_stay_failures(label: str) -> None:
    name, run = WRONG[label]
    tally = check(replace(NUMPY_BLOCKED, name="wrong", run=run), name, "float32", examples=200, seed=5)
    assert tally.failure is not None
    failure = tally.failure
    assert failure.case.shape[4] <= 5 and failure.verdict.sentence
    assert PROPERTIES[name].judge(NUMPY_BLOCKED, failure.case, failure.presentation).outcome is not Outcome.VIOLATED


def test_a_fault_of_the_group_sum_is_caught_without_the_oracle() -> None:
    tally = check(FAULTS["group-not-summed"].candidate(), "grouped-heads", "float32", examples=300, seed=0)
    assert tally.failure is not None and tally.failure.verdict.worst.output in ("dk", "dv")  # type: ignore[union-attr]


# -- what is not promised, and what is outside --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "promise", "label"),
    [
        ("twice", "repeatable", "order of sums"),
        ("company", "batch-invariant", "bits of company"),
        ("padding", "padding-not-read", "padding times 0"),
        ("masked-poison", "masked-not-read", "hidden times 0"),
        ("layouts", "layout-invariant", "strides ignored"),
    ],
)
def test_what_is_not_promised_is_a_fact(name: str, promise: str, label: str) -> None:
    quiet = replace(NUMPY_BLOCKED, promises=frozenset())
    seen = Counter(v.sentence for v in verdicts(quiet, name, "float32", 60) if v.outcome is Outcome.DECLINED)
    assert set(seen) == {f"it does not promise {promise}; seen: the same"}
    wrong = replace(quiet, run=WRONG[label][1])
    outcomes = list(verdicts(wrong, name, "float32", 60))
    assert f"it does not promise {promise}; seen: not the same" in {v.sentence for v in outcomes}
    assert Outcome.VIOLATED not in {v.outcome for v in outcomes}


def test_a_wrong_answer_is_a_violation_without_any_promise() -> None:
    wrong = replace(NUMPY_BLOCKED, promises=frozenset(), run=WRONG["first entry for all"][1])
    assert Outcome.VIOLATED in {v.outcome for v in verdicts(wrong, "company", "float32", 60)}
    wrong = replace(NUMPY_BLOCKED, promises=frozenset({"strided"}), run=WRONG["strides ignored"][1])
    assert Outcome.VIOLATED in {v.outcome for v in verdicts(wrong, "layouts", "float32", 60)}


def small(**fields: object) -> Case:
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, 2, 3, 4)).astype(np.float32) for _ in range(4))
    return Case(q, k, v, do=do, **fields)  # type: ignore[arg-type]


SINKS, DLSE = np.zeros(2, np.float32), np.ones((1, 2, 3), np.float32)
DROPOUT = {"dropout": 0.5, "keep": np.ones((3, 3), bool)}


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("ones", {"sinks": SINKS}, "not implied with sinks"),
        ("ones", DROPOUT, "not implied with dropout"),
        ("one-key", {"sinks": SINKS}, "not implied with sinks"),
        ("hull", DROPOUT, "not implied with dropout"),
        ("shift", {"sinks": SINKS}, "not implied with sinks"),
        ("shift", {"softcap": 1.0}, "not implied with a softcap"),
        ("shift", {"scale": 0.0}, "no shift of the scores is exact in the format"),
        ("zero-do", {"dlse": DLSE}, "not implied with a gradient through the log-sum-exp"),
        ("ds-sum", {"sinks": SINKS}, "not implied with sinks"),
        ("dk-sum", {"softcap": 1.0}, "not implied with a softcap"),
        ("masked", {"mask": np.ones(3, bool)}, "every key is seen by some row"),
    ],
)
def test_outside_its_preconditions_a_property_is_vacuous(name: str, fields: dict[str, object], reason: str) -> None:
    verdict = PROPERTIES[name].judge(NUMPY_BLOCKED, small(**fields), Presentation())
    assert (verdict.outcome, verdict.sentence) == (Outcome.VACUOUS, reason)


def test_gradients_of_one_key_are_not_judged_with_dlse() -> None:
    wrong = replace(NUMPY_BLOCKED, run=WRONG["gradient of one key"][1])
    assert PROPERTIES["one-key"].judge(wrong, small(), Presentation()).outcome is Outcome.VIOLATED
    assert PROPERTIES["one-key"].judge(wrong, small(dlse=DLSE), Presentation()).outcome is Outcome.HOLDS


def test_a_declared_fault_is_in_the_way() -> None:
    """SDPA's flash answers NaN for a causal flag with a scale below 0: no comparison can be made with it."""
    verdict = PROPERTIES["key-order"].judge(FLASH, small(causal="top-left", scale=-1.0), Presentation())
    assert verdict.outcome is Outcome.VACUOUS and verdict.sentence.startswith("a declared fault is in the way")


# -- the transformations, by the oracle ----------------------------------------------------------------


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal as certified answers rounded to doubles are, infinities included."""
    return bool(np.all((a == b) | (np.abs(a - b) <= 4 * 2.0**-53 * (np.abs(a) + np.abs(b)) + 1e-300)))


def test_the_transformations_pose_the_same_problem() -> None:
    plan = plan_for(NUMPY_BLOCKED, PROPERTIES["output"], "float32")
    done = Counter()
    for case, _ in islice(drawn(plan, 3), 80):
        exact = runs.answer(case)
        unplaced = transform.without_positions(case)
        if unplaced is not None and unplaced is not case:
            done["positions"] += 1
            assert close(runs.answer(unplaced).o.hi, exact.o.hi)
        if case.k.shape[2] > 1 and unplaced is not None:
            done["keys"] += 1
            turned = runs.answer(transform.keys(unplaced, range(case.k.shape[2])[::-1]))
            assert close(turned.dv.hi[:, :, ::-1], exact.dv.hi)  # type: ignore[union-attr]
        if case.k_lengths is not None or case.q_lengths is not None:
            for entry in range(case.q.shape[0]):
                done["alone"] += 1
                alone = runs.answer(transform.alone(case, entry)).o.hi
                assert close(alone, exact.o.hi[entry : entry + 1, :, : alone.shape[2]])
        if case.group > 1:
            done["heads"] += 1
            assert close(runs.answer(transform.repeated_heads(case)).dq.hi, exact.dq.hi)  # type: ignore[union-attr]
    assert min(done[x] for x in ("positions", "keys", "alone", "heads")) >= 5, done


def test_exact_sum_knows_what_rounds() -> None:
    a, b = np.array([1.0, -np.inf, 2.0**53]), np.array([2.0, 1.0, 1.0])
    assert transform.exact_sum(a, b) is None
    total = transform.exact_sum(a[:2], b[:2])
    assert total is not None and total.tolist() == [3.0, -np.inf]
    assert transform.exactly(np.array([1 / 3]), np.dtype(np.float32)) is None


@pytest.mark.parametrize("dtype", list(FORMATS))
@pytest.mark.parametrize("size", [1.0, 2.0**-20])
def test_at_the_ends_of_the_range_nothing_breaks_and_no_right_kernel_is_accused(dtype: str, size: float) -> None:
    """Inputs at the largest number, and near the smallest: sums of infinities, products that underflow."""
    fmt = FORMATS[dtype]
    rng = np.random.default_rng(1)
    ends = [fmt.max * size, -fmt.max * size, fmt.smallest, 1.0, 0.0]
    for _ in range(6):
        q, k, v, do = (rng.choice(ends, (1, 2, 3, 2)).astype(fmt.dtype) for _ in range(4))
        case = Case(q, k[:, :1], v[:, :1], do=do, scale=float(rng.choice([1.0, 2.0**-30])))
        for name in NAMES:
            verdict = PROPERTIES[name].judge(NUMPY_BLOCKED, case, Presentation())
            assert verdict.outcome is not Outcome.VIOLATED, f"{name}: {verdict.sentence}"
