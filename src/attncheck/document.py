"""The machine-readable report: one JSON document, built from the rows that judging returned.

``attncheck-report`` version 1:

    format, version, attncheck   "attncheck-report", 1, the version of this package
    command        the pytest command that the run stands for
    seed, examples, seconds_limit, block, require, processes
    environment    versions and the machine
    seconds        wall-clock time of the run
    examples       cases drawn for each property, summed over candidates; and examples_per_minute
    judgements     verdicts given, over all candidates and properties
    checked_twice  cases whose exact answer both engines computed
    exit_code      0, 1, 2 or 3, and why: a list of sentences (empty for 0 and 1)
    errors         what went wrong that is no verdict
    waivers        per line of the waiver file: entry, candidate, property, condition, reason, the judged
                   cases that met its condition (held, violated), and its status
    candidates     per target: name, target, convention, device, dtypes, offers, lacks, conventions and
                   profiles (where they differ from the default), properties
      properties   per property: name, title, status, the sums over dtypes, the worst element, the
                   largest of the dtypes' medians, and dtypes: the rows

Numbers that JSON cannot hold are the strings "inf", "-inf", "nan".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attncheck.waivers import Waiver

FORMAT = "attncheck-report"
VERSION = 1

#: a property whose bound would accept 0 in more than this share of what is at stake, and in more than this share
#: of the elements of as many of its cases (one large case is not all), has judged nothing
WEAK_SHARE = 0.5
#: with fewer elements at stake than this the share is an accident of a few cases
WEAK_LEAST = 50

#: how a property can stand, in the order in which a reader should look
STATUSES = ("violated", "weak", "not judged", "known", "not offered", "holds")

#: output named by --require -> the property that judges it
JUDGED_BY = {"o": "output", "lse": "lse", "dq": "dq", "dk": "dk", "dv": "dv", "dbias": "dbias"}

_SUMS = ("examples", "judged", "declined", "vacuous", "known", "elements", "at_stake", "zeros", "weak", "checked_twice")


def build(
    rows: Sequence[dict[str, Any]],
    *,
    titles: dict[str, str],
    targets: Sequence[str] = (),
    require: Sequence[str] = (),
    errors: Sequence[str] = (),
    waivers: Sequence[Waiver] = (),
    strict_waivers: bool = False,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of a run. ``titles`` are the properties' titles by name, in the order of the table;
    ``targets`` those of the run, in its order (rows of several processes arrive in any); ``waivers`` those
    that were applied, which fail the run where ``strict_waivers`` and one of them is stale; ``about`` the
    run's own facts (seed, command, seconds, …)."""
    from attncheck import __version__
    from attncheck.waivers import STALE, outcomes

    known: dict[str, dict[str, Any]] = {}
    by_target: dict[str, list[dict[str, Any]]] = {}
    problems = list(errors)
    for row in rows:
        facts = row["candidate"]
        if row["error"] and not row["property"]:
            problems.append(row["error"])
            continue
        known.setdefault(facts["target"], facts)
        if row["error"]:
            problems.append(f"{facts['name']}, {row['property']}, {row['dtype']}: {row['error']}")
        elif row["property"]:
            by_target.setdefault(facts["target"], []).append(row)
    candidates = []
    for target in [t for t in targets if t in known] + [t for t in known if t not in targets]:
        facts = known[target]
        mine = sorted(by_target.get(target, []), key=lambda row: _place(facts["dtypes"], row["dtype"]))
        properties = [
            _property(name, title, [row for row in mine if row["property"] == name])
            for name, title in titles.items()
            if any(row["property"] == name for row in mine)
        ]
        candidates.append({**facts, "properties": properties})
    code, why = _exit(candidates, require, problems)
    settled = outcomes(waivers, candidates)
    if strict_waivers and code in (0, 3) and any(waiver["status"] in STALE for waiver in settled):
        code = 1
    run = dict(about or {})
    judgements = sum(p["examples"] for c in candidates for p in c["properties"])
    # an example is a case that all the properties have judged: as slow as the one with the most cases
    examples = sum(max((p["examples"] for p in c["properties"]), default=0) for c in candidates)
    seconds = run.get("seconds")
    return {
        "format": FORMAT,
        "version": VERSION,
        "attncheck": __version__,
        **run,
        "require": list(require),
        "examples": examples,
        "examples_per_minute": 60 * examples / seconds if seconds else None,
        "judgements": judgements,
        "checked_twice": _checked_twice(candidates),
        "exit_code": code,
        "why": why,
        "errors": problems,
        "waivers": settled,
        "candidates": candidates,
    }


def _place(names: Sequence[str], name: str) -> int:
    return list(names).index(name) if name in names else len(names)


def placeholder(facts: dict[str, Any], error: str | None = None) -> dict[str, Any]:
    """The row of a candidate of which nothing can be judged, so that the report still names it."""
    return {"candidate": facts, "property": "", "dtype": "", "error": error}


def died(facts: dict[str, Any], name: str, dtype: str, how: str = "") -> dict[str, Any]:
    """The row of a property during which the kernel ended its process; ``how`` as far as it is known."""
    return {
        "candidate": facts,
        "property": name,
        "dtype": dtype,
        "error": None,
        **dict.fromkeys(_SUMS, 0),
        "judged": 1,
        "examples": 1,
        "worst": None,
        "median": None,
        "offered": True,
        "reasons": {},
        "known_reasons": {},
        "leans": {},
        "waived": {},
        "seconds": 0.0,
        "failure": {
            "kind": "died",
            "sentence": f"the process that ran the kernel died{how and f' ({how})'}; the case that did it died with it",
            "worst": None,
            "case": None,
            "first": None,
            "seen": 1,
            "calls": 1,
            "saved": None,
            "not_saved": None,
            "replay": None,
        },
    }


def ratio(worst: dict[str, Any] | None) -> float:
    """The ratio of a worst element in a report, as a number to compare; -1 where there is none."""
    if worst is None:
        return -1.0
    value = float(worst["ratio"])
    return float("inf") if math.isnan(value) else value


def _property(name: str, title: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    sums = {key: sum(row.get(key, 0) for row in rows) for key in _SUMS}
    judged = [row for row in rows if row["judged"]]
    worst = max(judged, key=lambda row: ratio(row["worst"]), default=None)
    medians = [float(row["median"]) for row in judged if row["median"] is not None]
    share = sums["zeros"] / sums["at_stake"] if sums["at_stake"] else 0.0
    return {
        "name": name,
        "title": title,
        "status": _status(rows, sums, share),
        **sums,
        "zero_share": share,
        "worst": None if worst is None or worst["worst"] is None else {**worst["worst"], "dtype": worst["dtype"]},
        "median": max(medians, default=None),
        "reasons": _merged(row["reasons"] for row in rows),
        "known_reasons": _merged(row["known_reasons"] for row in rows),
        "dtypes": {
            row["dtype"]: {k: v for k, v in row.items() if k not in ("candidate", "property", "dtype", "error")}
            for row in rows
        },
    }


def _checked_twice(candidates: list[dict[str, Any]]) -> int:
    """Cases computed by both exact engines. Candidates and properties share their cases dtype by
    dtype, so per dtype the largest count is taken: never more than there were."""
    most: dict[str, int] = {}
    for candidate in candidates:
        for p in candidate["properties"]:
            for dtype, row in p["dtypes"].items():
                most[dtype] = max(most.get(dtype, 0), row["checked_twice"])
    return sum(most.values())


def _merged(counts: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for reasons in counts:
        for sentence, n in reasons.items():
            out[sentence] = out.get(sentence, 0) + n
    return dict(sorted(out.items(), key=lambda pair: -pair[1]))


def _status(rows: list[dict[str, Any]], sums: dict[str, Any], share: float) -> str:
    if any(row["failure"] for row in rows):
        return "violated"
    if not any(row["offered"] for row in rows):
        return "not offered"
    if sums["judged"] == 0:
        return "known" if sums["known"] else "not judged"
    weak = share > WEAK_SHARE and sums["weak"] > WEAK_SHARE * sums["judged"]
    return "weak" if weak and sums["at_stake"] >= WEAK_LEAST else "holds"


def _exit(candidates: list[dict[str, Any]], require: Sequence[str], errors: list[str]) -> tuple[int, list[str]]:
    """The exit code, in this order of precedence: 2 an error, 1 a violation, 3 not judged, 0."""
    if errors:
        return 2, list(errors)
    if any(p["status"] == "violated" for c in candidates for p in c["properties"]):
        return 1, []
    why = [] if candidates else ["no candidate was judged"]
    for candidate in candidates:
        name, properties = candidate["name"], candidate["properties"]
        if not any(p["judged"] or p["known"] for p in properties):
            why.append(f"{name}: nothing was judged{_because(candidate)}")
        for p in properties:
            if p["status"] == "weak":
                why.append(
                    f"{name}: {p['title']} was not judged: in {p['zero_share']:.0%} of its elements 0 would have been "
                    "accepted, so its bound tells nothing"
                )
        for output in require:
            p = next((p for p in properties if p["name"] == JUDGED_BY[output]), None)
            if output not in candidate["offers"] or (p is not None and p["status"] == "not offered"):
                why.append(f"{name}: {output} is required but not offered by this candidate")
            elif p is None or p["status"] == "not judged":
                why.append(f"{name}: {output} is required but was not judged")
    return (3, why) if why else (0, [])


def _because(candidate: dict[str, Any]) -> str:
    reasons = _merged(p["reasons"] for p in candidate["properties"])
    if reasons:
        return ": " + "; ".join(list(reasons)[:3])
    return f" (it takes {', '.join(candidate['dtypes']) or 'no dtype'})"
