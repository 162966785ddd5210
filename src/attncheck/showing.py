"""What the commands print, and where to: results on standard output, progress on standard error."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncheck.selection import SelectionError

if TYPE_CHECKING:
    from attncheck.fixtures import Record
    from attncheck.kernels.candidate import Candidate
    from attncheck.properties.verdict import Verdict

Progress = Callable[[int, int, str], None]


class Output:
    """Where a run's report goes: text to standard output, JSON to a file; with "-" JSON goes to
    standard output and text to standard error. Raises SelectionError where the file cannot be written."""

    def __init__(self, json_file: str | None) -> None:
        self.json_file = json_file
        self.stream = sys.stderr if json_file == "-" else sys.stdout
        if json_file is not None and json_file != "-":
            writable(json_file, "--json")

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def report(self, document: dict[str, Any]) -> None:
        """Print the report, and write the JSON."""
        from attncheck.report import render

        terminal = self.stream.isatty()
        width = shutil.get_terminal_size().columns  # COLUMNS, or the terminal's, or 80
        color = terminal and "NO_COLOR" not in os.environ
        self.stream.write(render(document, width=width, color=color))
        self.stream.flush()
        self.write(document)

    def write(self, document: dict[str, Any]) -> None:
        """Write the JSON, where it is asked for."""
        if self.json_file is None:
            return
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        if self.json_file == "-":
            sys.stdout.write(text)
        else:
            write(self.json_file, text, "--json")


def writable(file: str, option: str) -> str:
    """``file``. Raises SelectionError where it cannot be written: before the work, not after it."""
    folder = Path(file).resolve().parent
    if Path(file).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SelectionError(f"{option} is {file}, which cannot be written")
    return file


def write(file: str, text: str, option: str) -> None:
    """The whole file or nothing. Raises SelectionError where it cannot be written."""
    beside = Path(f"{file}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        raise SelectionError(f"{option} is {file}, which cannot be written: {error.strerror}") from None


def width() -> int:
    """Columns of the terminal: COLUMNS, or the terminal's, or 80; unlimited in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


@contextmanager
def progress() -> Iterator[Progress | None]:
    """A progress bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)

        def show(done: int, total: int, item: str) -> None:
            bar.update(task, completed=done, total=total or None, description=item or "loading")

        yield show


# -- list -----------------------------------------------------------------------------------


def show_list(what: str | None) -> None:
    from attncheck.kernels import loading
    from attncheck.oracle.features import FEATURES
    from attncheck.properties.catalogue import PROPERTIES

    announced = {name: f"entry point {point.value}" for name, point in loading.entry_points().items()}
    sections = {
        "candidates": {**dict.fromkeys(loading.BUILT_IN, "built in"), **announced},
        "properties": {name: p.about for name, p in PROPERTIES.items()},
        "conventions": {name: _first_sentence(wrap) for name, wrap in loading.CONVENTIONS.items()},
        "features": FEATURES,
    }
    for name, entries in sections.items():
        if what is None:
            click.echo(f"{name}")
        if what in (None, name):
            width = max(map(len, entries))
            for key, text in entries.items():
                click.echo(f"{'  ' if what is None else ''}{key.ljust(width)}  {text}".rstrip())
        if what is None:
            click.echo()


def _first_sentence(wrap: Any) -> str:
    """What a convention follows: the first line of its adapter's module."""
    text = sys.modules[wrap.__module__].__doc__ or ""
    return text.strip().splitlines()[0] if text.strip() else ""


# -- replay ---------------------------------------------------------------------------------


def show_replay(record: Record, candidate: Candidate, verdict: Verdict) -> int:
    """Print the verdict on a saved case. Returns the exit code."""
    from attncheck.describe import case_as_data
    from attncheck.properties.verdict import Outcome

    case = case_as_data(record.case, record.presentation)
    click.echo(f"{candidate.name} {verdict.outcome.value}{': ' if verdict.sentence else ''}{verdict.sentence}")
    click.echo(f"  {case['summary']}")
    for name, text in case["arrays"].items():
        click.echo(f"  {name} {text}")
    worst = verdict.worst
    if worst is not None:
        if verdict.outcome is Outcome.HOLDS:
            click.echo(
                f"  worst element: {worst.output} got {worst.got}, exact {worst.exact}, allowed ±{worst.allowed:.2g}, "
                f"at {list(worst.index)} (ratio {worst.ratio:.2g})"
            )
        parts = " + ".join(f"{name} {value:.2g}" for name, value in worst.parts if value)
        click.echo(f"  bound   {worst.allowed:.2g} = {parts}")
    return {Outcome.HOLDS: 0, Outcome.VIOLATED: 1}.get(verdict.outcome, 3)


# -- exact ----------------------------------------------------------------------------------

#: significant digits that the certified engine's hi + lo carry
ENCLOSED_DIGITS = 30


def show_exact(record: Record, digits: int) -> None:
    """Print every output of a saved case. Up to 30 digits come from the certified engine, which prints
    only digits that are certain; more from the definition, at two precisions that agree on them."""
    from attncheck.describe import case_as_data
    from attncheck.oracle.result import OUTPUTS

    click.echo(case_as_data(record.case, record.presentation)["summary"])
    texts = _enclosed(record, digits) if digits <= ENCLOSED_DIGITS else _defined(record, digits)
    for name in OUTPUTS:
        if name not in texts:
            continue
        shape, text = texts[name]
        click.echo(f"{name} {list(shape)}")
        for index in _indices(shape):
            click.echo(f"  {list(index)}  {text(index)}")


Text = Callable[[tuple[int, ...]], str]


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    import numpy as np

    return np.ndindex(*shape)


def _enclosed(record: Record, digits: int) -> dict[str, tuple[tuple[int, ...], Text]]:
    from attncheck.oracle.enclosure import exact
    from attncheck.oracle.result import OUTPUTS

    answer = exact(record.case, pairs=False)
    texts: dict[str, tuple[tuple[int, ...], Text]] = {}
    for name in OUTPUTS:
        balls = getattr(answer, name)
        if balls is not None:
            texts[name] = (balls.hi.shape, lambda index, balls=balls: balls.decimal(index, digits))  # type: ignore[misc]
    return texts


def _defined(record: Record, digits: int) -> dict[str, tuple[tuple[int, ...], Text]]:
    from attncheck.fixtures import decimals
    from attncheck.oracle.definition import define
    from attncheck.oracle.precision import working_bits
    from attncheck.oracle.result import OUTPUTS

    bits = working_bits(record.case, math.ceil(digits * math.log2(10)))
    coarse = None
    while True:
        answer = define(record.case, bits)
        found = {n: decimals(getattr(answer, n), digits) for n in OUTPUTS if getattr(answer, n) is not None}
        if coarse is not None and all((found[n] == coarse[n]).all() for n in found):
            return {name: (array.shape, lambda index, array=array: array[index]) for name, array in found.items()}  # type: ignore[misc]
        coarse, bits = found, bits + 128


# -- trace ----------------------------------------------------------------------------------


def show_trace(record: Record, row: tuple[int, int, int], blocks: tuple[int, ...] | None, digits: int) -> None:
    """Print the online-softmax ledger of one row."""
    from attncheck.oracle.ledger import ledger_of_row

    try:
        ledger = ledger_of_row(record.case, *row, blocks or record.presentation.k_blocks)
    except ValueError as error:
        raise SelectionError(f"--row {','.join(map(str, row))}: {error}") from None

    def text(x: Any) -> str:
        return str(x.context.nstr(x, digits)) if hasattr(x, "context") else f"{x:.{digits}g}"

    def vector(xs: Any) -> str:
        shown = [text(x) for x in xs[:8]]
        return "[" + ", ".join(shown) + (f", … {len(xs)} in all]" if len(xs) > 8 else "]")

    b, h, i = row
    click.echo(f"batch {b}, head {h}, query {i}: output {vector(ledger.output)}, log-sum-exp {text(ledger.lse)}")
    for n, block in enumerate(ledger.blocks):
        click.echo(f"block {n}: keys {block.start} to {block.stop - 1}{', all hidden' if block.hidden else ''}")
        if not block.hidden:
            click.echo(f"  keys seen    {', '.join(map(str, block.keys[:16]))}{' …' if len(block.keys) > 16 else ''}")
            click.echo(f"  scores       {vector(block.scores)}")
            click.echo(f"  block max    {text(block.maximum)}")
        click.echo(f"  m            {text(block.running_maximum)}")
        click.echo(f"  rescale      {text(block.rescale)}")
        click.echo(f"  l            {text(block.denominator)}")
        click.echo(f"  a            {vector(block.accumulator)}")
        click.echo(f"  a / l        {vector(block.output)}")
        click.echo(f"  m + log l    {text(block.lse)}")
        click.echo(f"  distance     {text(block.distance)}")
