"""Twelve wrong kernels out of the zoo, by name, and the right kernel that they break: a quick choice for tests.

Whatever catches a fault must let ``RIGHT`` pass.
"""

from __future__ import annotations

from dataclasses import replace

from attncheck.kernels.faulty import ZOO, Fault, right

__all__ = ["FAULTS", "RIGHT", "Fault"]

RIGHT = replace(right(), name="right")

FAULTS: dict[str, Fault] = {
    "unguarded-empty-row": ZOO["B014"],
    "backward-always-causal": ZOO["B020"],
    "finite-start": ZOO["B029"],
    "no-rescale": ZOO["B035"],
    "tail-scores-zero": ZOO["B045"],
    "causal-without-offset": ZOO["B053"],
    "lse-in-base-two": ZOO["B074"],
    "dlse-ignored": ZOO["B083"],
    "group-not-summed": ZOO["B086"],
    "tanh-of-exponentials": ZOO["B144"],
    "one-element-half": ZOO["sharp:one-element-half"],
    "one-element-float32": ZOO["sharp:one-element-float32"],
}
