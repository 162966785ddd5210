"""`attncheck verify`: run pytest in a child process that nothing in the project around it can reach."""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from attncheck.selection import Selection

#: more processes than this wait for one another more than they judge
MOST_PROCESSES = 16

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def default_processes() -> int:
    """One per core that this process may use."""
    return min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST_PROCESSES
    )


def limit_threads(environ: MutableMapping[str, str]) -> None:
    """One thread per process where there are several: they would only take the cores from one another."""
    for name in _THREADS:
        environ[name] = "1"


def pytest_command(selection: Selection, processes: int, fail_fast: bool) -> str:
    """The pytest command that a run stands for, to be used in a project of one's own."""
    words = ["pytest", "--pyargs", "attncheck"]
    if processes > 1:
        words += ["-n", str(processes)]
    if fail_fast:
        words.append("-x")
    return shlex.join([*words, *_plugin_words(selection)])


def about(selection: Selection, processes: int, seconds: float) -> dict[str, Any]:
    """The facts of a run that its report begins with."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "mpmath", "python-flint", "hypothesis", "pytest", "torch", "triton"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": pytest_command(selection, processes, False),
        "seed": selection.seed,
        "examples": selection.limit,
        "seconds_limit": selection.seconds,
        "block": None if selection.block is None else list(selection.block),
        "processes": processes,
        "seconds": seconds,
        "environment": {"system": platform.system(), "machine": platform.machine(), "versions": versions},
    }


def run(
    selection: Selection,
    *,
    processes: int,
    fail_fast: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Judge in a child process and return the report. ``progress(done, total, item)`` is called a few
    times a second. Whatever goes wrong is an error in the report, never an exception."""
    with tempfile.TemporaryDirectory(prefix="attncheck-") as name:
        folder = Path(name)
        report, events, log = folder / "report.json", folder / "events", folder / "log"
        events.touch()
        words = [sys.executable, "-m", "pytest", "-q", "-c", str(Path(__file__).with_name("verify.ini"))]
        words += ["--rootdir", ".", "--noconftest", "-p", "no:cacheprovider", "-p", "attncheck.plugin"]
        if processes > 1:
            words += ["-p", "xdist.plugin", "-n", str(processes)]
        if fail_fast:
            words.append("-x")
        words += ["--pyargs", "attncheck", *_plugin_words(selection)]
        words += ["--attncheck-json", str(report), "--attncheck-events", str(events)]
        with (
            log.open("wb") as output,
            events.open(encoding="utf-8") as signs,
            _child(words, _environment(folder, processes), output) as child,
        ):
            watch = _Watch(signs)
            while child.poll() is None:
                time.sleep(0.1)
                watch.read()
                if progress is not None:
                    progress(watch.done, watch.total, watch.item)
            watch.read()
        if report.exists():
            document: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            document["command"] = pytest_command(selection, processes, fail_fast)
            return document
        return _broken(selection, processes, child.returncode, watch.item, log.read_text("utf-8", "replace"))


def _plugin_words(selection: Selection) -> list[str]:
    targets = [word for target in selection.targets for word in ("--candidate", target)]
    return [*targets, *selection.arguments("--attncheck-")]


def _environment(folder: Path, processes: int) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environ["PYTHONSAFEPATH"] = "1"  # modules of the current folder must not hide the standard library
    environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")  # leave nothing behind
    if processes > 1:
        limit_threads(environ)
    return environ


@contextmanager
def _child(words: list[str], environ: dict[str, str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which does not outlive the block."""
    child = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class _Watch:
    """Adds up the signs of progress that the judging processes append to a file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._rest = ""
        self._done: dict[str, int] = {}
        self.total = 0
        self.item = ""

    @property
    def done(self) -> int:
        return sum(self._done.values())

    def read(self) -> None:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            facts = json.loads(line)
            self.total = facts.get("plan", self.total)
            self.item = facts.get("start", self.item)
            if "item" in facts:
                self._done[facts["item"]] = facts["done"]


def _broken(selection: Selection, processes: int, code: int, item: str, log: str) -> dict[str, Any]:
    """The report of a run that could not write one."""
    from attncheck.collecting import died_row
    from attncheck.document import build
    from attncheck.properties.catalogue import PROPERTIES

    rows, errors = [], []
    fatal = {s.value: s.name for s in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)}
    if -code in fatal and item:
        target, _, rest = item.rpartition("[")
        name, _, dtype = rest.rstrip("]").rpartition("-")
        rows = [died_row(target, name, dtype, fatal[-code], [])]
    else:
        tail = "\n".join(log.strip().splitlines()[-15:])
        errors = [f"the run ended with pytest's code {code} before it could report; its last words were:\n{tail}"]
    titles = {name: p.title for name, p in PROPERTIES.items()}
    return build(
        rows,
        titles=titles,
        require=selection.require,
        errors=errors,
        waivers=selection.read_waivers(),
        about=about(selection, processes, 0.0),
    )
