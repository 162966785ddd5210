"""Property-based verification and an exact reference oracle for attention kernels.

Importing this package is light: numpy, torch, Hypothesis and the oracle load when they are used.

>>> import attncheck
>>> report = attncheck.verify(my_attention, like="sdpa")      # doctest: +SKIP
>>> assert report.passed, str(report)                         # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Report, assert_close, exact, verify
    from .kernels.candidate import Candidate, Known, Unsupported
    from .oracle.case import Case, CaseError, Presentation
    from .oracle.profile import Conventions, Profile
    from .oracle.result import Result

__version__ = "0.1.0"

#: public name -> the module that defines it
_HOMES = {
    "Case": "oracle.case",
    "CaseError": "oracle.case",
    "Presentation": "oracle.case",
    "Candidate": "kernels.candidate",
    "Known": "kernels.candidate",
    "Unsupported": "kernels.candidate",
    "Profile": "oracle.profile",
    "Conventions": "oracle.profile",
    "Result": "oracle.result",
    "Report": "api",
    "assert_close": "api",
    "exact": "api",
    "verify": "api",
}

__all__ = [
    "Candidate",
    "Case",
    "CaseError",
    "Conventions",
    "Known",
    "Presentation",
    "Profile",
    "Report",
    "Result",
    "Unsupported",
    "__version__",
    "assert_close",
    "exact",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'attncheck' has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
