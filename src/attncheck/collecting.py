"""What the plug-in does when there is a candidate: items, their outcomes, and the report of the session."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attncheck.document import build, died, placeholder
from attncheck.launching import about, limit_threads
from attncheck.report import failure_lines, render
from attncheck.selection import DEFAULT_SAVE, Selection, SelectionError, Work, block_sizes, plan, words
from attncheck.waivers import WaiverError

PACKAGE = Path(__file__).resolve().parent

#: the user property in which an item's row crosses xdist's workers
ROW = "attncheck"

#: seconds between two signs of progress of one item
TICK = 0.2


class Violation(Exception):
    """An item's property is violated; the message is what a person reads."""


class Broken(Exception):
    """Something went wrong that is no verdict: a target that does not load, engines that disagree."""


def selection_of(config: pytest.Config) -> Selection:
    """The plug-in's options as a Selection. Raises pytest.UsageError."""
    get = config.getoption
    try:
        selection = Selection(
            targets=tuple(get("attncheck_candidate")),
            like=get("attncheck_like"),
            supports=words(get("attncheck_supports")),
            lacks=words(get("attncheck_lacks")),
            forward_only=get("attncheck_forward_only"),
            device=get("attncheck_device"),
            isolate=get("attncheck_isolate"),
            timeout=get("attncheck_timeout"),
            dtypes=words(get("attncheck_dtype")),
            properties=words(get("attncheck_property")),
            examples=get("attncheck_examples"),
            seconds=get("attncheck_seconds"),
            seed=get("attncheck_seed"),
            block=block_sizes(get("attncheck_block")),
            require=words(get("attncheck_require")),
            save=get("attncheck_save") or DEFAULT_SAVE,
            waivers=get("attncheck_waivers"),
            strict_waivers=get("attncheck_strict_waivers"),
        )
        selection.check_names()
    except (SelectionError, WaiverError) as error:
        raise pytest.UsageError(str(error)) from None
    return selection


class Root(pytest.Directory):
    """The package's own folder, collected as the items of this run instead of as a folder of tests."""

    run: Run

    def collect(self) -> Iterable[pytest.Item]:
        return list(self.run.items(self))


class Judgement(pytest.Item):
    """One property of one candidate in one dtype."""

    def __init__(self, *, run: Run, work: Work, seconds: float | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.run, self.work, self.seconds = run, work, seconds

    def runtest(self) -> None:
        from attncheck.judging import judge
        from attncheck.properties.catalogue import PROPERTIES

        self.run.event(start=self.name)
        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        with _own_warnings():
            row = judge(self.work, self.run.selection, deadline, self.run.ticker(self.name))
        self.run.event(item=self.name, done=self.work.examples)
        self.user_properties.append((ROW, json.dumps(row, allow_nan=False)))
        if row["error"]:
            raise Broken(row["error"])
        if not self.work.property:
            pytest.skip("none of the candidate's dtypes was selected")
        if row["failure"]:
            lines = failure_lines(PROPERTIES[self.work.property].title, row["failure"])
            raise Violation("\n".join(text for text, _ in lines))
        if not row["judged"]:
            pytest.skip("; ".join(row["reasons"]) or "not offered by this candidate")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, (Violation, Broken)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class Unloadable(pytest.Item):
    """A target that could not be loaded."""

    def __init__(self, *, target: str, message: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.target, self.message = target, message

    def runtest(self) -> None:
        row = placeholder({"target": self.target, "name": self.target}, self.message)
        self.user_properties.append((ROW, json.dumps(row)))
        raise Broken(self.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class Run:
    """The plug-in of a session that judges: registered only when there is a candidate."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.selection = selection_of(config)
        self.worker = hasattr(config, "workerinput")
        self.rows: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.crashed: list[str] = []
        self.document: dict[str, Any] = {}
        self.started = time.monotonic()
        if self.worker or self.processes > 1:
            limit_threads(os.environ)

    @property
    def processes(self) -> int:
        count = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
        if self.worker and count:
            return int(count)
        return len(getattr(self.config.option, "tx", None) or ()) or 1

    # -- collecting -------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return False if collection_path.resolve() == PACKAGE else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        if path.resolve() != PACKAGE:
            return None
        root = Root.from_parent(parent, path=path, nodeid="attncheck")
        root.run = self
        return root

    def items(self, parent: Root) -> Iterator[pytest.Item]:
        """Load the targets; one item per piece of work, or, if a target does not load, only that."""
        from attncheck.kernels.loading import LoadError

        candidates, unloadable = [], []
        for target in self.selection.targets:
            try:
                with _own_warnings():
                    candidates.append((target, self.selection.load(target)))
            except LoadError as error:
                unloadable.append((target, str(error)))
        if "torch" in sys.modules and (self.worker or self.processes > 1):
            sys.modules["torch"].set_num_threads(1)
        if unloadable:
            for target, message in unloadable:
                yield Unloadable.from_parent(parent, name=f"{target}[loading]", target=target, message=message)
            return
        work = plan(self.selection, candidates)
        self.event(plan=sum(w.examples for w in work))
        seconds = self.selection.seconds
        budget = None if seconds is None else seconds * self.processes / max(len(work), 1)
        for w in work:
            name = f"{w.target}[{w.property or 'nothing'}-{w.dtype or 'none'}]"
            yield Judgement.from_parent(parent, name=name, run=self, work=w, seconds=budget)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from attncheck.scheduling import Scheduling

        return Scheduling(config, log)

    # -- running ----------------------------------------------------------------------------

    def event(self, **facts: Any) -> None:
        """One line for whoever watches: short enough that lines of several processes do not mix."""
        path = self.config.getoption("attncheck_events")
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")

    def ticker(self, name: str) -> Any:
        last, done = 0.0, 0

        def tick(more: int) -> None:
            nonlocal last, done
            done += more
            now = time.monotonic()
            if now - last >= TICK:
                last = now
                self.event(item=name, done=done)

        return tick

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker:
            return
        rows = [value for key, value in report.user_properties if key == ROW]
        if report.when == "call" and rows:
            self.rows.append(json.loads(str(rows[-1])))
        elif report.failed and report.when not in ("setup", "call", "teardown"):
            self.crashed.append(report.nodeid)  # xdist's word for a worker that died
        elif report.failed and not rows and report.nodeid.startswith("attncheck::"):
            self.errors.append(f"{report.nodeid} broke: {_last_line(report.longreprtext)}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.worker or self.config.option.collectonly or exitstatus == pytest.ExitCode.INTERRUPTED:
            return
        from attncheck.properties.catalogue import PROPERTIES

        for nodeid in self.crashed:
            self.rows += self._died(nodeid)
        if not self.rows and not self.errors:
            self.errors.append("nothing was collected: --candidate needs --pyargs attncheck among the arguments")
        self.document = build(
            self.rows,
            titles={name: p.title for name, p in PROPERTIES.items()},
            targets=self.selection.targets,
            require=self.selection.require,
            errors=self.errors,
            waivers=self.selection.read_waivers(),
            strict_waivers=self.selection.strict_waivers,
            about=about(self.selection, self.processes, time.monotonic() - self.started),
        )
        path = self.config.getoption("attncheck_json")
        if path:
            Path(path).write_text(json.dumps(self.document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if self.document["exit_code"] and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _died(self, nodeid: str) -> list[dict[str, Any]]:
        from attncheck.scheduling import ITEM

        found = ITEM.search(nodeid)
        if found is None:
            self.errors.append(f"a worker died at {nodeid}")
            return []
        return [died_row(found["target"], found["property"], found["dtype"], "", self.rows)]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.document:
            writer = terminalreporter._tw if hasattr(terminalreporter, "_tw") else None
            width = writer.fullwidth if writer is not None else 80
            color = bool(writer is not None and writer.hasmarkup)
            terminalreporter.write_sep("=", "attncheck")
            terminalreporter.write(render(self.document, width=width, color=color))


def died_row(target: str, name: str, dtype: str, how: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a kernel that ended its process, with what other rows of its candidate know of it."""
    unknown = {
        "name": target,
        "target": target,
        "convention": "",
        "device": "cpu",
        "about": "",
        "dtypes": [dtype],
        "offers": [],
        "lacks": {},
        "conventions": {},
        "profiles": {},
    }
    facts = next((row["candidate"] for row in rows if row["candidate"]["target"] == target), unknown)
    return died(facts, name, dtype, how)


@contextlib.contextmanager
def _own_warnings() -> Iterator[None]:
    """A project's ``filterwarnings = error`` is about its own code: here a warning stays a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
