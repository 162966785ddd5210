"""What the backward pass owes whatever its exact values are: linearity in V and dO, sums that are 0, dropout."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..kernels.candidate import Candidate
from ..oracle.case import Case, Presentation
from ..oracle.formats import format_of
from ..oracle.visibility import kept, visible
from . import runs, transform
from .asking import FORWARD
from .compare import Array, Claim, Side, agree, call, same, to
from .metamorphic_forward import unsuitable, vacuous
from .verdict import Outcome, Verdict, first_or_worst

#: the power of two that V and dO are multiplied by
FACTOR = 16.0

#: gradients that grow with V and with dO
GROW_WITH_V = ("dq", "dk", "dbias", "dsink")
GROW_WITH_DO = (*GROW_WITH_V, "dv")


def scaled_v(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """V (and dlse) times 16 multiply O and all gradients but dV by 16, and leave LSE and dV alone.

    A power of two rounds nothing, so a kernel that repeats its bits owes this to the bit, away from
    overflow and underflow. A kernel that does not promise to is held to its bounds.
    """
    return _scaled(candidate, case, presentation, ("v", "dlse"), ("o", *GROW_WITH_V))


def scaled_do(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """dO (and dlse) times 16 multiply all gradients by 16, and leave O and LSE alone; exact as for V."""
    if case.do is None:
        return vacuous("the case has no dO")
    return _scaled(candidate, case, presentation, ("do", "dlse"), GROW_WITH_DO)


def _scaled(
    candidate: Candidate, case: Case, presentation: Presentation, names: tuple[str, ...], grow: tuple[str, ...]
) -> Verdict:
    scaled = transform.times(case, FACTOR, names)
    if scaled is None:
        return vacuous(f"{FACTOR:.0f} times {names[0]} passes the range of the format")
    a = call(candidate, case, presentation)
    if isinstance(a, Verdict):
        return a
    b = call(candidate, scaled, presentation)
    if isinstance(b, Verdict):
        return b
    claims = (_grown(x, a, b, FACTOR if x in grow else 1.0) for x in a.arrays)
    return agree(f"{names[0]} times {FACTOR:.0f}", claims, f"{FACTOR:.0f} times or once what it was is")


def _grown(output: str, a: Side, b: Side, factor: float) -> Claim:
    """Exact where nothing that is summed can underflow, else within both bounds."""
    claim = same(output, a, b, factor=factor)

    def allowed() -> tuple[Array, Array]:
        most, nothing = claim.allowed()
        # below this one of the two may be rounded as a subnormal number
        small = np.maximum(np.abs(claim.got), np.abs(claim.expected)) < 2 * FACTOR * _tiny(a, output)
        exact = _exact(a, output) & ~small & ~a.overflow(output) & ~b.overflow(output)
        return np.where(exact, 0.0, most), np.asarray(nothing & ~exact)

    return replace(claim, allowed=allowed)


def _tiny(side: Side, output: str) -> float:
    return max(format_of(side.arrays[output].dtype).tiny, side.candidate.profile(side.case.dtype).tiny)


def _exact(side: Side, output: str) -> Array:
    """Where multiplying by a power of two commutes with every rounding on the way to an output.

    It does in floating point unless a product underflows: of numbers that are 0 or at least ``least``
    and probabilities of at least ``least`` squared, products of a few are far from the end of the
    accumulator's range. Of the storage format's range too, unless it is float16: there O, P or dS
    stored on the way may be subnormal.
    """
    case, shape = side.case, side.arrays[output].shape
    never = np.zeros(shape, dtype=bool)
    if "repeatable" not in side.candidate.promises:
        return never
    profile = side.candidate.profile(case.dtype, side.presentation)
    least = 2.0**-12 if case.dtype != "float64" else 2.0**-100
    if output == "dsink":
        return never  # the probability of a sink may be anything
    forward = output in FORWARD
    inputs = (case.v,) if forward else (case.q, case.k, case.v, case.do, case.dlse)
    if any(x is not None and _least(x) < least for x in inputs):
        return never
    logp = runs.answer(case).logp
    assert logp is not None
    low: Array = np.asarray(np.where(visible(case), logp, 0.0) < 2 * math.log(least))
    if forward:
        rows = np.logical_not(low.any(axis=3))
        return np.broadcast_to(rows if output == "lse" else rows[..., None], shape)
    scale = 1.0 if case.scale is None else abs(case.scale)
    if low.any() or not least <= scale or (output != "dv" and not _kept_apart(side, profile.u_p)):
        return never
    if profile.grads_in_storage is not None and case.dtype == "float16":
        return never
    return ~never


def _kept_apart(side: Side, u_p: float) -> bool:
    """Whether what is stored between the passes stays among the normal numbers of the format."""
    if side.case.dtype != "float16":
        return True
    o = np.abs(side.got("o")) if "o" in side else np.zeros(1)
    return u_p == 0 and not ((o > 0) & (o < 2 * format_of("float16").tiny)).any()


def _least(x: Array) -> float:
    wide = np.abs(x.astype(np.float64))
    return float(wide[wide > 0].min(initial=np.inf))


def zero_do(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """With dO = 0 every gradient is exactly 0. Not with dlse."""
    outside = unsuitable(case, "dlse")
    if outside is not None:
        return outside
    if case.do is None:
        return vacuous("the case has no dO")
    side = call(candidate, replace(case, do=np.zeros_like(case.do)), presentation)
    if isinstance(side, Verdict):
        return side

    def claim(output: str) -> Claim:
        return replace(
            to(output, side, 0.0),
            allowed=lambda: (np.zeros(side.arrays[output].shape), side.overflow(output)),
        )

    return agree("dO = 0", [claim(x) for x in side.arrays if x not in FORWARD], "wanted exactly")


def ds_sum(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """dS, seen through a bias of every pair's own, sums to 0 over the keys of each row. Not with dlse or sinks."""
    outside = unsuitable(case, "dlse", "sinks")
    if outside is not None:
        return outside
    return _sums_to_zero(candidate, transform.in_full(case), presentation, "dbias", 3, "dS summed over the keys")


def dk_sum(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """dK sums to 0 over the keys: sum_j dK_j = scale sum_i q_i sum_j dS_ij. Not with dlse, sinks or softcap."""
    outside = unsuitable(case, "dlse", "sinks", "softcap")
    if outside is not None:
        return outside
    return _sums_to_zero(candidate, case, presentation, "dk", 2, "dK summed over the keys")


def _sums_to_zero(
    candidate: Candidate, case: Case, presentation: Presentation, output: str, axis: int, what: str
) -> Verdict:
    if case.do is None:
        return vacuous("the case has no dO")
    side = call(candidate, case, presentation, (output,))
    if isinstance(side, Verdict):
        return side
    got = side.got(output)
    count = got.shape[axis]
    infinite = np.isinf(got)  # right where an element may reach the end of its format, but of no use in a sum
    total = np.where(infinite, 0.0, got).sum(axis=axis, keepdims=True)

    def allowed() -> tuple[Array, Array]:
        forming = 2.0**-53 * count * np.abs(got).sum(axis=axis, keepdims=True)
        most = side.allowed(output).sum(axis=axis, keepdims=True) + forming
        nothing: Array = np.asarray(side.vacuous(output).any(axis=axis, keepdims=True))
        return most, nothing

    judged = (side.judged(output) & ~infinite).all(axis=axis, keepdims=True) & (count > 0)
    claim = Claim(output, total, np.zeros(total.shape), judged, allowed)
    return agree(what, [claim], "wanted")


# -- dropout ------------------------------------------------------------------------------------

#: the most rows or keys whose keep mask is recovered
RECOVERED = 24


def dropout_mask(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """The keep mask that the kernel applies, read off its outputs, is the given one in both passes.

    With V = identity O is z p, with dO = identity dV is its transpose, z = 1 / (1 - p) where a pair is
    kept and 0 where it is dropped. Compared with what the kernel returns without dropout, times z.
    A case without dropout is given a keep mask.
    """
    b, hq, hk, sq, sk, _, _ = case.shape
    if 0 in case.shape:
        return vacuous("there is no pair to drop")
    if case.dropout is None:
        drawn = np.random.default_rng(int(case.digest[:8], 16)).random((b, hq, sq, sk))
        case = replace(case, dropout=0.5, keep=drawn < 0.6)
    assert case.dropout is not None
    factor = np.asarray(kept(case) / (1 - case.dropout))
    forward = replace(case, v=_identity(case, (b, hk, sk)), do=None, dlse=None)
    sides = _with_and_without(candidate, forward, presentation, ("o",))
    if isinstance(sides, Verdict):
        return sides
    with_, without = sides
    n = forward.v.shape[3]
    first = agree(
        "V = identity under dropout", [_times(with_, without, "o", factor[..., :n])], "without dropout times z"
    )
    if first.outcome is Outcome.VIOLATED or case.do is None or "dv" not in candidate.offers:
        return first
    # one head of each group at a time would take a call each: only the last of a group gets dO
    rows = _identity(case, (b, hq, sq))
    others = np.arange(hq) % case.group != case.group - 1
    rows[:, others] = 0
    backward = replace(case, v=np.ones((b, hk, sk, rows.shape[3]), case.v.dtype), do=rows, dlse=None)
    sides = _with_and_without(candidate, backward, presentation, ("dv",))
    if isinstance(sides, Verdict):
        return first
    with_, without = sides
    z = factor[:, ~others, : rows.shape[3]].swapaxes(2, 3)
    second = agree("dO = identity under dropout", [_times(with_, without, "dv", z)], "without dropout times z")
    return first_or_worst([second, first])


def _identity(case: Case, shape: tuple[int, int, int]) -> Array:
    """The first columns of an identity for each [B, H], [*shape, columns]."""
    columns = min(shape[2], RECOVERED)
    return np.array(np.broadcast_to(np.eye(shape[2], columns, dtype=case.q.dtype), (*shape, columns)))


def _with_and_without(
    candidate: Candidate, case: Case, presentation: Presentation, outputs: tuple[str, ...]
) -> tuple[Side, Side] | Verdict:
    with_ = call(candidate, case, presentation, outputs)
    if isinstance(with_, Verdict):
        return with_
    without = call(candidate, replace(case, dropout=None, keep=None), presentation, outputs)
    return without if isinstance(without, Verdict) else (with_, without)


def _times(with_: Side, without: Side, output: str, z: Array) -> Claim:
    """Exactly 0 where a pair is dropped; elsewhere z times what is returned without dropout."""
    expected = np.where(z == 0, 0.0, without.got(output)) * z

    def allowed() -> tuple[Array, Array]:
        most = with_.allowed(output) + z * without.allowed(output)
        nothing: Array = np.where(z == 0, with_.overflow(output), with_.vacuous(output) | without.vacuous(output))
        return np.where(z == 0, 0.0, most), nothing

    return replace(to(output, with_, expected), allowed=allowed)
