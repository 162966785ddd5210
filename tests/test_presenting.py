"""The memory of a presentation: strides, poison and pages hold what they say, and show kernels that misread them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attncheck.kernels.candidate import PROMISES, Candidate
from attncheck.kernels.presenting import (
    MARGINS,
    Presented,
    buffer,
    fresh,
    hidden_keys,
    lay_out,
    page_table,
    poison_value,
    present,
)
from attncheck.oracle.case import LAYOUTS, POISONS, Case, CaseError, Presentation
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.result import Result
from attncheck.oracle.visibility import visible

SHAPES = ((2, 3, 4, 5), (1, 1, 1, 1), (1, 2, 3, 1), (2, 1, 0, 3), (0, 2, 3, 4))


def numbers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(FORMATS[dtype].dtype)


def make(dtype: str = "float32", *, sq: int = 5, sk: int = 7, hq: int = 4, hk: int = 2, **fields: Any) -> Case:
    """Two batch entries; D = 3, Dv = 2."""
    return Case(
        numbers((2, hq, sq, 3), dtype, 0),
        numbers((2, hk, sk, 3), dtype, 1),
        numbers((2, hk, sk, 2), dtype, 2),
        do=numbers((2, hq, sq, 2), dtype, 3),
        **fields,
    )


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def is_poison(array: np.ndarray, poison: str | None, dtype: str) -> np.ndarray:
    wide, value = array.astype(np.float64), poison_value(poison, FORMATS[dtype])
    return np.isnan(wide) if math.isnan(value) else wide == value


# -- strides -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_the_same_bits(layout: str, dtype: str) -> None:
    for shape in SHAPES:
        for array in (numbers(shape, dtype), np.full(shape, np.nan, FORMATS[dtype].dtype)):
            view = lay_out(array, layout, np.inf)
            assert same_bits(view, array)
            assert buffer(view).flags.c_contiguous
            copy = fresh(view)
            assert same_bits(copy, array) and copy.strides == view.strides
            assert buffer(copy).nbytes == buffer(view).nbytes and not np.shares_memory(copy, view)


def test_strides() -> None:
    array = numbers((2, 3, 4, 5))
    item = array.itemsize
    assert [n // item for n in lay_out(array, "contiguous", 0).strides] == [60, 20, 5, 1]
    assert [n // item for n in lay_out(array, "transposed", 0).strides] == [60, 20, 1, 4]
    whole = [n + 2 * m for n, m in zip(array.shape, MARGINS, strict=True)]
    assert [n // item for n in lay_out(array, "sliced", 0).strides] == [math.prod(whole[n:]) for n in (1, 2, 3, 4)]


def test_expanded_is_stride_0_where_all_are_equal_and_only_there() -> None:
    array = numbers((2, 3, 4, 5))
    assert lay_out(array, "expanded", 0).strides == array.strides
    for axis in range(4):
        equal = np.repeat(array.take([0], axis=axis), array.shape[axis], axis=axis)
        strides = lay_out(equal, "expanded", 0).strides
        assert [n for n in range(4) if strides[n] == 0] == [axis]
    assert lay_out(np.ones((2, 3, 4, 5)), "expanded", 0).strides == (0, 0, 0, 0)
    signs = np.zeros((2, 1, 1, 1))
    signs[1] = -0.0
    assert lay_out(signs, "expanded", 0).strides[0] != 0


@pytest.mark.parametrize("poison", [None, *POISONS])
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_slice_is_surrounded_on_all_sides(dtype: str, poison: str | None) -> None:
    array = numbers((2, 3, 4, 5), dtype)
    view = lay_out(array, "sliced", poison_value(poison, FORMATS[dtype]))
    whole = buffer(view).copy()
    around = np.ones(whole.shape, dtype=bool)
    around[1:3, 1:4, 1:5, 8:13] = False
    assert is_poison(whole[around], poison, dtype).all()
    assert same_bits(whole[1:3, 1:4, 1:5, 8:13], array)


def test_writing_to_a_fresh_view_leaves_the_first_one() -> None:
    for layout in LAYOUTS:
        view = lay_out(numbers((1, 2, 3, 4)), layout, 7.0)
        before = buffer(view).tobytes()
        copy = fresh(view)
        copy[...] = 0
        buffer(copy)[...] = 1
        assert (copy == 1).all() and buffer(view).tobytes() == before


# -- what a case becomes -----------------------------------------------------------------------


def test_without_wishes_the_arrays_are_the_cases_own() -> None:
    case = make(q_lengths=(2, 5), k_lengths=(7, 0))
    given = present(case, Presentation())
    assert all(buffer(getattr(given, name)) is getattr(case, name) for name in ("q", "k", "v", "do"))
    assert given.table is None and given.fill == 0


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_poison_fills_padding_and_nothing_else(dtype: str, poison: str) -> None:
    wide = FORMATS["float64" if dtype == "float64" else "float32"].dtype
    case = make(dtype, q_lengths=(2, 5), k_lengths=(7, 3), dlse=np.ones((2, 4, 5), wide))
    given = present(case, Presentation(poison=poison))
    for name, lengths in (("q", (2, 5)), ("do", (2, 5)), ("dlse", (2, 5)), ("k", (7, 3)), ("v", (7, 3))):
        got, stored = getattr(given, name), getattr(case, name)
        assert got.dtype == stored.dtype
        for b, n in enumerate(lengths):
            assert same_bits(got[b, :, :n], stored[b, :, :n]), name
            assert is_poison(got[b, :, n:], poison, dtype).all(), name
    assert is_poison(np.array(given.fill), poison, dtype)


def test_a_kernel_without_lengths_is_not_asked_to_leave_padding_alone() -> None:
    case = make(q_lengths=(2, 5), k_lengths=(7, 3), dlse=np.ones((2, 4, 5), np.float32))
    for presentation in (Presentation(), Presentation(poison="nan")):
        given = present(case, presentation, told_lengths=False)
        assert all(same_bits(getattr(given, name), getattr(case, name)) for name in ("k", "v"))
        for name in ("q", "do", "dlse"):
            got, stored = getattr(given, name), getattr(case, name)
            assert (got[0, :, 2:] == 0).all() and same_bits(got[0, :, :2], stored[0, :, :2])
            assert same_bits(got[1], stored[1])
    given = present(case, Presentation(poison="nan", poison_hidden=True), told_lengths=False)
    assert np.isnan(given.k[1, :, 3:]).all() and np.isfinite(given.k[1, :, :3]).all() and np.isfinite(given.q).all()


def hiding_cases() -> list[Case]:
    rng = np.random.default_rng(0)
    cases = []
    for causal in (None, "top-left", "bottom-right"):
        for window in (None, (1, None), (None, 0), (0, 2), (2, 1)):
            for q_lengths, k_lengths in ((None, None), (None, (7, 2)), ((1, 5), (3, 6)), ((0, 2), None)):
                fields: dict[str, Any] = {"causal": causal, "window": window}
                fields |= {"q_lengths": q_lengths, "k_lengths": k_lengths}
                shape = [(7,), (5, 1), (2, 1, 1, 7), (4, 5, 7), (2, 4, 5, 7)][int(rng.integers(5))]
                if rng.integers(2):
                    fields["mask"] = rng.random(shape) < 0.4
                if rng.integers(2):
                    fields["bias"] = np.where(rng.random(shape) < 0.4, -np.inf, 0.5).astype(np.float32)
                cases.append(make(**fields))
    return [*cases, make(sq=0), make(sk=0), make(sq=2, causal="top-left"), make(sq=9, sk=3, causal="bottom-right")]


def test_hidden_keys_are_those_that_the_oracle_says_nobody_sees() -> None:
    found = 0
    for case in hiding_cases():
        b, hq, hk, sq, sk, _, _ = case.shape
        seen = visible(case).reshape(b, hk, case.group * sq, sk).any(axis=2)
        assert np.array_equal(hidden_keys(case), ~seen)
        found += int((~seen).any())
        given = present(case, Presentation(poison="nan", poison_hidden=True))
        for name in ("k", "v"):
            got, stored = getattr(given, name), getattr(case, name)
            assert np.isnan(got[~seen]).all() and same_bits(got[seen], stored[seen])
    assert found > 30


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("poison", [None, *POISONS])
def test_pages(poison: str | None, page_size: int) -> None:
    for lengths in ((7, 4), (0, 7), (1, 1), (0, 0)):
        case = make(k_lengths=lengths)
        given = present(case, Presentation(page_size=page_size, poison=poison))
        assert given.table is not None and given.table.shape == (2, -(-7 // page_size))
        assert given.table.min() >= 0 and given.table.max() < len(given.k)
        used = [int(given.table[b, n]) for b in (0, 1) for n in range(-(-lengths[b] // page_size))]
        assert len(set(used)) == len(used)
        for name in ("k", "v"):
            pool, stored = getattr(given, name), getattr(case, name)
            assert pool.shape == (len(used) + 2, page_size, *stored.shape[1::2])
            rest = np.ones(pool.shape[:2], dtype=bool)
            for b, n in enumerate(lengths):
                for j in range(n):
                    at = given.table[b, j // page_size], j % page_size
                    assert same_bits(pool[at], stored[b, :, j])
                    rest[at] = False
                past = given.table[b, -(-n // page_size) :]
                assert not set(past.tolist()) & set(used)
            assert is_poison(pool[rest], poison, "float32").all() and rest.any()


def test_pages_are_shuffled_the_same_way_every_time() -> None:
    case = make(sk=40)
    table = page_table(case, 4)
    assert np.array_equal(table, page_table(case, 4))
    assert not np.array_equal(np.sort(table.ravel()), table.ravel())


def test_layouts_are_those_of_the_kernels_own_axes() -> None:
    case = make()
    presentation = Presentation(layouts=("transposed", "contiguous", "sliced", "expanded"))
    given = present(case, presentation, axes=(0, 2, 1, 3))
    assert same_bits(given.q.swapaxes(1, 2), case.q) and given.q.swapaxes(-1, -2).flags.c_contiguous
    assert same_bits(given.k.swapaxes(1, 2), case.k) and given.k.flags.c_contiguous
    assert given.v.shape == (2, 7, 2, 2) and not given.v.flags.c_contiguous
    paged = present(case, replace(presentation, page_size=2), axes=(0, 2, 1, 3))
    assert paged.k.shape == (10, 2, 2, 3)  # pages are not turned


def test_hidden_poison_needs_a_poison() -> None:
    with pytest.raises(CaseError, match="poison_hidden is True; it must be a bool, and False where poison is None"):
        Presentation(poison_hidden=True)
    with pytest.raises(CaseError, match="poison_hidden is 1"):
        Presentation(poison="nan", poison_hidden=1)  # type: ignore[arg-type]


# -- kernels that misread ----------------------------------------------------------------------

Read = Callable[[Case, Presented, str, int, int], np.ndarray]


def read(case: Case, given: Presented, name: str, b: int, h: int) -> np.ndarray:
    """One head of q, k or v up to its length."""
    n = (case.q_length if name == "q" else case.k_length)[b]
    array = getattr(given, name)
    if given.table is None or name == "q":
        return np.asarray(array[b, h, :n])
    page_size = array.shape[1]
    return np.array([array[given.table[b, j // page_size], j % page_size, h] for j in range(n)])


def kernel(case: Case, presentation: Presentation, reader: Read = read, *, by_zero: bool = False) -> np.ndarray:
    """o by plain attention over what ``reader`` reads; ``by_zero``: hidden keys by a factor of 0."""
    given = present(case, presentation)
    o = np.full((*case.q.shape[:3], case.v.shape[3]), given.fill, np.float32)
    seen = visible(case)
    for b, h in np.ndindex(*case.q.shape[:2]):
        rows, keys = case.q_length[b], case.k_length[b]
        o[b, h, rows:] = 0
        if rows == 0:
            continue
        o[b, h, :rows] = 0
        if keys == 0:
            continue
        q, k, v = (reader(case, given, name, b, h if name == "q" else h // case.group) for name in ("q", "k", "v"))
        here = seen[b, h, :rows, :keys] if len(k) == keys else np.ones((rows, len(k)), dtype=bool)
        with np.errstate(all="ignore"):
            s = np.where(here, q @ k.T, -np.inf)
            p = np.where(here, np.exp(s - np.where(here, s, -1e30).max(axis=1, keepdims=True)), 0)
            total = p.sum(axis=1, keepdims=True)
            parts = p[:, :, None] * v[None] if by_zero else np.where(p[:, :, None] > 0, p[:, :, None] * v[None], 0)
            o[b, h, :rows] = parts.sum(axis=1) / np.where(total == 0, 1, total)
    return o


def no_strides(case: Case, given: Presented, name: str, b: int, h: int) -> np.ndarray:
    array = getattr(given, name)
    return read(case, replace(given, **{name: np.resize(buffer(array), array.shape)}), name, b, h)


def one_key_more(case: Case, given: Presented, name: str, b: int, h: int) -> np.ndarray:
    array, n = getattr(given, name), case.k_length[b]
    return read(case, given, name, b, h) if name == "q" else np.asarray(array[b, h, : n + 1])


def whole_pages(case: Case, given: Presented, name: str, b: int, h: int) -> np.ndarray:
    """The last page as if it were full."""
    array = getattr(given, name)
    if given.table is None or name == "q":
        return read(case, given, name, b, h)
    return np.concatenate([array[page, :, h] for page in given.table[b, : -(-case.k_length[b] // array.shape[1])]])


def pages_in_order(case: Case, given: Presented, name: str, b: int, h: int) -> np.ndarray:
    assert given.table is not None
    table = np.arange(given.table.size, dtype=np.int32).reshape(given.table.shape)
    return read(case, replace(given, table=table), name, b, h)


RAGGED = {"k_lengths": (7, 4), "q_lengths": (3, 5)}
STRIDED = Presentation(layouts=("transposed", "sliced", "transposed", "contiguous"), poison="nan")


@pytest.mark.parametrize("poison", [None, *POISONS])
def test_the_right_kernel_gives_the_same_bits_in_any_memory(poison: str | None) -> None:
    for case in (make(), make(**RAGGED), make(causal="bottom-right", window=(2, None), sq=3)):
        wanted = kernel(case, Presentation())
        for presentation in (
            replace(STRIDED, poison=poison),
            Presentation(poison=poison),
            Presentation(page_size=3, poison=poison),
            Presentation(page_size=2, poison=poison, layouts=("expanded", "sliced", "transposed", "contiguous")),
            Presentation(poison=poison, poison_hidden=poison is not None),
        ):
            assert same_bits(kernel(case, presentation), wanted), presentation


@pytest.mark.parametrize(
    ("reader", "presentation", "fields"),
    [
        (no_strides, STRIDED, {}),
        (no_strides, replace(STRIDED, poison=None), {}),
        (one_key_more, Presentation(poison="nan"), RAGGED),
        (one_key_more, Presentation(poison="huge"), RAGGED),
        (whole_pages, Presentation(page_size=3, poison="inf"), RAGGED),
        (pages_in_order, Presentation(page_size=3), {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_kernel_that_misreads_shows(reader: Read, presentation: Presentation, fields: dict[str, Any]) -> None:
    case = make(**fields)
    assert not same_bits(kernel(case, presentation, reader), kernel(case, Presentation()))


def test_a_kernel_that_multiplies_hidden_values_by_0_shows() -> None:
    case = make(window=(1, None), sq=2)
    plain = Presentation()
    assert same_bits(kernel(case, plain, by_zero=True), kernel(case, plain))
    for poison in ("nan", "inf"):
        hidden = Presentation(poison=poison, poison_hidden=True)
        assert np.isnan(kernel(case, hidden, by_zero=True)).any() and np.isfinite(kernel(case, hidden)).all()


# -- what a candidate says of memory -----------------------------------------------------------


def candidate(**declared: Any) -> Candidate:
    return Candidate(name="some", run=lambda case, presentation, want: Result(), **declared)


def test_a_candidate_takes_plain_memory_and_promises_nothing_unless_it_says_so() -> None:
    unknown = candidate()
    assert unknown.promises == frozenset() and unknown.refuses(Presentation(poison="nan")) is None
    assert unknown.refuses(Presentation(page_size=4)) == "it takes no pages of keys and values"
    sliced = Presentation(layouts=("contiguous", "sliced", "contiguous", "contiguous"))
    assert unknown.refuses(sliced) == "it takes k contiguous, not sliced"
    able = candidate(takes_layouts=frozenset(LAYOUTS), takes_pages=True, promises=frozenset(PROMISES))
    assert able.refuses(replace(sliced, page_size=4)) is None


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"takes_layouts": frozenset({"packed"})}, "takes_layouts holds 'packed'; accepted are contiguous, transposed"),
        ({"promises": frozenset({"speed"})}, "promises holds 'speed'; accepted are repeatable, batch-invariant"),
    ],
)
def test_what_is_not_in_the_vocabulary_is_refused(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        candidate(**declared)
