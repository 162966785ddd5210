"""Candidate: a kernel under test, with what it supports and what it declares of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..oracle.case import LAYOUTS, Case, Presentation
from ..oracle.features import FEATURES
from ..oracle.formats import FORMATS
from ..oracle.profile import Conventions, Profile, default_profile
from ..oracle.result import OUTPUTS, Result

#: what a candidate may promise beyond right answers to contiguous arrays -> what that means. Where it is
#: not promised, the property that tests it reports a fact and not a violation. "The same" is bit for bit,
#: in every element that is judged.
PROMISES: dict[str, str] = {
    "repeatable": "calling twice gives the same",
    "batch-invariant": "a batch entry alone gives the same as in company",
    "strided": "q, k, v and do of any strides, 0 included, are answered as rightly as contiguous copies, or declined",
    "layout-invariant": "q, k, v and do of any strides, keys and values in pages, and packed batches, give the same "
    "as contiguous, padded copies",
    "padding-not-read": "padded rows and keys, where it is told the lengths, may hold anything, NaN included: the same",
    "masked-not-read": "keys and values that no row sees (by mask, causal, window, bias of -inf or length) may hold "
    "anything, NaN included: the same",
}


class Unsupported(Exception):
    """Raised by a kernel or an adapter that declines a case. The message says why."""


@dataclass(frozen=True)
class Known:
    """A fault of a third-party candidate that was settled to be the kernel's own, kept as data.

    ``when`` says which (case, presentation) it concerns; ``case`` is the name of the shipped
    fixture with the smallest such case. A violation that matches is shown as known and does not
    fail the run. ``entry`` is the line of an adopter's waiver file that says so; "" where the fault is
    declared with the candidate.
    """

    properties: tuple[str, ...]
    dtypes: tuple[str, ...]
    when: Callable[[Case, Presentation], bool]
    reason: str
    versions: str
    case: str
    entry: str = ""


Run = Callable[[Case, Presentation, frozenset[str]], Result]


@dataclass(frozen=True)
class Candidate:
    """A kernel under test.

    ``run(case, presentation, want)`` computes at least the outputs named in ``want`` (a subset of
    o, lse, dq, dk, dv, dbias, dsink that the candidate offers) and returns a Result. Gradients are wanted
    only of cases that hold ``do``. It raises Unsupported or NotImplementedError to decline; any
    other exception is a violation.

    ``offers`` are the outputs it has at all, ``lacks`` the FEATURES it declines, each with the
    reason that reports print. ``takes_blocks``: it honours the block sizes of the presentation;
    ``blocks`` are block sizes of its own, around which lengths are drawn. ``profiles`` gives its
    precision profile per dtype; a dtype without one gets the default.

    ``takes_layouts``: the layouts of q, k, v and do that run realises; ``takes_pages``: it puts keys
    and values in pages where the presentation asks for them; ``takes_packed``: it puts a batch packed,
    where the case has no mask, bias or keep of every pair. All are about run, which for a plain
    callable is its adapter; whether the kernel then owes the same answer is what ``promises`` (of
    PROMISES) says.
    """

    name: str
    run: Run
    dtypes: tuple[str, ...] = tuple(FORMATS)
    offers: frozenset[str] = frozenset(OUTPUTS)
    lacks: Mapping[str, str] = field(default_factory=dict)
    conventions: Conventions = field(default_factory=Conventions)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    known: tuple[Known, ...] = ()
    takes_blocks: bool = False
    blocks: tuple[int, ...] = ()
    takes_layouts: frozenset[str] = frozenset({"contiguous"})
    takes_pages: bool = False
    takes_packed: bool = False
    promises: frozenset[str] = frozenset()
    convention: str = "case"
    device: str = "cpu"
    about: str = ""

    def __post_init__(self) -> None:
        for name, values, accepted in (
            ("dtypes", self.dtypes, FORMATS),
            ("offers", self.offers, OUTPUTS),
            ("lacks", self.lacks, FEATURES),
            ("profiles", self.profiles, FORMATS),
            ("takes_layouts", self.takes_layouts, LAYOUTS),
            ("promises", self.promises, PROMISES),
        ):
            for value in values:
                if value not in accepted:
                    raise ValueError(
                        f"candidate {self.name}: {name} holds {value!r}; accepted are {', '.join(accepted)}"
                    )

    def profile(self, dtype: str, presentation: Presentation | None = None) -> Profile:
        """The arithmetic it declares for this storage dtype, with the key blocks it is given."""
        profile = self.profiles.get(dtype) or default_profile(dtype)
        if self.takes_blocks and presentation is not None and presentation.k_blocks is not None:
            profile = replace(profile, key_block=min(presentation.k_blocks))
        return profile

    def refuses(self, presentation: Presentation) -> str | None:
        """Why its run cannot put a case so; None where it can."""
        if presentation.page_size is not None and not self.takes_pages:
            return "it takes no pages of keys and values"
        if presentation.packed and not self.takes_packed:
            return "it takes no packed batches"
        for name, layout in zip(("q", "k", "v", "do"), presentation.layouts, strict=True):
            if layout not in self.takes_layouts:
                return f"it takes {name} {' or '.join(x for x in LAYOUTS if x in self.takes_layouts)}, not {layout}"
        return None
