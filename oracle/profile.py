"""What a candidate declares of itself: its precision profile and its conventions."""

from __future__ import annotations

from dataclasses import dataclass

from .formats import FORMATS, format_of


@dataclass(frozen=True)
class Profile:
    """The arithmetic a kernel declares; the bounds are derived from it.

    ``storage``      format of q, k, v, o and their gradients.
    ``u``            unit roundoff of the accumulator (2^-24 float32, 2^-23 where it truncates).
    ``u_in``         rounding of matmul operands on the way in (tf32 2^-11; 0 otherwise).
    ``u_p``          rounding of P and dS before their matmul (the storage unit where they are
                     stored in it; 0 where they stay in the accumulator's type). The row sum is that
                     of P before it is rounded.
    ``u_exp``        relative error of exp, of log and of the divisions by the row sum and by dropout's
                     1 - p, each; exp(0) is 1.
    ``u_tanh``       error of tanh: relative, or absolute where ``tanh_is_absolute``.
    ``lse``          format in which the log-sum-exp is stored.
    ``tiny``         below this a stored value may flush or lose digits.
    ``u_prescale``   rounding of q and k pre-multiplied by the scale or its root, together (0: scaled
                     after the product).
    ``u_bias``       rounding of the bias by the kernel or its adapter.
    ``chain``        None: sums may run in any order, error n u. A block length b: at most b + n / b
                     roundings in a chain. 0: pairwise, log2 n.
    ``key_block``    fewest keys that are taken in one step of the online softmax (the last step of
                     a row may be shorter); each further step that raises the maximum rescales what
                     was summed so far.
    ``grads_in_storage``  None, or (query block, key block): dQ is accumulated in the storage format
                     after each key block, dK and dV after each query block and query head.
    ``ds_scaled_first``   dS is multiplied by the scale before it is rounded.
    """

    storage: str
    u: float
    u_in: float = 0.0
    u_p: float = 0.0
    u_exp: float = 0.0
    u_tanh: float = 0.0
    tanh_is_absolute: bool = False
    lse: str = "float32"
    tiny: float = 0.0
    u_prescale: float = 0.0
    u_bias: float = 0.0
    chain: int | None = None
    key_block: int = 1
    grads_in_storage: tuple[int, int] | None = None
    ds_scaled_first: bool = False

    @property
    def accumulator(self) -> str:
        """The format sums run in, read off ``u``."""
        return "float64" if self.u < FORMATS["float32"].unit / 4 else "float32"


def default_profile(dtype: str) -> Profile:
    """What is assumed of a kernel that declares nothing: sums in float32 (float64 for float64),
    P and dS rounded to storage, exp, division and tanh good to four units."""
    storage = format_of(dtype)
    wide = FORMATS["float64" if dtype == "float64" else "float32"]
    return Profile(
        storage=dtype,
        u=wide.unit,
        u_p=storage.unit,
        u_exp=4 * wide.unit,
        u_tanh=4 * wide.unit,
        lse=wide.name,
        # float16 keeps its subnormals unless a kernel says that it flushes them
        tiny=2.0**-24 if dtype == "float16" else storage.tiny,
    )


EMPTY_ROWS: tuple[str, ...] = ("zero", "nan", "mean", "rejects")
EMPTY_LSE: tuple[str, ...] = ("-inf", "+inf", "nan", "0")
LSE_BASES: tuple[str, ...] = ("e", "2")


@dataclass(frozen=True)
class Conventions:
    """Where kernels rightly differ. Declared where they differ from the defaults; judged as declared.

    ``empty_row``  output of a row that sees no key: "zero", "nan", "mean" (of V over the keys that
                   are not padding) or "rejects". Gradients through such a row are 0 either way,
                   except under "nan" and "mean", where they are not judged.
    ``empty_lse``  log-sum-exp of such a row.
    ``lse_base``   "e" or "2".
    """

    empty_row: str = "zero"
    empty_lse: str = "-inf"
    lse_base: str = "e"

    def __post_init__(self) -> None:
        for name, accepted in (("empty_row", EMPTY_ROWS), ("empty_lse", EMPTY_LSE), ("lse_base", LSE_BASES)):
            value = getattr(self, name)
            if value not in accepted:
                raise ValueError(f"{name} is {value!r}; accepted are {', '.join(map(repr, accepted))}")
