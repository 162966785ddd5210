"""What the torch conventions share: exact conversion, autograd, the comparison with saved copies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ...oracle.case import Case
from ..candidate import Unsupported
from ..presenting import buffer, offset_of

if TYPE_CHECKING:
    import torch

NO_GRADIENT = "the output carries no gradient; pass --forward-only if the kernel has none"


def to_tensor(array: np.ndarray, device: str = "cpu") -> torch.Tensor:
    """A contiguous tensor with the same bits."""
    import torch

    array = np.array(array, order="C", copy=True)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """A host array with the same bits, whatever the dtype (types unknown to numpy are ml_dtypes')."""
    import torch

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):
        width = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return np.array(tensor.view(width).numpy().view(getattr(ml_dtypes, name)))
    return np.array(tensor.numpy())


def place(array: np.ndarray, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with the same bits and strides, and the whole memory that it is a view of. Both are fresh."""
    whole = to_tensor(buffer(array), device)
    size = array.dtype.itemsize
    return whole.as_strided(array.shape, [n // size for n in array.strides], offset_of(array) // size), whole


@contextmanager
def nan_in_fresh_memory(wanted: bool) -> Iterator[None]:
    """While open, where ``wanted``: torch fills memory that torch.empty and its like hand out with NaN.

    That is a service of torch's deterministic mode, which is left as it was afterwards. What has no
    deterministic algorithm warns there, and the warning is hushed.
    """
    if not wanted:
        yield
        return
    import torch
    from torch.utils import deterministic

    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=mode == (False, False) or mode[1])
        deterministic.fill_uninitialized_memory = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where both have the same shape, dtype and bits (NaN equals itself, -0 differs from 0)."""
    import torch

    a, b = a.detach(), b.detach()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def tensor_result(value: Any, what: str) -> torch.Tensor:
    """``value`` where it is a tensor. Raises TypeError otherwise."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the kernel's {what} is a {type(value).__name__}; it must be a torch.Tensor")
    return value


def output_and_lse(returned: Any, *, asked: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a kernel of flash_attn's kind returned: the output, and the log-sum-exp behind it where it was ``asked``."""
    if not isinstance(returned, (tuple, list)):
        return tensor_result(returned, "output"), None
    lse = tensor_result(returned[1], "log-sum-exp") if asked and len(returned) > 1 else None
    return tensor_result(returned[0], "output"), lse


def evaluate(
    call: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
    case: Case,
    inputs: Mapping[str, torch.Tensor | None],
    leaves: Mapping[str, torch.Tensor],
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    *,
    device: str,
    refusals: tuple[str, ...],
    poisons: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor | None], tuple[str, ...]]:
    """Run ``call`` -> (output, lse or None) and differentiate it with respect to ``leaves``.

    ``inputs``, those that there are, are compared bit for bit with copies taken before. ``do`` has the output's axes.
    ``poisons``: the memory of outputs and gradients holds NaN until it is written. Returns output,
    lse, gradient per leaf (None where autograd has none) and the names of changed inputs. Raises
    Unsupported where an exception holds one of ``refusals``.
    """
    import torch

    saved = {name: (tensor, tensor.detach().clone()) for name, tensor in inputs.items() if tensor is not None}
    gradients: dict[str, torch.Tensor | None] = {}
    try:
        with nan_in_fresh_memory(poisons):
            with torch.set_grad_enabled(bool(leaves)):
                output, lse = call()
            if leaves:
                assert do is not None, "gradients are wanted of a case without do"
                gradients = _differentiate(case, output, lse, leaves, do, dlse)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
    except Exception as error:
        if any(text in str(error) for text in refusals):
            raise Unsupported(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        raise
    mutated = tuple(name for name, (tensor, before) in saved.items() if not same_bits(tensor, before))
    return output, lse, gradients, mutated


def _differentiate(
    case: Case,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    leaves: Mapping[str, torch.Tensor],
    do: torch.Tensor,
    dlse: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    import torch

    if output.shape != do.shape:
        return dict.fromkeys(leaves)  # the wrong shape is the finding; there is nothing to differentiate
    pairs = [(output, do.to(output.dtype))]
    if dlse is not None and lse is not None and lse.shape == dlse.shape:
        pairs.append((lse, dlse.to(lse.dtype)))
    pairs = [(out, up) for out, up in pairs if out.requires_grad]
    empty = 0 in case.shape[:5]
    if not output.requires_grad and not empty:
        raise RuntimeError(NO_GRADIENT)
    if dlse is not None and len(pairs) < 2 and not empty:
        raise RuntimeError("the log-sum-exp carries no gradient; pass --lacks dlse if the kernel has none")
    found: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
    if pairs:
        outs, ups = zip(*pairs, strict=True)
        found = torch.autograd.grad(outs, tuple(leaves.values()), ups, allow_unused=True)
    gradients = dict(zip(leaves, found, strict=True))
    if empty:  # nothing depends on an axis of size 0, so an input left out of the graph has gradient 0
        gradients = {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in gradients.items()}
    return gradients
