"""Candidate: a kernel under test, with what it supports and what it declares of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..oracle.case import Case, Presentation
from ..oracle.features import FEATURES
from ..oracle.formats import FORMATS
from ..oracle.profile import Conventions, Profile, default_profile
from ..oracle.result import OUTPUTS, Result


class Unsupported(Exception):
    """Raised by a kernel or an adapter that declines a case. The message says why."""


@dataclass(frozen=True)
class Known:
    """A fault of a third-party candidate that was settled to be the kernel's own, kept as data.

    ``when`` says which (case, presentation) it concerns; ``case`` is the name of the shipped
    fixture with the smallest such case. A violation that matches is shown as known and does not
    fail the run.
    """

    properties: tuple[str, ...]
    dtypes: tuple[str, ...]
    when: Callable[[Case, Presentation], bool]
    reason: str
    versions: str
    case: str


Run = Callable[[Case, Presentation, frozenset[str]], Result]


@dataclass(frozen=True)
class Candidate:
    """A kernel under test.

    ``run(case, presentation, want)`` computes at least the outputs named in ``want`` (a subset of
    o, lse, dq, dk, dv, dbias that the candidate offers) and returns a Result. Gradients are wanted
    only of cases that hold ``do``. It raises Unsupported or NotImplementedError to decline; any
    other exception is a violation.

    ``offers`` are the outputs it has at all, ``lacks`` the FEATURES it declines, each with the
    reason that reports print. ``takes_blocks``: it honours the block sizes of the presentation;
    ``blocks`` are block sizes of its own, around which lengths are drawn. ``profiles`` gives its
    precision profile per dtype; a dtype without one gets the default.
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
    convention: str = "case"
    device: str = "cpu"
    about: str = ""

    def __post_init__(self) -> None:
        for name, values, accepted in (
            ("dtypes", self.dtypes, FORMATS),
            ("offers", self.offers, OUTPUTS),
            ("lacks", self.lacks, FEATURES),
            ("profiles", self.profiles, FORMATS),
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
