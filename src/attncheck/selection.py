"""What a run judges: the targets and options shared by the command line, the plug-in and the API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attncheck.kernels.candidate import Candidate
    from attncheck.waivers import Waiver

#: cases per candidate and property, over all dtypes: about a minute for one kernel on two cores
DEFAULT_EXAMPLES = 1200

#: what `examples` means where only --seconds was given: more than anyone waits for
UNLIMITED = 1_000_000

#: seconds that a case may take with --isolate
DEFAULT_TIMEOUT = 60.0

#: where failures are saved, relative to the folder of the run
DEFAULT_SAVE = ".attncheck/failures"


class SelectionError(ValueError):
    """An option with a value that is not accepted. The message names the option and what is."""


@dataclass(frozen=True)
class Selection:
    """The targets of a run and how to judge them. Plain strings and numbers, nothing loaded yet.

    ``isolate`` runs each candidate in a child process, with ``timeout`` seconds per case (None: 60).
    ``examples`` is None where it was not given. ``seconds`` bounds the drawing of the whole run.
    ``waivers`` is the path of a waiver file; with ``strict_waivers`` a stale line in it fails the run.
    Raises SelectionError.
    """

    targets: tuple[str, ...]
    like: str | None = None
    supports: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    forward_only: bool = False
    device: str = "cpu"
    isolate: bool = False
    timeout: float | None = None
    dtypes: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()
    examples: int | None = None
    seconds: float | None = None
    seed: int = 0
    block: tuple[int, ...] | None = None
    require: tuple[str, ...] = ()
    save: str = DEFAULT_SAVE
    waivers: str | None = None
    strict_waivers: bool = False

    def __post_init__(self) -> None:
        if not self.targets:
            raise SelectionError("no target is given; name at least one candidate (see `attncheck list`)")
        repeated = sorted({t for t in self.targets if self.targets.count(t) > 1})
        if repeated:
            raise SelectionError(f"target {repeated[0]!r} is given twice")
        if self.timeout is not None and not self.isolate:
            raise SelectionError(f"--timeout is {self.timeout:g} but --isolate is not given; it needs a child process")
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise SelectionError(f"--timeout is {self.timeout:g}; it must be a positive number of seconds")
        if self.examples is not None and self.examples < 1:
            raise SelectionError(f"--examples is {self.examples}; it must be at least 1")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise SelectionError(f"--seconds is {self.seconds:g}; it must be a positive number")
        if self.strict_waivers and self.waivers is None:
            raise SelectionError(
                "--strict-waivers is given but --waivers is not; there is no waiver to be strict about"
            )
        if not 0 <= self.seed < 2**64:
            raise SelectionError(f"--seed is {self.seed}; it must be from 0 to 2^64 - 1")
        if self.block is not None and (not self.block or min(self.block) < 1):
            raise SelectionError(f"--block is {self.block}; block sizes must be at least 1")

    @property
    def limit(self) -> int:
        """Cases per candidate and property."""
        if self.examples is not None:
            return self.examples
        return DEFAULT_EXAMPLES if self.seconds is None else UNLIMITED

    def check_names(self) -> None:
        """Raise SelectionError for a dtype, property, feature or output that does not exist, and
        WaiverError for a waiver file that cannot be used."""
        from attncheck.oracle.features import FEATURES
        from attncheck.oracle.formats import FORMATS
        from attncheck.oracle.result import OUTPUTS
        from attncheck.properties.catalogue import PROPERTIES

        for option, values, accepted in (
            ("--dtype", self.dtypes, FORMATS),
            ("--property", self.properties, PROPERTIES),
            ("--supports", self.supports, FEATURES),
            ("--lacks", self.lacks, FEATURES),
            ("--require", self.require, OUTPUTS),
        ):
            for value in values:
                if value not in accepted:
                    raise SelectionError(f"{option} is {value!r}; accepted are {', '.join(accepted)}")
        self.read_waivers()

    def read_waivers(self) -> tuple[Waiver, ...]:
        """The lines of the waiver file; none without one. Raises WaiverError."""
        from attncheck.waivers import read

        return () if self.waivers is None else read(self.waivers)

    def load(self, target: str, **declared: Any) -> Candidate:
        """Load one target under this selection's options, waivers included; ``declared`` are further
        options of kernels.loading.load. Raises its LoadError, and WaiverError."""
        from attncheck.kernels.isolated import isolated
        from attncheck.kernels.loading import load

        options: dict[str, Any] = {
            "like": self.like,
            "supports": self.supports,
            "lacks": self.lacks,
            "forward_only": self.forward_only,
            "device": self.device,
            **declared,
        }
        if self.isolate:
            limit = DEFAULT_TIMEOUT if self.timeout is None else self.timeout
            return self.waive(target, isolated(target, timeout=limit, **options))
        return self.waive(target, load(target, **options))

    def waive(self, target: str, candidate: Candidate) -> Candidate:
        """The candidate with the waivers that name it. Raises WaiverError."""
        from attncheck.waivers import waived

        return waived(candidate, target, self.read_waivers())

    def arguments(self, prefix: str = "--") -> list[str]:
        """These options as command-line words, without the targets and where not the default.

        ``prefix`` is "--" for `attncheck verify`, "--attncheck-" for pytest.
        """
        words = self.loading_arguments(prefix)

        def option(name: str, value: object) -> None:
            words.extend([prefix + name, str(value)])

        for name, values in (("dtype", self.dtypes), ("property", self.properties), ("require", self.require)):
            for value in values:
                option(name, value)
        if self.examples is not None:
            option("examples", self.examples)
        if self.seconds is not None:
            option("seconds", f"{self.seconds:g}")
        option("seed", self.seed)
        if self.block is not None:
            option("block", ",".join(map(str, self.block)))
        if self.save != DEFAULT_SAVE:
            option("save", self.save)
        if self.waivers is not None:
            option("waivers", self.waivers)
        if self.strict_waivers:
            words.append(f"{prefix}strict-waivers")
        return words

    def loading_arguments(self, prefix: str = "--") -> list[str]:
        """The options that say how a target becomes a candidate, likewise."""
        words: list[str] = []
        if self.like is not None:
            words += [f"{prefix}like", self.like]
        for name, values in (("supports", self.supports), ("lacks", self.lacks)):
            for value in values:
                words += [f"{prefix}{name}", value]
        if self.forward_only:
            words.append(f"{prefix}forward-only")
        if self.device != "cpu":
            words += [f"{prefix}device", self.device]
        if self.isolate:
            words.append(f"{prefix}isolate")
        if self.timeout is not None:
            words += [f"{prefix}timeout", f"{self.timeout:g}"]
        return words


@dataclass(frozen=True)
class Work:
    """One thing to judge: a property of a candidate in one dtype, on this many cases."""

    target: str
    candidate: Candidate
    property: str
    dtype: str
    examples: int


def plan(selection: Selection, candidates: Sequence[tuple[str, Candidate]]) -> list[Work]:
    """The work of a run, in order: candidate, dtype, property.

    Each property's examples are shared out over the candidate's selected dtypes. A candidate with
    none of these dtypes is one piece of work with no property.
    """
    from attncheck.properties.catalogue import PROPERTIES

    names = [name for name in PROPERTIES if not selection.properties or name in selection.properties]
    work = []
    for target, candidate in candidates:
        dtypes = [d for d in candidate.dtypes if not selection.dtypes or d in selection.dtypes]
        if not dtypes:
            work.append(Work(target, candidate, "", "", 0))
        for n, dtype in enumerate(dtypes):
            examples = selection.limit // len(dtypes) + (n < selection.limit % len(dtypes))
            if examples:
                work += [Work(target, candidate, name, dtype, examples) for name in names]
    return work


def words(values: Sequence[str]) -> tuple[str, ...]:
    """Repeated and comma-separated option values as one tuple: ("o,lse", "dq") is o, lse, dq."""
    return tuple(word.strip() for value in values for word in value.split(",") if word.strip())


def block_sizes(text: str | None) -> tuple[int, ...] | None:
    """ "128" or "64,128" as block sizes. Raises SelectionError."""
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise SelectionError(f"--block is {text!r}; it must be a size, or sizes separated by commas") from None
