"""What is declared of a plain callable, and what its signature shows it accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...oracle.case import Presentation
from ...oracle.formats import FORMATS
from ...oracle.profile import Conventions, Profile
from ..candidate import Known, Unsupported


class LoadError(ValueError):
    """A target that cannot become a Candidate. The message is one sentence for people."""


@dataclass(frozen=True)
class Declared:
    """What is said of a callable beside its code; everything but the name has a default.

    ``supports`` and ``lacks`` overrule what the signature shows. ``refusals`` are texts: an
    exception whose message holds one of them declines the case. ``promises`` are of PROMISES.
    """

    name: str
    supports: frozenset[str] = frozenset()
    lacks: Mapping[str, str] = field(default_factory=dict)
    forward_only: bool = False
    device: str = "cpu"
    dtypes: tuple[str, ...] = tuple(FORMATS)
    conventions: Conventions = field(default_factory=Conventions)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    known: tuple[Known, ...] = ()
    refusals: tuple[str, ...] = ()
    promises: frozenset[str] = frozenset()
    about: str = ""

    def missing(self, like: str, never: Mapping[str, str], unless: Mapping[str, str]) -> dict[str, str]:
        """The features a candidate lacks, each with its reason.

        ``never`` are those that there is no way to ask of it, ``unless`` those it lacks unless
        ``supports`` names them. Raises LoadError where ``supports`` names one of the former.
        """
        for feature in sorted(self.supports):
            if feature in never:
                raise LoadError(f"{self.name} cannot support {feature} with --like {like}: {never[feature]}")
        undeclared = {feature: reason for feature, reason in unless.items() if feature not in self.supports}
        return {**undeclared, **never, **self.lacks}


def without_pages(presentation: Presentation, like: str) -> None:
    """Raise Unsupported where a presentation asks for pages, which the convention ``like`` has not."""
    if presentation.page_size is not None:
        raise Unsupported(f"the {like} convention has no pages of keys and values")


@dataclass(frozen=True)
class Signature:
    """The keywords a callable accepts: those it ``names``, and any other where it is ``open``."""

    names: frozenset[str]
    open: bool

    def has(self, keyword: str) -> bool:
        return self.open or keyword in self.names

    def pick(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords to call with: every one it names, and through ``**kwargs`` only those that
        differ from the convention's default."""
        return {
            keyword: value
            for keyword, value in values.items()
            if keyword in self.names or (self.open and value is not defaults[keyword])
        }


def read_signature(
    function: Callable[..., Any], name: str, like: str, arrays: tuple[str, ...], keywords: Mapping[str, Any]
) -> Signature:
    """What ``function`` accepts of a convention that passes ``arrays`` by position and ``keywords`` by name.

    A callable whose signature cannot be read (builtins) counts as open. Raises LoadError where
    the convention cannot call it.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return Signature(names=frozenset(), open=True)
    passes = f"{like} passes {', '.join((*arrays, *keywords))}"
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in by_position]
    if len(positional) < len(arrays) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        has = ", ".join(p.name for p in positional) or "none"
        raise LoadError(
            f"{name} does not follow {like}: it takes {len(positional)} by position ({has}) "
            f"where {len(arrays)} are needed; {passes}"
        )
    taken = positional[: len(arrays)]
    rest = [p for p in parameters if p not in taken and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in rest:
        if p.default is p.empty and (p.name not in keywords or p.kind is p.POSITIONAL_ONLY):
            raise LoadError(
                f"{name} does not follow {like}: its parameter {p.name!r} has no default "
                f"and is not one that {like} passes by name; {passes}"
            )
    return Signature(
        names=frozenset(p.name for p in rest if p.kind is not p.POSITIONAL_ONLY and p.name in keywords),
        open=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
