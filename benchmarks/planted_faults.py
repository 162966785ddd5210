"""The planted faults of tests/faulty.py under many seeds, at the default number of examples.

    python benchmarks/planted_faults.py [--seeds 20] [--examples 1200]

For each fault: under how many seeds it is caught, after how many cases of the property that
catches it, and how small the failing case is after shrinking.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from attncheck.properties.campaign import check
from attncheck.properties.catalogue import PROPERTIES
from attncheck.properties.verdict import Tally
from attncheck.selection import DEFAULT_EXAMPLES

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.faulty import FAULTS, Fault


def first_catch(fault: Fault, seed: int, examples: int) -> Tally | None:
    """The first catch by any property in any dtype, if verify would catch it at all.

    The draws are the same prefix for any number of examples, so asking for few first saves time and
    changes nothing.
    """
    candidate = fault.candidate()
    for few in sorted({min(n, examples // 4) for n in (20, 100, examples // 4)}):
        for dtype in fault.dtypes:
            for name in PROPERTIES:
                tally = check(candidate, name, dtype, examples=few, seed=seed)
                if tally.failure is not None:
                    return tally
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--examples", type=int, default=DEFAULT_EXAMPLES)
    options = parser.parse_args()
    print(f"{'fault':26} {'kind':6} {'caught':>8}  {'by':18} {'cases':>6} {'keys':>5} {'D':>3} {'Dv':>3}")
    caught_all, keys, widths = 0, [], []
    for fault in FAULTS.values():
        found = [first_catch(fault, seed, options.examples) for seed in range(options.seeds)]
        caught = [tally for tally in found if tally is not None and tally.failure is not None]
        shapes = [tally.failure.case.shape for tally in caught if tally.failure is not None]
        caught_all += len(caught) == options.seeds
        keys += [shape[4] for shape in shapes]
        widths += [max(shape[5], shape[6]) for shape in shapes]
        by = ", ".join(sorted({tally.property for tally in caught}))
        cases = statistics.median(tally.examples for tally in caught) if caught else float("nan")
        small = [f"{statistics.median(s[n] for s in shapes):g}" if shapes else "-" for n in (4, 5, 6)]
        print(
            f"{fault.name:26} {fault.kind:6} {len(caught):3} of {options.seeds:<2}  {by:18} {cases:6g} "
            f"{small[0]:>5} {small[1]:>3} {small[2]:>3}",
            flush=True,
        )
    print(f"{caught_all} of {len(FAULTS)} faults caught under every one of {options.seeds} seeds")
    print(f"median failing case: {statistics.median(keys):g} keys, D {statistics.median(widths):g}")


if __name__ == "__main__":
    main()
