"""A long sequence through the certified engine: time, peak memory and radii.

    python benchmarks/long_row.py [--size 4096] [--width 64]

One head, forward and backward, streamed over blocks of rows. "where it cancels" counts the values
whose radius is not below 1e-25 of them; their radius is then given beside the largest value.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from attncheck.oracle.case import Case
from attncheck.oracle.enclosure import exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, 1, options.size, options.width)).astype(np.float32) for _ in range(4))
    start, used = time.perf_counter(), time.process_time()
    found = exact(Case(q, k, v, do=do), pairs=False)
    wall, used = time.perf_counter() - start, time.process_time() - used
    print(f"S = {options.size}, D = {options.width}, one head, forward and backward, {found.bits} bits")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"wall {wall:.0f} s, processor {used:.0f} s, peak {peak:.2f} GiB")
    for name in ("o", "lse", "dq", "dk", "dv"):
        balls = getattr(found, name)
        size = np.abs(balls.hi)
        cancels = balls.rad >= 1e-25 * size
        worst = float((balls.rad[~cancels] / size[~cancels]).max())
        print(
            f"{name:4} relative radius at most {worst:.1e}; cancels in {int(cancels.sum())} of {size.size} values"
            + (f", radius there at most {balls.rad[cancels].max():.1e} of {size.max():.1e}" if cancels.any() else "")
        )


if __name__ == "__main__":
    main()
