"""What a planted fault is, and the list that the modules of faults fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...oracle.case import LAYOUTS
from ...oracle.formats import FORMATS
from ...oracle.profile import Profile, default_profile
from ...oracle.result import OUTPUTS
from ..candidate import PROMISES, Candidate
from .call import DEFAULT_BLOCK
from .kernel import Kernel

ALL = OUTPUTS
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")
#: a wrong O is in these: the backward pass reads O only for rowsum(dO * O)
THROUGH_O = ("o", "dq", "dk", "dbias", "dsink")
#: what rowsum(dO * O) is in
THROUGH_DELTA = ("dq", "dk", "dbias", "dsink")
HALF = ("float16", "bfloat16")


def profile(dtype: str) -> Profile:
    """The arithmetic of ``Kernel``: numpy's functions, P and dS never rounded to storage."""
    return replace(default_profile(dtype), u_p=0.0, key_block=DEFAULT_BLOCK)


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    ``kind`` and ``report`` name the public report that it re-enacts ("sharp" or "cheat", and "", where
    there is none), ``about`` says what is broken, ``touches`` which outputs it can change: names of
    OUTPUTS, or "inputs". ``dtypes`` is where it lives, ``profile`` the arithmetic that it truly has
    beside the fault, ``offers`` what it returns at all.
    """

    id: str
    kind: str
    report: str
    about: str
    touches: tuple[str, ...]
    kernel: type[Kernel]
    dtypes: tuple[str, ...] = tuple(FORMATS)
    profile: Callable[[str], Profile] = profile
    offers: tuple[str, ...] = ALL

    @property
    def name(self) -> str:
        return f"zoo:{self.id}"

    @property
    def outputs(self) -> tuple[str, ...]:
        """What it touches of what is returned."""
        return tuple(name for name in self.touches if name in OUTPUTS)

    def candidate(self) -> Candidate:
        """A new kernel with the fault; some remember earlier calls."""
        return _candidate(self.name, self.kernel(), self, self.about)

    def right(self) -> Candidate:
        """The same kernel without it."""
        right = next(base for base in self.kernel.__mro__[1:] if base not in _FAULTY)
        return _candidate("zoo:right", right(), self, RIGHT_ABOUT)


ZOO: dict[str, Fault] = {}
_FAULTY: set[type] = set()
RIGHT_ABOUT = "the kernel that the faults of the zoo are planted in, with nothing switched on"


def fault(
    id: str,
    kind: str,
    about: str,
    touches: tuple[str, ...],
    *,
    dtypes: tuple[str, ...] = tuple(FORMATS),
    profile: Callable[[str], Profile] = profile,
    offers: tuple[str, ...] = ALL,
) -> Callable[[type[Kernel]], type[Kernel]]:
    """Enter a kernel class into the zoo. An id that names a report may have a suffix: "B158-dropout"."""

    def enter(kernel: type[Kernel]) -> type[Kernel]:
        assert id not in ZOO, id
        report = id.partition("-")[0] if id[0] == "B" and id[1:4].isdigit() else ""
        ZOO[id] = Fault(id, kind, report, about, touches, kernel, dtypes, profile, offers)
        _FAULTY.add(kernel)
        return kernel

    return enter


def _candidate(name: str, kernel: Kernel, fault: Fault | None, about: str) -> Candidate:
    dtypes = tuple(FORMATS) if fault is None else fault.dtypes
    profile_of = profile if fault is None else fault.profile
    return Candidate(
        name=name,
        run=kernel.run,
        dtypes=dtypes,
        offers=frozenset(ALL if fault is None else fault.offers),
        profiles={dtype: profile_of(dtype) for dtype in dtypes},
        takes_blocks=True,
        takes_layouts=frozenset(LAYOUTS),
        takes_pages=True,
        # a fault in how memory is read is about the padded batch
        takes_packed=type(kernel).read is Kernel.read,
        promises=frozenset(PROMISES),
        blocks=(DEFAULT_BLOCK,),
        about=about,
    )


def right() -> Candidate:
    """The kernel with nothing switched on."""
    return _candidate("zoo:right", Kernel(), None, RIGHT_ABOUT)
