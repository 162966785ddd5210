"""How far a correct kernel may be from the exact answer, element by element.

A forward error bound, evaluated from the exact values and the arithmetic that the kernel declares
(its Profile). Every term is a rounding that a right kernel may commit, named where it is computed;
nothing is fitted. The verdict elsewhere is |got - exact| / allowed.

Throughout, with u the accumulator's unit roundoff (standard model of floating-point arithmetic:
Higham, Accuracy and Stability of Numerical Algorithms, chapters 2 to 4):

- a sum of n products in any order errs by at most n u of the sum of their magnitudes; ``growth``
  adds the rounding of matmul operands and honours a declared shorter chain. Terms that are exactly
  0 (hidden pairs) do not round, so n counts what is visible.
- k roundings of one value are k u (1 + k u) of it: ``_roundings``.
- a kernel may hold its scores in base 2 (exp2 is what processors have): log2(e) is a constant that
  was rounded and a product that rounds, two more roundings of whatever it multiplies.
- an absolute error e of a score becomes a factor exp(±e) of its probability.
- a sink enters with the other scores, before or after them, or at the end of a row as exp(sink - m)
  with the maximum m of the keys alone.
- 1 / (1 - p) of dropout multiplies P, V and dO, or what was summed at the end; dS may wait for it too,
  with D brought down to it.
- a value that is w off before it is stored is w + u_T (|exact| + w) off after rounding to format T.

Where the bound says nothing any more (it passes the natural size of the value, or an intermediate
may overflow) the element is vacuous: it is counted and shown, not judged.
"""

from __future__ import annotations

import numpy as np

from ..case import Case
from ..enclosure import Exact
from ..profile import Profile
from .backward import backward
from .forward import forward
from .keys import KeySide
from .scores import scores
from .terms import Array, Bound, growth, prepare

__all__ = ["Bound", "bounds", "growth"]

#: elements of the largest intermediate; rows are taken in steps where more would be needed
BLOCK_ELEMENTS = 1 << 21


def bounds(case: Case, exact: Exact, profile: Profile) -> dict[str, Bound]:
    """What is allowed for o, lse and, where the case has do, dq, dk, dv (and dbias with a bias).

    ``exact`` must carry its pairs. Rows of padding get meaningless entries; they are not judged.
    """
    if exact.logp is None or exact.raw is None:
        raise ValueError("exact was computed without its pairs; the bounds need them")
    with np.errstate(all="ignore"):
        s = prepare(case, exact, profile)
        b, hq, _, sq, sk, d, dv = case.shape
        step = max(1, BLOCK_ELEMENTS // max(1, b * hq * sk * max(d, dv)))
        if profile.grads_in_storage is not None:
            block = profile.grads_in_storage[0]
            step = -(-step // block) * block
        keys = KeySide(s) if case.do is not None else None
        outs: dict[str, list[Bound]] = {"o": [], "lse": [], "dq": []}
        # an empty query axis still yields bounds of the right (empty) shape
        for start in range(0, max(sq, 1), step):
            rows = scores(s, slice(start, min(sq, start + step)))
            o, lse, kept = forward(s, rows)
            outs["o"].append(o)
            outs["lse"].append(lse)
            if keys is not None:
                outs["dq"].append(backward(s, rows, o, lse, kept, keys))
        found = {name: _joined(pieces) for name, pieces in outs.items() if pieces}
        return found if keys is None else found | keys.finish()


def _joined(pieces: list[Bound]) -> Bound:
    if len(pieces) == 1:
        return pieces[0]

    def along_rows(name: str) -> Array:
        return np.concatenate([getattr(piece, name) for piece in pieces], axis=2)

    return Bound(
        allowed=along_rows("allowed"),
        vacuous=along_rows("vacuous"),
        overflow=along_rows("overflow"),
        structural=along_rows("structural"),
        must_be_zero=along_rows("must_be_zero"),
        parts={name: np.concatenate([x.parts[name] for x in pieces], axis=2) for name in pieces[0].parts},
    )
