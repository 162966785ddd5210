"""Right kernels under the whole suite, for as many cases as you like: every violation is a false alarm.

    python benchmarks/false_alarms.py --cases 200000 --minutes 30 --state false_alarms.json -n 2

A unit of work is a dtype and a seed: its cases go through every kernel, which share the exact answers.
What was counted is kept in the state file after each unit, so that a run can be stopped and taken up
again; it counts per kernel, dtype and seed. A violation is shrunk, saved as a fixture beside the state
file, and makes the exit code 1. Faults that a third-party kernel is known to have count as known.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from attncheck.fixtures import write
from attncheck.kernels.candidate import Candidate
from attncheck.oracle.formats import FORMATS
from attncheck.properties.campaign import check
from attncheck.properties.false_alarms import Alarm, judge_right, right_kernels
from attncheck.properties.replay import make_record

#: cases of each plan in a unit
CASES = 256
#: the first seed: none that the power report uses
FIRST_SEED = 2000
FORMAT = "attncheck false alarms"


def unit(dtype: str, seed: int, only: tuple[str, ...], folder: str) -> dict[str, dict[str, Any]]:
    """Judge a unit's cases; returns counts and violations per kernel."""
    kernels = {name: kernel for name, kernel in right_kernels()[0].items() if not only or name in only}
    return {
        name: {
            "cases": counts.cases,
            **counts.verdicts,
            "violations": [_saved(kernels[name], alarm, folder) for alarm in counts.alarms],
        }
        for name, counts in judge_right(kernels, dtype, seed, CASES).items()
    }


def _saved(kernel: Candidate, alarm: Alarm, folder: str) -> dict[str, Any]:
    """Shrink and save a violation, as `attncheck verify` does it."""
    facts = {**vars(alarm), "saved": None}
    tally = check(kernel, alarm.property, alarm.dtype, examples=alarm.number + 1, seed=alarm.seed)
    if tally.failure is not None:
        facts |= {"sentence": tally.failure.verdict.sentence, "saved": str(write(make_record(kernel, tally), folder))}
    return facts


def read_state(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"format": FORMAT, "version": 1, "units": {}}
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if state.get("format") != FORMAT or state.get("version") != 1:
        raise SystemExit(f"{path} is not a state file of this benchmark, or of another version")
    return state


def write_state(path: Path, state: dict[str, Any]) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(state, indent=1), encoding="utf-8")
    beside.replace(path)


def totals(state: dict[str, Any]) -> dict[tuple[str, str], Counter[str]]:
    """Counts per kernel and dtype over all units."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for key, kernels in state["units"].items():
        for name, facts in kernels.items():
            counts = {k: v for k, v in facts.items() if k != "violations"}
            found.setdefault((name, key.split("|")[0]), Counter()).update(counts)
    return found


def show(state: dict[str, Any]) -> int:
    """Print the totals and every violation; returns how many there were."""
    found = totals(state)
    columns = ("cases", "holds", "vacuous", "declined", "known", "violated")
    width = max((len(name) for name, _ in found), default=6)
    print(f"\n{'kernel':{width}}  {'dtype':9}" + "".join(f"{c:>11}" for c in columns))
    for (name, dtype), counts in sorted(found.items()):
        print(f"{name:{width}}  {dtype:9}" + "".join(f"{counts[c]:11,}" for c in columns))
    everything = sum(found.values(), Counter())
    print(f"{'all':{width}}  {'':9}" + "".join(f"{everything[c]:11,}" for c in columns))
    for key, kernels in state["units"].items():
        for name, facts in kernels.items():
            for alarm in facts["violations"]:
                print(f"\n{name}, {key.replace('|', ', seed ')}: {alarm['property']}: {alarm['sentence']}")
                print(f"  saved {alarm['saved']}")
    return everything["violated"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200_000, help="stop at this many, all runs together")
    parser.add_argument("--minutes", type=float, default=30.0, help="stop after this long")
    parser.add_argument("--state", type=Path, default=Path("false_alarms.json"), help="where the counts are kept")
    parser.add_argument("--kernel", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("-n", type=int, default=1, help="processes")
    options = parser.parse_args()
    kernels, missing = right_kernels()
    for sentence in missing:
        print(f"left out: {sentence}", file=sys.stderr)
    unknown = set(options.kernel) - kernels.keys()
    if unknown:
        parser.error(f"--kernel is {min(unknown)!r}; accepted are {', '.join(kernels)}")
    state, deadline = read_state(options.state), time.monotonic() + 60 * options.minutes
    folder = str(options.state.resolve().parent / "false_alarms")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    count = sum(c["cases"] for c in totals(state).values())
    only, todo = tuple(options.kernel), _units(state)
    with ProcessPoolExecutor(options.n, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Any, tuple[str, int]] = {}
        while running or (count < options.cases and time.monotonic() < deadline):
            while len(running) < options.n and count < options.cases and time.monotonic() < deadline:
                dtype, seed = next(todo)
                running[pool.submit(unit, dtype, seed, only, folder)] = (dtype, seed)
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                dtype, seed = running.pop(future)
                found = future.result()
                state["units"].setdefault(f"{dtype}|{seed}", {}).update(found)
                write_state(options.state, state)
                count += sum(facts["cases"] for facts in found.values())
                alarms = sum(facts.get("violated", 0) for facts in found.values())
                print(f"{dtype:9} seed {seed}: {count:,} cases so far; {alarms} violations", flush=True)
    return 1 if show(state) else 0


def _units(state: dict[str, Any]) -> Any:
    """Units that are not in the state, dtypes in turn."""
    seed = FIRST_SEED
    while True:
        for dtype in FORMATS:
            if f"{dtype}|{seed}" not in state["units"]:
                yield dtype, seed
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
