"""The Python interface: judge a kernel, ask for exact answers, assert in tests of one's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.kernels.candidate import Candidate
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.profile import Conventions, Profile
from attncheck.oracle.result import Result

if TYPE_CHECKING:
    from attncheck.oracle.enclosure import Exact


@dataclass(frozen=True)
class Report:
    """What came of judging: ``document`` as written by ``--json``. ``str(report)`` is the table."""

    document: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """What `attncheck verify` would have returned: 0, 1 (violated), 2 (error) or 3 (not judged)."""
        return int(self.document["exit_code"])

    @property
    def passed(self) -> bool:
        """Every property that was judged holds, and something was judged."""
        return self.exit_code == 0

    def __str__(self) -> str:
        from attncheck.report import render

        return render(self.document)


def verify(
    candidate: Candidate | Callable[..., Any] | str,
    *,
    like: str | None = None,
    name: str | None = None,
    supports: Iterable[str] = (),
    lacks: Iterable[str] = (),
    forward_only: bool = False,
    device: str = "cpu",
    conventions: Conventions | None = None,
    profiles: Mapping[str, Profile] | None = None,
    dtypes: Iterable[str] = (),
    properties: Iterable[str] = (),
    examples: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    block: int | tuple[int, ...] | None = None,
    require: Iterable[str] = (),
    save: str | None = None,
    waivers: str | None = None,
    strict_waivers: bool = False,
) -> Report:
    """Judge a kernel in this process; the parameters are the options of `attncheck verify`.

    ``candidate`` is a Candidate, a TARGET as on the command line, or a callable that follows the
    calling convention ``like``. ``conventions`` and ``profiles`` (by dtype) declare what differs
    from the defaults. ``save`` is the folder for failing cases (None: ``.attncheck/failures``),
    ``waivers`` the path of a waiver file.
    Raises ValueError for an option or waiver that is not accepted or a target that cannot be loaded.
    """
    from attncheck.document import build
    from attncheck.judging import judge
    from attncheck.kernels.loading import from_callable, load
    from attncheck.launching import about
    from attncheck.properties.catalogue import PROPERTIES
    from attncheck.selection import DEFAULT_SAVE, Selection, plan

    declared: dict[str, Any] = {
        "name": name,
        "supports": tuple(supports),
        "lacks": tuple(lacks),
        "forward_only": forward_only,
        "conventions": conventions,
        "profiles": profiles,
    }
    if isinstance(candidate, Candidate):
        loaded, target = candidate, candidate.name
    elif isinstance(candidate, str):
        loaded, target = load(candidate, like=like, device=device, **declared), candidate
    else:
        loaded = from_callable(candidate, like, device=device, **declared)
        target = loaded.name
    selection = Selection(
        targets=(target,),
        like=like,
        supports=declared["supports"],
        lacks=declared["lacks"],
        forward_only=forward_only,
        device=device,
        dtypes=tuple(dtypes),
        properties=tuple(properties),
        examples=examples,
        seconds=seconds,
        seed=seed,
        block=(block,) if isinstance(block, int) else block,
        require=tuple(require),
        save=DEFAULT_SAVE if save is None else save,
        waivers=waivers,
        strict_waivers=strict_waivers,
    )
    selection.check_names()
    started = time.monotonic()
    work = plan(selection, [(target, selection.waive(target, loaded))])
    rows = []
    for piece in work:
        deadline = None if seconds is None else time.monotonic() + seconds / len(work)
        rows.append(judge(piece, selection, deadline))
    titles = {key: p.title for key, p in PROPERTIES.items()}
    facts = about(selection, 1, time.monotonic() - started)
    return Report(
        build(
            rows,
            titles=titles,
            require=selection.require,
            waivers=selection.read_waivers(),
            strict_waivers=strict_waivers,
            about=facts,
        )
    )


def exact(case: Case) -> Exact:
    """The exact output, log-sum-exp and gradients of a case: each value enclosed in hi + lo ± rad."""
    from attncheck.oracle.enclosure import exact as enclose

    return enclose(case)


def assert_close(
    case: Case,
    *,
    o: Any = None,
    lse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dbias: Any = None,
    profile: Profile | None = None,
    conventions: Conventions | None = None,
) -> None:
    """Assert that a kernel's outputs for ``case`` are as exact as its arithmetic allows.

    Outputs are arrays or CPU tensors in the shapes of Result; those that are None are not looked
    at. ``profile`` and ``conventions`` declare what differs from the defaults. Raises
    AssertionError with one sentence that names the worst element and its bound, ValueError where
    nothing was given or nothing could be judged.
    """
    from attncheck.document import JUDGED_BY
    from attncheck.properties.catalogue import PROPERTIES
    from attncheck.properties.verdict import Outcome

    given = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias}
    given = {name: _array(value) for name, value in given.items() if value is not None}
    if not given:
        raise ValueError("no output is given; give at least one of o, lse, dq, dk, dv, dbias")
    result = Result(**given)
    candidate = Candidate(
        name="the given outputs",
        run=lambda case, presentation, want: result,
        offers=frozenset(given),
        conventions=conventions or Conventions(),
        profiles={} if profile is None else {case.dtype: profile},
    )
    for name in given:
        verdict = PROPERTIES[JUDGED_BY[name]].judge(candidate, case, Presentation())
        if verdict.outcome is Outcome.VIOLATED:
            raise AssertionError(verdict.sentence)
        if verdict.outcome is not Outcome.HOLDS:
            raise ValueError(f"{name} was not judged: {verdict.sentence}")


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        from attncheck.kernels.adapters.tensors import to_array

        return to_array(value)
    return np.asarray(value)
