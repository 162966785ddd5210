"""The power report for people: a table on the terminal, and a page of Markdown."""

from __future__ import annotations

import string
from typing import Any


def render(document: dict[str, Any], width: int = 100) -> str:
    """The table, one line per fault, and what it comes to. Ends with a newline."""
    letters = dict(zip(document["styles"], string.ascii_lowercase, strict=False))
    size = max(5, *(len(row["id"]) for row in document["faults"]))
    public = max(len(letters), len("public"))
    lines = [f"$ {document['command']}", ""]
    lines.append(
        f"{'fault':{size}}  {'kind':5}  {'seeds':>5}  {'examples':>8}  {'keys x D':8}  {'public':{public}}  "
        f"{'seconds':>7}  caught by"
    )
    for row in _sorted(document):
        caught = "".join(letter if row["public"][name] else "." for name, letter in letters.items())
        line = f"{row['id']:{size}}  {row['kind']:5}  {row['caught']:>2}/{row['seeds']:<2}  "
        line += f"{_number(row['examples']):>8}  {_small(row['shrunk']):8}  {caught:{public}}  "
        line += f"{row['seconds']:7.1f}  {_properties(row)}"
        lines.append(line[: max(width, 40)].rstrip())
    lines += ["", "public: " + ", ".join(f"{letters[name]} {s['title']}" for name, s in document["styles"].items())]
    lines += ["", *_conclusions(document)]
    lines.append(f"{document['wall_seconds']:.0f} seconds in {document['processes']} processes")
    return "\n".join(lines) + "\n"


def markdown(document: dict[str, Any]) -> str:
    """The page: the same facts and what is broken in each fault; the same on every machine with these versions."""
    styles = document["styles"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    seeds = f"{document['seeds']} seed{'s' if document['seeds'] != 1 else ''}"
    lines = [
        "# Detection power",
        "",
        f"Written by `{document['command']} --markdown FILE` ({versions}).",
        "",
        "Every fault of the zoo is switched on in an otherwise right kernel and judged as "
        f"`attncheck verify zoo:ID` judges it, under {seeds}, until the first violation, for at most "
        f"{document['examples']:,} examples. The same kernels are then shown to public checking habits.",
        "",
        *(f"- {line}" for line in _conclusions(document)),
        "",
        "## The public habits",
        "",
        "Inputs and thresholds as test suites publish them, over problems of all sizes and features, one at a time: "
        "more than any of these suites has. Each accepts the right kernel.",
        "",
        "| habit | inputs and threshold | faults caught |",
        "| --- | --- | ---: |",
    ]
    total = document["summary"]["faults"]
    for name, style in styles.items():
        about = style["about"].replace("|", "\\|")
        lines.append(f"| {style['title']} | {about} | {document['summary']['styles'][name]} of {total} |")
    lines.append(f"| any of them | | {document['summary']['any_style']} of {total} |")
    lines.append(f"| **attncheck** | | **{document['summary']['caught']} of {total}** |")
    lines += [
        "",
        "## The faults",
        "",
        "*examples* is the least `--examples` that catches the fault, the median over the seeds: cases of one "
        "property, dealt out over the dtypes. *cases* counts all cases judged by then, as some properties need "
        "cases of their own. *keys × D* is the failing case after shrinking, the median over "
        f"{document['shrunk_seeds']} of the seeds.",
        "",
        "| fault | kind | what is broken | caught by | seeds | examples | cases | keys × D | "
        + " | ".join(style["title"] for style in styles.values())
        + " |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |" + " :---: |" * len(styles),
    ]
    for row in _sorted(document):
        about = row["about"].replace("|", "\\|")
        public = " | ".join("yes" if row["public"][name] else "no" for name in styles)
        lines.append(
            f"| `{row['id']}` | {row['kind']} | {about} | {_properties(row)} | "
            f"{row['caught']} of {row['seeds']} | {_number(row['examples'])} | {_number(row['cases'])} | "
            f"{_small(row['shrunk'])} | {public} |"
        )
    if document["right"]:
        lines += [
            "",
            "## Right kernels",
            "",
            "The same properties over kernels that are right: a violation is a false alarm.",
        ]
        lines += ["Faults that PyTorch's kernels are known to have, declared with a case each, are counted as known."]
        lines += ["", "| kernel | cases | holds | vacuous | declined | known | violated |", "| --- |" + " ---: |" * 6]
        for row in document["right"]:
            counts = " | ".join(
                f"{row['verdicts'].get(name, 0):,}" for name in ("holds", "vacuous", "declined", "known", "violated")
            )
            lines.append(f"| {row['kernel']} | {row['cases']:,} | {counts} |")
        if document["not_loaded"]:
            lines += ["", "Not judged, for they could not be loaded:", ""]
            lines += [f"- {why}" for why in document["not_loaded"]]
    if "--faults" in document["command"]:
        return "\n".join(lines) + "\n"
    lines += ["", "## Not imitated", "", "| report or kind | reason |", "| --- | --- |"]
    lines += [f"| {name} | {reason} |" for name, reason in document["not_imitated"].items()]
    return "\n".join(lines) + "\n"


def _conclusions(document: dict[str, Any]) -> list[str]:
    s, styles = document["summary"], document["styles"]
    total, best = s["faults"], s["best_style"]
    kinds, caught = ([k for k in s[key] if k.startswith("K")] for key in ("kinds", "kinds_caught"))
    lines = [f"{s['caught']} of {total} faults caught under every seed; kinds covered: {len(caught)} of {len(kinds)}"]
    if s["missed"]:
        lines.append(f"missed under some seed: {', '.join(s['missed'])}")
    if s["examples"] is not None:
        lines.append(
            f"examples to detection: median {_number(s['examples'])}, at most {_number(s['most_examples'])}; "
            f"cases of all properties: median {_number(s['cases'])}"
        )
    if s["shrunk"] is not None:
        keys, width, heads = (_number(s["shrunk"][name]) for name in ("keys", "width", "heads"))
        lines.append(f"shrunk size, median: keys {keys}, D {width}, heads {heads}")
    lines.append(
        f"best public habit: {styles[best]['title']}, {s['styles'][best]} of {total}; any of them: {s['any_style']}; "
        f"caught here only: {s['only_here']}"
    )
    if document["right"]:
        judged = [row for row in document["right"] if row["verdicts"].keys() - {"declined", "vacuous"}]
        cases = sum(row["cases"] for row in judged)
        alarms = sum(row["verdicts"].get("violated", 0) for row in judged)
        lines.append(f"false alarms: {alarms} in {cases:,} cases of {len(judged)} right kernels")
        lines += [f"right, but nothing was judged: {row['kernel']}" for row in document["right"] if row not in judged]
        lines += [f"right, but not loaded: {why}" for why in document["not_loaded"]]
        for alarm in (alarm for row in document["right"] for alarm in row["alarms"]):
            where = f"case {alarm['number']} of seed {alarm['seed']} in {alarm['dtype']}"
            lines.append(f"false alarm: {alarm['kernel']}, {alarm['property']}, {where}: {alarm['sentence']}")
    return lines


def _sorted(document: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(document["faults"], key=lambda row: (row["kind"], row["id"]))


def _properties(row: dict[str, Any]) -> str:
    """``output``, or ``output 7, dq 3`` where the seeds differ."""
    if not row["properties"]:
        return "nothing"
    if len(row["properties"]) == 1:
        return str(next(iter(row["properties"])))
    return ", ".join(f"{name} {count}" for name, count in row["properties"].items())


def _small(shrunk: dict[str, float] | None) -> str:
    return "-" if shrunk is None else f"{_number(shrunk['keys'])} × {_number(shrunk['width'])}"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:g}"
