"""The long attack on the error bounds: right kernels, drawn and bent cases, for as long as you like.

    python benchmarks/search_bounds.py --minutes 10 --seed 0

Per output, type and feature: the worst and the median of the worst |got - exact| / allowed per case,
and the share of outputs that were vacuous. A case in which a right kernel passes its bound is saved
as JSON (with the kernel's choices) and makes the exit code 1: either the kernel is not right for its
profile, or the bound lacks a term.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attncheck.oracle.case import Case
from attncheck.oracle.features import features
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.result import OUTPUTS
from attncheck.properties.verdict import Outcome
from tests.attack import climb, pairs, ratio, verdicts  # the attack belongs to the tests
from tests.right import Choices

#: features that get a row of their own; the others are "plain"
SHOWN = ("sinks", "dropout", "softcap", "bias", "alibi", "gqa", "dlse", "mask", "lengths", "scale")
#: share of the time that goes into bending cases rather than drawing them
BENDING = 0.5


@dataclass
class Row:
    """What was seen of one output, type and feature."""

    worsts: list[float] = field(default_factory=list)
    vacuous: int = 0
    cases: int = 0


def saved(case: Case, c: Choices, output: str, reached: float, folder: Path) -> Path:
    """Write a case as JSON, every number as a hexadecimal float."""

    def plain(value: object) -> object:
        if isinstance(value, np.ndarray):
            listed = (
                value.tolist() if value.dtype == bool else [float(x).hex() for x in value.astype(np.float64).ravel()]
            )
            return {"dtype": value.dtype.name, "shape": value.shape, "values": listed}
        return value

    content = {
        "output": output,
        "ratio": reached,
        "choices": asdict(c),
        "case": {f.name: plain(getattr(case, f.name)) for f in fields(case)},
    }
    path = folder / f"bound-passed-{case.dtype}-{output}-{case.digest[:12]}.json"
    path.write_text(json.dumps(content, indent=1))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to search (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=list(FORMATS), action="append", help="one or more types (default all)")
    parser.add_argument("--save", type=Path, default=Path("."), help="folder for cases that pass a bound")
    options = parser.parse_args()
    dtypes = options.dtype or list(FORMATS)
    rng = np.random.default_rng(options.seed)
    streams = {dtype: pairs(dtype, options.seed) for dtype in dtypes}
    table: dict[tuple[str, str, str], Row] = defaultdict(Row)
    bent: dict[tuple[str, str], list[float]] = defaultdict(list)
    passed = 0
    started = time.monotonic()
    drawing = 0.0
    while (elapsed := time.monotonic() - started) < 60 * options.minutes:
        dtype = str(rng.choice(dtypes))
        if drawing <= (1 - BENDING) * elapsed:
            began = time.monotonic()
            case, c = next(streams[dtype])
            found = {name: (v.outcome, ratio(v)) for name, v in verdicts(case, c).items()}
            shown = [f for f in SHOWN if f in features(case)] or ["plain"]
            for name, (outcome, reached) in found.items():
                for feature in shown:
                    row = table[dtype, name, feature]
                    row.cases += 1
                    row.vacuous += outcome is Outcome.VACUOUS
                    if outcome is not Outcome.VACUOUS:
                        row.worsts.append(reached)
                if outcome is Outcome.VIOLATED:
                    passed += 1
                    print("passed:", saved(case, c, name, reached, options.save), flush=True)
            drawing += time.monotonic() - began
            continue
        case, c = small(streams[dtype])
        for name in rng.permutation([n for n in OUTPUTS if asked(case, n)])[:2]:
            reached, worst, choices = climb(case, c, str(name), rng, 60)
            bent[dtype, str(name)].append(reached)
            if reached > 1:
                passed += 1
                print("passed:", saved(worst, choices, str(name), reached, options.save), flush=True)
    show(table, bent, dtypes)
    print(f"{passed} passed their bound, in {(time.monotonic() - started) / 60:.1f} minutes, seed {options.seed}")
    return 1 if passed else 0


def asked(case: Case, output: str) -> bool:
    """Whether a case with gradients has this output."""
    return {"dbias": case.bias, "dsink": case.sinks}.get(output, case.q) is not None


def small(stream: Iterator[tuple[Case, Choices]]) -> tuple[Case, Choices]:
    """The next case that is small enough to be bent often."""
    while True:
        case, c = next(stream)
        if case.q.size * case.k.size > 0 and case.shape[0] * case.shape[1] * case.shape[3] * case.shape[4] <= 60:
            return case, c


def show(table: dict[tuple[str, str, str], Row], bent: dict[tuple[str, str], list[float]], dtypes: list[str]) -> None:
    """Print what was seen: worst (median; share vacuous) per feature, then what bending reached."""
    for dtype in dtypes:
        print(f"\n{dtype}: worst (median; vacuous) of drawn cases")
        print(f"  {'':10}" + "".join(f"{name:>22}" for name in OUTPUTS))
        for feature in ("plain", *SHOWN):
            cells = []
            for name in OUTPUTS:
                row = table.get((dtype, name, feature))
                if row is None or not row.cases:
                    cells.append("-")
                    continue
                worst, median = max(row.worsts, default=0.0), float(np.median(row.worsts)) if row.worsts else 0.0
                cells.append(f"{worst:.2f} ({median:.2f}; {row.vacuous / row.cases:.0%})")
            print(f"  {feature:10}" + "".join(f"{cell:>22}" for cell in cells))
        ends = [bent.get((dtype, name), []) for name in OUTPUTS]
        print(f"  {'bent':10}" + "".join(f"{f'{max(x):.3f} ({len(x)} climbs)' if x else '-':>22}" for x in ends))
        count = max((row.cases for (d, _, f), row in table.items() if d == dtype), default=0)
        print(f"  at most {count} cases per cell")


if __name__ == "__main__":
    sys.exit(main())
