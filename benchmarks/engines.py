"""The certified engine against the mpmath definition, at the same precision, in one process.

    python benchmarks/engines.py [--size 128] [--width 64] [--runs 3]

Prints processor seconds of each, forward and backward, one head, and their ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from attncheck.oracle.case import Case
from attncheck.oracle.definition import define
from attncheck.oracle.enclosure import exact


def seconds(call: Callable[[], object], runs: int) -> float:
    """The least processor time of several runs: what others do on the machine only adds to it."""
    taken = []
    for _ in range(runs):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, 1, options.size, options.width)).astype(np.float32) for _ in range(4))
    case = Case(q, k, v, do=do)
    bits = exact(case, pairs=False).bits
    fast = seconds(lambda: exact(case, pairs=False), options.runs)
    slow = seconds(lambda: define(case, bits), 1)
    print(f"S = {options.size}, D = {options.width}, one head, forward and backward, {bits} bits")
    print(f"definition (mpmath)        {slow:8.3f} s")
    print(f"certified engine           {fast:8.3f} s")
    print(f"ratio                      {slow / fast:8.1f}")


if __name__ == "__main__":
    main()
