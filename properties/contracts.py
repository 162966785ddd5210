"""Contracts on memory and on calls: what may be read, where it lies, and that a call stands for itself.

Exactness is owed here: bit for bit where a candidate promises it (PROMISES). Where it does not, the
verdict is "declined" with the fact that was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..kernels.candidate import Candidate
from ..oracle.case import Case, Presentation
from ..oracle.visibility import visible
from . import transform
from .asking import BACKWARD, FORWARD, all_outputs
from .compare import Move, Side, agree, call, identical, same
from .metamorphic_forward import vacuous
from .verdict import Outcome, Verdict, first_or_worst

Layouts = tuple[str, str, str, str]

PLAIN: Layouts = ("contiguous", "contiguous", "contiguous", "contiguous")


def plain(presentation: Presentation) -> Presentation:
    """The presentation in contiguous memory, padded, without poison or pages."""
    return replace(presentation, layouts=PLAIN, poison=None, poison_hidden=False, page_size=None, packed=False)


def _promised(
    promise: str,
    pairs: Sequence[tuple[str, Side, Side | Verdict]],
    than: str,
    move: Move = np.asarray,
    *,
    bounded: bool = False,
) -> Verdict:
    """Whether for each (what, a, b) b's numbers are a's: a violation where ``promise`` says so, else a fact.

    ``bounded``: they must be within both bounds of each other in any case.
    """
    verdicts = []
    owed = any(promise in a.candidate.promises for _, a, _ in pairs)
    for what, a, b in pairs:
        if isinstance(b, Verdict):
            if b.outcome is Outcome.VIOLATED:
                return b if owed or bounded else _fact(promise, f"it {b.kind}")
            verdicts.append(b)
            continue
        verdicts.append(agree(what, [identical(x, a, b, move=move) for x in a.arrays if x in b], than))
        if bounded and not owed and verdicts[-1].outcome is Outcome.VIOLATED:
            loose = agree(what, [same(x, a, b, move=move) for x in a.arrays if x in b], than)
            if loose.outcome is Outcome.VIOLATED:
                return loose
    verdict = first_or_worst(verdicts)
    if owed or verdict.outcome in (Outcome.VACUOUS, Outcome.DECLINED):
        return verdict
    return _fact(promise, "the same" if verdict.outcome is Outcome.HOLDS else "not the same")


def _fact(promise: str, seen: str) -> Verdict:
    return Verdict(Outcome.DECLINED, f"it does not promise {promise}; seen: {seen}")


def twice(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Calling twice is calling once: nothing is left over from other calls, and the order of sums is fixed."""
    first = call(candidate, case, presentation)
    if isinstance(first, Verdict):
        return first
    second = call(candidate, case, presentation, again=True)
    return _promised("repeatable", [("called again", first, second)], "the first time", bounded=True)


def company(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """The last batch entry gives the same alone as in company, bit for bit where promised, else within both bounds.

    A batch of one is given company: an entry before it, of its own numbers with the channels of V reversed.
    """
    n = case.q.shape[0]
    if n == 0:
        return vacuous("the batch is empty")
    alone, together = transform.entries(case, [n - 1]), case
    if n == 1:
        together = transform.entries(case, [0, 0])
        together = replace(together, v=np.stack([case.v[0, ..., ::-1], case.v[0]]))
    a = call(candidate, together, presentation, _per_entry(candidate, together))
    if isinstance(a, Verdict):
        return a
    b = call(candidate, alone, presentation, _per_entry(candidate, alone))
    pair = ("a batch entry alone", a, b)
    return _promised("batch-invariant", [pair], "in company", lambda x: x[-1:], bounded=True)


def _per_entry(candidate: Candidate, case: Case) -> tuple[str, ...]:
    """The outputs that are not summed over the batch."""
    return tuple(x for x in all_outputs(candidate, case) if x not in ("dbias", "dsink"))


#: layouts of q, k, v and do that are compared with contiguous ones
STRIDED: tuple[Layouts, ...] = (
    ("transposed", "transposed", "transposed", "transposed"),
    ("sliced", "sliced", "sliced", "sliced"),
)


def layouts(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Transposed and sliced q, k, v and dO give what contiguous copies give; so does a dO of stride 0.

    Within both bounds where "strided" is promised, bit for bit where "layout-invariant" is. A dO of
    stride 0 is what a sum's gradient is: it is compared on a case whose dO is all ones.
    """
    if candidate.takes_layouts <= {"contiguous"}:
        return Verdict(Outcome.DECLINED, "it takes contiguous arrays only")
    asked = [(case, names) for names in STRIDED]
    if case.do is not None:
        asked.append((replace(case, do=np.ones_like(case.do)), (*PLAIN[:3], "expanded")))
    pairs: list[tuple[str, Side, Side | Verdict]] = []
    for strided, names in asked:
        a = call(candidate, strided, plain(presentation))
        if isinstance(a, Verdict):
            return a
        b = call(candidate, strided, replace(plain(presentation), layouts=_as_taken(candidate, names)))
        pairs.append((f"q, k, v and dO {names[0] if len(set(names)) == 1 else ', '.join(names)}", a, b))
    if "strided" not in candidate.promises or "layout-invariant" in candidate.promises:
        return _promised("layout-invariant", pairs, "contiguous")
    verdicts = []
    for what, a, b in pairs:
        verdicts.append(b if isinstance(b, Verdict) else agree(what, [same(x, a, b) for x in a.arrays], "contiguous"))
    return first_or_worst(verdicts)


def packed(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """A ragged batch that is packed, entry after entry without padding, gives what it gives padded.

    A case without lengths is given rows and keys that differ from entry to entry, and a batch of one is
    given company. Positions count from each sequence's own first row.
    """
    if not candidate.takes_packed:
        return Verdict(Outcome.DECLINED, "it takes no packed batches")
    if any(array is not None for array in (case.mask, case.bias, case.keep)):
        return vacuous("a mask, bias or keep of every pair keeps a batch padded")
    batch, _, _, rows, keys, _, _ = case.shape
    if 0 in (batch, rows):
        return vacuous("there are no rows")
    if batch == 1:
        case, batch = transform.entries(case, [0, 0]), 2
    if case.q_lengths is None and case.k_lengths is None and "lengths" not in candidate.lacks:
        fewer = [min(b + 1, 2) for b in range(batch)]
        case = replace(
            case,
            q_lengths=tuple(max(1, rows - n) for n in fewer),
            k_lengths=tuple(max(min(1, keys), keys - n) for n in reversed(fewer)),
        )
    before = replace(plain(presentation), route="flags")
    a = call(candidate, case, before)
    if isinstance(a, Verdict):
        return a
    b = call(candidate, case, replace(before, packed=True))
    return _promised("layout-invariant", [("a packed batch", a, b)], "padded", bounded=True)


def with_gradients(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """O and the log-sum-exp are the same, within both bounds, whether gradients are asked for or not."""
    if case.do is None or not set(BACKWARD) & candidate.offers:
        return vacuous("no gradients are asked for")
    a = call(candidate, case, presentation, FORWARD)
    if isinstance(a, Verdict):
        return a
    b = call(candidate, case, presentation, (*FORWARD, *BACKWARD))
    if isinstance(b, Verdict):
        return b
    return agree("asked for with gradients", [same(x, a, b) for x in a.arrays], "alone")


def _as_taken(candidate: Candidate, names: Layouts) -> Layouts:
    """The layouts with those that the candidate's run cannot realise put contiguous."""
    q, k, v, do = (name if name in candidate.takes_layouts else "contiguous" for name in names)
    return q, k, v, do


def padding(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """NaN in padded rows and keys changes nothing. A case without lengths is given key lengths."""
    if case.q_lengths is None and case.k_lengths is None:
        n = case.k.shape[2]
        if n < 2:
            return vacuous("fewer than two keys leave no padding")
        case = replace(case, k_lengths=tuple(max(1, n - 1 - b) for b in range(case.q.shape[0])))
    a = call(candidate, case, plain(presentation))
    if isinstance(a, Verdict):
        return a
    b = call(candidate, case, replace(plain(presentation), poison="nan"))
    return _promised("padding-not-read", [("NaN in padding", a, b)], "without")


def masked(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Other finite numbers in keys and values that no row sees leave the answer as it is, within both bounds."""
    case = _with_hidden_key(candidate, case)
    hidden = _hidden(case)
    if not hidden.any():
        return vacuous("every key is seen by some row")
    a = call(candidate, case, presentation)
    if isinstance(a, Verdict):
        return a
    b = call(candidate, _other_where(case, hidden), presentation)
    if isinstance(b, Verdict):
        return b
    return agree("other numbers in hidden keys", [same(x, a, b) for x in a.arrays], "with those of the case")


def _hidden(case: Case) -> np.ndarray:
    """Keys [B, Hk, Sk] that no row of any query head of their group sees."""
    b, hk, n, _ = case.k.shape
    return np.asarray(~visible(case).any(axis=2).reshape(b, hk, case.group, n).any(axis=2))


def _with_hidden_key(candidate: Candidate, case: Case) -> Case:
    """The case itself, or with a mask over its middle key where it has no mask and every key is seen."""
    n = case.k.shape[2]
    if n < 2 or case.mask is not None or "mask" in candidate.lacks or _hidden(case).any():
        return case
    return replace(case, mask=np.arange(n) != n // 2)


def _other_where(case: Case, hidden: np.ndarray) -> Case:
    """k and v four times as large and turned around at these keys."""
    turned = {}
    for name in ("k", "v"):
        wide = getattr(case, name).astype(np.float64)
        size = 4 * min(max(float(np.abs(wide).max()), 1.0), case.format.max / 4)
        turned[name] = np.where(hidden[..., None], size * (1 - 2.0 * (wide > 0)), wide).astype(case.q.dtype)
    return replace(case, **turned)


def masked_poison(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """NaN in keys and values that no row sees changes nothing."""
    case = _with_hidden_key(candidate, case)
    if not _hidden(case).any():
        return vacuous("every key is seen by some row")
    before = replace(plain(presentation), poison="nan")
    a = call(candidate, case, before)
    if isinstance(a, Verdict):
        return a
    b = call(candidate, case, replace(before, poison_hidden=True))
    return _promised("masked-not-read", [("NaN in hidden keys", a, b)], "without")


def written(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Every element of every output is written: what fresh buffers held before does not show.

    The lengths of the case are left out, so that the buffers are all that poison fills.
    """
    case = replace(case, q_lengths=None, k_lengths=None)
    a = call(candidate, case, plain(presentation))
    if isinstance(a, Verdict):
        return a
    b = call(candidate, case, replace(plain(presentation), poison="nan"))
    if isinstance(b, Verdict):
        return b
    return agree("NaN in fresh output buffers", [same(x, a, b) for x in a.arrays], "without")
