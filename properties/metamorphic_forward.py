"""What attention owes whatever its exact values are: convexity, symmetries, and ways to take it apart.

Each property changes the case in a way whose effect on the answer is known, and compares. Where a
precondition fails the verdict is vacuous and says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..kernels.candidate import Candidate
from ..oracle.case import Case, Presentation
from ..oracle.visibility import visible
from . import transform
from .compare import Array, Claim, Side, agree, any_of, call, same, to
from .judge import FORMING
from .verdict import Outcome, Verdict


def vacuous(reason: str) -> Verdict:
    return Verdict(Outcome.VACUOUS, reason)


def unsuitable(case: Case, *fields: str) -> Verdict | None:
    """Vacuous, naming the first of these fields that the case has; None where it has none."""
    names = {
        "dlse": "a gradient through the log-sum-exp",
        "sinks": "sinks",
        "dropout": "dropout",
        "softcap": "a softcap",
    }
    for name in fields:
        if getattr(case, name) is not None:
            return vacuous(f"not implied with {names[name]}")
    return None


def ones(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """With V = 1 every row that sees a key gives 1. Not with sinks or dropout, whose weights do not sum to 1."""
    outside = unsuitable(case, "sinks", "dropout")
    if outside is not None:
        return outside
    side = call(candidate, replace(case, v=np.ones_like(case.v)), presentation, ("o",))
    return side if isinstance(side, Verdict) else agree("V = 1", [to("o", side, 1.0)])


def one_key(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """A row that sees one key gives that key's value, and no gradient of Q or K.

    Not with sinks or dropout, and the gradients not with dlse. Where the case has no such row, it is
    cut down to the first key that anyone sees.
    """
    outside = unsuitable(case, "sinks", "dropout")
    if outside is not None:
        return outside
    seen = visible(case)
    if not (seen.sum(axis=3) == 1).any():
        found = np.flatnonzero(seen.any(axis=(0, 1, 2)))
        if not found.size:
            return vacuous("no row sees a key")
        case = transform.keys(case, [int(found[0])])
        seen = visible(case)
    single = seen.sum(axis=3) == 1
    if not single.any():
        return vacuous("no row sees exactly one key")
    outputs = ("o", "dq", "dk") if case.dlse is None else ("o",)
    side = call(candidate, case, presentation, outputs)
    if isinstance(side, Verdict):
        return side
    # whatever sees a key together with other keys may move it
    crowded = (seen & ~single[..., None]).any(axis=2)
    free = ~crowded.reshape(case.k.shape[0], case.k.shape[1], case.group, -1).any(axis=2)

    def claims() -> Iterator[Claim]:
        if "o" in side:
            v = np.repeat(case.v.astype(np.float64), case.group, axis=1)
            yield to("o", side, np.take_along_axis(v, seen.argmax(axis=3)[..., None], axis=2), single[..., None])
        if "dq" in side:
            yield to("dq", side, 0.0, single[..., None])
        if "dk" in side:
            yield to("dk", side, 0.0, free[..., None])

    return agree("rows that see one key", claims(), "wanted")


def hull(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """O lies between the least and the largest visible V, up to the rounding of sums. Not with dropout.

    A sink adds a value of 0. No error of the scores can leave the hull, so this is judged even where
    the scores are too large for the bound of O to say anything.
    """
    outside = unsuitable(case, "dropout")
    if outside is not None:
        return outside
    side = call(candidate, case, presentation, ("o",))
    if isinstance(side, Verdict):
        return side
    seen = visible(case)[..., None]
    v = np.repeat(case.v.astype(np.float64), case.group, axis=1)[:, :, None]
    low = np.where(seen, v, np.inf).min(axis=3, initial=np.inf)
    high = np.where(seen, v, -np.inf).max(axis=3, initial=-np.inf)
    if case.sinks is not None:
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)

    def allowed() -> tuple[Array, Array]:
        # what the weights are off by does not count: any weights stay in the hull
        parts = side.bounds["o"].parts
        rest = sum((part for name, part in parts.items() if name != "errors of the probabilities"), np.zeros(low.shape))
        return rest, side.overflow("o") | ~np.isfinite(rest)

    got, judged = side.got("o"), side.judged("o") & seen.any(axis=3)
    nearest = np.where(judged, np.clip(got, np.where(judged, low, 0.0), np.where(judged, high, 0.0)), got)
    claim = replace(to("o", side, nearest, judged), allowed=allowed)
    return agree("O in the hull of visible V", [claim], "the nearest end is")


#: a row's shift, times about 16: both signs, sizes that move the row's maximum through many rescales
SHIFTS = (1.0, -1.0, 4.0, -8.0)


def shift(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """A constant added to all scores of a row moves its LSE by that constant, and nothing else.

    Added through the bias where that is exact, else through a channel of Q that is constant in K.
    Not with sinks, which are not shifted, nor with a softcap.
    """
    outside = unsuitable(case, "sinks", "softcap")
    if outside is not None:
        return outside
    if 0 in case.shape:
        return vacuous("there is nothing to shift")
    pair = _shifted_bias(case) or _shifted_channel(case)
    if pair is None:
        return vacuous("no shift of the scores is exact in the format")
    before, after, by = pair
    through_channel = after.q is not before.q
    a = call(candidate, before, presentation)
    if isinstance(a, Verdict):
        return a
    b = call(candidate, after, presentation)
    if isinstance(b, Verdict):
        return b

    def claims() -> Iterator[Claim]:
        for output in a.arrays:
            if output == "dk" and through_channel:
                # the shifted channel of Q is what the gradient of that channel of K is made of
                claim = same(output, a, b)
                yield replace(claim, judged=claim.judged & (np.arange(case.q.shape[3]) > 0))
            else:
                yield same(output, a, b, shift=by if output == "lse" else 0.0)

    return agree("a constant added to the scores of each row", claims(), "from the unshifted scores")


def _rows(case: Case) -> Array:
    return np.resize(SHIFTS, case.q.shape[2])[:, None]


def _shifted_bias(case: Case) -> tuple[Case, Case, Array] | None:
    if case.bias is None:
        return None
    b, hq, _, sq, _, _, _ = case.shape
    wide = case.bias.astype(np.float64)
    for size in (16.0, 1.0, 64.0, 0.25):
        by = size * _rows(case) if case.bias.ndim > 1 and case.bias.shape[-2] > 1 else np.array(size)
        total = transform.exact_sum(wide, by)
        stored = None if total is None else transform.exactly(total, case.bias.dtype)
        if stored is not None:
            return case, replace(case, bias=stored), np.broadcast_to(by, (b, hq, sq, 1))[..., 0]
    return None


def _shifted_channel(case: Case) -> tuple[Case, Case, Array] | None:
    scale = case.shape[5] ** -0.5 if case.scale is None else case.scale
    if not scale:
        return None
    fmt = case.format
    size = 2.0 ** round(math.log2(16 / abs(scale)))
    if not fmt.tiny <= size <= fmt.max / 16:
        return None
    k, q = case.k.copy(), case.q.copy()
    k[..., 0] = 1
    moved = np.broadcast_to(size * _rows(case)[:, 0], q.shape[:3])
    with np.errstate(over="ignore"):
        by = scale * (moved - q[..., 0].astype(np.float64))
    if not np.isfinite(by).all():
        return None
    q[..., 0] = moved.astype(q.dtype)
    return replace(case, k=k), replace(case, k=k, q=q), by


def permutation(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Keys in reverse order, with their masks and biases: the same O, LSE and dQ, and dK and dV in that order.

    What depends on positions (causal, window, ALiBi, key lengths) is put as a mask and a bias first.
    """
    if case.k.shape[2] < 2:
        return vacuous("fewer than two keys have no other order")
    unplaced = transform.without_positions(case)
    if unplaced is None:
        return vacuous("the bias cannot hold ALiBi exactly")
    a = call(candidate, case, presentation)
    if isinstance(a, Verdict):
        return a
    b = call(candidate, transform.keys(unplaced, range(case.k.shape[2])[::-1]), presentation)
    if isinstance(b, Verdict):
        return b

    def claims() -> Iterator[Claim]:
        for output in a.arrays:
            if output in ("dk", "dv"):
                yield same(output, a, b, move=lambda x: x[:, :, ::-1])
            elif output == "dbias" and case.alibi_slopes is None and case.bias is not None:
                yield same(output, a, b, move=lambda x: x[..., ::-1])
            elif output != "dbias":
                yield same(output, a, b)

    return agree("keys in reverse order", claims(), "in their own order")


def split_merge(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Attention over two halves of the keys, merged by their log-sum-exps, is attention over all keys.

    O = w1 O1 + w2 O2 with w1 = 1 / (1 + exp(L2 - L1)), and LSE = log(exp(L1) + exp(L2)). A sink goes
    with the first half.
    """
    if case.k.shape[2] < 2:
        return vacuous("fewer than two keys cannot be split")
    unplaced = transform.without_positions(case)
    if unplaced is None:
        return vacuous("the bias cannot hold ALiBi exactly")
    forward = replace(unplaced, do=None, dlse=None)
    middle, n = case.k.shape[2] // 2, case.k.shape[2]
    halves = (transform.keys(forward, range(middle)), replace(transform.keys(forward, range(middle, n)), sinks=None))
    sides = [call(candidate, x, presentation, ("o", "lse")) for x in (replace(case, do=None, dlse=None), *halves)]
    for side in sides:
        if isinstance(side, Verdict):
            return side
    whole, left, right = (side for side in sides if isinstance(side, Side))
    if not all("o" in side and "lse" in side for side in (whole, left, right)):
        return Verdict(Outcome.DECLINED, "it offers no log-sum-exp to merge by")
    return agree("two halves of the keys merged", _merged(whole, left, right), "in one pass")


def _merged(whole: Side, left: Side, right: Side) -> Iterator[Claim]:
    """Errors e1, e2 of the log-sum-exps move w1 by at most w1 w2 (exp(e1 + e2) - 1): the logistic function
    s has s(x + d) - s(x) = s(x + d) s(-x) (1 - exp(-d)), and s(x + d) <= s(x) exp(d)."""
    lse, o, empty = [], [], []
    for side in (left, right):
        # what a row without keys returns is a convention; its weight is 0
        none = np.asarray(~visible(side.case).any(axis=3) & (side.case.sinks is None))
        empty.append(none)
        lse.append(np.where(none, -np.inf, side.got("lse")))
        o.append(np.where(none[..., None], 0.0, side.got("o")))
    with np.errstate(all="ignore"):
        total = np.logaddexp(lse[0], lse[1])
        weights = [
            np.where(none, 0.0, 1 / (1 + np.exp(other - one)))[..., None]
            for one, other, none in ((lse[0], lse[1], empty[0]), (lse[1], lse[0], empty[1]))
        ]
        merged = weights[0] * o[0] + weights[1] * o[1]

    def limits(output: str) -> list[tuple[Array, Array]]:
        return [
            (
                np.where(none if output == "lse" else none[..., None], 0.0, side.allowed(output)),
                side.vacuous(output) & ~(none if output == "lse" else none[..., None]),
            )
            for side, none in zip((left, right), empty, strict=True)
        ]

    def allowed_lse() -> tuple[Array, Array]:
        (e1, v1), (e2, v2) = limits("lse")
        size = sum(np.where(np.isfinite(x), np.abs(x), 0.0) for x in (*lse, total))
        return whole.allowed("lse") + np.maximum(e1, e2) + FORMING * (1 + size), whole.vacuous("lse") | v1 | v2

    def allowed_o() -> tuple[Array, Array]:
        (e1, l1), (e2, l2) = limits("lse")
        (b1, v1), (b2, v2) = limits("o")
        with np.errstate(all="ignore"):
            # the weights are formed from numbers as large as the log-sum-exps
            forming = FORMING * sum(np.where(np.isfinite(x), np.abs(x), 0.0) for x in (*lse, total))
            swing = (weights[0] * weights[1]) * np.expm1(e1 + e2 + forming)[..., None]
            most = whole.allowed("o") + weights[0] * b1 + weights[1] * b2
            most = most + np.where(swing > 0, swing * (np.abs(o[0] - o[1]) + b1 + b2), 0.0)
            most = most + FORMING * (weights[0] * np.abs(o[0]) + weights[1] * np.abs(o[1]))
        return most, whole.vacuous("o") | v1 | v2 | (l1 | l2)[..., None] | ~np.isfinite(most)

    for output, expected, allowed in (("o", merged, allowed_o), ("lse", total, allowed_lse)):
        yield replace(to(output, whole, expected), allowed=allowed)


def grouped_heads(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Query heads that share a key head give what they give with a copy each; dK and dV are summed.

    Where no heads are shared, all query heads are given the first key head; a single one is given company.
    """
    if case.group == 1:
        case = transform.key_heads(case, [0]) if case.k.shape[1] > 1 else transform.second_head(case)
    a = call(candidate, transform.repeated_heads(case), presentation)
    if isinstance(a, Verdict):
        return a
    b = call(candidate, case, presentation)
    if isinstance(b, Verdict):
        return b

    def summed(x: Array) -> Array:
        return x.reshape(*case.k.shape[:2], case.group, *x.shape[2:]).sum(axis=2)

    def claims() -> Iterator[Claim]:
        for output in a.arrays:
            if output in ("dk", "dv"):
                claim = same(output, a, b, move=summed)
                # an infinity may be right where an element reaches the end of its format, but not in a sum
                yield replace(claim, judged=claim.judged & ~any_of(summed, np.isinf(a.got(output))))
            else:
                yield same(output, a, b)

    return agree("heads that share a key head", claims(), "with a copy each")


def ragged(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Each entry of a ragged batch gives what it gives alone, cut to its lengths.

    A case without lengths is given key lengths that leave out the last key or two.
    """
    n = case.k.shape[2]
    if case.q.shape[0] == 0:
        return vacuous("the batch is empty")
    if case.q_lengths is None and case.k_lengths is None:
        if n < 2:
            return vacuous("fewer than two keys leave nothing to cut off")
        case = replace(case, k_lengths=tuple(max(1, n - 1 - b) for b in range(case.q.shape[0])))
    together = call(candidate, case, presentation)
    if isinstance(together, Verdict):
        return together
    claims: list[Claim] = []
    for entry in range(case.q.shape[0]):
        one = transform.alone(case, entry)
        if 0 in one.shape:
            continue
        alone = call(candidate, one, presentation)
        if isinstance(alone, Verdict):
            return alone
        claims += [_part(x, together, alone, entry) for x in together.arrays if x not in ("dbias", "dsink")]
    return agree("a sequence in a ragged batch", claims, "alone")


def _part(output: str, together: Side, alone: Side, entry: int) -> Claim:
    size = alone.arrays[output].shape[2]
    part = (slice(entry, entry + 1), slice(None), slice(0, size))
    claim = same(output, together, alone, move=lambda x: x[part])
    # printed the other way round: what is odd is the batch, not the entry by itself
    return replace(claim, got=claim.expected, expected=claim.got)


def blocks(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Other block sizes give the same answer."""
    if not candidate.takes_blocks:
        return Verdict(Outcome.DECLINED, "it takes no block sizes")
    other = replace(presentation, q_blocks=(2,), k_blocks=(3, 1))
    if (presentation.q_blocks, presentation.k_blocks) == (other.q_blocks, other.k_blocks):
        other = replace(presentation, q_blocks=None, k_blocks=None)
    a = call(candidate, case, presentation)
    if isinstance(a, Verdict):
        return a
    b = call(candidate, case, other)
    if isinstance(b, Verdict):
        return b
    return agree("other block sizes", [same(x, a, b) for x in a.arrays], "with the drawn ones")
