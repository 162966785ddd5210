"""The worked examples known by heart, and the answers that two independent routes agree on.

Run as a script, this file writes the shipped cases anew: their inputs are made here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context, Decimal, getcontext, localcontext
from pathlib import Path

import numpy as np
import pytest

from attncheck.fixtures import FixtureError, Record, decimals, load, shipped, write
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.cost import cost
from attncheck.oracle.definition import define
from attncheck.oracle.ledger import ledger_of_row
from attncheck.oracle.result import OUTPUTS

#: what a pinned number promises
AGREEMENT = Decimal(10) ** -30


# -- the inputs ------------------------------------------------------------------------------


def rows(values: Sequence[Sequence[float]], dtype: type = np.float64) -> np.ndarray:
    """One batch entry, one head."""
    return np.array(values, dtype=dtype)[None, None]


Q5 = [[0.2, -0.3], [0.5, 0.1], [-0.4, 0.7], [0.6, -0.2], [0.1, 0.8]]
K5 = [[0.3, 0.5], [-0.2, 0.4], [0.7, -0.1], [0.1, -0.6], [-0.5, 0.2]]
V5 = [[1, 0], [0, 2], [-1, 1], [2, -1], [0.5, 0.3]]
G5 = [[0.2, -0.1], [0.3, 0.5], [-0.4, 0.2], [0.1, -0.3], [0.6, 0.4]]
TWO_BY_TWO = Presentation(q_blocks=(2,), k_blocks=(2,))

Q2 = [[0.5, -1.0], [1.5, 0.25]]
K3 = [[1.0, 0.5], [-0.75, 2.0], [0.25, -0.5]]
V3 = [[1.0, -2.0], [0.5, 3.0], [-1.5, 0.75]]
HIDDEN3 = [[True, True, False], [True, True, True]]  # the first query may not see the third key


def five_positions(mask: np.ndarray | None = None, causal: bool = False) -> Case:
    return Case(rows(Q5), rows(K5), rows(V5), do=rows(G5), mask=mask, causal="top-left" if causal else None)


def two_queries_three_keys() -> Case:
    """J = sum O^2 / 2, so that dO = O: here O rounded to float64."""
    case = Case(rows(Q2), rows(K3), rows(V3), mask=np.array(HIDDEN3))
    return Case(case.q, case.k, case.v, mask=case.mask, do=define(case).o.astype(np.float64))


def tiles(keys: int) -> Case:
    """Three rows: one that sees no key, one that sees one key, one with its maximum repeated."""
    j = np.arange(keys)
    k = ((5 * j) % 7) / 2.0 - 1.0  # -1 to 2; the maximum comes back every seven keys
    v = np.stack([(3 * j) % 11 / 4.0 - 1.0, np.where(j % 3 == 0, -2.0, 0.5)], axis=1)
    mask = np.ones((3, keys), dtype=bool)
    mask[0] = False
    mask[1] = j == keys // 2
    q, do = rows([[1.0], [0.5], [3.0]], np.float32), rows([[1.0, -0.5], [0.25, 1.0], [-1.0, 0.75]], np.float32)
    return Case(q, rows(k[:, None], np.float32), rows(v, np.float32), do=do, mask=mask, scale=1.0)


def one_row(scores: Sequence[float], values: Sequence[Sequence[float]], do: Sequence[float]) -> Case:
    """Scores made by a query of 1 and keys that are the scores."""
    return Case(
        rows([[1.0]], np.float32),
        rows([[s] for s in scores], np.float32),
        rows(values, np.float32),
        do=rows([do], np.float32),
        scale=1.0,
    )


def inputs() -> dict[str, tuple[Case, Presentation]]:
    """Every golden case and how it is presented."""
    empty = np.ones((5, 5), dtype=bool)
    empty[2] = False
    six = one_row([1, 2, -1, 3, 0, 2.5], [[1, 0], [0, 1], [2, -1], [-1, 3], [0.5, 0.5], [1, -2]], [1.0, -0.5])
    return {
        "six-scores": (six, Presentation(k_blocks=(2,))),
        "three-huge-scores": (one_row([1000, 1001, 999], [[1], [3], [7]], [1.0]), Presentation(k_blocks=(1,))),
        "five-positions-dense": (five_positions(), TWO_BY_TWO),
        "five-positions-causal": (five_positions(causal=True), TWO_BY_TWO),
        "five-positions-empty-row": (five_positions(empty), TWO_BY_TWO),
        "two-queries-three-keys": (two_queries_three_keys(), Presentation()),
        "tiles-short": (tiles(8), Presentation(k_blocks=(3,))),
        "tiles-long": (tiles(37), Presentation(k_blocks=(16,))),
    }


def expected(case: Case) -> dict[str, np.ndarray | None]:
    answer = define(case)
    values = {name: getattr(answer, name) for name in OUTPUTS}
    return {name: None if x is None else decimals(x) for name, x in values.items()}


# -- the second route: one head in decimal arithmetic, sharing nothing with the oracle ---------


def by_hand(case: Case, hidden: Sequence[Sequence[bool]]) -> dict[str, list[list[Decimal]]]:
    """o, lse, dq, dk, dv of one head. exp is taken of the scores as they are: Decimal has the range."""
    with localcontext(Context(prec=70)):
        q, k, v, g = (
            [[Decimal(x) for x in row] for row in a[0, 0].tolist()] for a in (case.q, case.k, case.v, case.do)
        )
        scale = 1 / Decimal(len(q[0])).sqrt() if case.scale is None else Decimal(case.scale)
        out = {name: [[Decimal(0)] * len(a[0]) for _ in a] for name, a in (("dq", q), ("dk", k), ("dv", v), ("o", g))}
        out["lse"] = []
        for i, query in enumerate(q):
            weight = {
                j: (scale * sum(a * b for a, b in zip(query, key, strict=True))).exp()
                for j, key in enumerate(k)
                if not hidden[i][j]
            }
            total = sum(weight.values(), Decimal(0))
            out["lse"].append([total.ln()])  # Decimal("-Infinity") of 0
            for j, w in weight.items():
                for c, x in enumerate(v[j]):
                    out["o"][i][c] += w * x / total
            for j, w in weight.items():
                # d o / d s_j = p_j (v_j - o)
                ds = w / total * sum(y * (x - o) for y, x, o in zip(g[i], v[j], out["o"][i], strict=True))
                for c in range(len(query)):
                    out["dq"][i][c] += scale * ds * k[j][c]
                    out["dk"][j][c] += scale * ds * query[c]
                for c in range(len(v[j])):
                    out["dv"][j][c] += w / total * g[i][c]
        return out


def hidden(name: str, sq: int, sk: int) -> list[list[bool]]:
    """Which keys each row of a golden case does not see, said a second time."""
    table = {
        "five-positions-causal": lambda i, j: j > i,
        "five-positions-empty-row": lambda i, j: i == 2,
        "two-queries-three-keys": lambda i, j: (i, j) == (0, 2),
        "tiles-short": lambda i, j: i == 0 or (i == 1 and j != 4),
        "tiles-long": lambda i, j: i == 0 or (i == 1 and j != 18),
    }
    rule = table.get(name, lambda i, j: False)
    return [[rule(i, j) for j in range(sk)] for i in range(sq)]


def differences(record: Record, answer: dict[str, list[list[Decimal]]]) -> list[str]:
    """The pinned numbers that differ from ``answer``, in words."""
    found = []
    for name, table in answer.items():
        pinned = record.expected[name]
        assert pinned is not None
        for place, text in enumerate(pinned.ravel().tolist()):
            number = [x for row in table for x in row][place]
            if Decimal(text) != number and not abs(Decimal(text) - number) <= AGREEMENT * max(1, abs(number)):
                found.append(f"{name}[{place}] is pinned as {text}, but is {number}")
    return found


# -- what is checked -------------------------------------------------------------------------


def test_the_shipped_cases_are_the_ones_made_here() -> None:
    made = inputs()
    assert shipped() == tuple(sorted(f"golden/{name}" for name in made))
    for name, (case, presentation) in made.items():
        record = load(f"golden/{name}")
        assert (record.case, record.presentation) == (case, presentation)


def test_the_pinned_numbers_are_the_definitions() -> None:
    for name in shipped():
        record = load(name)
        for output, numbers in expected(record.case).items():
            pinned = record.expected[output]
            assert (pinned is None) == (numbers is None)
            assert pinned is None or pinned.tolist() == numbers.tolist(), (name, output)


@pytest.mark.parametrize("name", sorted(inputs()))
def test_a_second_route_agrees_on_thirty_digits(name: str) -> None:
    record = load(f"golden/{name}")
    _, _, _, sq, sk, _, _ = record.case.shape
    assert differences(record, by_hand(record.case, hidden(name, sq, sk))) == []
    # the comparison sees a key that is dropped, or one that is let in
    wrong = [[not x for x in row] for row in hidden(name, sq, sk)]
    assert differences(record, by_hand(record.case, wrong))


def test_pinned_numbers_have_at_least_34_digits_where_they_are_not_short_by_nature() -> None:
    lengths = [
        len(Decimal(text).as_tuple().digits)
        for name in shipped()
        for array in load(name).expected.values()
        if array is not None
        for text in array.ravel().tolist()
        if text != "-inf"
    ]
    # a dyadic number of few bits ends early; nothing else is cut below 34
    assert max(lengths) == 40
    assert sum(34 <= n <= 40 for n in lengths) > len(lengths) / 2


def test_example_2_prints_what_is_known_by_heart() -> None:
    record = load("golden/three-huge-scores")
    first, second, third = ledger_of_row(record.case, 0, 0, 0, record.presentation.k_blocks).blocks
    assert (first.running_maximum, first.denominator, first.accumulator) == (1000, 1, (1,))
    assert second.running_maximum == third.running_maximum == 1001
    assert f"{float(second.denominator):.6f} {float(second.accumulator[0]):.6f}" == "1.367879 3.367879"
    assert f"{float(third.denominator):.6f} {float(third.accumulator[0]):.6f}" == "1.503215 4.315226"
    assert f"{float(third.output[0]):.6f}" == "2.870665"


def test_example_3_counts_and_its_empty_row() -> None:
    causal = load("golden/five-positions-causal")
    counted = cost(causal.case, causal.presentation)
    assert (counted.visible_pairs, counted.score_entries, counted.lse_entries) == (15, 25, 5)
    assert counted.largest_block == 4
    empty = load("golden/five-positions-empty-row").expected
    assert empty["o"][0, 0, 2].tolist() == ["0", "0"]
    assert empty["dq"][0, 0, 2].tolist() == ["0", "0"]
    assert empty["lse"][0, 0, 2] == "-inf"
    assert "-inf" not in [x for n, x in enumerate(empty["lse"].ravel()) if n != 2]


def test_example_4_differences_rows_and_masked_entries() -> None:
    case = load("golden/two-queries-three-keys").case
    answer = define(case)
    assert answer.p[0, 0, 0, 2] == answer.ds[0, 0, 0, 2] == 0
    assert all(p > 0 for p in answer.p.ravel().tolist()[:2] + answer.p.ravel().tolist()[3:])
    # rounding of a sum of three terms at that many bits
    assert all(abs(x) <= 2.0 ** (4 - answer.bits) for x in answer.ds.sum(axis=-1).ravel())

    def loss(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
        s = np.where(HIDDEN3, q @ k.T / np.sqrt(2), -np.inf)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        return float(((p / p.sum(axis=1, keepdims=True) @ v) ** 2).sum() / 2)

    # Two steps h and h / 2, extrapolated: the h^2 term of the cut-off goes, h^4 leaves some 1e-12
    # for h = 2^-10, and rounding some u / h = 1e-13.
    step, worst = 2.0**-10, 0.0
    arrays = [case.q[0, 0], case.k[0, 0], case.v[0, 0]]
    for n, gradient in enumerate((answer.dq, answer.dk, answer.dv)):
        for index in np.ndindex(arrays[n].shape):

            def slope(h: float, n: int = n, index: tuple[int, ...] = index) -> float:
                ends = []
                for sign in (1, -1):
                    moved = [a.copy() for a in arrays]
                    moved[n][index] += sign * h
                    ends.append(loss(*moved))
                return (ends[0] - ends[1]) / (2 * h)

            extrapolated = (4 * slope(step / 2) - slope(step)) / 3
            worst = max(worst, abs(extrapolated - float(gradient[(0, 0, *index)])))
    assert worst < 4e-11  # the figure of the example


@pytest.mark.parametrize(("name", "lengths"), [("tiles-short", (1, 2, 3, 8)), ("tiles-long", (1, 8, 16, 37))])
def test_example_5_every_tile_length_gives_the_same_answer(name: str, lengths: tuple[int, ...]) -> None:
    record = load(f"golden/{name}")
    assert record.expected["o"][0, 0, 0].tolist() == ["0", "0"]
    with localcontext(Context(prec=70)):
        for i in range(3):
            pinned = [Decimal(x) for x in record.expected["o"][0, 0, i].tolist()]
            for length in lengths:
                last = ledger_of_row(record.case, 0, 0, i, (length,)).blocks[-1]
                for got, want in zip(last.output, pinned, strict=True):
                    assert abs(Decimal(got.context.nstr(got, 50)) - want) <= AGREEMENT


def test_the_repeated_maximum_of_example_5_is_repeated_in_and_across_tiles() -> None:
    case = load("golden/tiles-long").case
    ties = np.flatnonzero(case.k[0, 0, :, 0] == case.k.max())
    assert len(ties) >= 5
    assert {int(j) // 16 for j in ties} == {0, 1, 2}
    assert sum(int(j) // 16 == 0 for j in ties) >= 2


def test_example_6_is_the_ledger_of_costs() -> None:
    s, d = 4096, 64
    flat = np.zeros((1, 1, s, d), dtype=np.float16)
    dense, causal = (cost(Case(flat, flat, flat, causal=c), TWO_BY_TWO) for c in (None, "top-left"))
    assert dense.score_entries == 16_777_216
    assert dense.score_bytes == 32 * 2**20
    assert dense.forward_flops == 4 * s * s * d
    assert causal.forward_flops == 4 * d * s * (s + 1) // 2
    assert dense.lse_entries == s


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(FixtureError, match=r"no case 'golden/nothing' is shipped; there are golden/five-positions"):
        load("golden/nothing")
    with pytest.raises(FixtureError, match="there are golden/five-positions"):
        load("../oracle/case")


if __name__ == "__main__":
    getcontext().prec = 70
    for stem, (made_case, made_presentation) in inputs().items():
        golden = Path(__file__).parents[1] / "fixtures" / "golden"
        print(write(Record(made_case, made_presentation, expected(made_case)), golden, stem))
