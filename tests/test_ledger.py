"""The online-softmax ledger: every state, and its last one against the whole row."""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.fixtures import load
from attncheck.oracle.case import Case
from attncheck.oracle.definition import define
from attncheck.oracle.ledger import Ledger, ledger, ledger_of_row

SIX = [1, 2, -1, 3, 0, 2.5]
VALUES = [[1, 0], [0, 1], [2, -1], [-1, 3], [0.5, 0.5], [1, -2]]
HIDDEN = float("-inf")


def off(book: Ledger) -> Any:
    """How far the last state is from the whole row, output and log-sum-exp."""
    if not book.blocks:
        return 0
    last = book.blocks[-1]
    return last.distance if book.lse == mpmath.ninf else max(last.distance, abs(last.lse - book.lse))


def rounding(book: Ledger, scores: list[float], values: list[list[float]]) -> Any:
    """What the recurrence may lose at its precision: some units a block and key, of the largest
    value and score. exp and log are good to a unit; the argument of exp to a unit of the score."""
    steps = 8 * (len(book.blocks) + len(scores) + 1)
    size = 1 + max([abs(x) for row in values for x in row], default=0)
    size *= 1 + max([abs(x) for x in scores if x != HIDDEN], default=0)
    return steps * size * mpmath.mpf(2) ** -book.bits


# -- worked rows -----------------------------------------------------------------------------


def test_example_1_state_by_state_in_decimal_arithmetic() -> None:
    book = ledger(SIX, VALUES, (2, 3, 1))
    with localcontext(Context(prec=60)):
        tolerance = Decimal(10) ** -55  # 60 digits, less what a few operations lose
        m, denominator, a = None, Decimal(0), [Decimal(0)] * 2
        for block in book.blocks:
            s = [Decimal(x) for x in SIX[block.start : block.stop]]
            new = max(s) if m is None else max(m, *s)
            alpha = Decimal(0) if m is None else (m - new).exp()
            e = [(x - new).exp() for x in s]
            denominator = alpha * denominator + sum(e)
            v = VALUES[block.start : block.stop]
            a = [alpha * x + sum(w * Decimal(row[c]) for w, row in zip(e, v, strict=True)) for c, x in enumerate(a)]
            m = new
            want = [max(s), m, alpha, denominator, *a, *(x / denominator for x in a)]
            got = [block.maximum, block.running_maximum, block.rescale, block.denominator]
            got += [*block.accumulator, *block.output]
            assert all(abs(Decimal(mpmath.nstr(x, 60)) - y) <= tolerance for x, y in zip(got, want, strict=True))
        assert [block.scores for block in book.blocks] == [(1, 2), (-1, 3, 0), (2.5,)]
        assert [block.keys for block in book.blocks] == [(0, 1), (2, 3, 4), (5,)]
    distances = [block.distance for block in book.blocks]
    assert distances[0] > 1e-2 and distances[1] > 1e-2  # only the last must agree
    assert off(book) <= rounding(book, SIX, VALUES)


def test_example_1_a_shift_of_all_scores_changes_m_and_nothing_else() -> None:
    book, shifted = ledger(SIX, VALUES, (2,), bits=300), ledger([s - 4096 for s in SIX], VALUES, (2,), bits=300)
    for here, there in zip(book.blocks, shifted.blocks, strict=True):
        assert there.running_maximum == here.running_maximum - 4096
        assert there.maximum == here.maximum - 4096
        same = ("start", "stop", "keys", "rescale", "denominator", "accumulator", "output", "hidden")
        assert [getattr(here, name) for name in same] == [getattr(there, name) for name in same]


def test_example_2_is_known_by_heart() -> None:
    book = ledger([1000, 1001, 999], [[1], [3], [7]], (1,))
    states = [
        (int(b.running_maximum), f"{float(b.denominator):.6f}", f"{float(b.accumulator[0]):.6f}") for b in book.blocks
    ]
    assert states == [(1000, "1.000000", "1.000000"), (1001, "1.367879", "3.367879"), (1001, "1.503215", "4.315226")]
    assert f"{float(book.output[0]):.6f}" == "2.870665"
    assert [float(b.rescale) for b in book.blocks] == [0.0, float(mpmath.exp(-1)), 1.0]


@pytest.mark.parametrize(("name", "lengths"), [("tiles-short", (1, 2, 3, 8)), ("tiles-long", (1, 8, 16, 37))])
def test_example_5_tile_lengths_on_the_golden_rows(name: str, lengths: tuple[int, ...]) -> None:
    case = load(f"golden/{name}").case
    answer = define(case)
    keys = case.k.shape[2]
    for length in lengths:
        books = [ledger_of_row(case, 0, 0, i, (length,)) for i in range(3)]
        assert all(len(book.blocks) == -(-keys // length) for book in books)
        for i, book in enumerate(books):
            assert off(book) <= rounding(book, [3.0], [[2.0]] * keys)
            gaps = [abs(x - y) for x, y in zip(book.output, answer.o[0, 0, i], strict=True)]
            assert max(gaps) <= rounding(book, [3.0], [[2.0]] * keys)
            assert book.lse == answer.lse[0, 0, i] or abs(book.lse - answer.lse[0, 0, i]) < 2.0**-150
        empty, single, _ = books
        assert all(b.hidden and b.denominator == 0 and b.lse == mpmath.ninf for b in empty.blocks)
        assert sum(not b.hidden for b in single.blocks) == 1


# -- hidden blocks ---------------------------------------------------------------------------


def test_a_hidden_block_leaves_the_state_as_it_was_and_says_so() -> None:
    book = ledger([HIDDEN, HIDDEN, 1, 2, HIDDEN, HIDDEN, 3], [[float(n)] for n in range(7)], (2,))
    before, first, between, last = book.blocks
    assert [b.hidden for b in book.blocks] == [True, False, True, False]
    assert (before.running_maximum, before.denominator, before.output) == (mpmath.ninf, 0, (0,))
    assert (before.maximum, before.rescale, before.scores) == (mpmath.ninf, 1, ())
    assert first.rescale == 0  # the first block that is seen, not the first that is read
    state = ("running_maximum", "denominator", "accumulator", "output", "lse", "distance")
    assert [getattr(between, name) for name in state] == [getattr(first, name) for name in state]
    assert between.rescale == 1 and last.rescale == first.running_maximum.context.exp(-1)


def test_an_empty_row_ends_where_it_began() -> None:
    book = ledger([HIDDEN] * 3, [[1.0, 2.0]] * 3, (2,))
    assert book.output == (0, 0) and book.lse == mpmath.ninf
    assert all(b.hidden and b.distance == 0 for b in book.blocks)
    assert ledger([], []).blocks == ()


# -- any partition ---------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(-4, 4).map(float),
    st.floats(-100, 100, width=32),
    st.sampled_from([1e30, -1e30, 1e4, -1e6, 88.0]),
)


@st.composite
def partitioned_rows(draw: st.DrawFn) -> tuple[list[float], list[list[float]], tuple[int, ...]]:
    """Scores (some hidden), values, and ragged block sizes; shrinks to one key in one block."""
    scores = draw(st.lists(st.one_of(numbers, st.just(HIDDEN)), min_size=1, max_size=12), label="scores")
    width = draw(st.integers(1, 3), label="width")
    value = st.lists(st.floats(-8, 8, width=16), min_size=width, max_size=width)
    values = draw(st.lists(value, min_size=len(scores), max_size=len(scores)), label="values")
    return scores, values, tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=6), label="blocks"))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(partitioned_rows())
def test_the_last_state_is_the_whole_row(drawn: tuple[list[float], list[list[float]], tuple[int, ...]]) -> None:
    scores, values, blocks = drawn
    book = ledger(scores, values, blocks)
    assert [b.start for b in book.blocks] == [0, *(b.stop for b in book.blocks[:-1])]
    assert book.blocks[-1].stop == len(scores)
    allowed = rounding(book, scores, values)
    assert off(book) <= allowed
    whole = ledger(scores, values)
    assert max(abs(x - y) for x, y in zip(whole.blocks[-1].output, book.blocks[-1].output, strict=True)) <= allowed
    # running states are those of the row cut short
    for block in book.blocks:
        cut = ledger(scores[: block.stop], values[: block.stop], bits=book.bits)
        assert cut.blocks[-1].running_maximum == block.running_maximum
        assert max(abs(x - y) for x, y in zip(cut.output, block.output, strict=True)) <= allowed


def test_a_recurrence_that_forgets_to_rescale_is_seen() -> None:
    book = ledger(SIX, VALUES, (2,))
    forgotten = [sum(x) for x in zip(*(_fresh(SIX[n : n + 2], VALUES[n : n + 2]) for n in (0, 2, 4)), strict=True)]
    wrong = [x / forgotten[0] for x in forgotten[1:]]
    assert max(abs(x - y) for x, y in zip(wrong, book.output, strict=True)) > 1e3 * rounding(book, SIX, VALUES)


def _fresh(scores: list[float], values: list[list[float]]) -> list[Any]:
    """(l, a) of a block alone."""
    (block,) = ledger(scores, values).blocks
    return [block.denominator, *block.accumulator]


# -- rows of a case --------------------------------------------------------------------------


def test_every_row_of_a_case_with_every_kind_of_score() -> None:
    rng = np.random.default_rng(7)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    case = Case(
        normal(2, 4, 3, 2),
        normal(2, 2, 5, 2),
        normal(2, 2, 5, 3),
        softcap=3.0,
        causal="bottom-right",
        window=(2, None),
        bias=normal(4, 1, 5),
        alibi_slopes=normal(4),
        k_lengths=(5, 2),
    )
    answer = define(case)
    for b, h, i in np.ndindex(2, 4, 3):
        book = ledger_of_row(case, b, h, i, (2, 1))
        assert book.bits == answer.bits and len(book.blocks) == 4
        gaps = [abs(x - y) for x, y in zip(book.blocks[-1].output, answer.o[b, h, i], strict=True)]
        assert max(gaps) < mpmath.mpf(2) ** (12 - book.bits)
        assert book.lse == answer.lse[b, h, i]
        assert [j for block in book.blocks for j in block.keys] == [j for j in range(5) if answer.p[b, h, i, j] > 0]


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [[1]], None), "values has 1 rows but there are 2 scores"),
        (([1, 2], [[1], [1, 2]], None), r"values has rows of lengths \[1, 2\]"),
        (([float("inf")], [[1]], None), "scores holds \\+inf at 0; a score must be finite, or -inf"),
        (([1, float("nan")], [[1], [1]], None), "scores holds nan at 1"),
        (([1], [[float("inf")]], None), "values holds .* at 0; values must be finite"),
        (([1], [[1]], (0,)), "k_blocks is \\(0,\\)"),
        (([1], [[1]], ()), "k_blocks is \\(\\)"),
    ],
)
def test_bad_rows_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ledger(*arguments)


@pytest.mark.parametrize(
    ("row", "message"), [((1, 0, 0), "b is 1"), ((0, -1, 0), "h is -1"), ((0, 0, 5), "i is 5; the case has 5 of them")]
)
def test_rows_that_are_not_there_are_refused(row: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ledger_of_row(load("golden/five-positions-dense").case, *row)
