"""The command line, as people use it: exit codes, what is printed, what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attncheck import cli, launching

from .kernels_to_load import BROKEN, KERNELS

FEW = ("--examples", "24", "--dtype", "float32", "-n", "1")


@pytest.fixture
def project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (project / "mine.py").write_text(KERNELS)
    (project / "broken.py").write_text(BROKEN)
    monkeypatch.setenv("COLUMNS", "100")
    return project


# -- verdicts -------------------------------------------------------------------------------


def test_a_right_kernel_exits_0_with_the_table_and_the_same_facts_as_json(attncheck: Any, project: Path) -> None:
    code, out, _ = attncheck("verify", "mine.py:right", *FEW, "--json", "report.json")
    assert code == 0
    assert out.startswith("$ pytest --pyargs attncheck --candidate mine.py:right --attncheck-dtype float32")
    assert out.rstrip().endswith("holds: right")
    report = json.loads((project / "report.json").read_text())
    properties = {p["name"]: p for p in report["candidates"][0]["properties"]}
    for p in properties.values():
        assert p["title"] in out
    assert properties["output"]["judged"] + properties["output"]["vacuous"] == 24
    assert properties["output"]["worst"]["dtype"] == "float32"
    assert report["exit_code"] == 0
    assert [path.name for path in project.iterdir() if path.name.startswith(".")] == []  # nothing left behind


def test_a_wrong_kernel_exits_1_and_its_failure_replays(attncheck: Any, project: Path) -> None:
    code, out, _ = attncheck("verify", "mine.py:wrong", "--property", "output", *FEW)
    assert code == 1
    assert "output violated: got " in out
    (saved,) = (project / ".attncheck" / "failures").glob("output-*.json")
    replay = next(line for line in out.splitlines() if line.startswith("  replay"))
    words = replay.split()[2:]
    assert words == ["replay", str(saved.relative_to(project)), "--candidate", "mine.py:wrong"]

    violated = next(line for line in out.splitlines() if "output violated" in line).partition("got ")[2]
    code, out, _ = attncheck(*words)
    assert code == 1
    assert f"wrong violated: output: got {violated}" in out  # the same worst element

    code, out, _ = attncheck("replay", words[1], "--candidate", "mine.py:right")
    assert (code, out.splitlines()[0]) == (0, "right holds")

    code, out, _ = attncheck("replay", words[1], "--candidate", "mine.py:half_only")
    assert code == 3
    assert "declined: it does not take float32" in out


def test_json_on_standard_output_is_nothing_but_json(attncheck: Any) -> None:
    code, out, err = attncheck("verify", "mine.py:wrong", "--property", "output", *FEW, "--json", "-")
    report = json.loads(out)
    assert report["exit_code"] == code == 1
    assert "output violated" in err
    failure = report["candidates"][0]["properties"][0]["dtypes"]["float32"]["failure"]
    assert failure["worst"]["parts"]
    assert Path(failure["saved"]).exists()


def test_a_folder_that_cannot_be_written_does_not_hide_the_verdict(attncheck: Any, project: Path) -> None:
    code, out, _ = attncheck("verify", "mine.py:wrong", "--property", "output", *FEW, "--save", "mine.py/failures")
    assert code == 1
    assert "output violated: got " in out
    assert "not saved: mine.py/failures/output-" in out


def test_an_exception_is_a_violation_and_no_traceback(attncheck: Any) -> None:
    code, out, err = attncheck("verify", "mine.py:raises", "--property", "output", *FEW)
    assert code == 1
    assert "output violated: it raised RuntimeError: no block size fits" in out
    assert "Traceback" not in out + err


def test_everything_declined_exits_3_and_says_why(attncheck: Any) -> None:
    code, out, _ = attncheck("verify", "mine.py:declines", "mine.py:half_only", *FEW)
    assert code == 3
    assert "not judged: declines: nothing was judged: not on a Sunday" in out
    assert "not judged: half-only: nothing was judged (it takes float16)" in out


def test_a_required_output_that_is_not_offered_exits_3(attncheck: Any) -> None:
    code, out, _ = attncheck("verify", "mine.py:only_o", *FEW, "--require", "o,lse")
    assert code == 3
    assert "only-o: lse is required but not offered by this candidate" in out
    assert "o is required" not in out


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_kernel_that_kills_its_process_is_a_violation(attncheck: Any, processes: str) -> None:
    words = ("--examples", "8", "--dtype", "float32", "--property", "output,lse", "-n", processes)
    code, out, _ = attncheck("verify", "mine.py:kills", *words)
    assert code == 1
    first = next(line for line in out.splitlines() if "violated: the process that ran the kernel died" in line)
    assert first.startswith("output")


def test_an_isolated_kernel_that_dies_leaves_a_case_that_replays(attncheck: Any, project: Path) -> None:
    code, out, _ = attncheck("verify", "mine.py:kills", "--property", "output", *FEW, "--isolate", "--timeout", "20")
    assert code == 1
    assert "output violated: it died of SIGSEGV" in out
    (saved,) = (project / ".attncheck" / "failures").glob("output-*.json")
    assert "--candidate mine.py:kills --isolate --timeout 20" in out
    code, out, _ = attncheck("replay", str(saved), "--candidate", "mine.py:kills", "--isolate")
    assert code == 1
    assert "kills violated: it died of SIGSEGV" in out


def test_fail_fast_stops_at_the_first_violation(attncheck: Any) -> None:
    code, out, _ = attncheck("verify", "mine.py:raises", *FEW, "--fail-fast")
    assert code == 1
    assert out.count(" violated: ") == 1


# -- errors ---------------------------------------------------------------------------------


def test_targets_that_do_not_load_exit_2_each_with_a_sentence_and_nothing_is_judged(attncheck: Any) -> None:
    targets = ["nobody", "mine.py:number", "mine.py:nothing", "broken.py:f", "absent.py:f", "mine.py:right"]
    code, out, _ = attncheck("verify", *targets, *FEW)
    assert code == 2
    errors = [line for line in out.splitlines() if line.startswith("error: ")]
    assert len(errors) == 5
    assert "unknown target 'nobody'; built in are numpy-blocked" in errors[0]
    assert "mine.py:number is of type int" in errors[1]
    assert "mine.py has no attribute 'nothing'" in errors[2]
    assert "ModuleNotFoundError" in errors[3]
    assert "absent.py does not exist" in errors[4]
    assert "judged" not in out


def test_an_unknown_convention_lists_those_that_exist(attncheck: Any, project: Path) -> None:
    (project / "plain.py").write_text("def f(q, k, v): ...\n")
    code, out, _ = attncheck("verify", "plain.py:f", "--like", "tensorflow", *FEW)
    assert code == 2
    known = "sdpa, flash_attn, flash_attn_varlen, flash_attn_with_kvcache, numpy, case"
    assert f"--like is 'tensorflow'; known conventions are {known}" in out
    code, out, _ = attncheck("verify", "plain.py:f", *FEW)
    assert code == 2
    assert "say with --like which convention it follows" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "TARGET"),
        (("x", "x"), "target 'x' is given twice"),
        (("x", "--examples", "0"), "--examples is 0; it must be at least 1"),
        (("x", "--examples", "many"), "'many' is not a valid int"),
        (("x", "--seconds", "0"), "--seconds is 0; it must be a positive number"),
        (("x", "--seconds", "nan"), "--seconds is nan; it must be a positive number"),
        (("x", "--seed", "-1"), "--seed is -1; it must be from 0"),
        (("x", "--seed", "1", "--random"), "--seed and --random exclude each other"),
        (("x", "--block", "0"), "--block is (0,); block sizes must be at least 1"),
        (("x", "--block", "big"), "--block is 'big'; it must be a size"),
        (("x", "--dtype", "float8"), "--dtype is 'float8'; accepted are float64, float32"),
        (("x", "--property", "beauty"), "--property is 'beauty'; accepted are output, lse"),
        (("x", "--require", "o,p"), "--require is 'p'; accepted are o, lse"),
        (("x", "--lacks", "nothing"), "--lacks is 'nothing'; accepted are backward"),
        (("x", "--supports", "all"), "--supports is 'all'; accepted are backward"),
        (("x", "--json", "absent/report.json"), "--json is absent/report.json, which cannot be written"),
        (("x", "--timeout", "3"), "--timeout is 3 but --isolate is not given"),
        (("x", "--isolate", "--timeout", "0"), "--timeout is 0; it must be a positive number of seconds"),
        (("x", "-n", "-1"), "-1 is not in the range"),
        (("x", "--colour"), "No such option"),
    ],
)
def test_an_option_that_is_not_accepted_exits_2_with_one_sentence(
    attncheck: Any, words: tuple[str, ...], says: str
) -> None:
    code, out, err = attncheck("verify", *words)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("command", [("replay", "--candidate", "numpy-blocked"), ("exact",), ("trace",)])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ('{"format": "attncheck-case", "version": 1, "dig', "not complete JSON"),
        ('{"format": "attncheck-case", "version": 99}', "upgrade attncheck"),
        ("[]", "format is"),
    ],
)
def test_a_fixture_that_is_not_one_exits_2(
    attncheck: Any, project: Path, command: tuple[str, ...], text: str | None, says: str
) -> None:
    if text is not None:
        (project / "case.json").write_text(text)
    code, out, err = attncheck(command[0], "case.json", *command[1:])
    assert code == 2
    assert says in err
    assert err.startswith("error: case.json: ")
    assert out == ""


def test_engines_that_disagree_are_an_error_of_ours(attncheck: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attncheck import verify
    from attncheck.properties import campaign

    def check(*_: Any, **__: Any) -> None:
        raise campaign.OracleError("element 0 of case ab lies outside its enclosure")

    monkeypatch.setattr(campaign, "check", check)
    report = verify("numpy-blocked", properties=["output"], dtypes=["float32"], examples=1)
    assert report.exit_code == 2
    assert "error: numpy-blocked, output, float32: the two exact engines disagree" in str(report)


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError("oops"), "this is a fault of attncheck"),
        (ValueError("oops"), "fault"),
    ],
)
def test_whatever_breaks_exits_2(
    attncheck: Any, monkeypatch: pytest.MonkeyPatch, raised: BaseException, says: str
) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(launching, "run", run)
    code, _, err = attncheck("verify", "numpy-blocked")
    assert code == 2
    assert says in err


# -- the other commands ---------------------------------------------------------------------


def test_list_names_everything(attncheck: Any) -> None:
    from attncheck.kernels.loading import BUILT_IN, CONVENTIONS
    from attncheck.oracle.features import FEATURES
    from attncheck.properties.catalogue import PROPERTIES

    code, out, _ = attncheck("list")
    assert code == 0
    for names in (BUILT_IN, CONVENTIONS, FEATURES, PROPERTIES):
        for name in names:
            assert f"  {name} " in out
    code, out, _ = attncheck("list", "properties")
    assert [line.split()[0] for line in out.splitlines()] == list(PROPERTIES)


@pytest.fixture
def saved(project: Path) -> str:
    """Two equal scores: o is the mean of 1 and 4."""
    import numpy as np

    from attncheck import Case
    from attncheck.fixtures import Record, write

    case = Case(
        q=np.zeros((1, 1, 1, 1)), k=np.ones((1, 1, 2, 1)), v=np.array([1.0, 4.0]).reshape(1, 1, 2, 1), scale=1.0
    )
    return str(write(Record(case), project).name)


@pytest.mark.parametrize(("digits", "log2"), [(5, "0.69315"), (40, "0.6931471805599453094172321214581765680755")])
def test_exact_prints_as_many_digits_as_asked_for(attncheck: Any, saved: str, digits: int, log2: str) -> None:
    code, out, _ = attncheck("exact", saved, "--digits", str(digits))
    assert code == 0
    assert out.startswith("1 query, 2 keys, D 1, float64, scale 1, no mask, forward only\no [1, 1, 1, 1]\n")
    assert f"lse [1, 1, 1]\n  [0, 0, 0]  {log2}\n" in out
    assert "dq" not in out


def test_trace_prints_the_state_after_each_block(attncheck: Any, saved: str) -> None:
    code, out, _ = attncheck("trace", saved, "--block", "1")
    assert code == 0
    assert "block 0: keys 0 to 0" in out
    assert "block 1: keys 1 to 1" in out
    assert "a            [5.0]" in out
    assert "distance     1.5" in out  # after the first block: 1 instead of 2.5


@pytest.mark.parametrize("row", ["0,0", "0,0,x", "0,0,1", "1,0,0"])
def test_a_row_that_the_case_has_not_exits_2(attncheck: Any, saved: str, row: str) -> None:
    code, _, err = attncheck("trace", saved, "--row", row)
    assert code == 2
    assert f"--row {row}" in err or f"--row is '{row}'" in err


def test_every_command_has_a_help_text_with_an_example(attncheck: Any) -> None:
    for command in [(), *((name,) for name in cli.cli.commands)]:
        code, out, _ = attncheck(*command, "--help")
        assert code == 0
        assert "Example" in out
        assert f"attncheck {' '.join(command)}".strip() in out.partition("Example")[2]
