"""benchmarks/gpu.py at its reduced sizes, in Triton's interpreter: what it would do on a GPU, it does here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"
SECTIONS = ("far offsets", "determinism", "long rows", "properties", "speed", "sanitizer")

#: runs a script as if some packages were not installed
WITHOUT = """
import runpy, sys
names, script, *arguments = sys.argv[1:]
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names.split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in names.split(",") else find(name, package)
sys.meta_path.insert(0, Missing())
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


def run(folder: Path, *arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """The script in a process that knows this project by its own folder only."""
    start = ["-c", WITHOUT, without, str(SCRIPT)] if without else [str(SCRIPT)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.run(
        [sys.executable, *start, "--reduced", *arguments],
        cwd=folder,
        env={**os.environ, **threads},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def reasons(found: Any) -> list[str]:
    """Whatever says in a document that it did not run, with its reason."""
    if isinstance(found, dict):
        own = [found["why"]] if found.get("ran") is False else []
        return own + [why for value in found.values() for why in reasons(value)]
    return [why for value in found for why in reasons(value)] if isinstance(found, list) else []


def test_every_section_runs_or_says_why_not(tmp_path: Path) -> None:
    done = run(tmp_path, "--out", "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu.json").read_text())
    environment = document.pop("environment")
    assert environment["device"] and environment["torch"] == torch.__version__
    assert {"python", "triton", "numpy"} <= environment.keys() and environment["missing packages"] == []
    assert tuple(document) == SECTIONS
    assert all(reasons(document)), "something was skipped without a reason"
    ran = {name for name, section in document.items() if section["ran"]}
    assert ran >= set(SECTIONS) - {"sanitizer"}
    assert document["far offsets"]["same bits"]
    assert all(row["same bits"] for row in document["determinism"]["rows"])
    assert sum(row["judged"] for row in document["properties"]["rows"]) > 0
    for row in document["long rows"]["rows"]:
        assert row["oracle"].keys() == {"o", "lse", "dq", "dk", "dv"} and not row["gross"]
    for row in document["speed"]["rows"]:
        assert row["triton"]["forward TFLOP/s"] > 0
    for name in SECTIONS:
        assert f"{name}: " in done.stdout


def test_packages_that_are_missing_are_named_and_cost_what_needs_them(tmp_path: Path) -> None:
    sections = ("far offsets", "long rows", "properties")
    done = run(tmp_path, "--out", "gpu.json", "--only", *sections, without="hypothesis,flint,ml_dtypes")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu.json").read_text())
    why = "not installed: ml_dtypes, python-flint, hypothesis"
    assert document["properties"]["why"] == why and f"properties: not run: {why}" in done.stdout
    assert document["long rows"]["ran"] and document["long rows"]["oracle"] == why
    assert document["far offsets"]["same bits"]
    assert document["speed"]["why"] == "not asked for"


def test_without_triton_it_says_so_in_a_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, without="triton")
    assert done.returncode == 1
    assert done.stderr.strip() == "triton is not installed; the kernel needs torch, triton and numpy"
