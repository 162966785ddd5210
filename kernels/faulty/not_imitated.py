"""Reports and kinds that have no fault in the zoo, each with the reason."""

from __future__ import annotations

_RIGHT = "a convention, and right: the suite must not flag it"
_UNKNOWN = "its cause is not known, so there is nothing to re-enact"

#: report or kind -> reason
NOT_IMITATED: dict[str, str] = {
    "B006": "the same fault as B005, in another library",
    "B008": "B005 followed by a second call; a candidate is called once per case",
    "B009": _RIGHT,
    "B021": "the same fault as B020, reported again",
    "B022": _UNKNOWN,
    "B023": _UNKNOWN,
    "B024": _UNKNOWN,
    "B027": "the same fault as B025",
    "B055": "the same fault as B053; that its verifier shared the mask code is a matter of the suite's tests",
    "B058": _RIGHT,
    "B066": "the same fault as B065",
    "B067": "the same fault as B065",
    "B076": "the same fault as B075, in another backend",
    "B096": "what stands in padded rows of O is undefined, so nothing is wrong",
    "B120": _UNKNOWN,
    "B121": "only the bias asks for a gradient: the suite asks for all gradients at once",
    "B172": "dropout in evaluation: a case has no such mode, its dropout always applies",
    "B203": "the same fault as B202, with pages",
    "B216": "no key heads at all: not a case",
    "B219": "a mask longer than the keys: not a case",
    "B220": "a fault of a comparison: the tests of the suite have it",
    "B221": "a fault of conformance data: golden cases are computed twice",
    "B222": "a fault of a harness: upstream gradients are part of the case",
    "K38": "faults of references and of tests belong to the tests of the suite",
}
