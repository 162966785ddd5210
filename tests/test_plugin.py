"""The pytest plug-in: harmless in sessions that are not about it, and unharmed by the project around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attncheck.scheduling import Scheduling, groups

from .kernels_to_load import BROKEN, KERNELS

FEW = ("--attncheck-examples", "24", "--attncheck-dtype", "float32")

#: a project that would break any pytest run that listened to it
HOSTILE_INI = """
[pytest]
addopts = --strict-markers --doctest-modules --maxfail=1 -v
filterwarnings = error
python_files = *.py
python_functions = *
norecursedirs = att* src
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(KERNELS)
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path


def python(project: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    return subprocess.run(
        [sys.executable, *words],
        cwd=project,
        env={**keep, "COLUMNS": "100", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def judge(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(project, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "attncheck", *words)


# -- in sessions that are not about it ------------------------------------------------------


def test_without_a_candidate_it_does_nothing_and_imports_nothing(project: Path) -> None:
    (project / "test_own.py").write_text(
        "import sys\n\n"
        "def test_own():\n"
        "    heavy = {'numpy', 'hypothesis', 'flint', 'torch', 'click', 'rich', 'attncheck.collecting'}\n"
        "    assert 'attncheck.plugin' in sys.modules\n"
        "    assert not heavy & set(sys.modules)\n"
    )
    done = python(project, "-m", "pytest", "-p", "no:cacheprovider", "test_own.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attncheck\n" not in done.stdout


def test_its_name_without_a_candidate_is_a_usage_error(project: Path) -> None:
    done = judge(project)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--pyargs attncheck judges nothing without --candidate TARGET" in done.stderr


def test_a_candidate_without_its_name_fails_instead_of_judging_nothing(project: Path) -> None:
    (project / "test_own.py").write_text("def test_own(): ...\n")
    done = python(project, "-m", "pytest", "-p", "no:cacheprovider", "test_own.py", "--candidate", "mine.py:right")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "--candidate needs --pyargs attncheck" in done.stdout


def test_an_option_that_is_not_accepted_is_a_usage_error(project: Path) -> None:
    done = judge(project, "--candidate", "mine.py:right", "--attncheck-dtype", "int8")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--dtype is 'int8'" in done.stderr


# -- judging under bare pytest --------------------------------------------------------------


def test_a_right_kernel_passes_with_the_table_and_junit_xml(project: Path) -> None:
    done = judge(project, "--candidate", "mine.py:right", *FEW, "--junitxml", "junit.xml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds: right" in done.stdout
    assert "worst/bound" in done.stdout
    suite = ElementTree.parse(project / "junit.xml").getroot()[0]
    names = {case.get("name") for case in suite.iter("testcase")}
    assert "mine.py:right[output-float32]" in names
    assert suite.get("failures") == "0"
    assert int(suite.get("tests") or 0) == len(names)


def test_a_failing_item_shows_the_verdict_and_not_our_code(project: Path) -> None:
    done = judge(project, "--candidate", "mine.py:wrong", *FEW, "--attncheck-property", "output", "--junitxml", "j.xml")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert done.stdout.count("output violated: got ") >= 2  # in the item's own report and in the table's
    assert "  replay  attncheck replay .attncheck/failures/output-" in done.stdout
    assert "raise Violation" not in done.stdout
    assert ".py:" not in done.stdout.replace("mine.py:", "")
    failure = next(ElementTree.parse(project / "j.xml").getroot().iter("failure"))
    assert "output violated: got " in str(failure.text)


def test_nothing_judged_is_a_failing_status_although_no_item_failed(project: Path) -> None:
    done = judge(project, "--candidate", "mine.py:declines", *FEW)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert " failed" not in done.stdout
    assert "not judged: declines: nothing was judged: not on a Sunday" in done.stdout


def test_a_missing_required_output_is_a_failing_status(project: Path) -> None:
    done = judge(project, "--candidate", "mine.py:only_o", *FEW, "--attncheck-require", "dq")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "dq is required but not offered" in done.stdout


def test_a_target_that_does_not_load_is_an_error_in_one_sentence(project: Path) -> None:
    done = judge(project, "--candidate", "broken.py:f", "--candidate", "mine.py:right", *FEW)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "broken.py could not be imported: ModuleNotFoundError" in done.stdout
    assert "holds" not in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("candidate", ["right", "kills"])
def test_several_processes_report_like_one(project: Path, candidate: str) -> None:
    words = ("--candidate", f"mine.py:{candidate}", "--attncheck-examples", "6", "--attncheck-dtype", "float32,float16")
    words += ("--attncheck-property", "output,lse")
    done = judge(project, "-n", "2", *words, "--attncheck-json", "report.json")
    assert done.returncode == (0 if candidate == "right" else 1), done.stdout + done.stderr
    report = json.loads((project / "report.json").read_text())
    (found,) = report["candidates"]
    assert report["processes"] == 2
    # a kernel that kills its process takes one item with it, not those that were still to come
    assert [p["name"] for p in found["properties"]] == ["output", "lse"]
    assert all(set(p["dtypes"]) == {"float32", "float16"} for p in found["properties"])
    if candidate == "right":
        one = judge(project, *words, "--attncheck-json", "one.json")
        assert one.returncode == 0
        alone = json.loads((project / "one.json").read_text())["candidates"][0]
        for p, q in zip(found["properties"], alone["properties"], strict=True):
            assert (p["judged"], p["worst"], p["median"]) == (q["judged"], q["worst"], q["median"])


# -- inside a hostile project ---------------------------------------------------------------


@pytest.fixture
def hostile(project: Path) -> Path:
    (project / "pytest.ini").write_text(HOSTILE_INI)
    (project / "conftest.py").write_text("raise RuntimeError('the conftest of the project was loaded')\n")
    for name in ("queue", "random", "numbers", "kernels", "oracle"):
        (project / f"{name}.py").write_text(f"raise RuntimeError('the project has a {name}.py of its own')\n")
    return project


def test_verify_is_not_reached_by_the_project_around_it(hostile: Path) -> None:
    environ = {"PYTEST_ADDOPTS": "--no-such-option", "PYTEST_PLUGINS": "no_such_plugin", "PYTHONSAFEPATH": "1"}
    words = ["--examples", "8", "--dtype", "float32", "--property", "output,lse,dq", "-n", "2"]
    done = python(hostile, "-m", "attncheck", "verify", "mine.py:warns", *words, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds: warns" in done.stdout


def test_verify_leaves_nothing_in_the_project(hostile: Path) -> None:
    before = {path.name for path in hostile.iterdir()}
    words = ["--examples", "8", "--dtype", "float32", "--property", "output", "-n", "1"]
    python(
        hostile, "-m", "attncheck", "verify", "mine.py:right", *words, PYTHONSAFEPATH="1", PYTHONDONTWRITEBYTECODE="1"
    )
    assert {path.name for path in hostile.iterdir()} == before


def test_bare_pytest_collects_our_items_whatever_the_project_collects(project: Path) -> None:
    (project / "pytest.ini").write_text(HOSTILE_INI)
    # a warning of the kernel is none of the project's business either
    done = judge(project, "--candidate", "mine.py:warns", *FEW, "--attncheck-property", "output,lse")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_probe_works_a_hostile_project_does_break_pytest(hostile: Path) -> None:
    done = python(hostile, "-m", "pytest", "--pyargs", "attncheck", "--candidate", "mine.py:right")
    assert done.returncode != 0


# -- sharing out ----------------------------------------------------------------------------


def _nodeids(targets: int, dtypes: int, properties: int) -> list[str]:
    return [
        f"attncheck::k{t}.py:f[p-{p}-float{d}]"
        for t in range(targets)
        for d in range(dtypes)
        for p in range(properties)
    ]


@pytest.mark.parametrize(
    ("targets", "dtypes", "workers", "count"),
    [
        (1, 4, 2, 4),  # a dtype is a group: its cases are answered once
        (3, 4, 2, 4),
        (3, 1, 3, 3),  # one dtype only: by candidate too
        (1, 1, 2, 11),  # and by property where even that leaves a worker idle
        (1, 4, 8, 44),
    ],
)
def test_groups_are_as_wide_as_the_workers_allow(targets: int, dtypes: int, workers: int, count: int) -> None:
    named = groups(_nodeids(targets, dtypes, 11), workers)
    assert len(set(named.values())) == count


def test_an_item_that_is_not_ours_is_a_group_of_its_own() -> None:
    named = groups([*_nodeids(1, 2, 2), "test_own.py::test[1]", "test_own.py::test_two"], 1)
    assert named["test_own.py::test_two"] == "test_own.py::test_two"
    assert len(set(named.values())) == 4


def test_what_a_dead_worker_had_left_is_given_to_others_without_the_killer() -> None:
    class Node:
        shutting_down = False
        sent: list[list[int]]

        def __init__(self) -> None:
            self.sent = []

        def shutdown(self) -> None:
            self.shutting_down = True

        def send_runtest_some(self, indices: list[int]) -> None:
            self.sent.append(indices)

    class Config:
        option: Any = type("Option", (), {"tx": ["popen", "popen"], "loadscopereorder": False})()

        def getvalue(self, name: str) -> Any:
            return ["popen", "popen"]

    ids = _nodeids(1, 1, 4)
    scheduling = Scheduling(Config())
    dead, alive = Node(), Node()
    scheduling.registered_collections = {dead: ids, alive: ids}  # type: ignore[dict-item]
    scheduling.assigned_work = {dead: {"g": {ids[0]: True, ids[1]: False, ids[2]: False}}, alive: {}}  # type: ignore[dict-item]
    assert scheduling.remove_node(dead) == ids[1]
    assert alive.sent == [[2]]
    assert alive.shutting_down  # or it would hold its only item for ever
    assert scheduling.remove_node(alive) == ids[2]  # type: ignore[arg-type]
