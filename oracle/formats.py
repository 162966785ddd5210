"""Facts about the storage formats a kernel may read and write."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary floating-point storage format.

    ``unit`` is the unit roundoff 2^-p (half an ulp of 1, p the significand's bits), ``tiny`` the
    smallest normal number, ``smallest`` the smallest subnormal, ``max`` the largest finite number.
    """

    name: str
    dtype: np.dtype
    unit: float
    tiny: float
    smallest: float
    max: float


def _format(name: str, dtype: np.dtype) -> Format:
    info = ml_dtypes.finfo(dtype)
    precision = info.nmant + 1
    return Format(
        name=name,
        dtype=np.dtype(dtype),
        unit=2.0**-precision,
        tiny=float(info.tiny),
        smallest=float(info.smallest_subnormal),
        max=float(info.max),
    )


FORMATS: dict[str, Format] = {
    "float64": _format("float64", np.dtype(np.float64)),
    "float32": _format("float32", np.dtype(np.float32)),
    "float16": _format("float16", np.dtype(np.float16)),
    "bfloat16": _format("bfloat16", np.dtype(ml_dtypes.bfloat16)),
}


def format_of(dtype: object) -> Format:
    """The format of a numpy dtype, an array's ``dtype`` or a name.

    Raises ValueError naming what is accepted.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name  # type: ignore[call-overload]
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"dtype is {name}; accepted are {', '.join(FORMATS)}") from None


def to_float64(array: np.ndarray) -> np.ndarray:
    """The same numbers as float64. Exact: every format here is a subset of float64."""
    return array.astype(np.float64)
