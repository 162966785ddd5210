"""Detection power: planted faults are caught, every property can fail, public checkers are what they
say, and a comparator that is broken on purpose does not go unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncheck import power_report, powering
from attncheck.kernels.candidate import Candidate, Unsupported
from attncheck.kernels.faulty import ZOO, Fault, Kernel, right
from attncheck.kernels.numpy_blocked import candidate as numpy_blocked
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.enclosure import Enclosed
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.result import Result
from attncheck.properties import catalogue, compare, false_alarms
from attncheck.properties import judge as judging
from attncheck.properties.campaign import check, plan_for
from attncheck.properties.catalogue import PROPERTIES
from attncheck.properties.draws import drawn
from attncheck.properties.false_alarms import judge_right, right_kernels
from attncheck.properties.power import Detection, hunt
from attncheck.properties.public_checks import STYLES, caught_by
from attncheck.properties.public_inputs import plain_attention
from attncheck.properties.verdict import Outcome, Verdict
from attncheck.selection import Selection, plan

#: one fault each of a dozen kinds
DOZEN = ("B003", "B013", "B020", "B025", "B035", "B042", "B059", "B074", "B086", "B101", "B112", "B209")

#: the right kernel, in the shape of a fault
RIGHT = replace(ZOO["B039"], id="right", kernel=Kernel)


@pytest.mark.parametrize("seed", [0, 1])
def test_faults_of_a_dozen_kinds_are_caught(seed: int) -> None:
    found = {d.fault: d for d in hunt([ZOO[id] for id in DOZEN], seed, examples=300)}
    assert len({ZOO[id].kind for id in DOZEN}) == 12
    assert {id for id in DOZEN if found[id].property is None} == set()


def test_the_right_kernel_is_not_caught() -> None:
    (found,) = hunt([RIGHT], 0, examples=12)
    assert (found.property, found.examples, found.shrunk) == (None, 12, None)


def test_failing_cases_are_shrunk() -> None:
    for found in hunt([ZOO["cheat:half-the-keys"], ZOO["B074"], ZOO["B020"]], 0, examples=20, shrink=True):
        assert found.shrunk is not None
        assert found.shrunk.keys <= 4 and found.shrunk.width <= 2 and found.shrunk.heads == 1
        assert found.shrunk.sentence


@pytest.mark.parametrize("id", ["B025", "B209", "B099"])
def test_examples_to_detection_is_what_verify_needs(id: str) -> None:
    """With that many examples verify finds a violation, with one less it finds none."""
    fault = ZOO[id]
    (found,) = hunt([fault], 0, examples=400)
    assert found.property is not None and found.dtype is not None

    def violated(examples: int) -> list[tuple[str, str]]:
        work = plan(Selection(targets=(fault.name,), examples=examples), [(fault.name, fault.candidate())])
        tallies = [check(w.candidate, w.property, w.dtype, examples=w.examples, seed=0) for w in work]
        return [(t.property, t.dtype) for t in tallies if t.failure is not None]

    assert (found.property, found.dtype) in violated(found.examples)
    assert found.examples == 1 or violated(found.examples - 1) == []


def test_faults_hunted_together_are_caught_as_they_are_alone() -> None:
    together = {d.fault: d for d in hunt([ZOO[id] for id in DOZEN[:6]], 3, examples=40)}
    for id in DOZEN[:6]:
        (alone,) = hunt([ZOO[id]], 3, examples=40)
        assert replace(alone, seconds=0.0) == replace(together[id], seconds=0.0)


# -- every property can fail ----------------------------------------------------------------

#: property -> a fault that it catches by itself
WITNESSES: dict[str, str] = {
    "output": "cheat:half-the-keys",
    "lse": "B074",
    "dq": "cheat:no-dq",
    "dk": "cheat:no-dk",
    "dv": "cheat:no-dv",
    "dbias": "cheat:no-dbias",
    "dsink": "cheat:no-dsink",
    "dlse": "B083",
    "empty-rows": "B003",
    "shape-dtype": "B209",
    "nan-pattern": "B042",
    "inputs-unchanged": "cheat:mutates-inputs",
    "ones": "B039",
    "one-key": "B039",
    "hull": "B039",
    "shift": "B074",
    "key-order": "cheat:half-the-keys",
    "block-sizes": "B049",
    "split-keys": "B039",
    "grouped-heads": "B086",
    "ragged": "B102",
    "scaled-v": "B195",
    "scaled-do": "B168",
    "zero-do": "B047",
    "ds-sum": "B020",
    "dk-sum": "B020",
    "dropout-mask": "sharp:keep-mask-of-backward",
    "twice": "B168",
    "company": "cheat:ignores-a-batch-entry",
    "layouts": "B109",
    "packed": "sharp:packed-rows",
    "with-gradients": "sharp:training-without-dropout",
    "padding": "B199",
    "masked": "B126",
    "masked-poison": "B204",
    "outputs-written": "B122",
}


def caught_alone(name: str, fault: Fault, cases: int = 64) -> bool:
    """Whether a property catches a fault by itself, in few cases of one dtype."""
    prop, candidate = PROPERTIES[name], fault.candidate()
    dtype = "float32" if "float32" in candidate.dtypes else candidate.dtypes[0]
    return any(
        prop.judge(candidate, case, presentation).outcome is Outcome.VIOLATED
        for case, presentation in islice(drawn(plan_for(candidate, prop, dtype), 0), cases)
    )


def toothless() -> set[str]:
    """The properties that let their witness pass: the suite's check on itself, empty where all is well."""
    return {name for name, id in WITNESSES.items() if not caught_alone(name, ZOO[id])}


def test_every_property_catches_a_fault_by_itself() -> None:
    assert WITNESSES.keys() == PROPERTIES.keys()
    assert toothless() == set()


# -- comparators broken on purpose ----------------------------------------------------------


def holds(*_: object) -> Verdict:
    return Verdict(Outcome.HOLDS, judged=1)


def judge_without_nan(case: Case, output: str, got: Any, exact: Any, *rest: Any) -> Verdict:
    """The judge, with what is right put in place of each NaN."""
    if isinstance(got, np.ndarray):
        truth = getattr(exact, output).hi
        got = np.where(np.isnan(got.astype(np.float64)), truth, got).astype(got.dtype)
    return judging.judge(case, output, got, exact, *rest)


_judge_ratio, _compare = judging._judge_ratio, compare._judge


def ratio_with_itself(output: str, got: Any, wide: Any, truth: Any, *rest: Any) -> Verdict:
    return _judge_ratio(output, got, wide, Enclosed(wide, np.zeros_like(wide), np.zeros_like(wide)), *rest)


def claim_without_nan(what: str, than: str, claim: compare.Claim) -> Any:
    return _compare(what, than, replace(claim, got=np.where(np.isnan(claim.got), claim.expected, claim.got)))


def claim_with_itself(what: str, than: str, claim: compare.Claim) -> Any:
    return _compare(what, than, replace(claim, expected=claim.got))


def claim_holds(what: str, than: str, claim: compare.Claim) -> Any:
    return max(int(claim.judged.sum()), 1), None, 0.0


ORACLE = {"output", "lse", "dq", "dk", "dv", "dbias", "dsink", "dlse"}


@pytest.mark.parametrize(
    ("module", "step", "broken", "lost"),
    [
        (catalogue, "judge", holds, {*ORACLE, "empty-rows", "nan-pattern"}),
        (catalogue, "judge", judge_without_nan, {"nan-pattern"}),
        (judging, "_judge_ratio", ratio_with_itself, ORACLE),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_broken_judge_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: Any, step: str, broken: Callable[..., Any], lost: set[str]
) -> None:
    monkeypatch.setattr(module, step, broken)
    assert toothless() >= lost


@pytest.mark.parametrize("broken", [claim_holds, claim_without_nan, claim_with_itself])
def test_a_broken_comparison_of_a_kernel_with_itself_is_noticed(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(compare, "_judge", broken)
    assert toothless() - ORACLE


# -- public checkers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "candidate", [right(), numpy_blocked(), numpy_blocked(round_p=True)], ids=["zoo", "numpy", "numpy, P rounded"]
)
def test_public_checkers_accept_right_kernels(candidate: Candidate) -> None:
    assert {style: found for style, found in caught_by(candidate).items() if found is not None} == {}


@pytest.mark.parametrize(
    ("id", "content"),
    [
        ("cheat:zeros", {"gradcheck"}),  # 0 is the derivative of 0
        ("cheat:no-dq", {"tenth-randn"}),  # a gradient of 0 is within the tolerance of such inputs
        ("B209", {"gradcheck"}),  # the wrong dtype of a half-precision output
        ("B037", set(STYLES)),  # a constant for a maximum: no public input law leaves its range
    ],
)
def test_public_checkers_catch_what_they_can(id: str, content: set[str]) -> None:
    assert {style for style, found in caught_by(ZOO[id].candidate()).items() if found is None} == content


def test_the_plain_reference_is_right() -> None:
    """Judged by the suite, as a kernel in float64."""

    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        with_do = case if case.do is not None else replace(case, do=np.zeros((*case.q.shape[:3], case.v.shape[3])))
        with np.errstate(all="ignore"):
            return Result(**plain_attention(with_do, lambda x: x, np.float64))

    plain = Candidate("plain", run, dtypes=("float64",), lacks={"dlse": "it has no gradient through the LSE"})
    for name in ("output", "lse", "dq", "dk", "dv", "dbias", "dsink"):
        tally = check(plain, name, "float64", examples=100, seed=0)
        assert tally.failure is None, tally.failure and tally.failure.verdict.sentence
        assert tally.judged > 50


# -- the command ----------------------------------------------------------------------------


FEW = ("power", "--faults", "cheat:zeros,B209", "--seeds", "1", "--examples", "8", "-n", "1")


def test_the_report_says_what_was_measured(attncheck: Any, tmp_path: Path) -> None:
    code, out, err = attncheck(*FEW, "--json", "power.json", "--markdown", "POWER.md")
    assert (code, err) == (0, "")
    document = json.loads((tmp_path / "power.json").read_text())
    rows = {row["id"]: row for row in document["faults"]}
    assert rows.keys() == {"cheat:zeros", "B209"}
    assert rows["cheat:zeros"]["properties"] == {"output": 1}
    assert rows["cheat:zeros"]["shrunk"]["keys"] == 1 and rows["cheat:zeros"]["examples"] == 1
    assert rows["cheat:zeros"]["public"]["gradcheck"] is None and rows["cheat:zeros"]["public"]["cosine"]
    assert document["summary"]["caught"] == 2 and document["summary"]["missed"] == []
    assert "2 of 2 faults caught under every seed" in out
    page = (tmp_path / "POWER.md").read_text()
    assert "2 of 2 faults caught under every seed" in page
    assert document["command"] == "attncheck power --faults cheat:zeros,B209 --seeds 1 --examples 8"
    assert document["command"] in page and f"numpy {np.__version__}" in page
    for row in rows.values():
        assert row["about"] in page and f"`{row['id']}`" in page
    for style in STYLES.values():
        assert f"| {style.title} |" in page


def test_a_fault_that_is_missed_exits_1_and_is_named(attncheck: Any) -> None:
    code, out, _ = attncheck("power", "--faults", "B030", "--seeds", "1", "--examples", "1", "-n", "1")
    assert code == 1
    assert "missed under some seed: B030" in out and "nothing" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--faults", "B039,K99"), "--faults names 'K99'"),
        (("--seeds", "0"), "0 is not in the range"),
        (("--examples", "few"), "'few' is not a valid integer"),
        (("--json", "missing/power.json"), "--json is missing/power.json, which cannot be written"),
        (("--markdown", "missing/POWER.md"), "--markdown is missing/POWER.md, which cannot be written"),
    ],
)
def test_bad_input_is_one_sentence_and_exits_2(attncheck: Any, words: tuple[str, ...], says: str) -> None:
    code, out, err = attncheck("power", *words)
    assert (code, out) == (2, "")
    assert says in err and "Traceback" not in err


def test_faults_are_named_by_id_by_kind_and_by_report() -> None:
    assert set(powering.select(["zoo:B039", "cheat-zeros"])) == {"B039", "cheat:zeros"}
    assert set(powering.select(["K06"])) == {f.id for f in ZOO.values() if f.kind == "K06"}
    assert {ZOO[id].report for id in powering.select(["B158"])} == {"B158"}
    assert powering.select([]) == tuple(ZOO)


def test_pieces_hold_every_fault_under_every_seed_and_once_for_the_public_checkers() -> None:
    power = powering.Power(tuple(ZOO), seeds=3)
    for processes in (1, 2, 16):
        found = powering.pieces(power, processes)
        hunted = [(p.seed, id) for p in found if isinstance(p, powering.Hunt) for id in p.faults]
        shown = [id for p in found if isinstance(p, powering.Show) for id in p.faults]
        assert sorted(hunted) == sorted((seed, id) for seed in range(3) for id in ZOO)
        assert sorted(shown) == sorted(ZOO)
        assert [p.dtype for p in found if isinstance(p, powering.Right)] == list(FORMATS)


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items() if k not in ("seconds", "wall_seconds", "processes")}
        return [plain(y) for y in x] if isinstance(x, list) else x

    return dict(plain(document))


def test_two_processes_measure_what_one_does() -> None:
    power = powering.Power(("cheat:zeros", "B209", "B074"), seeds=2, examples=8, shrunk_seeds=1, right_cases=0)
    seen: list[tuple[int, int]] = []
    two = powering.measure(power, processes=2, progress=lambda done, total, _: seen.append((done, total)))
    assert seen[-1] == (9, 9)
    assert without_times(two) == without_times(powering.measure(power))


# -- right kernels ------------------------------------------------------------------------


def test_right_kernels_are_counted_and_not_accused() -> None:
    kernels, missing = right_kernels()
    assert len(kernels) + len(missing) == 8
    few = {name: kernels[name] for name in ("zoo:right", "numpy-blocked (float32)")}
    found = judge_right(few, "float16", 0, 6)
    assert found.keys() == few.keys()
    for counts in found.values():
        assert counts.cases >= 25 and counts.verdicts["holds"] > 50 and counts.alarms == []
        assert counts.verdicts["violated"] == 0


def test_a_wrong_kernel_among_the_right_ones_is_a_false_alarm_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"cheat": ZOO["cheat:zeros"].candidate()}
    monkeypatch.setattr(false_alarms, "right_kernels", lambda: (wrong, []))
    power = powering.Power(("cheat:zeros",), seeds=1, examples=4, shrunk_seeds=0, right_cases=1)
    document = powering.measure(power)
    (row,) = document["right"]
    assert row["kernel"] == "cheat" and row["verdicts"]["violated"] == sum(1 for _ in row["alarms"]) > 0
    assert f"in {row['cases']:,} cases of 1 right kernels" in power_report.render(document)
    assert "false alarm: cheat, output, case 0 of seed 1000 in float16" in power_report.render(document)
    assert "| cheat | " in power_report.markdown(document)


def test_kernels_that_were_not_judged_are_not_counted_among_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        raise Unsupported("nothing pleases it")

    shy = replace(ZOO["B039"].candidate(), name="shy", run=refuses)
    monkeypatch.setattr(false_alarms, "right_kernels", lambda: ({"shy": shy}, ["triton is not installed"]))
    power = powering.Power(("cheat:zeros",), seeds=1, examples=4, shrunk_seeds=0, right_cases=1)
    document = powering.measure(power)
    text = power_report.render(document)
    assert "of 0 right kernels" in text
    assert "right, but nothing was judged: shy" in text and "right, but not loaded: triton is not installed" in text
    assert "\n- triton is not installed\n" in power_report.markdown(document)


def detections(*examples: int | None) -> Iterator[Detection]:
    for seed, n in enumerate(examples):
        caught = n is not None
        yield Detection("B039", seed, "output" if caught else None, None, None, n or 100, n or 100, 0.1)


def test_a_fault_counts_as_caught_where_every_seed_catches_it() -> None:
    power = powering.Power(("B039",), seeds=3)
    public: dict[str, str | None] = dict.fromkeys(STYLES)
    for examples, caught in (((1, 7, 3), 1), ((1, None, 3), 0), ((None, None, None), 0)):
        document = powering.build(
            power, {"B039": list(detections(*examples))}, {"B039": public}, {}, [], {"B039": 0.3}, processes=1, wall=1.0
        )
        assert document["summary"]["caught"] == caught
        assert document["summary"]["missed"] == ([] if caught else ["B039"])
        text = power_report.render(document)
        assert f"{caught} of 1 faults caught under every seed" in text
    assert document["summary"]["examples"] is None and "caught by" in power_report.markdown(document)
