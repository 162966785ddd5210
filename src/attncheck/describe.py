"""A case, a presentation and a candidate in words and plain data, for reports."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.kernels.candidate import Candidate
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.profile import Conventions, default_profile

if TYPE_CHECKING:
    from attncheck.properties.verdict import Worst

#: arrays with more elements than this are described, not printed
PRINTED_ELEMENTS = 24

ARRAYS = ("q", "k", "v", "do", "dlse", "alibi_slopes", "mask", "bias")
SHOWN_AS = {"do": "dO", "dlse": "dLSE", "alibi_slopes": "slopes"}


def number(value: float | None) -> float | str | None:
    """A float as JSON can hold it: non-finite ones become "inf", "-inf" or "nan"."""
    if value is None or math.isfinite(value):
        return value
    return repr(float(value))


def worst_as_data(worst: Worst | None) -> dict[str, Any] | None:
    if worst is None:
        return None
    return {
        "output": worst.output,
        "index": [int(n) for n in worst.index],
        "got": worst.got,
        "exact": worst.exact,
        "allowed": number(worst.allowed),
        "ratio": number(worst.ratio),
        "parts": [[name, number(value)] for name, value in worst.parts],
    }


def candidate_as_data(target: str, candidate: Candidate) -> dict[str, Any]:
    """What a candidate is and declares. Conventions and profiles only where they differ from the default."""
    standard = asdict(Conventions())
    profiles = {}
    for dtype in candidate.dtypes:
        default = asdict(default_profile(dtype))
        declared = {k: v for k, v in asdict(candidate.profile(dtype)).items() if v != default[k]}
        if declared:
            profiles[dtype] = declared
    return {
        "name": candidate.name,
        "target": target,
        "convention": candidate.convention,
        "device": candidate.device,
        "about": candidate.about,
        "dtypes": list(candidate.dtypes),
        "offers": sorted(candidate.offers),
        "lacks": dict(candidate.lacks),
        "conventions": {k: v for k, v in asdict(candidate.conventions).items() if v != standard[k]},
        "profiles": profiles,
    }


def case_as_data(case: Case, presentation: Presentation) -> dict[str, Any]:
    """A case for people: ``summary`` in words and ``arrays`` as text, by name. The fixture has the bits."""
    return {
        "summary": ", ".join(_words(case, presentation)),
        "digest": case.digest,
        "arrays": {
            SHOWN_AS.get(name, name): _array_text(getattr(case, name))
            for name in ARRAYS
            if getattr(case, name) is not None
        },
    }


def _words(case: Case, presentation: Presentation) -> list[str]:
    b, hq, hk, sq, sk, d, dv = case.shape
    said = []
    if b != 1:
        said.append(f"batch {b}")
    if hq != 1:
        said.append(f"{hq} heads" if hq == hk else f"{hq} query heads over {_count(hk, 'key head')}")
    said += [_count(sq, "query", "queries"), _count(sk, "key")]
    said.append(f"D {d}" if d == dv else f"D {d}, Dv {dv}")
    said.append(case.dtype)
    said.append("scale 1/sqrt(D)" if case.scale is None else f"scale {case.scale:.9g}")
    if case.softcap is not None:
        said.append(f"softcap {case.softcap:.9g}")
    if case.causal is not None:
        said.append(f"causal {case.causal}")
    if case.window is not None:
        left, right = ("any" if w is None else w for w in case.window)
        said.append(f"window {left} left {right} right")
    if case.alibi_slopes is not None:
        said.append("ALiBi")
    for name, lengths in (("query", case.q_lengths), ("key", case.k_lengths)):
        if lengths is not None:
            said.append(f"{name} lengths {' '.join(map(str, lengths))}")
    if case.mask is None and case.bias is None:
        said.append("no mask")
    if case.mask is not None:
        said.append(f"mask {list(case.mask.shape)}")
    if case.bias is not None:
        said.append(f"bias {list(case.bias.shape)} {case.bias.dtype.name}")
    if case.do is None:
        said.append("forward only")
    if presentation.route != "flags":
        said.append(f"put as a {presentation.route}")
    for name, blocks in (("query", presentation.q_blocks), ("key", presentation.k_blocks)):
        if blocks is not None:
            said.append(f"{name} blocks {' '.join(map(str, blocks))}")
    return said


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _array_text(array: np.ndarray) -> str:
    """Nested brackets in the shortest digits of the array's own dtype; leading axes of size 1 dropped to two."""
    if array.size > PRINTED_ELEMENTS:
        wide = array.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        spread = f", from {finite.min():.4g} to {finite.max():.4g}" if finite.size else ""
        return f"{array.dtype.name} {list(array.shape)}{spread}"
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    return _nested(array)


def _nested(array: np.ndarray) -> str:
    if array.ndim == 0:
        item = array[()]
        return ("1" if item else "0") if array.dtype == np.bool_ else str(item)
    return "[" + ", ".join(_nested(part) for part in array) + "]"
