"""Built-in triton: the kernel on a GPU where torch sees one, else in Triton's interpreter in a child process."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import numpy as np

from ...oracle.case import LAYOUTS, Case, Presentation
from ...oracle.formats import FORMATS
from ...oracle.profile import Profile
from ...oracle.result import GRADIENTS, OUTPUTS, Result
from ..candidate import Candidate, Unsupported
from ..presenting import present, unpacked
from .tiles import DTYPES, KERNELS, split_of, tile

NAME = "triton"

#: what the child's environment needs for the interpreter; one thread, as its arrays are small
INTERPRETER = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

PROMISED = frozenset({"repeatable", "batch-invariant", "strided", "padding-not-read"})

#: seconds for one case in the interpreter, of the clock: the longest drawn cases take two on a free core, and
#: the first waits until torch and triton are imported, on a busy machine for minutes
LIMIT = 600.0


def profile(dtype: str, target: str, precision: str = "ieee") -> Profile:
    """The arithmetic of the kernel for a storage dtype on a target of the tile table, or "interpreter".

    ``u``        float32 sums; tensor cores, which take the half types and tf32, cut off what they add.
    ``u_in``     tf32 keeps 10 bits after the point; Hopper's instructions cut the rest off. tf32x3 adds the
                 products of what was cut off, but the last: 2^-20.
    ``u_p``      P and dS are rounded to the half types, and stay float32 otherwise.
    ``u_exp``    ex2.approx and div.full are good to 2 units in the last place, so to 4 u each. (numpy's
                 exp2 and division in the interpreter are within 2 u.)
    ``u_tanh``   12 u: e^2x to 6 u and its sum with 1, of which 3/4 reach tanh where the polynomial ends;
                 the division, 4 u; the difference, 1 u; and the cap in base 2 with its product, 2 u.
    ``u_bias``   a bias is multiplied by log2 e: that constant and the product cost 1.25 u more.
    ``tiny``     float16 keeps its subnormals. ex2.approx.ftz flushes those of float32 to 0.
    """
    wide, storage = FORMATS["float32"], FORMATS[dtype]
    narrow = dtype != "float32"
    tensor_cores = target != "interpreter" and (narrow or precision != "ieee")
    u_in = 0.0 if narrow or target == "interpreter" else {"ieee": 0.0, "tf32": 2.0**-10, "tf32x3": 2.0**-20}[precision]
    # wider heads take smaller tiles
    keys = min(
        tile(kernel, target, dtype, d, d, featured=featured).n
        for kernel in ("forward", "decode")
        for d in (64, 128, 256)
        for featured in (False, True)
    )
    return Profile(
        storage=dtype,
        u=2 * wide.unit if tensor_cores else wide.unit,
        u_in=u_in,
        u_p=storage.unit if narrow else 0.0,
        u_exp=4 * wide.unit,
        u_tanh=12 * wide.unit,
        lse="float32",
        tiny=2.0**-24 if dtype == "float16" else storage.tiny,
        u_bias=1.25 * wide.unit,
        key_block=keys,
    )


def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
    """The kernel on a case, on the GPU or in the interpreter that this process has."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with np.errstate(all="ignore"):  # the interpreter computes in numpy; overflow is part of the arithmetic
        return _run(case, presentation, want, device)


def _run(case: Case, presentation: Presentation, want: frozenset[str], device: str) -> Result:
    import torch

    from ..adapters.tensors import nan_in_fresh_memory, place, same_bits, to_array, to_tensor
    from .functional import attention, packed_attention

    laid = present(case, presentation)
    given, whole = {}, {}  # the tensors, and the memory that each is a view of
    for name in ("q", "k", "v", "do"):
        if (array := getattr(laid, name)) is not None:
            given[name], whole[name] = place(array, device)
    for name, array in (("dlse", laid.dlse), *((n, getattr(case, n)) for n in ("alibi_slopes", "mask", "bias"))):
        if array is not None:
            given[name] = whole[name] = to_tensor(array, device)
    saved = {name: x.clone() for name, x in whole.items()}
    backward = not want.isdisjoint(GRADIENTS)
    leaves = [name for name in ("q", "k", "v", "bias") if name in given] if backward else []
    for name in leaves:
        given[name].requires_grad_()
    keywords: dict[str, Any] = {"scale": case.scale, "softcap": case.softcap}
    keywords |= {name: given.get(name) for name in ("alibi_slopes", "mask", "bias")}
    function: Any = attention
    if laid.q_starts is not None and laid.k_starts is not None:
        if case.mask is not None or case.bias is not None:
            raise Unsupported("a packed batch has no mask or bias")
        function = packed_attention
        keywords = {name: x for name, x in keywords.items() if name not in ("mask", "bias")}
        keywords |= {"q_starts": to_tensor(laid.q_starts, device), "k_starts": to_tensor(laid.k_starts, device)}
        keywords |= {"q_size": max(case.q_length, default=0), "k_size": max(case.k_length, default=0)}
    else:
        for axis, lengths in (("q_lengths", case.q_lengths), ("k_lengths", case.k_lengths)):
            if lengths is not None:
                keywords[axis] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if presentation.route == "mask" and (case.causal or case.window) and not presentation.packed:
        band = to_tensor(_band(case), device)
        keywords["mask"] = band if case.mask is None else band & given["mask"]
        if case.alibi_slopes is not None and case.causal == "top-left":
            keywords["causal"] = case.causal  # slopes are aligned by it; hiding the same keys twice changes nothing
    else:
        keywords |= {"causal": case.causal, "window": case.window}
    with nan_in_fresh_memory(presentation.poison is not None):
        try:
            o, lse = function(given["q"], given["k"], given["v"], **keywords)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        found: dict[str, Any] = {"o": o, "lse": lse}
        if backward:
            outputs, upstream = [o], [given["do"]]
            if case.dlse is not None:
                outputs, upstream = [o, lse], [given["do"], given["dlse"]]
            gradients = torch.autograd.grad(outputs, [given[name] for name in leaves], upstream, allow_unused=True)
            found |= {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
        if device == "cuda":
            torch.cuda.synchronize()
    mutated = tuple(name for name, x in whole.items() if not same_bits(x, saved[name]))
    arrays = {name: None if x is None else to_array(x) for name, x in found.items()}
    for name, x in arrays.items():
        at, size = (laid.k_starts, case.k.shape[2]) if name in ("dk", "dv") else (laid.q_starts, case.q.shape[2])
        if x is not None and at is not None:
            arrays[name] = unpacked(x, at, size)
    return Result(**arrays, mutated=mutated)


def _band(case: Case) -> np.ndarray:
    """causal and window as an explicit mask [B, 1, Sq, Sk], True where a row sees a key."""
    b, _, _, sq, sk, _, _ = case.shape
    ahead = np.arange(sk)[None, :] - np.arange(sq)[:, None]
    left, right = case.window or (None, None)
    seen = np.ones((b, 1, sq, sk), dtype=bool)
    for entry, (rows, keys) in enumerate(zip(case.q_length, case.k_length, strict=True)):
        ahead_of_diagonal = ahead - (0 if case.causal == "top-left" else keys - rows)
        if case.causal is not None:
            seen[entry, 0] &= ahead_of_diagonal <= 0
        if left is not None:
            seen[entry, 0] &= ahead_of_diagonal >= -left
        if right is not None:
            seen[entry, 0] &= ahead_of_diagonal <= right
    return seen


def _candidate(target: str, about: str, device: str) -> Candidate:
    # the tiles that small drawn cases meet
    tiles, split = [tile(kernel, target, "float16", 16, 16) for kernel in KERNELS], split_of(target)
    return Candidate(
        name=NAME,
        run=run,
        dtypes=DTYPES,
        offers=frozenset(OUTPUTS) - {"dsink"},
        lacks={"sinks": "the kernel has no sinks", "dropout": "the kernel has no dropout"},
        profiles={dtype: profile(dtype, target) for dtype in DTYPES},
        blocks=tuple(sorted({split.rows, split.keys, *(size for t in tiles for size in (t.m, t.n))})),
        takes_layouts=frozenset(LAYOUTS),
        takes_packed=True,
        # on a GPU other strides are another binary, whose sums may run in another order
        promises=PROMISED | {"layout-invariant"} if target == "interpreter" else PROMISED,
        device=device,
        about=about,
    )


def _patch_the_language_once() -> None:
    """Keep Triton's interpreter from patching its language again for each device function that a kernel calls.

    Inside a kernel it is patched already; to find that out costs a third of the time. Without these names, or
    with others, the interpreter is left as it is.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, scope = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if patch is None or scope is None or getattr(patch, "once", False):
        return

    def once(fn: Any) -> Any:
        languages = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
        done = languages and not any(tl.core.is_builtin(x.load) for x in languages)
        return scope() if done else patch(fn)

    once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = once


@cache
def interpreted() -> Candidate:
    """The kernel in this process's interpreter, for a process that was started with TRITON_INTERPRET=1."""
    import triton

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET is not 1; it must be when the process starts")
    _patch_the_language_once()
    about = f"Triton {triton.__version__}, forward and backward, in its interpreter (no GPU here)"
    return _candidate("interpreter", about, "cpu")


def on_device() -> Candidate:
    """The kernel on the GPU that torch sees."""
    import torch
    import triton

    from .launch import target_of

    device = torch.device("cuda", torch.cuda.current_device())
    about = f"Triton {triton.__version__}, forward and backward, on {torch.cuda.get_device_name(device)}"
    return _candidate(target_of(device), about, "cuda")


@cache
def find() -> Candidate:
    """The candidate for this machine. Raises ImportError where torch or triton is missing."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{package} is not installed; the extra attncheck[kernels] brings it")
    import torch

    if torch.cuda.is_available():
        return on_device()
    if os.environ.get("TRITON_INTERPRET") == "1":
        return interpreted()
    from ..isolated import isolated

    return isolated(f"{__name__}:INTERPRETED", environment=INTERPRETER, timeout=LIMIT)


def __getattr__(name: str) -> Candidate:
    # made when asked for: which it is depends on the machine, and one of them starts a process
    made = {"TRITON": find, "INTERPRETED": interpreted}.get(name)
    if made is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return made()
