"""The zoo: one right kernel in which one fault at a time is switched on.

Most faults re-enact a public bug report; ``ZOO`` says which, what is broken and which outputs it
touches, ``NOT_IMITATED`` why the other reports have no fault. Constants are shrunk so that small
cases reach them: blocks hold 4 to 16 elements where a GPU's hold 128, integers 4 to 7 bits where
a machine's hold 16 or 32.
"""

from __future__ import annotations

from ..candidate import Candidate
from . import (  # noqa: F401  each enters its faults into ZOO
    alignment,
    backward,
    batches,
    empty_rows,
    machine,
    masks,
    memory,
    results,
    scores,
    softmax,
    splits,
    tails,
)
from .call import DEFAULT_BLOCK
from .kernel import Kernel
from .not_imitated import NOT_IMITATED
from .registry import ZOO, Fault, right

__all__ = ["DEFAULT_BLOCK", "NOT_IMITATED", "ZOO", "Fault", "Kernel", "find", "right"]


def find(id: str) -> Candidate:
    """The candidate of an id; "right" is the kernel without a fault. Raises KeyError listing the ids."""
    if id == "right":
        return right()
    # a colon inside an id may be written as a dash: zoo:cheat-zeros
    for fault in ZOO.values():
        if id in (fault.id, fault.id.replace(":", "-")):
            return fault.candidate()
    missing = f"has no {id!r}" if id else "is asked for no fault"
    raise KeyError(f"the zoo {missing}; write zoo: and one of right, {', '.join(ZOO)}")
