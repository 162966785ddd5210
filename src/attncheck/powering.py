"""`attncheck power`: the suite and the public checking habits over the zoo of planted faults, and the suite over
right kernels, in several processes."""

from __future__ import annotations

import multiprocessing
import os
import platform
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from attncheck.selection import DEFAULT_EXAMPLES, SelectionError

if TYPE_CHECKING:
    from attncheck.properties.false_alarms import Counts
    from attncheck.properties.power import Detection

DEFAULT_SEEDS = 10

#: seeds under which failing cases are shrunk
SHRUNK_SEEDS = 2

#: what --quick runs instead
QUICK_SEEDS, QUICK_EXAMPLES = 2, 400

#: cases of each kind of draws, in each dtype, that the right kernels judge, and what --quick runs instead;
#: their seed is none of those of the hunts
RIGHT_CASES, QUICK_RIGHT_CASES = 192, 24
RIGHT_SEED = 1000

#: pieces of work per process: more share fewer exact answers, fewer leave processes idle at the end
PIECES = 8

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Power:
    """What is measured: ``faults`` are ids of the zoo, under the seeds 0 to ``seeds`` - 1."""

    faults: tuple[str, ...]
    seeds: int = DEFAULT_SEEDS
    examples: int = DEFAULT_EXAMPLES
    shrunk_seeds: int = SHRUNK_SEEDS
    right_cases: int = RIGHT_CASES  # 0: no right kernels
    words: tuple[str, ...] = ()  # the --faults that chose them
    quick: bool = False

    @property
    def command(self) -> str:
        """The command that this stands for."""
        words = ["attncheck", "power"]
        if self.words:
            words += ["--faults", ",".join(self.words)]
        if self.quick:
            words.append("--quick")
        if self.seeds != (QUICK_SEEDS if self.quick else DEFAULT_SEEDS):
            words += ["--seeds", str(self.seeds)]
        if self.examples != (QUICK_EXAMPLES if self.quick else DEFAULT_EXAMPLES):
            words += ["--examples", str(self.examples)]
        return shlex.join(words)


def plan(words: Sequence[str], *, seeds: int | None, examples: int | None, quick: bool) -> Power:
    """What the options of the command ask for. Raises SelectionError."""
    return Power(
        select(words),
        seeds=seeds or (QUICK_SEEDS if quick else DEFAULT_SEEDS),
        examples=examples or (QUICK_EXAMPLES if quick else DEFAULT_EXAMPLES),
        shrunk_seeds=1 if quick else SHRUNK_SEEDS,
        # who asks for some faults does not ask for the rest of the report
        right_cases=0 if words else QUICK_RIGHT_CASES if quick else RIGHT_CASES,
        words=tuple(words),
        quick=quick,
    )


def select(words: Sequence[str]) -> tuple[str, ...]:
    """The ids of the zoo that these words name: a fault, a report, or a kind (all of them where there
    are no words). Raises SelectionError."""
    from attncheck.kernels.faulty import ZOO

    chosen: set[str] = set()
    for word in words:
        name = word.removeprefix("zoo:")
        found = {f.id for f in ZOO.values() if name in (f.id, f.id.replace(":", "-"), f.kind, f.report)}
        if not found:
            kinds = ", ".join(sorted({f.kind for f in ZOO.values()}))
            raise SelectionError(f"--faults names {word!r}; accepted are ids of the zoo, as B039, and kinds: {kinds}")
        chosen |= found
    return tuple(id for id in ZOO if not words or id in chosen)


# -- the work --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hunt:
    """Faults to hunt under one seed."""

    faults: tuple[str, ...]
    seed: int
    examples: int
    shrink: bool


@dataclass(frozen=True)
class Show:
    """Faults to show to the public checkers."""

    faults: tuple[str, ...]


@dataclass(frozen=True)
class Right:
    """Cases of a dtype for the right kernels."""

    dtype: str
    cases: int

    @property
    def faults(self) -> tuple[str, ...]:
        return (f"right kernels, {self.dtype}",)


Piece = Hunt | Show | Right


def pieces(power: Power, processes: int) -> list[Piece]:
    """The work, cut so that the processes are done at about the same time."""
    from attncheck.oracle.formats import FORMATS

    count = len(power.faults)
    parts = min(count, max(1, -(-PIECES * processes // power.seeds))) if processes > 1 else 1
    cut = [power.faults[n::parts] for n in range(parts)]
    hunts = [Hunt(part, seed, power.examples, seed < power.shrunk_seeds) for seed in range(power.seeds) for part in cut]
    shows = min(count, 2 * processes if processes > 1 else 1)
    rights = [Right(dtype, power.right_cases) for dtype in FORMATS if power.right_cases]
    return [*rights, *hunts, *(Show(power.faults[n::shows]) for n in range(shows))]


def work(piece: Piece, tick: Callable[[str], None]) -> list[tuple[str, Any]]:
    """Do a piece: (id, Detection) per fault; or (id, (what each public style caught, seconds)); or (name, Counts)
    per right kernel, and (why it cannot be loaded, None)."""
    from attncheck.kernels.faulty import ZOO

    done: list[tuple[str, Any]] = []
    if isinstance(piece, Right):
        from attncheck.properties.false_alarms import judge_right, right_kernels

        kernels, missing = right_kernels()
        done += judge_right(kernels, piece.dtype, RIGHT_SEED, piece.cases).items()
        done += ((why, None) for why in missing)
        tick(piece.faults[0])
        return done
    if isinstance(piece, Show):
        from attncheck.properties.public_checks import caught_by

        for id in piece.faults:
            started = time.process_time()
            found = caught_by(ZOO[id].candidate())
            done.append((id, (found, time.process_time() - started)))
            tick(f"public checks, {id}")
        return done
    from attncheck.properties.power import hunt

    faults = [ZOO[id] for id in piece.faults]
    for detection in hunt(faults, piece.seed, examples=piece.examples, shrink=piece.shrink):
        done.append((detection.fault, detection))
        tick(f"seed {piece.seed}, {detection.fault}")
    return done


def measure(power: Power, *, processes: int = 1, progress: Progress | None = None) -> dict[str, Any]:
    """Run the hunts and the public checks; returns the report as plain data."""
    todo = pieces(power, processes)
    total, count = sum(len(piece.faults) for piece in todo), 0

    def tick(label: str) -> None:
        nonlocal count
        count += 1
        if progress is not None:
            progress(count, total, label)

    detections: dict[str, list[Detection]] = {id: [] for id in power.faults}
    public: dict[str, dict[str, str | None]] = {}
    right: dict[str, list[Counts]] = {}
    missing: set[str] = set()
    seconds = dict.fromkeys(power.faults, 0.0)
    started = time.monotonic()
    for piece, done in _all_done(todo, processes, tick):
        for id, found in done:
            if isinstance(piece, Right):
                if found is None:
                    missing.add(id)
                else:
                    right.setdefault(id, []).append(found)
                continue
            if isinstance(piece, Show):
                public[id], spent = found
            else:
                detections[id].append(found)
                spent = found.seconds
            seconds[id] += spent
    wall = time.monotonic() - started
    return build(power, detections, public, right, sorted(missing), seconds, processes=processes, wall=wall)


def _all_done(
    todo: list[Piece], processes: int, tick: Callable[[str], None]
) -> Iterator[tuple[Piece, list[tuple[str, Any]]]]:
    """Each piece with what came of it, here or in child processes."""
    if processes == 1:
        for piece in todo:
            yield piece, work(piece, tick)
        return
    context = multiprocessing.get_context("spawn")
    ticks = context.SimpleQueue()
    with (
        _one_thread_each(),
        ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(ticks,)) as pool,
    ):
        try:
            running: dict[Future[list[tuple[str, Any]]], Piece] = {pool.submit(_in_child, p): p for p in todo}
            while running:
                finished, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                while not ticks.empty():
                    tick(ticks.get())
                for future in finished:
                    yield running.pop(future), future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Child processes started here do not take the cores from one another."""
    from attncheck.launching import limit_threads

    before = dict(os.environ)
    limit_threads(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


_ticks: Any = None  # in a child process: where it says that a fault is settled


def _start(ticks: Any) -> None:
    global _ticks  # noqa: PLW0603  an initializer has no other place
    _ticks = ticks


def _in_child(piece: Piece) -> list[tuple[str, Any]]:
    return work(piece, _ticks.put)


# -- the report ------------------------------------------------------------------------------


def build(
    power: Power,
    detections: dict[str, list[Detection]],
    public: dict[str, dict[str, str | None]],
    right: Mapping[str, Sequence[Counts]],
    missing: Sequence[str],
    seconds: Mapping[str, float],
    *,
    processes: int,
    wall: float,
) -> dict[str, Any]:
    """The report as plain data."""
    from attncheck import __version__
    from attncheck.kernels.faulty import NOT_IMITATED, ZOO
    from attncheck.properties.catalogue import PROPERTIES
    from attncheck.properties.public_checks import STYLES

    rows = []
    for id in power.faults:
        fault, found = ZOO[id], sorted(detections[id], key=lambda d: d.seed)
        caught = [d for d in found if d.property is not None]
        small = [d.shrunk for d in caught if d.shrunk is not None]
        rows.append(
            {
                "id": id,
                "kind": fault.kind,
                "report": fault.report,
                "about": fault.about,
                "touches": list(fault.touches),
                "dtypes": list(fault.dtypes),
                "caught": len(caught),
                "seeds": len(found),
                "properties": dict(Counter(str(d.property) for d in caught).most_common()),
                "examples": _median(d.examples for d in caught),
                "most_examples": max((d.examples for d in caught), default=None),
                "cases": _median(d.cases for d in caught),
                "shrunk": None if not small else _smallness(small),
                "public": public[id],
                "seconds": round(seconds[id], 2),
                "detections": [_plain(d) for d in found],
            }
        )
    versions = {"attncheck": __version__, "python": platform.python_version()}
    versions |= {package: metadata.version(package) for package in ("numpy", "hypothesis", "python-flint", "mpmath")}
    return {
        "format": "attncheck power report",
        "version": 1,
        "command": power.command,
        "examples": power.examples,
        "seeds": power.seeds,
        "shrunk_seeds": min(power.shrunk_seeds, power.seeds),
        "processes": processes,
        "wall_seconds": round(wall, 1),
        "versions": versions,
        "properties": {name: p.title for name, p in PROPERTIES.items()},
        "styles": {name: {"title": style.title, "about": style.about} for name, style in STYLES.items()},
        "faults": rows,
        "right": [_counted(name, right[name]) for name in sorted(right)],
        "not_loaded": list(missing),
        "summary": summary(rows, list(STYLES)),
        "not_imitated": dict(NOT_IMITATED),
    }


def _median(numbers: Any) -> float | None:
    numbers = list(numbers)
    return float(statistics.median(numbers)) if numbers else None


def _smallness(small: Sequence[Any]) -> dict[str, float]:
    return {name: float(statistics.median(getattr(s, name) for s in small)) for name in ("keys", "width", "heads")}


def _counted(name: str, counts: Sequence[Counts]) -> dict[str, Any]:
    verdicts = sum((c.verdicts for c in counts), Counter[str]())
    return {
        "kernel": name,
        "cases": sum(c.cases for c in counts),
        "verdicts": dict(verdicts),
        "alarms": [vars(alarm) for c in counts for alarm in c.alarms],
    }


def _plain(d: Detection) -> dict[str, Any]:
    return {
        "seed": d.seed,
        "property": d.property,
        "dtype": d.dtype,
        "kind": d.kind,
        "examples": d.examples,
        "cases": d.cases,
        "shrunk": None if d.shrunk is None else vars(d.shrunk),
        "seconds": round(d.seconds, 3),
    }


def summary(rows: list[dict[str, Any]], styles: list[str]) -> dict[str, Any]:
    """What the table comes to. A fault counts as caught where it is caught under every seed."""
    always = [row for row in rows if row["caught"] == row["seeds"]]
    small = [row["shrunk"] for row in rows if row["shrunk"] is not None]
    by_style = {name: sum(row["public"][name] is not None for row in rows) for name in styles}
    best = max(by_style, key=lambda name: by_style[name])
    return {
        "faults": len(rows),
        "caught": len(always),
        "missed": [row["id"] for row in rows if row["caught"] < row["seeds"]],
        "kinds": sorted({row["kind"] for row in rows}),
        "kinds_caught": sorted({row["kind"] for row in always}),
        "examples": _median(row["examples"] for row in rows if row["examples"] is not None),
        "cases": _median(row["cases"] for row in rows if row["cases"] is not None),
        "most_examples": max((row["most_examples"] for row in rows if row["caught"]), default=None),
        "shrunk": {name: _median(s[name] for s in small) for name in ("keys", "width", "heads")} if small else None,
        "styles": by_style,
        "best_style": best,
        "any_style": sum(any(row["public"].values()) for row in rows),
        "only_here": sum(not any(row["public"].values()) for row in always),
    }
