"""The report: statuses, exit codes and their precedence, and the text that people read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attncheck.document import build, died, placeholder
from attncheck.report import render

TITLES = {"output": "output", "lse": "log-sum-exp", "dq": "dQ", "empty-rows": "empty rows"}

FACTS: dict[str, Any] = {
    "name": "mine",
    "target": "mine.py:f",
    "convention": "sdpa",
    "device": "cpu",
    "about": "",
    "dtypes": ["float32", "float16"],
    "offers": ["o", "lse", "dq", "dk", "dv"],
    "lacks": {},
    "conventions": {},
    "profiles": {},
}

WORST = {
    "output": "dq",
    "index": [0, 0, 0, 0],
    "got": "0.0",
    "exact": "0.19661193324148185",
    "allowed": 2.1e-7,
    "ratio": 9.4e5,
    "parts": [["products", 1.5e-7], ["exp", 0.6e-7], ["storage", 0.0]],
}

FAILURE = {
    "kind": "bound",
    "sentence": "dQ: got 0.0, exact 0.19661193324148185, allowed ±2.1e-07, at [0, 0, 0, 0] (ratio 9.4e+05)",
    "worst": WORST,
    "case": {
        "summary": "1 query, 2 keys, D 1, float32, scale 1, no mask",
        "digest": "ab",
        "arrays": {"q": "[[1.0]]", "k": "[[0.0], [1.0]]"},
    },
    "first": "cd",
    "seen": 10,
    "calls": 10,
    "saved": ".attncheck/failures/dq-3f2a91c4.json",
    "not_saved": None,
    "replay": "attncheck replay .attncheck/failures/dq-3f2a91c4.json --candidate mine.py:f --like sdpa",
}


def row(
    name: str = "output", dtype: str = "float32", *, facts: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "candidate": facts or FACTS,
        "property": name,
        "dtype": dtype,
        "error": None,
        "examples": 100,
        "judged": 100,
        "declined": 0,
        "vacuous": 0,
        "known": 0,
        "elements": 1000,
        "at_stake": 900,
        "zeros": 9,
        "weak": 1,
        "checked_twice": 12,
        "worst": {**WORST, "ratio": 0.44},
        "median": 0.05,
        "offered": True,
        "reasons": {},
        "known_reasons": {},
        "seconds": 1.0,
        "failure": None,
    }
    return {**plain, **changes}


UNJUDGED: dict[str, Any] = {"judged": 0, "elements": 0, "at_stake": 0, "zeros": 0, "worst": None, "median": None}


def document(rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    about = {"seed": 0, "seconds": 60.0, "processes": 2}
    return build(rows, titles=TITLES, about=about, **options)


def test_everything_that_was_judged_holds() -> None:
    report = document([row(), row("lse"), row("dq", declined=40)])
    assert (report["exit_code"], report["why"]) == (0, [])
    assert report["judgements"] == 300
    assert report["examples_per_minute"] == report["examples"] * 60 / report["seconds"]
    assert report["checked_twice"] == 12  # the properties share their cases


def test_a_violation_exits_1_whatever_was_not_judged_beside_it() -> None:
    rows = [row("dq", failure=FAILURE), row("output", **UNJUDGED, declined=100, reasons={"no masks": 100})]
    assert document(rows, require=["lse"])["exit_code"] == 1


def test_an_error_of_ours_exits_2_even_beside_a_violation() -> None:
    report = document([row("dq", failure=FAILURE), row(error="the two exact engines disagree")])
    assert report["exit_code"] == 2
    assert report["errors"] == ["mine, output, float32: the two exact engines disagree"]


def test_one_candidate_of_two_with_nothing_judged_exits_3_and_says_why() -> None:
    other = {**FACTS, "name": "other", "target": "other.py:f"}
    rows = [row(), row(facts=other, **UNJUDGED, declined=100, reasons={"an additive bias": 100})]
    report = document(rows)
    assert report["exit_code"] == 3
    assert report["why"] == ["other: nothing was judged: an additive bias"]


def test_a_candidate_of_no_selected_dtype_is_named() -> None:
    report = document([placeholder(FACTS)])
    assert report["exit_code"] == 3
    assert report["why"] == ["mine: nothing was judged (it takes float32, float16)"]


def test_a_target_that_does_not_load_exits_2() -> None:
    report = document([placeholder({"name": "x", "target": "x"}, "unknown target 'x'")])
    assert report["exit_code"] == 2
    assert "error: unknown target 'x'" in render(report)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row(facts={**FACTS, "offers": ["o"]})], "mine: lse is required but not offered by this candidate"),
        ([row(), row("lse", **UNJUDGED, offered=False)], "mine: lse is required but not offered by this candidate"),
        ([row(), row("lse", **UNJUDGED, declined=9)], "mine: lse is required but was not judged"),
        ([row()], "mine: lse is required but was not judged"),
    ],
)
def test_a_required_output_that_is_missing_exits_3(rows: list[dict[str, Any]], says: str) -> None:
    report = document(rows, require=["lse"])
    assert (report["exit_code"], report["why"]) == (3, [says])
    assert document([row(), row("lse")], require=["lse"])["exit_code"] == 0


def test_a_bound_that_would_accept_zero_is_no_pass() -> None:
    one_large_case = row("dq", at_stake=100, zeros=51, weak=1)
    report = document(
        [row(at_stake=100, zeros=51, weak=51), row("lse", at_stake=100, zeros=50, weak=60), one_large_case]
    )
    statuses = {p["name"]: p["status"] for p in report["candidates"][0]["properties"]}
    assert statuses == {"output": "weak", "lse": "holds", "dq": "holds"}
    assert report["exit_code"] == 3
    assert "51%" in report["why"][0]
    assert "0 would pass" in render(report)


def test_a_known_fault_is_shown_and_does_not_fail_the_run() -> None:
    reason = "scale 0 is taken for no scale"
    report = document(
        [row(known=3, known_reasons={reason: 3}), row("dq", **UNJUDGED, known=5, known_reasons={reason: 5})]
    )
    assert report["exit_code"] == 0
    text = render(report)
    assert f"known   {reason} (5 cases)" in text
    assert "known fault" in text


def test_rows_of_several_dtypes_become_one_line_with_the_worst_of_them() -> None:
    report = document(
        [row(worst={**WORST, "ratio": 0.2}), row(dtype="float16", worst={**WORST, "ratio": 0.6}, median=0.3)]
    )
    p = report["candidates"][0]["properties"][0]
    assert (p["judged"], p["worst"]["dtype"], p["worst"]["ratio"], p["median"]) == (200, "float16", 0.6, 0.3)


def test_a_ratio_of_infinity_or_nan_is_the_worst() -> None:
    for ratio in ("inf", "nan"):
        rows = [row(worst={**WORST, "ratio": 0.9}), row(dtype="float16", worst={**WORST, "ratio": ratio})]
        assert document(rows)["candidates"][0]["properties"][0]["worst"]["dtype"] == "float16"


def test_the_failure_tells_what_where_and_how_to_replay() -> None:
    text = render(document([row("dq", failure=FAILURE), row("dq", "float16", failure={**FAILURE, "saved": "b.json"})]))
    expected = """\
dQ violated: got 0.0, exact 0.19661193324148185, allowed ±2.1e-07, at [0, 0, 0, 0] (ratio 9.4e+05)
  1 query, 2 keys, D 1, float32, scale 1, no mask
  q [[1.0]]   k [[0.0], [1.0]]
  bound   2.1e-07 = products 1.5e-07 + exp 6e-08
  saved   .attncheck/failures/dq-3f2a91c4.json
  replay  attncheck replay .attncheck/failures/dq-3f2a91c4.json --candidate mine.py:f --like sdpa
  also in float16: """
    assert expected in text
    assert text.rstrip().endswith("violated: dQ of mine")


def test_a_failure_that_could_not_be_saved_is_told_with_the_reason() -> None:
    failure = {**FAILURE, "saved": None, "replay": None, "not_saved": "x cannot be written: Permission denied"}
    text = render(document([row("dq", failure=failure)]))
    assert "dQ violated" in text
    assert "not saved: x cannot be written: Permission denied" in text
    assert "replay" not in text


def test_a_kernel_that_kills_its_process_is_a_violation() -> None:
    report = document([row(), died(FACTS, "dq", "float32", "SIGSEGV")])
    assert report["exit_code"] == 1
    assert "dQ violated: the process that ran the kernel died (SIGSEGV)" in render(report)


def test_a_kernel_that_fails_sometimes_is_told_so() -> None:
    assert "3 of 10 calls" in render(document([row("dq", failure={**FAILURE, "seen": 3, "calls": 10})]))


def test_what_is_declared_differently_is_shown() -> None:
    facts = {**FACTS, "conventions": {"lse_base": "2"}, "profiles": {"float16": {"u_p": 0.0}, "bfloat16": {"u_p": 0.0}}}
    text = render(document([row(facts=facts)]))
    assert "conventions declared: lse_base 2" in text
    assert "profile declared for float16 bfloat16: u_p 0" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_narrow_terminals_keep_the_verdicts_whole(width: int) -> None:
    rows = [row(), row("lse", **UNJUDGED, offered=False), row("dq", failure=FAILURE), row("empty-rows", worst=None)]
    text = render(document(rows), width=width)
    table = text.split("\n\n")[1]
    if width >= 40:
        for words in ("0.44  float32", "violated", "not offered", "exact", "log-sum-exp"):
            assert words in table
    assert max(map(len, table.splitlines())) <= width


def test_colour_is_asked_for_or_absent() -> None:
    report = document([row("dq", failure=FAILURE)])
    assert "\x1b[" not in render(report)
    assert "\x1b[" in render(report, color=True)


def test_names_with_square_brackets_are_not_markup() -> None:
    facts = {**FACTS, "name": "f[bold]x"}
    assert "f[bold]x" in render(document([row(facts=facts)]))


def test_the_document_is_strict_json() -> None:
    report = document([row("dq", failure=FAILURE, worst={**WORST, "ratio": "inf"})])
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert (report["format"], report["version"]) == ("attncheck-report", 1)
