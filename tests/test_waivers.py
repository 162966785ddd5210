"""Waivers: what a line may say, what is said of a bad one, and what a run makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncheck import verify
from attncheck.document import build
from attncheck.kernels.candidate import Candidate
from attncheck.kernels.numpy_blocked import NUMPY_BLOCKED
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.result import Result
from attncheck.properties.campaign import check
from attncheck.properties.catalogue import PROPERTIES
from attncheck.selection import Selection, SelectionError
from attncheck.waivers import Waiver, WaiverError, condition, read, waived

LINK = "https://example.org/issues/7"

#: a kernel that takes scale 0 as 1, and says o is too large by 1 there
MINE = """
from dataclasses import replace
from attncheck.kernels.numpy_blocked import NUMPY_BLOCKED

def run(case, presentation, want):
    result = NUMPY_BLOCKED.run(case, presentation, want)
    return replace(result, o=result.o + result.o.dtype.type(1)) if case.scale == 0 else result

candidate = replace(NUMPY_BLOCKED, name="mine", run=run)
"""


def case(*, sq: int = 2, sk: int = 3, dtype: str = "float32", **fields: Any) -> Case:
    def ones(n: int) -> np.ndarray:
        return np.ones((1, 1, n, 4), FORMATS[dtype].dtype)

    return Case(ones(sq), ones(sk), ones(sk), **fields)


# -- conditions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "met", "unmet"),
    [
        ("any", case(), None),
        ("softcap", case(softcap=2.0), case()),
        ("scale<=0", case(scale=-1.0), case(scale=1.0)),
        ("causal-bottom-right", case(causal="bottom-right"), case(causal="top-left")),
        ("bfloat16", case(dtype="bfloat16"), case()),
        ("! softcap", case(), case(softcap=2.0)),
        ("Sq>Sk", case(sq=4), case(sq=3)),
        ("Sk = 0", case(sk=0), case()),
        ("Sq!=Sk", case(), case(sq=3)),
        ("D>=4", case(), None),
        ("D<4", None, case()),
        ("scale=0.5", case(), case(scale=0.25)),  # 1 / sqrt(4)
        ("softcap<3", case(softcap=2.0), case()),  # absent is not below 3
        ("softcap & Sq>1 & float32", case(softcap=2.0), case(softcap=2.0, sq=1)),
    ],
)
def test_a_condition_says_which_cases(text: str, met: Case | None, unmet: Case | None) -> None:
    holds, plain = condition(text), Presentation()
    assert met is None or holds(met, plain)
    assert unmet is None or not holds(unmet, plain)


def test_a_condition_may_be_of_the_presentation() -> None:
    transposed = Presentation(layouts=("contiguous", "transposed", "contiguous", "contiguous"))
    for text, met in (
        ("route=mask", Presentation(route="mask")),
        ("layout=transposed", transposed),
        ("poison=nan", Presentation(poison="nan")),
        ("route!=flags", Presentation(route="mask")),
    ):
        assert condition(text)(case(), met) and not condition(text)(case(), Presentation())
    assert condition("layout!=transposed")(case(), Presentation())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "softcup",
        "Sq>>Sk",
        "Sq>",
        "3<4",
        "route=masks",
        "route<mask",
        "softcap &",
        "scale=nan",
        "D>1e999",
        "causal=top",
    ],
)
def test_what_is_no_condition_is_told_with_what_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"^condition holds '.*'; accepted are any, a feature"):
        condition(text)


def test_nothing_in_a_condition_is_executed() -> None:
    with pytest.raises(ValueError, match="condition holds"):
        condition("__import__('os').system('true')")


# -- files ----------------------------------------------------------------------------------------


def file_of(folder: Path, *lines: str) -> str:
    path = folder / "waivers.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = file_of(tmp_path, "# settled", "", f"mine | output, lse | any | no | yes: {LINK}", f"* | * | D>64 | {LINK}")
    first, second = read(path)
    assert first == Waiver(f"{path}:3", "mine", "output, lse", ("output", "lse"), "any", f"no | yes: {LINK}")
    assert (second.entry, second.properties) == (f"{path}:4", tuple(PROPERTIES))
    assert first.names("mine", "mine.py:f") and first.names("other", "mine") and not first.names("other", "other")
    assert second.names("other", "other")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mine | output | any", "it has 3 of the columns candidate | property | condition | reason; all must be there"),
        (
            f"mine |  | any | {LINK}",
            "property is empty; all of candidate | property | condition | reason must be there",
        ),
        (f"mine | outputs | any | {LINK}", "property is 'outputs'; accepted are *, output, lse, dq"),
        (f"mine | output | Sk==0 | {LINK}", "condition holds 'Sk==0'; accepted are any, a feature"),
        ("mine | output | any | it is known", "reason is 'it is known'; it must hold a link, such as https://"),
        (f"a | lse | any | {LINK}", "it repeats {path}:1; each waiver is written once"),
    ],
)
def test_a_bad_line_is_told_with_its_number(line: str, said: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, f"a | lse | any | {LINK}", line)
    with pytest.raises(WaiverError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:2: {said.replace('{path}', path)}")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(WaiverError, match="cannot be read: No such file"):
        read(str(tmp_path / "none.txt"))
    with pytest.raises(WaiverError, match="cannot be read: Is a directory"):
        read(str(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WaiverError, match="is not UTF-8 text"):
        read(str(tmp_path / "bytes"))


def test_strictness_needs_a_file() -> None:
    with pytest.raises(SelectionError, match="--strict-waivers is given but --waivers is not"):
        Selection(targets=("numpy-blocked",), strict_waivers=True)


# -- campaigns ------------------------------------------------------------------------------------


def mine(*waivers: Waiver) -> Candidate:
    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        result = NUMPY_BLOCKED.run(case, presentation, want)
        off = case.scale == 0 or case.softcap is not None
        assert result.o is not None
        return replace(result, o=result.o + result.o.dtype.type(1)) if off else result

    return waived(replace(NUMPY_BLOCKED, name="mine", run=run), "mine.py:candidate", waivers)


def waiver(text: str, prop: str = "output", candidate: str = "mine") -> Waiver:
    return Waiver(f"w:{text}", candidate, prop, (prop,), text, LINK)


def test_violations_are_counted_by_waiver_and_others_still_fail() -> None:
    both = mine(
        waiver("scale=0"), waiver("softcap"), waiver("Sk>9000"), waiver("any", "lse"), waiver("any", candidate="x")
    )
    assert len(both.known) == 4
    tally = check(both, "output", "float32", examples=120, seed=0)
    assert tally.failure is None and tally.known_reasons == {LINK: tally.known}
    assert set(tally.waived) == {"w:scale=0", "w:softcap"}
    assert sum(violated for _, violated in tally.waived.values()) == tally.known > 0
    one = check(mine(waiver("scale=0")), "output", "float32", examples=120, seed=0)
    assert one.failure is not None and one.failure.case.softcap is not None and one.failure.case.scale != 0


def test_a_pass_where_a_violation_was_waived_is_counted() -> None:
    tally = check(mine(waiver("any", "lse")), "lse", "float32", examples=40, seed=0)
    assert tally.waived == {"w:any": (tally.judged, 0)} and tally.judged > 0


def test_a_waiver_of_one_property_takes_no_case_from_another() -> None:
    """Fidelity to what the adopter wrote: comparisons, which pass over faults declared with a candidate, do not."""
    plain = check(NUMPY_BLOCKED, "key-order", "float32", examples=40, seed=0)
    tally = check(
        waived(NUMPY_BLOCKED, "t", [waiver("any", candidate="*")]), "key-order", "float32", examples=40, seed=0
    )
    assert tally.judged == plain.judged > 0


# -- runs -----------------------------------------------------------------------------------------

FACTS: dict[str, Any] = {"name": "mine", "target": "mine.py:f", "offers": [], "dtypes": ["float32"]}


@pytest.mark.parametrize(
    ("counts", "names", "status", "code"),
    [
        ([3, 2], "mine", "matched", 0),
        ([3, 0], "*", "unexpected pass", 1),
        (None, "mine.py:f", "matched nothing", 1),
        ([3, 2], "other", "not in this run", 0),
    ],
)
def test_what_became_of_a_waiver(counts: list[int] | None, names: str, status: str, code: int) -> None:
    entry = Waiver("w.txt:1", names, "output", ("output",), "any", LINK)
    row = {
        "candidate": FACTS,
        "property": "output",
        "dtype": "float32",
        "error": None,
        "failure": None,
        "judged": 5,
        "examples": 5,
        "worst": None,
        "median": None,
        "offered": True,
        "checked_twice": 0,
        "reasons": {},
        "known_reasons": {},
        "waived": {} if counts is None else {"w.txt:1": counts},
    }
    for strict in (False, True):
        document = build([row], titles={"output": "output"}, waivers=[entry], strict_waivers=strict)
        assert document["waivers"][0]["status"] == status
        assert document["exit_code"] == (code if strict else 0)


@pytest.fixture
def project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (project / "mine.py").write_text(MINE)
    monkeypatch.setenv("COLUMNS", "200")
    return project


FEW = ("verify", "mine.py:candidate", "--dtype", "float32", "--property", "output,lse", "--examples", "60")


def test_a_run_shows_known_violations_and_names_stale_waivers(attncheck: Any, project: Path) -> None:
    assert attncheck(*FEW, "-n", "1")[0] == 1  # without a waiver it is violated
    lines = (
        f"mine | output | scale<=0 & !scale<0 | scale 0 is taken as 1: {LINK}",
        f"mine.py:candidate | lse | softcap | {LINK}",
        f"* | lse | Sk>9000 | {LINK}",
        f"other | lse | any | {LINK}",
    )
    file_of(project, *lines)
    code, out, _ = attncheck(*FEW, "-n", "2", "--waivers", "waivers.txt", "--json", "report.json")
    assert code == 0 and " --attncheck-waivers waivers.txt" in out.splitlines()[0]
    assert f"known   scale 0 is taken as 1: {LINK} (" in out
    report = json.loads((project / "report.json").read_text())
    assert [w["status"] for w in report["waivers"]] == [
        *("matched", "unexpected pass", "matched nothing", "not in this run")
    ]
    held = report["waivers"][1]["held"]
    assert f"waiver waivers.txt:2 (mine.py:candidate | lse | softcap): unexpected pass: none of the {held} " in out
    assert "waiver waivers.txt:3 (* | lse | Sk>9000): it matches nothing" in out and "waivers.txt:4" not in out

    code, out, _ = attncheck(*FEW, "-n", "1", "--waivers", "waivers.txt", "--strict-waivers")
    assert code == 1 and out.rstrip().endswith("stale waivers fail the run (--strict-waivers)")
    file_of(project, lines[0])
    code, out, _ = attncheck(*FEW, "-n", "1", "--waivers", "waivers.txt", "--strict-waivers", "--isolate")
    assert code == 0 and out.rstrip().endswith("holds: mine")
    assert verify(
        "mine.py:candidate", dtypes=["float32"], properties=["output"], examples=60, waivers="waivers.txt"
    ).passed


def test_a_bad_file_is_one_sentence_and_exit_2(attncheck: Any, project: Path) -> None:
    file_of(project, "# settled", f"mine | output | Sk=zero | {LINK}")
    code, out, err = attncheck(*FEW, "--waivers", "waivers.txt")
    assert (code, out) == (2, "")
    assert err.startswith("error: waivers.txt:2: condition holds 'Sk=zero'; accepted are any,") and err.count("\n") == 1
