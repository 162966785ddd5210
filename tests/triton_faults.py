"""Faults planted in copies of the Triton kernel by rewriting its source, and the run that judges them.

As a program (``python triton_faults.py FOLDER``, with TRITON_INTERPRET=1) it judges every copy and the
unchanged kernel, and prints one JSON object: for each what was found. The shipped kernel is never touched.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import attncheck.kernels
from attncheck.kernels.candidate import Candidate
from attncheck.kernels.loading import from_callable

SOURCE = Path(attncheck.kernels.__file__).resolve().parent / "triton_attention"


@dataclass(frozen=True)
class Fault:
    """``changes`` are (file, text, text instead); each text must be there. ``examples`` is where the search
    ends: a fault not found by then is a failure of the suite."""

    name: str
    about: str
    changes: tuple[tuple[str, str, str], ...]
    property: str
    dtype: str = "float32"
    examples: int = 150
    call: str = ""  # of functional, judged by the convention of this name; "": the built-in candidate


_OFFSET = ("offset = k_count - q_count", "offset = (k_count - q_count) * 0")

# fmt: off
FAULTS: dict[str, Fault] = {fault.name: fault for fault in (
    Fault("no-rescale", "old outputs are not rescaled when a later tile raises the maximum",
          (("forward.py", "acc * rescale[:, None]", "acc"),), "output"),
    Fault("sum-not-rescaled", "the row sum is not rescaled when a later tile raises the maximum",
          (("forward.py", "total * rescale + tl.sum(p, 1)", "total + tl.sum(p, 1)"),), "lse"),
    Fault("finite-start", "the running maximum starts at -5e4: rows with lower scores come out as if empty",
          (("forward.py", 'tl.full([M], float("-inf"), tl.float32)', "tl.full([M], -5e4, tl.float32)"),), "output"),
    Fault("tail-not-hidden", "keys past the last one score 0 instead of being hidden",
          (("scores.py", "end = key_count", "end = key_count + 1024"),), "output", "float16"),
    Fault("causal-without-offset", "bottom-right causality forgets the offset, forward and backward",
          (("forward.py", *_OFFSET), ("backward.py", *_OFFSET)), "output", "bfloat16"),
    Fault("window-off-by-one", "the window's left edge hides one key too many",
          (("scores.py", "keys >= rows + (offset - left)", "keys > rows + (offset - left)"),), "lse", "float16"),
    Fault("wrong-key-head", "query heads take key heads in turn instead of by groups",
          (("forward.py", "(head // group)", "(head % (heads // group))"),), "output", "float16", examples=300),
    Fault("slope-in-base-e", "ALiBi slopes are added to base-2 scores unconverted",
          (("forward.py", "slopes_b + h * slopes_h) * LOG2E", "slopes_b + h * slopes_h)"),), "lse"),
    Fault("lse-in-base-two", "the log-sum-exp is stored in base 2",
          (("forward.py", "(top + tl.log2(divisor)) * LN2", "top + tl.log2(divisor)"),), "lse", "bfloat16"),
    Fault("truncating-bfloat16", "P and the outputs are cut off instead of rounded to nearest",
          (("scores.py", "bits += 0x7FFF + ((bits >> 16) & 1)", "bits += 0"),), "output", "bfloat16"),
    Fault("dlse-ignored", "the upstream gradient of the log-sum-exp is dropped",
          (("backward.py", "if HAS_DLSE:", "if False:"),), "dlse"),
    Fault("cap-not-differentiated", "dS misses the derivative of tanh",
          (("backward.py", "if HAS_CAP:", "if False:"),), "dq"),
    Fault("unguarded-empty-row", "the backward pass sees exp2(-inf - -inf) in rows that see nothing",
          (("backward.py", 'tl.where(x == float("-inf"), float("inf"), x * LOG2E)', "x * LOG2E"),), "empty-rows"),
    Fault("group-not-summed", "dK and dV hold the first query head of each group",
          (("backward.py", "for member in range(group):", "for member in range(1):"),), "dk", "bfloat16"),
    Fault("edge-rows-skipped", "dK and dV begin with the first row tile that sees a whole key tile",
          (("scores.py", "start = down_to_tile(first - offset - right, TILE)",
            "start = up_to_tile(last - offset - right, TILE)"),), "dv"),
    Fault("dbias-of-one-head", "the gradient of a bias that all heads share holds the first head's",
          (("bias_gradient.py", "end_head = heads", "end_head = first_head + 1"),), "dbias"),
    Fault("parts-not-weighed", "split keys: parts are added as if they had one maximum",
          (("decode.py", "acc += tl.sum(x * weight[:, None], 0)", "acc += tl.sum(x, 0)"),), "output"),
    Fault("first-split-only", "split keys: the log-sum-exp is that of the first split",
          (("decode.py", "total += tl.sum(part * weight, 0)",
            "total += tl.sum(tl.where(split == 0, part * weight, 0.0), 0)"),), "lse"),
    Fault("last-split-dropped", "split keys: the merge stops before an incomplete step of splits",
          (("decode.py", "range(0, splits, N)", "range(0, splits // N * N, N)"),), "output"),
    Fault("unwritten-part-read", "split keys: parts that no program wrote are weighed too",
          (("decode.py", "there = (split < splits) & (part != 0.0)", "there = split < splits"),), "padding", "bfloat16",
          examples=40),
    Fault("split-left-of-window", "split keys: a split begins where the window does, not where it should",
          (("decode.py", "start = tl.maximum(start, split * KEYS)", "start += split * KEYS"),), "output"),
    Fault("heads-in-turn", "split keys: query rows of a group are read head by head, but counted row by row",
          (("decode.py", "h = (kv * group + member % group)",
            "h = (kv * group + tl.minimum(member // q_count, group - 1))"),), "output", examples=300),
    Fault("longest-decides", "split keys: whether an entry is decoded hangs on the longest of the batch",
          (("launch.py", "known = p.ragged[0] == FULL", "known = True"),), "packed", examples=300),
    Fault("pages-in-order", "pages are taken in the order in which they lie, not in the table's",
          (("forward.py", "page = tl.load(pages + keys // page_size, mask=keys < k_count, other=0)",
            "page = (keys // page_size)"),), "output", call="flash_attn_with_kvcache"),
)}
# fmt: on

#: 32-bit offsets: found by the one case that needs more, see test_triton.py
NARROW = Fault(
    "narrow-offsets",
    "offsets are computed in 32 bits",
    (
        (
            "scores.py",
            "rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride",
            "rows[:, None] * row_stride + columns[None, :] * column_stride",
        ),
    ),
    "output",
)


def plant(fault: Fault | None, folder: Path) -> ModuleType:
    """A copy of the kernel's package with the fault in it (None: as it is), imported beside the original."""
    name = "unchanged" if fault is None else fault.name
    copy = folder / name
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in () if fault is None else fault.changes:
        text = (copy / file).read_text()
        if old not in text:
            raise ValueError(f"{name}: {file} does not hold {old!r}")
        (copy / file).write_text(text.replace(old, new))
    full = f"attncheck.kernels.triton_{name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(full, copy / "__init__.py", submodule_search_locations=[str(copy)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def candidate_of(module: ModuleType, call: str = "") -> Candidate:
    """The candidate of a copy, or of one of its calls, in this process's interpreter."""
    made: Candidate = importlib.import_module(f"{module.__name__}.candidate").INTERPRETED
    if not call:
        return made
    function = getattr(importlib.import_module(f"{module.__name__}.functional"), call)
    return from_callable(function, call, dtypes=made.dtypes, profiles=made.profiles)


def search(candidate: Candidate, name: str, dtype: str, examples: int) -> dict[str, Any]:
    """Judge drawn cases until one is violated; {"found": sentence or None, "cases": how many were judged}."""
    from attncheck.properties.campaign import plan_for
    from attncheck.properties.catalogue import PROPERTIES
    from attncheck.properties.draws import drawn
    from attncheck.properties.verdict import Outcome

    prop = PROPERTIES[name]
    for number, (case, presentation) in enumerate(islice(drawn(plan_for(candidate, prop, dtype), 0), examples), 1):
        verdict = prop.judge(candidate, case, presentation)
        if verdict.outcome is Outcome.VIOLATED:
            return {"found": verdict.sentence, "cases": number}
    return {"found": None, "cases": examples}


def main(folder: Path) -> None:
    found = {}
    for name, fault in FAULTS.items():
        candidate = candidate_of(plant(fault, folder), fault.call)
        found[name] = search(candidate, fault.property, fault.dtype, fault.examples)
    right = plant(None, folder)
    seen: dict[tuple[str, str, str], int] = {}
    for name, fault in FAULTS.items():
        key = (fault.call, fault.property, fault.dtype)
        seen[key] = max(seen.get(key, 0), found[name]["cases"])
    found["unchanged"] = {
        "/".join(key): search(candidate_of(right, key[0]), *key[1:], cases) for key, cases in seen.items()
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
