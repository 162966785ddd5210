"""The zoo: its right kernel is right, each fault changes what it says it touches, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest

from attncheck.kernels.candidate import Candidate
from attncheck.kernels.faulty import NOT_IMITATED, ZOO, Fault, right
from attncheck.kernels.loading import LoadError, load
from attncheck.oracle.case import LAYOUTS, POISONS, Case, Presentation
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.result import OUTPUTS, Result
from attncheck.properties.catalogue import PROPERTIES
from attncheck.properties.draws import drawn
from attncheck.properties.strategies import Plan
from attncheck.properties.verdict import Outcome

Pair = tuple[Case, Presentation]

#: cases that each fault is compared with the right kernel on
CASES = 60


# -- the right kernel --------------------------------------------------------------------------------


def plans(dtype: str) -> list[tuple[Plan, int]]:
    """What to draw, and how many of it: every feature, and the rare ones on purpose."""
    common = {"takes_blocks": True, "takes_layouts": True, "takes_pages": True, "blocks": (4,)}
    back = frozenset({"backward"})
    return [
        (Plan(dtype, needs=back | more, **common), count)  # type: ignore[arg-type]
        for more, count in (
            (frozenset(), 12),
            (frozenset({"dlse"}), 4),
            (frozenset({"bias"}), 4),
            (frozenset({"sinks"}), 4),
            (frozenset({"dropout"}), 4),
        )
    ]


AGAINST_THE_ORACLE = ("output", "lse", "dq", "dk", "dv", "dbias", "dsink", "empty-rows", "shape-dtype")


def violations(candidate: Candidate, case: Case, presentation: Presentation) -> list[str]:
    wrong = []
    for name in AGAINST_THE_ORACLE:
        if (name == "dbias" and case.bias is None) or (name == "dsink" and case.sinks is None):
            continue
        verdict = PROPERTIES[name].judge(candidate, case, presentation)
        if verdict.outcome is Outcome.VIOLATED:
            wrong.append(f"{name}: {verdict.sentence}")
    return wrong


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_right_kernel_holds(dtype: str) -> None:
    candidate = right()
    for plan, count in plans(dtype):
        for case, presentation in islice(drawn(plan, 5), count):
            assert violations(candidate, case, presentation) == [], (case.shape, presentation)


def test_right_kernels_that_some_faults_are_planted_in_hold_too() -> None:
    """Those that split the keys, count their calls or repair their rows."""
    kernels = {type(fault.right().run.__self__): fault.right() for fault in ZOO.values()}  # type: ignore[attr-defined]
    assert len(kernels) > 1
    for candidate in kernels.values():
        for case, presentation in islice(drawn(plans("float32")[0][0], 6), 4):
            assert violations(candidate, case, presentation) == [], (candidate, case.shape, presentation)


def test_a_wrong_kernel_does_not_hold() -> None:
    candidate = ZOO["B035"].candidate()
    plan = plans("float32")[0][0]
    assert any(violations(candidate, case, presentation) for case, presentation in islice(drawn(plan, 5), 24))


def test_memory_changes_nothing() -> None:
    """Layouts, pages and poison leave every bit of every output as it was."""
    candidate = right()
    for case, presentation in dense("float32")[:30]:
        plain = replace(presentation, layouts=("contiguous",) * 4, poison=None, poison_hidden=False, page_size=None)
        a, b = (candidate.run(case, p, want(case, candidate)) for p in (plain, presentation))
        for name in OUTPUTS:
            x, y = (judged(case, name, getattr(result, name)) for result in (a, b))
            assert x.tobytes() == y.tobytes(), (name, presentation)


def judged(case: Case, name: str, array: np.ndarray | None) -> np.ndarray:
    """An output with zeros in rows of padding, which nobody judges."""
    if array is None:
        return np.zeros(0)
    if name not in ("o", "lse", "dq"):
        return array
    array = array.copy()
    for b, n in enumerate(case.q_length):
        array[b, :, n:] = 0
    return array


# -- cases with many features at once ----------------------------------------------------------------


@cache
def dense(dtype: str) -> tuple[Pair, ...]:
    """Small cases in which every feature is as likely as not, so that rare combinations are not rare."""
    rng = np.random.default_rng([7, list(FORMATS).index(dtype)])
    pairs = [_dense(dtype, rng) for _ in range(CASES)]
    return (*pairs, *by_hand(dtype))


def _dense(dtype: str, rng: np.random.Generator) -> Pair:
    def maybe(share: float = 0.5) -> bool:
        return bool(rng.random() < share)

    def pick(*options: object) -> object:
        return options[rng.integers(len(options))]

    storage = FORMATS[dtype].dtype
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    b, hk, group = (int(rng.integers(1, n + 1)) for n in (2, 2, 2))
    few = b * hk * group <= 2  # where there are few heads there may be many rows and keys
    sq = int(pick(*((1, 3, 9, 18) if few else (1, 2, 3, 5))))  # type: ignore[call-overload]
    sk = int(pick(*((3, 5, 8, 17, 18) if few else (1, 2, 3, 5, 7))))  # type: ignore[call-overload]
    if maybe(0.05):
        sk = 0
    d = int(pick(1, 3, 4, 6))  # type: ignore[call-overload]
    dv = d if maybe() else int(pick(2, 5, 7))  # type: ignore[call-overload]
    hq = hk * group
    q, k, v, do = (
        rng.standard_normal(shape) for shape in ((b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv), (b, hq, sq, dv))
    )
    if maybe(0.2):
        q, k = np.round(2 * q), np.round(2 * k)
    if maybe(0.3):  # all scores far down or up, or in steps
        size = float(pick(15.0, 300.0))  # type: ignore[arg-type]
        q[..., 0], k[..., 0] = size, size * float(pick(-1, 1))  # type: ignore[arg-type]
    if maybe(0.2):
        q[..., 0], k[..., 0] = 1, (40 * np.arange(sk))
    if maybe(0.2):
        do = np.ones_like(do)
    if maybe(0.1):
        k, v = np.ones_like(k), np.ones_like(v)
    arrays = {name: x.astype(storage) for name, x in (("q", q), ("k", k), ("v", v), ("do", do))}
    shape = tuple(n if maybe(0.7) else 1 for n in (b, hq, sq, sk))
    mask, bias = None, None
    if maybe(0.4):
        mask = (rng.random(shape) < 0.6) & (np.arange(shape[3]) >= (2 if maybe() else 0))
    if maybe(0.4):
        law = int(rng.integers(3))
        bias = rng.standard_normal(shape) if law else rng.integers(0, 2, shape).astype(np.float64)
        bias = np.where(rng.random(shape) < 0.2, -np.inf, bias) if law == 2 else bias
        bias = bias.astype(storage if maybe() else wide)
    lengths = [
        tuple(int(n) for n in rng.integers(0, size + 1, b)) if maybe(0.4) else None
        for size in (sq, sk)
    ]  # fmt: skip
    drops = maybe(0.3)
    case = Case(
        **arrays,
        dlse=rng.standard_normal((b, hq, sq)).astype(wide) if maybe(0.4) else None,
        scale=None if maybe(0.6) else float(pick(0.5, 2.0, 0.125)),  # type: ignore[arg-type]
        softcap=None if maybe(0.7) else 0.5,
        causal=pick(None, None, "top-left", "bottom-right"),  # type: ignore[arg-type]
        window=(int(rng.integers(4)), int(rng.integers(4))) if maybe(0.3) else None,
        alibi_slopes=rng.standard_normal((b, hq) if maybe() else (hq,)).astype(wide) if maybe(0.2) else None,
        q_lengths=lengths[0],
        k_lengths=lengths[1],
        mask=mask,
        bias=bias,
        sinks=rng.standard_normal(hq).astype(wide) * 50 if maybe(0.2) else None,
        dropout=0.5 if drops else None,
        keep=rng.random((b, hq, sq, sk)) < 0.5 if drops else None,
    )
    poison = pick(None, *POISONS) if maybe() else None
    presentation = Presentation(
        route="flags" if maybe(0.8) else "mask",
        q_blocks=pick(None, (2,), (4,), (16,)),  # type: ignore[arg-type]
        k_blocks=pick(None, (2,), (4,), (3, 1), (16,)),  # type: ignore[arg-type]
        layouts=tuple(pick(*LAYOUTS) for _ in range(4)) if maybe(0.4) else ("contiguous",) * 4,  # type: ignore[arg-type]
        poison=poison,  # type: ignore[arg-type]
        poison_hidden=poison is not None and maybe(),
        page_size=pick(1, 2, 4, None),  # type: ignore[arg-type]
    )
    return case, presentation


def by_hand(dtype: str) -> list[Pair]:
    """What chance does not find."""
    storage = FORMATS[dtype].dtype
    ones = np.ones((2, 4, 4, 2), storage)
    least = np.full((4, 4), -FORMATS[dtype].max, storage)
    values = np.arange(1.0, 33).reshape(2, 2, 4, 2).astype(storage)
    item = np.zeros((2, 1, 4, 4), dtype=bool)
    item[0, ..., :2] = item[1, ..., 1:3] = True
    huge = np.full((1, 1, 3, 2), min(2.0**40, FORMATS[dtype].max / 8), storage)
    huge[..., 1, :] /= 2
    steps, zero_last = np.zeros((2, 1, 1, 2, 2), storage)
    steps[..., 1, 0] = 25
    zero_last[..., 0, :] = 1
    narrow = np.ones((1, 1, 2, 1), storage)
    packed = Presentation(packed=True)
    expanded = Presentation(layouts=("expanded",) * 4)  # type: ignore[arg-type]
    return [
        (Case(ones, ones[:, :2], values, do=ones, mask=item), Presentation()),
        (Case(ones, ones[:, :2], values, do=ones, bias=least), Presentation()),
        (Case(huge, huge, huge, do=huge, scale=1.0), Presentation()),
        (Case(ones[:1, :1, :2], steps, zero_last, do=ones[:1, :1, :2], scale=1.0), Presentation(k_blocks=(1,))),
        (Case(-30 * narrow, 30 * narrow, narrow, do=narrow, scale=1.0), Presentation()),
        (Case(ones, ones, ones, do=ones, k_lengths=(2, 4)), Presentation(page_size=1)),
        (Case(values, ones[:, :2, :1].repeat(5, 2), ones[:, :2, :1].repeat(5, 2), do=ones[:, :2]), expanded),
        (Case(values[:, :, :1], values, values, do=values[:, :, :1], causal="bottom-right"), Presentation()),
        (Case(*(values[:1].reshape(1, 1, 8, 2).repeat(2, 2) for _ in "qkv")), Presentation(page_size=4)),
        (Case(values, values, values, do=values), Presentation()),
        (Case(values / 8, values / 4, values / 2, do=values), Presentation()),
        (Case(values / 16, values / 16, values, do=values, causal="top-left", k_lengths=(3, 4)), packed),
    ]


# -- the faults ----------------------------------------------------------------------------------------


def want(case: Case, candidate: Candidate) -> frozenset[str]:
    names = {"o", "lse"} if case.do is None else {"o", "lse", "dq", "dk", "dv"}
    given = {"dbias": case.bias, "dsink": case.sinks} if case.do is not None else {}
    names |= {name for name, array in given.items() if array is not None}
    return frozenset(names) & candidate.offers


@cache
def from_the_right(kernel: type, dtype: str, number: int, asked: frozenset[str]) -> Result:
    case, presentation = dense(dtype)[number]
    return kernel().run(case, presentation, asked)  # type: ignore[no-any-return]


def changed(fault: Fault) -> set[str]:
    """The outputs in which a fault differs from the right kernel in any bit, or all where it raises."""
    found: set[str] = set()
    dtype = "float32" if "float32" in fault.dtypes else fault.dtypes[0]
    candidate = fault.candidate()
    kernel = type(fault.right().run.__self__)  # type: ignore[attr-defined]
    for number, (case, presentation) in enumerate(dense(dtype)):
        if candidate.refuses(presentation) is not None:
            continue
        asked = want(case, candidate)
        right_result = from_the_right(kernel, dtype, number, asked)
        try:
            result = candidate.run(case, presentation, asked)
        except (ValueError, IndexError, RuntimeError, ZeroDivisionError):
            found |= set(OUTPUTS)
            continue
        found |= {"inputs"} if result.mutated else set()
        for name in asked:
            got, wanted = getattr(result, name), getattr(right_result, name)
            if (got.dtype, got.shape, got.tobytes()) != (wanted.dtype, wanted.shape, wanted.tobytes()):
                found.add(name)
    return found


@pytest.mark.parametrize("fault", ZOO.values(), ids=list(ZOO))
def test_each_fault_changes_what_it_touches_and_nothing_else(fault: Fault) -> None:
    found = changed(fault)
    assert found, "no case shows it"
    assert found <= set(fault.touches), f"it also touches {sorted(found - set(fault.touches))}"


def test_a_fault_that_touches_more_than_it_says_is_told() -> None:
    assert not changed(replace(ZOO["B035"], touches=("lse",))) <= {"lse"}


def test_every_fault_says_what_it_is() -> None:
    assert len(ZOO) >= 90
    for id, fault in ZOO.items():
        assert fault.id == id and fault.about and fault.touches and fault.dtypes
        assert set(fault.touches) <= {*OUTPUTS, "inputs"}
        assert set(fault.dtypes) <= set(FORMATS)
        assert re.fullmatch(r"K\d\d|cheat|sharp", fault.kind), id
        if id.startswith("B"):
            assert fault.report == id[:4] and fault.kind[0] == "K", id
        else:
            assert fault.report == "" and id.startswith(("cheat:", "sharp:")), id
        candidate = fault.candidate()
        assert (candidate.name, candidate.about) == (f"zoo:{id}", fault.about)
    abouts = [fault.about for fault in ZOO.values()]
    assert len(set(abouts)) == len(abouts)


def test_every_kind_is_imitated_or_said_not_to_be() -> None:
    kinds = {f"K{n:02}" for n in range(1, 39)}
    imitated = {fault.kind for fault in ZOO.values()}
    assert kinds <= imitated | set(NOT_IMITATED)
    reports = {fault.report for fault in ZOO.values()}
    assert not (reports | imitated) & set(NOT_IMITATED)
    assert all(re.fullmatch(r"[BK]\d+", name) and reason for name, reason in NOT_IMITATED.items())


# -- loading -------------------------------------------------------------------------------------------


def test_faults_are_built_in_targets() -> None:
    assert load("zoo:B035").name == "zoo:B035"
    assert load("zoo:cheat:zeros").name == load("zoo:cheat-zeros").name == "zoo:cheat:zeros"
    assert load("zoo:right").name == "zoo:right"


@pytest.mark.parametrize("target", ["zoo:", "zoo:B999"])
def test_an_unknown_fault_lists_the_ids(target: str) -> None:
    with pytest.raises(LoadError) as error:
        load(target)
    assert all(id in str(error.value) for id in ZOO) and "right" in str(error.value)


def test_the_zoo_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys; from attncheck.kernels.loading import load; load('numpy-blocked'); "
        "print('attncheck.kernels.faulty' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
