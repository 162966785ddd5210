"""Adapters: one per calling convention. Each puts a Case to a plain callable and reads its Result.

They import no oracle answers and own their mask code; torch is imported when a candidate runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..candidate import Candidate
from . import case_function, flash_attn, kv_cache, numpy_arrays, sdpa
from .declared import Declared, LoadError

__all__ = ["CONVENTIONS", "Declared", "LoadError", "known_convention", "wrap"]

#: convention -> the adapter's wrap(function, declared) -> Candidate
CONVENTIONS: dict[str, Callable[[Callable[..., Any], Declared], Candidate]] = {
    "sdpa": sdpa.wrap,
    "flash_attn": flash_attn.wrap,
    "flash_attn_varlen": flash_attn.wrap_varlen,
    kv_cache.LIKE: kv_cache.wrap,
    "numpy": numpy_arrays.wrap,
    "case": case_function.wrap,
}


def wrap(function: Callable[..., Any], like: str, declared: Declared) -> Candidate:
    """The callable as a Candidate that follows the calling convention ``like``.

    Raises LoadError for an unknown convention or a signature that does not fit it.
    """
    known_convention(like)
    return CONVENTIONS[like](function, declared)


def known_convention(like: str) -> None:
    """Raise LoadError where ``like`` is none of CONVENTIONS."""
    if like not in CONVENTIONS:
        raise LoadError(f"--like is {like!r}; known conventions are {', '.join(CONVENTIONS)}")
