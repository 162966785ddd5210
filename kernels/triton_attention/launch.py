"""Launching the kernels: arguments by name, tiles, grids, and where outputs are put."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from .backward import backward_kv, backward_q
from .bias_gradient import backward_bias
from .decode import decode, merge
from .forward import forward
from .problem import DTYPES, FULL, IN_INTERPRETER, Problem
from .tiles import Split, Tile, padded, split_of, target_named, tile

KERNELS: dict[str, Any] = {
    "forward": forward,
    "decode": decode,
    "merge": merge,
    "backward_q": backward_q,
    "backward_kv": backward_kv,
    "backward_bias": backward_bias,
}


@cache
def parameters(kernel: str) -> tuple[str, ...]:
    """The names of a kernel's parameters."""
    return tuple(inspect.signature(KERNELS[kernel].fn).parameters)


@cache
def target_of(device: torch.device) -> str:
    """The entry of the tile table for a device."""
    if IN_INTERPRETER:
        return "interpreter"
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return target_named(facts.gcnArchName.partition(":")[0])
    return target_named(f"sm_{facts.major}{facts.minor}")


def run_forward(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """O as a view [B, Hq, Sq, Dv] (packed: [1, Hq, T, Dv]) and the log-sum-exp [B, Hq, Sq] ([1, Hq, T])."""
    split = split_of(target_of(p.q.device))
    known = p.ragged[0] == FULL  # else entries of few rows are told from the others on the device
    o = _new(p, p.q, p.v.shape[3], zero=not known)
    lse = torch.full(p.q.shape[:3], -torch.inf, dtype=torch.float32, device=p.q.device)
    if p.q_size > split.rows:
        chosen = _tile(p, "forward")
        values = {"SHORT": 0 if known else split.rows}
        _launch(p, "forward", chosen, _row_tiles(p, chosen), {"o": o, "lse": lse}, values)
    if p.q_size <= split.rows or not known:
        _decode(p, split, o, lse)
    return o, lse


def _decode(p: Problem, split: Split, o: torch.Tensor, lse: torch.Tensor) -> None:
    """The rows of batch entries that have at most ``split.rows`` of them."""
    heads, group = p.q.shape[1], p.q.shape[1] // p.k.shape[1]
    rows, splits = min(p.q_size, split.rows), max(1, -(-p.k_size // split.keys))
    shape, device = (p.batches, heads, rows, splits), p.q.device
    tensors = {
        "parts": torch.empty((*shape, p.v.shape[3]), dtype=torch.float32, device=device),
        "sums": torch.zeros(shape, dtype=torch.float32, device=device),
        "tops": torch.empty(shape, dtype=torch.float32, device=device),
        "o": o,
        "lse": lse,
    }
    chosen = _tile(p, "decode")
    values = {"splits": splits, "row_limit": rows, "KEYS": split.keys}
    _launch(p, "decode", chosen, -(-group * rows // chosen.m), tensors, values)
    _launch(p, "merge", _tile(p, "merge"), rows, tensors, values)


def run_backward(
    p: Problem,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    with_bias: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dQ, dK, dV as views like q, k, v, and dbias like the bias where ``with_bias``.

    ``do`` (any strides) and ``dlse`` are upstream gradients of what run_forward returned.
    """
    dq, dk, dv = (_new(p, x, x.shape[3], zero=p.packed) for x in (p.q, p.k, p.v))
    delta = torch.empty_like(lse)
    tensors = {"o": o, "lse": lse, "do": do, "delta": delta, "dq": dq, "dk": dk, "dv": dv}
    if dlse is not None:
        tensors["dlse"] = dlse
    chosen = _tile(p, "backward_q")
    _launch(p, "backward_q", chosen, _row_tiles(p, chosen), tensors)
    chosen = _tile(p, "backward_kv")
    _launch(p, "backward_kv", chosen, -(-p.k_size // chosen.n), tensors)
    if not with_bias or p.bias is None:
        return dq, dk, dv, None
    tensors["dbias"] = torch.empty(p.bias.shape, dtype=p.bias.dtype, device=p.bias.device)
    _launch(p, "backward_bias", _tile(p, "backward_bias"), 0, tensors)
    return dq, dk, dv, tensors["dbias"]


def _tile(p: Problem, kernel: str) -> Tile:
    target = target_of(p.q.device)
    if p.precision != "ieee" and target.startswith("gfx"):
        raise ValueError(f"precision is {p.precision!r}; on AMD GPUs it must be 'ieee'")
    featured = any(x is not None for x in (p.mask, p.bias, p.slopes, p.softcap))
    return tile(kernel, target, DTYPES[p.q.dtype], p.q.shape[3], p.v.shape[3], featured=featured)


def _row_tiles(p: Problem, chosen: Tile) -> int:
    return -(-p.q_size // chosen.m)


def _new(p: Problem, like: torch.Tensor, width: int, *, zero: bool) -> torch.Tensor:
    """An output of the batch, heads and rows of ``like``, laid out in the caller's order of axes; ``zero`` where
    it has rows that no program owns, as those past the last packed sequence."""
    b, h, s, _ = like.shape
    new = torch.zeros if zero else torch.empty
    if p.order == "bhsd":
        return new((b, h, s, width), dtype=like.dtype, device=like.device)
    return new((b, s, h, width), dtype=like.dtype, device=like.device).transpose(1, 2)


def _launch(
    p: Problem,
    kernel: str,
    chosen: Tile,
    tiles: int,
    tensors: Mapping[str, torch.Tensor],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Run a kernel over ``tiles`` tiles per head and batch entry (bias gradient: over the stored bias), ``more``
    being values of its own."""
    values = _values(p, chosen, tensors) | dict(more or {})
    if kernel == "backward_bias":
        dbias = tensors["dbias"]
        values["row_tiles"] = -(-dbias.shape[2] // chosen.m)
        values["key_tiles"] = -(-dbias.shape[3] // chosen.n)
        programs = dbias.shape[0] * dbias.shape[1] * values["row_tiles"] * values["key_tiles"]
    else:
        values["tiles"] = tiles
        programs = tiles * p.batches * (p.k if kernel in ("backward_kv", "decode") else p.q).shape[1]
        programs *= values["splits"] if kernel == "decode" else 1
    if programs == 0:
        return
    if programs >= 2**31:
        raise ValueError(f"the call needs {programs} programs of the {kernel} kernel; a launch has at most {2**31 - 1}")
    arguments = {name: values[name] for name in parameters(kernel)}
    with torch.cuda.device(p.q.device) if p.q.is_cuda else contextlib.nullcontext():
        KERNELS[kernel][(programs,)](**arguments, num_warps=chosen.warps, num_stages=chosen.stages)


def _values(p: Problem, chosen: Tile, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Every argument of every kernel, by parameter name. Pointers nobody reads are q's."""
    d, dv = p.q.shape[3], p.v.shape[3]
    left, right = p.window
    if p.causal is not None:
        right = 0  # a window's right side is at least 0
    furthest = p.q_size + p.k_size
    ragged_q, ragged_k = p.ragged
    values: dict[str, Any] = {
        "batches": p.batches,
        "heads": p.q.shape[1],
        "group": p.q.shape[1] // p.k.shape[1],
        "q_size": p.q_size,
        "k_size": p.k_size,
        "page_size": p.k.shape[2],
        "d_size": d,
        "dv_size": dv,
        "factor": p.factor,
        "cap": p.cap,
        "scale": p.scale,
        "left": 0 if left is None else min(left, furthest),
        "right": 0 if right is None else min(right, furthest),
        "HAS_MASK": p.mask is not None,
        "HAS_BIAS": p.bias is not None,
        "HAS_SLOPES": p.slopes is not None,
        "HAS_CAP": p.softcap is not None,
        "HAS_DLSE": "dlse" in tensors,
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
        "TOP_LEFT": p.causal == "top-left",
        "PAGED": p.pages is not None,
        "RAGGED_Q": ragged_q,
        "RAGGED_K": ragged_k,
        "EVEN_Q": ragged_q == FULL and p.q_size % chosen.m == 0,
        "EVEN_K": ragged_k == FULL and p.k_size % chosen.n == 0,
        "EVEN_D": d == padded(d),
        "EVEN_DV": dv == padded(dv),
        "M": chosen.m,
        "N": chosen.n,
        "D": padded(d),
        "DV": padded(dv),
        "CHUNK": chosen.channels(d, dv),
        "PRECISION": p.precision if p.q.dtype == torch.float32 else "ieee",
        "BFLOAT16_BY_HAND": IN_INTERPRETER and p.q.dtype == torch.bfloat16,
        "slopes": p.q if p.slopes is None else p.slopes,
        "q_ranges": p.q if p.q_ranges is None else p.q_ranges,
        "k_ranges": p.q if p.k_ranges is None else p.k_ranges,
        "pages": p.q if p.pages is None else p.pages,
        "pages_b": 0 if p.pages is None else p.pages.stride(0),
    }
    values["slopes_b"], values["slopes_h"] = (0, 0) if p.slopes is None else _strides(p.slopes)
    for name, x in {"q": p.q, "k": p.k, "v": p.v, **tensors}.items():
        values[name] = x
        if x.ndim == 4:
            steps = _strides(x)
            # packed sequences lie along the row axis
            values |= dict(
                zip((f"{name}_{axis}" for axis in "bhsd"), (0, *steps[1:]) if p.packed else steps, strict=True)
            )
    if "lse" in tensors:
        values["lse_b"], values["lse_h"] = (0 if p.packed else tensors["lse"].stride(0)), tensors["lse"].stride(1)
    dlse = tensors.get("dlse")
    values["dlse"] = p.q if dlse is None else dlse
    steps = (0, 0, 0) if dlse is None else _strides(dlse)
    values |= {"dlse_b": 0 if p.packed else steps[0], "dlse_h": steps[1], "dlse_s": steps[2]}
    for name, y in (("mask", p.mask), ("bias", p.bias), ("dbias", tensors.get("dbias"))):
        steps = (0, 0, 0, 0) if y is None else _strides(y)
        values |= dict(zip((f"{name}_{axis}" for axis in "bhij"), steps, strict=True))
    values["mask"] = p.q if p.mask is None else p.mask.view(torch.uint8)
    values["bias"] = p.q if p.bias is None else p.bias
    if p.bias is not None:
        values |= {
            "bias_batches": p.bias.shape[0],
            "bias_heads": p.bias.shape[1],
            "SUM_ROWS": p.bias.shape[2] == 1,
            "SUM_KEYS": p.bias.shape[3] == 1,
        }
    return values


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides in elements, 0 on axes of size 1: such an axis broadcasts wherever it may."""
    return tuple(0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True))
