"""What the Triton kernels need on each target, compiled here: registers, spills, shared memory.

    python benchmarks/triton_resources.py [--target sm_90 ...] [--dtype bfloat16 float32] [--width 64 128 256]

Needs no GPU. One line per entry of the tile table: the plain (causal) call at the widest heads of the entry and,
with a "+", the call with mask, bias, ALiBi, softcap, window and ragged lengths at once, at head sizes that are no
powers of two. Exit code 1 where an entry spills or takes too much.
"""

from __future__ import annotations

import argparse
import sys
import time

from attncheck.kernels.triton_attention.compiled import compile_for
from attncheck.kernels.triton_attention.tiles import DTYPES, KERNELS, SHARED_MEMORY

PLAIN = {"HAS_RIGHT": True, "HAS_DLSE": True}
EVERYTHING = PLAIN | {
    "HAS_MASK": True,
    "HAS_BIAS": True,
    "HAS_CAP": True,
    "HAS_SLOPES": True,
    "HAS_LEFT": True,
    "RAGGED_Q": 1,
    "RAGGED_K": 1,
}

#: width of an entry -> D and Dv of the call with everything
UNEVEN = {64: (48, 40), 128: (96, 80), 256: (192, 160)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=SHARED_MEMORY, default=list(SHARED_MEMORY))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--width", nargs="+", type=int, choices=UNEVEN, default=list(UNEVEN))
    options = parser.parse_args()
    print(f"{'target':8}{'dtype':10}{'D':>4}  {'kernel':15} {'tile':>9} warps stages registers spills  shared bytes")
    bad = count = 0
    started = time.monotonic()
    for target in options.target:
        for dtype in options.dtype:
            for width in options.width:
                for kernel in (*KERNELS, "merge"):
                    for mark, features in (("", PLAIN), ("+", EVERYTHING)):
                        # a bias gradient is never plain, and a merge nothing else
                        if (kernel == "backward_bias" and not mark) or (kernel == "merge" and mark):
                            continue
                        d, dv = UNEVEN[width] if mark else (width, width)
                        found = compile_for(kernel, target, dtype, d, dv, **features)
                        limit, size = SHARED_MEMORY[target], found.tile
                        wrong = found.spills > 0 or found.shared > limit
                        bad, count = bad + wrong, count + 1
                        shape = f"{size.m}x{size.n}"
                        print(
                            f"{target:8}{dtype:10}{width:>4}  {kernel + mark:15} {shape:>9} {size.warps:5} "
                            f"{size.stages:6} {found.registers:9} {found.spills:6}  {found.shared} of {limit}"
                            + ("  BAD" if wrong else ""),
                            flush=True,
                        )
    print(f"{count} kernels in {time.monotonic() - started:.0f} s, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
