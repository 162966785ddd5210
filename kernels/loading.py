"""How kernels come in: a TARGET on the command line, or a callable in Python, becomes a Candidate."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ..oracle.case import Case, Presentation
from ..oracle.features import FEATURES
from ..oracle.formats import FORMATS
from ..oracle.profile import Conventions, Profile
from ..oracle.result import GRADIENTS, Result
from .adapters import CONVENTIONS, Declared, LoadError, known_convention, wrap
from .candidate import PROMISES, Candidate

__all__ = ["BUILT_IN", "CONVENTIONS", "ENTRY_POINTS", "LoadError", "entry_points", "from_callable", "load"]

#: built-in candidate -> (module of this package, attribute), imported only when asked for
BUILT_IN: dict[str, tuple[str, str]] = {
    "numpy-blocked": ("numpy_blocked", "NUMPY_BLOCKED"),
    "torch-sdpa-math": ("torch_sdpa", "MATH"),
    "torch-sdpa-flash": ("torch_sdpa", "FLASH"),
    "triton": ("triton_attention.candidate", "TRITON"),
}

#: what comes before the name of a planted fault: zoo:B035; zoo:right has none
ZOO = "zoo:"

#: the group in which an installed package announces candidates
ENTRY_POINTS = "attncheck.candidates"


def load(
    target: str,
    *,
    like: str | None = None,
    name: str | None = None,
    supports: Iterable[str] = (),
    lacks: Iterable[str] = (),
    forward_only: bool = False,
    device: str = "cpu",
    dtypes: Iterable[str] | None = None,
    conventions: Conventions | None = None,
    profiles: Mapping[str, Profile] | None = None,
    promises: Iterable[str] = (),
) -> Candidate:
    """The Candidate that ``target`` names.

    ``target`` is a built-in name, ``zoo:`` and the id of a planted fault, ``package.module:attribute``,
    ``path/to/file.py:attribute``, or an entry point of the group ``attncheck.candidates``. The
    attribute is a Candidate, or a plain callable that follows the calling convention ``like`` (which
    a Candidate has no use for).
    ``supports`` and ``lacks`` name FEATURES and overrule what the signature or the Candidate says;
    ``promises`` names PROMISES beside those it makes; the rest is declared over it likewise.

    Raises LoadError, one sentence, for whatever cannot be loaded.
    """
    if like is not None:
        known_convention(like)
    found, run_in = _find(target)
    changes: dict[str, Any] = {
        "name": name,
        "supports": supports,
        "lacks": lacks,
        "forward_only": forward_only,
        "dtypes": dtypes,
        "conventions": conventions,
        "profiles": profiles,
        "promises": promises,
    }
    if isinstance(found, Candidate):
        if device not in ("cpu", found.device):  # cpu is also what is said where nothing is said
            raise LoadError(f"{target} is a Candidate that runs on {found.device}; --device {device} is for callables")
        candidate = _declare_over(found, **changes)
    else:
        candidate = from_callable(found, like, **{**changes, "name": name or target}, device=device)
    return candidate if run_in is None else replace(candidate, run=_importing(run_in, candidate.run))


def from_callable(
    function: Callable[..., Any],
    like: str | None,
    *,
    name: str | None = None,
    supports: Iterable[str] = (),
    lacks: Iterable[str] = (),
    forward_only: bool = False,
    device: str = "cpu",
    dtypes: Iterable[str] | None = None,
    conventions: Conventions | None = None,
    profiles: Mapping[str, Profile] | None = None,
    promises: Iterable[str] = (),
) -> Candidate:
    """A plain callable as a Candidate that follows the calling convention ``like``.

    Raises LoadError where it is not callable, the convention is missing or unknown, or the
    signature does not fit it.
    """
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if not callable(function):
        raise LoadError(f"{name} is of type {type(function).__name__}; it must be a Candidate or a callable")
    if inspect.isclass(function):
        raise LoadError(f"{name} is a class; name an instance or a function")
    if like is None:
        raise LoadError(
            f"{name} is a plain callable; say with --like which convention it follows: {', '.join(CONVENTIONS)}"
        )
    declared = Declared(
        name=name,
        supports=_features(supports, "--supports"),
        lacks=dict.fromkeys(sorted(_features(lacks, "--lacks")), "declared with --lacks"),
        forward_only=forward_only,
        device=device,
        dtypes=_dtypes(dtypes),
        conventions=conventions or Conventions(),
        profiles=profiles or {},
        promises=_promises(promises),
    )
    return wrap(function, like, declared)


def entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """The candidates that installed packages announce, by name. Imports none of them."""
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


# -- finding the object ---------------------------------------------------------------------


def _find(target: str) -> tuple[Any, Path | None]:
    """The object that ``target`` names, and the folder whose modules it may import (for files)."""
    if target in BUILT_IN:
        module, attribute = BUILT_IN[target]
        with _told(target):
            return getattr(importlib.import_module(f".{module}", __package__), attribute), None
    if target.startswith(ZOO):
        return _from_zoo(target), None
    path, colon, attribute = target.rpartition(":")
    if colon and path and attribute:
        if path.endswith(".py") or "/" in path:
            file = Path(path).expanduser().resolve()
            return _attribute(_load_file(file, path), attribute, path), file.parent
        with _told(path):
            module_found = _import_module(path)
        return _attribute(module_found, attribute, path), None
    announced = entry_points()
    if target in announced:
        with _told(target):
            return announced[target].load(), None
    if target.endswith(".py") or colon:
        raise LoadError(f"target {target!r} names no attribute; write it as path/to/file.py:attribute")
    raise LoadError(
        f"unknown target {target!r}; built in are {', '.join(BUILT_IN)}; "
        f"entry points in {ENTRY_POINTS}: {', '.join(announced) or 'none'}; "
        f"or name package.module:attribute or path/to/file.py:attribute"
    )


def _from_zoo(target: str) -> Candidate:
    """A planted fault, or the kernel that they are planted in; imported only when asked for."""
    from . import faulty

    try:
        return faulty.find(target.removeprefix(ZOO))
    except KeyError as error:
        raise LoadError(f"{target}: {error.args[0]}") from None


def _import_module(name: str) -> ModuleType:
    """A module of an installed package, or of the current folder where nothing else has the name."""
    here = str(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] or here in sys.path:
            raise
    sys.path.append(here)  # for good: the kernel may import more when it runs
    return importlib.import_module(name)


def _load_file(file: Path, shown: str) -> ModuleType:
    """Execute a file as a module of a name that no other module has."""
    if not file.is_file():
        raise LoadError(f"{shown} does not exist or is not a file")
    unique = f"attncheck_target_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(unique, file)
    if spec is None or spec.loader is None:
        raise LoadError(f"{shown} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # dataclasses and pickle look their module up
    try:
        importlib.invalidate_caches()  # the folder may have changed since Python last looked
        with _told(shown, file), _importable(file.parent):
            spec.loader.exec_module(module)
    except LoadError:
        del sys.modules[unique]
        raise
    return module


def _attribute(module: ModuleType, attribute: str, shown: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise LoadError(f"{shown} has no attribute {attribute!r}; callables there: {_callables(module)}")
        found = getattr(found, part)
    if not callable(found) and not isinstance(found, Candidate):
        raise LoadError(
            f"{shown}:{attribute} is of type {type(found).__name__}; it must be a Candidate or a callable; "
            f"callables there: {_callables(module)}"
        )
    return found


def _callables(module: ModuleType) -> str:
    """The public callables and candidates that a module defines itself."""
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (
            isinstance(value, Candidate) or (callable(value) and getattr(value, "__module__", None) == module.__name__)
        )
    ]
    return ", ".join(sorted(names)) or "none"


@contextmanager
def _told(shown: str, file: Path | None = None) -> Iterator[None]:
    """An import that fails, as one sentence with the exception and the line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        where = _line(error, file)
        raise LoadError(f"{shown} could not be imported: {type(error).__name__}: {text}{where}") from error


def _line(error: BaseException, file: Path | None) -> str:
    """Where an import failed: the last line of ``file`` itself that ran, else the last line that ran."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    machinery = ("<frozen", importlib.__file__, __file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(machinery)]
    own = [frame for frame in frames if file is not None and Path(frame.filename) == file]
    return f" ({(own or frames)[-1].filename}, line {(own or frames)[-1].lineno})" if frames else ""


# -- a file's own folder --------------------------------------------------------------------

#: modules imported from the folder of a loaded file, by folder: two files may both import a
#: sibling called common, and each must get its own
_siblings: dict[Path, dict[str, ModuleType]] = {}


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make ``folder`` importable, and give it its own siblings rather than another folder's."""
    entry = str(folder)
    own = _siblings.setdefault(folder, {})
    for other, modules in _siblings.items():
        for name, module in modules.items():
            if other != folder and sys.modules.get(name) is module:
                del sys.modules[name]
    sys.modules.update(own)
    before = set(sys.modules)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)
        if len(sys.modules) != len(before):
            for name in set(sys.modules) - before:
                origin = getattr(sys.modules[name], "__file__", None)
                if origin and Path(origin).is_relative_to(folder) and "site-packages" not in origin:
                    own[name] = sys.modules[name]


def _importing(folder: Path, run: Callable[[Case, Presentation, frozenset[str]], Result]) -> Any:
    """``run`` with ``folder`` importable, for kernels that import inside their functions."""

    def run_there(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        with _importable(folder):
            return run(case, presentation, want)

    return run_there


# -- what is declared beside the code -------------------------------------------------------


def _features(names: Iterable[str], option: str) -> frozenset[str]:
    names = tuple(names)
    for name in names:
        if name not in FEATURES:
            raise LoadError(f"{option} names {name!r}; accepted are {', '.join(FEATURES)}")
    return frozenset(names)


def _promises(names: Iterable[str]) -> frozenset[str]:
    names = frozenset(names)
    for name in sorted(names):
        if name not in PROMISES:
            raise LoadError(f"promises names {name!r}; accepted are {', '.join(PROMISES)}")
    return names


def _dtypes(dtypes: Iterable[str] | None) -> tuple[str, ...]:
    chosen = tuple(FORMATS) if dtypes is None else tuple(dtypes)
    for dtype in chosen:
        if dtype not in FORMATS:
            raise LoadError(f"dtype is {dtype!r}; accepted are {', '.join(FORMATS)}")
    return chosen


def _declare_over(
    candidate: Candidate,
    *,
    name: str | None,
    supports: Iterable[str],
    lacks: Iterable[str],
    forward_only: bool,
    dtypes: Iterable[str] | None,
    conventions: Conventions | None,
    profiles: Mapping[str, Profile] | None,
    promises: Iterable[str],
) -> Candidate:
    """A Candidate with what the caller says of it put over what it says of itself."""
    supported = _features(supports, "--supports")
    missing = {feature: reason for feature, reason in candidate.lacks.items() if feature not in supported}
    missing |= dict.fromkeys(sorted(_features(lacks, "--lacks")), "declared with --lacks")
    return replace(
        candidate,
        name=name or candidate.name,
        lacks=missing,
        offers=candidate.offers - set(GRADIENTS) if forward_only else candidate.offers,
        dtypes=candidate.dtypes if dtypes is None else _dtypes(dtypes),
        conventions=conventions or candidate.conventions,
        profiles={**candidate.profiles, **(profiles or {})},
        promises=candidate.promises | _promises(promises),
    )
