"""What a person reads: the table and the failures, rendered from the JSON document."""

from __future__ import annotations

import io
from typing import Any

from attncheck.document import ratio

#: below these widths the table drops its least needed columns
_WIDE, _MEDIUM = 84, 56

#: reasons for not judging a case that are printed, of properties where this share of the cases had
#: one; the JSON report has all of them
_REASONS_PRINTED, _WORTH_TELLING = 4, 0.1

_STYLES = {"violated": "bold red", "weak": "yellow", "not judged": "yellow", "known": "yellow", "holds": "green"}

Line = tuple[str, str]  # text, style


def render(document: dict[str, Any], *, width: int = 80, color: bool = False) -> str:
    """The whole report as text, its table at most ``width`` columns wide. Ends with a newline."""
    from rich.console import Console
    from rich.text import Text

    console = Console(
        file=io.StringIO(),
        width=max(width, 20),
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
    )
    for n, candidate in enumerate(document["candidates"]):
        if n:
            console.print()
        console.print(Text(headline(candidate, document), style="bold"), soft_wrap=True)
        if candidate["properties"]:
            console.print()
            console.print(_table(candidate, width))
        for line, style in [*_failures(candidate), *_notes(candidate)]:
            console.print(Text(line, style=style), soft_wrap=True)
    for line, style in _closing(document):
        console.print(Text(line, style=style), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def headline(candidate: dict[str, Any], document: dict[str, Any]) -> str:
    """``my_kernel.py:attention   sdpa · float32 float16 · forward + backward · CPU · seed 0``"""
    seen = list(dict.fromkeys(dtype for p in candidate["properties"] for dtype in p["dtypes"]))
    seen.sort(key=lambda dtype: candidate["dtypes"].index(dtype) if dtype in candidate["dtypes"] else len(seen))
    facts = [" ".join(seen or candidate["dtypes"])]
    if candidate["convention"]:  # a kernel that died before it was described has none
        backward = {"dq", "dk", "dv"} & set(candidate["offers"]) and "backward" not in candidate["lacks"]
        device = candidate["device"]
        facts = [candidate["convention"], *facts, "forward + backward" if backward else "forward"]
        facts.append("CPU" if device == "cpu" else device)
    facts.append(f"seed {document['seed']}")
    return f"{candidate['name']}   {' · '.join(facts)}"


def _table(candidate: dict[str, Any], width: int) -> Any:
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    known = any(p["known"] for p in candidate["properties"])
    columns = ["judged", "declined", "vacuous"]
    if known:
        columns.append("known")
    columns.append("worst/bound")
    if width >= _WIDE:
        columns += ["median", "0 passes"]
    elif width < _MEDIUM:
        columns = ["judged", "worst/bound"]
    table = Table(
        box=box.SIMPLE_HEAD if width >= _MEDIUM else None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0)
    )
    table.add_column("property", no_wrap=True, overflow="fold")
    for name in columns:
        table.add_column(name, justify="left" if name == "worst/bound" else "right", no_wrap=True, overflow="fold")
    for p in candidate["properties"]:
        cells = _cells(p)
        style = _STYLES.get(p["status"], "") if p["status"] != "holds" else ""
        table.add_row(
            p["title"], *(Text(cells[name], style=style if name == "worst/bound" else "") for name in columns)
        )
    return Padding(table, (0, 0, 0, 2 if width >= _MEDIUM else 0))


def _cells(p: dict[str, Any]) -> dict[str, str]:
    offered = p["status"] != "not offered"
    cases = p["judged"] + p["vacuous"]
    return {
        "judged": f"{p['judged']:,}" if offered else "-",
        "declined": f"{p['declined']:,}" if offered else "-",
        "vacuous": _percent(p["vacuous"] / cases) if offered and cases else "-",
        "known": f"{p['known']:,}" if p["known"] else "-",
        "worst/bound": _standing(p),
        "median": "-" if p["median"] is None else f"{float(p['median']):.2g}",
        "0 passes": _percent(p["zero_share"]) if p["worst"] else "-",
    }


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _standing(p: dict[str, Any]) -> str:
    if p["status"] != "holds":
        return {"not offered": "not offered", "weak": "0 would pass", "known": "known fault"}.get(
            p["status"], p["status"]
        )
    return "exact" if p["worst"] is None else f"{ratio(p['worst']):.2f}  {p['worst']['dtype']}"


def _failures(candidate: dict[str, Any]) -> list[Line]:
    """Each failure once: a kernel that raises fails many properties with one sentence on one case."""
    told: dict[tuple[str, str | None], tuple[list[str], dict[str, Any], list[Line]]] = {}
    for p in candidate["properties"]:
        failing = [(dtype, row["failure"]) for dtype, row in p["dtypes"].items() if row["failure"]]
        if not failing:
            continue
        _, failure = failing[0]
        also: list[Line] = []
        for dtype, other in failing[1:]:
            sentence = other["sentence"].removeprefix(f"{p['title']}: ")
            where = other["saved"] or (f"not saved: {other['not_saved']}" if other["not_saved"] else "")
            also.append((f"  also in {dtype}: {sentence}{where and f'  {where}'}", ""))
        key = (failure["sentence"], failure["case"] and failure["case"]["digest"])
        told.setdefault(key, ([], failure, also))[0].append(p["title"])
    lines: list[Line] = []
    for titles, failure, also in told.values():
        lines += [("", ""), *failure_lines(", ".join(titles), failure), *also]
    return lines


def failure_lines(title: str, failure: dict[str, Any]) -> list[Line]:
    """A violation as a person reads it: the sentence, the case, the bound's parts, where it is saved."""
    lines: list[Line] = [(f"{title} violated: {failure['sentence'].removeprefix(f'{title}: ')}", _STYLES["violated"])]
    case = failure["case"]
    if case is not None:
        lines.append((f"  {case['summary']}", ""))
        lines += [(f"  {line}", "") for line in _packed([f"{name} {text}" for name, text in case["arrays"].items()])]
    worst = failure["worst"]
    if worst is not None and worst["parts"]:
        parts = " + ".join(f"{name} {_short(value)}" for name, value in worst["parts"] if value != 0)
        lines.append((f"  bound   {_short(worst['allowed'])} = {parts}", ""))
    if failure["seen"] < failure["calls"]:
        lines.append((f"  it fails only sometimes: {failure['seen']} of {failure['calls']} calls", ""))
    if failure["saved"]:
        lines.append((f"  saved   {failure['saved']}", ""))
        lines.append((f"  replay  {failure['replay']}", "cyan"))
    elif failure["not_saved"]:
        lines.append((f"  not saved: {failure['not_saved']}", "yellow"))
    return lines


def _short(value: float | str) -> str:
    return f"{float(value):.2g}"


def _packed(texts: list[str], width: int = 100) -> list[str]:
    """Short texts share a line, three spaces apart."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + len(text) + 3 <= width:
            lines[-1] += "   " + text
        else:
            lines.append(text)
    return lines


def _notes(candidate: dict[str, Any]) -> list[Line]:
    lines: list[Line] = []
    if candidate["conventions"]:
        said = ", ".join(f"{k} {v}" for k, v in candidate["conventions"].items())
        lines.append((f"  conventions declared: {said}", ""))
    by_text: dict[str, list[str]] = {}
    for dtype, fields in candidate["profiles"].items():
        said = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items())
        by_text.setdefault(said, []).append(dtype)
    for said, dtypes in by_text.items():
        lines.append((f"  profile declared for {' '.join(dtypes)}: {said}", ""))
    for sentence, n in _most(candidate, "known_reasons"):
        lines.append((f"  known   {sentence} ({n:,} cases)", "yellow"))
    by_reason: dict[str, list[str]] = {}
    for feature, reason in candidate["lacks"].items():
        by_reason.setdefault(reason, []).append(feature)
    for reason, features in by_reason.items():
        lines.append((f"  lacks   {', '.join(features)}: {reason}", ""))
    reasons = _most(candidate, "reasons")
    for sentence, n in reasons[:_REASONS_PRINTED]:
        lines.append((f"  passed over: {sentence} ({n:,} cases)", ""))
    if len(reasons) > _REASONS_PRINTED:
        lines.append((f"  and {len(reasons) - _REASONS_PRINTED} more reasons in the JSON report", ""))
    return [("", ""), *lines] if lines else []


def _most(candidate: dict[str, Any], key: str) -> list[tuple[str, int]]:
    """Reasons with the largest count that any one property has for them (properties share their cases).

    Reasons for which hardly a case was passed over are left to the JSON report.
    """
    counts: dict[str, int] = {}
    for p in candidate["properties"]:
        if key == "reasons" and p["declined"] + p["vacuous"] < _WORTH_TELLING * p["examples"]:
            continue
        for sentence, n in p[key].items():
            counts[sentence] = max(counts.get(sentence, 0), n)
    return sorted(counts.items(), key=lambda pair: -pair[1])


def _stale(document: dict[str, Any]) -> list[str]:
    """The waivers that should be looked at, by name."""
    lines = []
    for waiver in document.get("waivers", ()):
        held = waiver["held"]
        said = {
            "unexpected pass": f"unexpected pass: none of the {held:,} judged cases that met its condition is violated",
            "matched nothing": "it matches nothing: no judged case met its condition",
        }.get(waiver["status"])
        if said is not None:
            column = f"{waiver['candidate']} | {waiver['property']} | {waiver['condition']}"
            lines.append(f"waiver {waiver['entry']} ({column}): {said}")
    return lines


def _closing(document: dict[str, Any]) -> list[Line]:
    lines: list[Line] = []
    if document["judgements"]:
        pace = document["examples_per_minute"]
        told = f"{document['examples']:,} example{'s' if document['examples'] > 1 else ''}"
        told += f" ({document['judgements']:,} verdicts)"
        if pace is not None:
            told += f" in {document['seconds']:.0f} s: {pace:,.0f} examples per minute"
        processes = document.get("processes")
        if processes:
            told += f" on {processes} process{'es' if processes > 1 else ''}"
        if document["checked_twice"]:
            told += f"; {document['checked_twice']:,} of the cases computed by both exact engines"
        lines += [("", ""), (told, "")]
    if document["errors"]:
        lines += [("", ""), *((f"error: {sentence}", _STYLES["violated"]) for sentence in document["errors"])]
        return lines
    lines += [(line, "yellow") for line in _stale(document)]
    violated = [
        f"{p['title']} of {c['name']}"
        for c in document["candidates"]
        for p in c["properties"]
        if p["status"] == "violated"
    ]
    if violated:
        lines.append((f"violated: {', '.join(violated)}", _STYLES["violated"]))
    elif document["exit_code"] == 1:
        lines.append(("stale waivers fail the run (--strict-waivers)", _STYLES["violated"]))
    elif document["why"]:
        lines += [(f"not judged: {sentence}", _STYLES["not judged"]) for sentence in document["why"]]
    else:
        lines.append((f"holds: {', '.join(c['name'] for c in document['candidates'])}", _STYLES["holds"]))
    return lines
