"""The Triton kernel on a GPU: is it right there, is it the same each time, how fast is it. Writes one JSON.

    python benchmarks/gpu.py [--out benchmarks/results/gpu.json] [--minutes 8] [--only SECTION ...]
    python benchmarks/gpu.py --reduced      (no GPU: tiny sizes in Triton's interpreter, to exercise this file)

Needs this checkout, torch, triton and numpy, and no network. What another missing package prevents is
written down with its name; so is whatever the time did not suffice for. The JSON is written anew after each
section, so that one that takes the device down leaves the others' figures.

Speeds are medians of device events after a warm-up, with cold caches, in TFLOP/s of the two (forward) and
seven (forward and backward) matrix products that attention needs, half of them with causal, beside PyTorch's
attention pinned to its flash and cuDNN backends on the same inputs, with the names of the kernels that ran.
"host ms" is what issuing the call takes: where it is the longer one, a loop of such calls waits for it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

for package in ("torch", "triton", "numpy"):
    if importlib.util.find_spec(package) is None:
        sys.exit(f"{package} is not installed; the kernel needs torch, triton and numpy")

import torch  # noqa: E402

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, below

#: what judging needs beside torch and triton, by the name it is imported by
JUDGING = {"ml_dtypes": "ml_dtypes", "mpmath": "mpmath", "flint": "python-flint", "hypothesis": "hypothesis"}

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

#: rows of a long sequence that are compared
SAMPLED = 4

#: errors against float64, relative to the largest element, that no rounding explains
GROSS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}

Json = dict[str, Any]


def missing() -> list[str]:
    return [name for module, name in JUDGING.items() if importlib.util.find_spec(module) is None]


class Run:
    """The options, and the time that is left."""

    def __init__(self, reduced: bool, minutes: float) -> None:
        self.reduced = reduced
        self.end = time.monotonic() + 60 * minutes
        self.device = "cuda" if ON_GPU else "cpu"
        self.flushing: torch.Tensor | None = None

    def left(self) -> float:
        return self.end - time.monotonic()

    def normal(self, *shape: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).to(DTYPES[dtype])

    def synchronize(self) -> None:
        if ON_GPU:
            torch.cuda.synchronize()

    def flush(self) -> None:
        """Empty the device's caches, which also keeps it busy while the host issues what is timed next."""
        if self.flushing is None:
            size = min(2**30, torch.cuda.get_device_properties(0).total_memory // 16)
            self.flushing = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.flushing.zero_()


# -- is it right ----------------------------------------------------------------------------


def properties(run: Run) -> Json:
    """The property suite on drawn cases."""
    if missing():
        return not_run(f"not installed: {', '.join(missing())}")
    from attncheck.kernels.triton_attention.candidate import TRITON
    from attncheck.properties import campaign
    from attncheck.properties.catalogue import PROPERTIES

    names = ("output", "dq", "dbias") if run.reduced else tuple(PROPERTIES)
    examples = 3 if run.reduced else 60
    rows, until = [], time.monotonic() + (1e9 if run.reduced else min(150.0, run.left() / 3))
    for dtype in DTYPES:
        for name in names:
            tally = campaign.check(TRITON, name, dtype, examples=examples, seed=0, deadline=until)
            row = {"property": name, "dtype": dtype, "cases": tally.examples, "judged": tally.judged}
            row |= {"vacuous": tally.vacuous, "declined": tally.declined, "worst": tally.worst and tally.worst.ratio}
            rows.append(row | {"violation": tally.failure and tally.failure.verdict.sentence})
    return {
        "ran": True,
        "candidate": TRITON.about,
        "violations": sum(row["violation"] is not None for row in rows),
        "cases wanted of each": examples,
        "rows": rows,
    }


def long_rows(run: Run) -> Json:
    """Rows of a long sequence, forward and backward, against float64 and, where it is installed, the oracle.

    Upstream gradients are 0 except in the sampled rows, so that dK and dV depend on these alone: the case
    with only these rows has the same exact answers.
    """
    size, rows = (20, []) if run.reduced else (16384, [])
    for dtype in DTYPES:
        for causal in (False, True):
            if run.left() < 60 and not run.reduced:
                rows.append({"dtype": dtype, "causal": causal} | not_run("the time was used up"))
                continue
            rows.append({"dtype": dtype, "causal": causal, "size": size} | _long_row(run, dtype, size, causal))
    return {"ran": True, "rows": rows, "oracle": not missing() or f"not installed: {', '.join(missing())}"}


def _long_row(run: Run, dtype: str, size: int, causal: bool) -> Json:
    from attncheck.kernels.triton_attention.functional import attention

    q, k, v, do = (run.normal(1, 1, size, 64, dtype=dtype, seed=n) for n in range(4))
    at = sorted({int(n) for n in torch.linspace(0, size - 1, SAMPLED)})
    only = torch.zeros_like(do)
    only[:, :, at] = do[:, :, at]
    for x in (q, k, v):
        x.requires_grad_()
    o, lse = attention(q, k, v, causal="top-left" if causal else None)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), only)
    got = {"o": o[:, :, at], "lse": lse[:, :, at], "dq": dq[:, :, at], "dk": dk, "dv": dv}
    seen = torch.arange(size, device=q.device)[None] <= torch.tensor(at, device=q.device)[:, None]
    seen = seen if causal else torch.ones_like(seen)
    wanted = _float64(q[:, :, at], k, v, only[:, :, at], seen)
    last = slice(-1, None)  # sees every key: alone it is decoded, its keys split among programs
    alone = dict(zip(("o", "lse"), attention(q[:, :, last].detach(), k.detach(), v.detach()), strict=True))
    errors = {name: _off(x, wanted[name]) for name, x in got.items()}
    errors |= {f"{name}, decoded": _off(x, wanted[name][:, :, last]) for name, x in alone.items()}
    out: Json = {
        "largest error against float64": errors,
        "gross": any(not error < GROSS[dtype] for error in errors.values()),  # NaN is gross as well
    }
    if not missing():
        out["oracle"] = _judged(q[:, :, at], k, v, only[:, :, at], seen, got, dtype)
        out["oracle, decoded"] = _judged(q[:, :, last], k, v, do[:, :, last], seen[last], alone, dtype)
    return out


def _off(x: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error over the largest value."""
    return float((x.detach().double() - wanted).abs().max() / wanted.abs().max())


def _float64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, seen: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Attention and its gradients by autograd in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    o = scores.softmax(-1) @ v
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do.double())
    return {"o": o.detach(), "lse": scores.logsumexp(-1).detach(), "dq": dq, "dk": dk, "dv": dv}


def _judged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    seen: torch.Tensor,
    got: dict[str, torch.Tensor],
    dtype: str,
) -> Json:
    """The verdict of each output against its bound."""
    from attncheck.kernels.adapters.tensors import to_array
    from attncheck.kernels.candidate import Candidate
    from attncheck.kernels.triton_attention.candidate import TRITON
    from attncheck.oracle.case import Case, Presentation
    from attncheck.oracle.result import Result
    from attncheck.properties.catalogue import judge_output

    case = Case(*(to_array(x) for x in (q, k, v, do)), mask=to_array(seen))
    result = Result(**{name: to_array(x) for name, x in got.items()})
    shown = Candidate("triton", lambda *_: result, profiles=TRITON.profiles)
    out = {}
    for name in got:
        verdict = judge_output(shown, case, Presentation(), name)
        out[name] = {
            "outcome": verdict.outcome.value,
            "judged": verdict.judged,
            "worst": verdict.worst and verdict.worst.ratio,
            "sentence": verdict.sentence,
        }
    return out


def far_offsets(run: Run) -> Json:
    """Rows that begin 2^31 elements apart give the bits of rows that lie together, forward and backward."""
    from attncheck.kernels.triton_attention.functional import attention

    room = torch.empty(2**31 + 2**20, dtype=torch.float16, device=run.device)
    far = room.as_strided((1, 1, 3, 16), (0, 0, 2**30, 1))
    near = run.normal(1, 1, 3, 16, dtype="float16")
    far.copy_(near)
    bits = []
    for given in (far, near):
        x = given.detach().requires_grad_()
        o, lse = attention(x, x, x)
        bits.append((o, lse, *torch.autograd.grad(o, x, near)))
    return {"ran": True, "same bits": all(torch.equal(a, b) for a, b in zip(*bits, strict=True))}


def determinism(run: Run) -> Json:
    """The same bits in every one of 20 runs, dbias included."""
    from attncheck.kernels.triton_attention.functional import attention

    batch, size, width, runs = (1, 9, 16, 2) if run.reduced else (2, 2000, 64, 20)
    rows = []
    for dtype in DTYPES:
        q = run.normal(batch, 4, size, width, dtype=dtype, seed=1)
        k, v = (run.normal(batch, 2, size, width, dtype=dtype, seed=n) for n in (2, 3))
        bias = run.normal(1, 4, 1, size, seed=4)
        leaves = [x.requires_grad_() for x in (q, k, v, bias)]
        first: tuple[torch.Tensor, ...] | None = None
        same = True
        for _ in range(runs):
            o, lse = attention(q, k, v, bias=bias, causal="bottom-right")
            found = (o, lse, *torch.autograd.grad(o, leaves, q.detach()))
            first = first or found
            same = same and all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
        rows.append({"dtype": dtype, "runs": runs, "same bits": same})
    return {"ran": True, "rows": rows}


def sanitizer(run: Run) -> Json:
    """compute-sanitizer's memcheck over a small ragged case."""
    if not ON_GPU:
        return not_run("no GPU")
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return not_run("compute-sanitizer is not on the path")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, "--sanitized"]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=max(30.0, min(120.0, run.left()))
        )
    except subprocess.TimeoutExpired as stopped:
        return not_run(f"not finished within {stopped.timeout:.0f} s")
    return {"ran": True, "exit code": done.returncode, "last words": done.stdout.strip().splitlines()[-3:]}


def sanitized_case(run: Run) -> None:
    from attncheck.kernels.triton_attention.functional import attention

    q, do = (run.normal(2, 4, 70, 40, dtype="float16", seed=n) for n in (0, 1))
    k, v = (run.normal(2, 2, 90, 40, dtype="float16", seed=n) for n in (2, 3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    lengths = torch.tensor([90, 37], dtype=torch.int32, device=run.device)
    o, _ = attention(q, k, v, k_lengths=lengths, causal="bottom-right", window=(33, 0))
    torch.autograd.grad(o, leaves, do)
    run.synchronize()


# -- how fast is it -------------------------------------------------------------------------


def speed(run: Run) -> Json:
    """Prefill and decode, forward and forward with backward, beside PyTorch's backends."""
    rows = []
    for setting in _settings(run.reduced):
        if run.reduced or run.left() > 10:
            rows.append(_timed(run, **setting))
        else:
            rows.append(setting | not_run("the time was used up"))
    return {"ran": True, "rows": rows}


def _settings(reduced: bool) -> Iterator[Json]:
    """The settings that matter most first: 4k and 16k, D = 128, bfloat16."""
    if reduced:
        yield {"kind": "prefill", "rows": 16, "keys": 16, "width": 16, "causal": True, "dtype": "bfloat16"}
        yield {"kind": "decode", "rows": 1, "keys": 32, "width": 16, "causal": False, "dtype": "bfloat16"}
        return
    for width in (128, 64):
        for size in (4096, 16384, 1024):
            for causal in (False, True):
                yield {"kind": "prefill", "rows": size, "keys": size, "width": width, "causal": causal}
        for keys in (4096, 16384, 65536, 131072):
            for batch in (8, 1):
                yield {"kind": "decode", "rows": 1, "keys": keys, "width": width, "causal": False, "batch": batch}


def _timed(
    run: Run,
    kind: str,
    rows: int,
    keys: int,
    width: int,
    causal: bool,
    dtype: str = "bfloat16",
    batch: int | None = None,
) -> Json:
    from attncheck.kernels.triton_attention.functional import scaled_dot_product_attention

    heads = 2 if run.reduced else 2048 // width
    batch = batch or (1 if run.reduced else max(1, 16384 // keys))
    q, do = (run.normal(batch, heads, rows, width, dtype=dtype, seed=n) for n in (0, 1))
    k, v = (run.normal(batch, heads, keys, width, dtype=dtype, seed=n) for n in (2, 3))
    for x in (q, k, v):
        x.requires_grad_(kind == "prefill")
    flops = 4.0 * batch * heads * rows * keys * width * (0.5 if causal else 1.0)
    out: Json = {"kind": kind, "B": batch, "H": heads, "Sq": rows, "Sk": keys, "D": width}
    out |= {"causal": causal, "dtype": dtype}
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "triton": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)
    }
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        calls[f"torch {backend}"] = _pinned(backend, q, k, v, causal)
    for name, call in calls.items():

        def both(call: Callable[[], torch.Tensor] = call) -> Any:
            return torch.autograd.grad(call(), (q, k, v), do)

        try:
            forward, host = _milliseconds(run, call)
            out[name] = {"forward ms": forward, "forward TFLOP/s": flops / forward / 1e9, "forward host ms": host}
            if kind == "prefill":
                whole, _ = _milliseconds(run, both)
                out[name] |= {"forward + backward ms": whole, "forward + backward TFLOP/s": 3.5 * flops / whole / 1e9}
            out[name]["kernels"] = _kernels(call)
        except Exception as error:  # a backend that refuses, or runs out of memory, must not end the others' timing
            out[name] = out.get(name, {}) | not_run(f"{type(error).__name__}: {str(error).splitlines()[:1]}"[:300])
    for other in ("torch FLASH_ATTENTION", "torch CUDNN_ATTENTION"):
        for what in ("forward ms", "forward + backward ms"):
            if what in out["triton"] and what in out[other]:
                out.setdefault("speed relative to", {}).setdefault(other, {})[what.removesuffix(" ms")] = (
                    out[other][what] / out["triton"][what]
                )
    return out


def _pinned(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Callable[[], torch.Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call() -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def _milliseconds(run: Run, call: Callable[[], Any]) -> tuple[float, float]:
    """Median time of one call on the device, and of issuing it on the host."""
    call()  # compiles
    run.synchronize()
    started, warm = time.perf_counter(), 0
    while warm < 1 or (not run.reduced and warm < 10 and time.perf_counter() - started < 0.1):
        call()
        run.synchronize()
        warm += 1
    one = (time.perf_counter() - started) / warm
    repeats = 1 if run.reduced else max(5, min(50, int(0.3 / max(one, 1e-5))))
    device, host = [], []
    for _ in range(repeats):
        if ON_GPU:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            run.flush()
            begin.record()
        start = time.perf_counter()
        call()
        host.append(1e3 * (time.perf_counter() - start))
        if ON_GPU:
            end.record()
            end.synchronize()
            device.append(begin.elapsed_time(end))
    return statistics.median(device or host), statistics.median(host)


def _kernels(call: Callable[[], Any]) -> list[str]:
    """The device kernels of one call, by name: the backend that really ran."""
    if not ON_GPU:
        return []
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
    except RuntimeError as error:  # a profiler that the machine forbids costs the names, not the times
        return [f"not known: {error}"[:200]]
    return sorted({event.key[:120] for event in profiler.key_averages() if "emcpy" not in event.key})


# -- the run --------------------------------------------------------------------------------


def not_run(why: str) -> Json:
    return {"ran": False, "why": why}


def environment(run: Run) -> Json:
    import numpy
    import triton

    facts: Json = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "device": "none: Triton's interpreter on a CPU",
        "reduced": run.reduced,
        "missing packages": missing(),
    }
    if ON_GPU:
        found = torch.cuda.get_device_properties(0)
        facts |= {"device": found.name, "capability": f"{found.major}.{found.minor}", "memory": found.total_memory}
        facts |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
            facts["driver, clock, power"] = subprocess.run(
                query, check=False, capture_output=True, text=True
            ).stdout.strip()
    return facts


SECTIONS: dict[str, Callable[[Run], Json]] = {
    "far offsets": far_offsets,
    "determinism": determinism,
    "long rows": long_rows,
    "properties": properties,
    "speed": speed,
    "sanitizer": sanitizer,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--sanitized", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not ON_GPU and not options.reduced:
        print("torch sees no GPU here; --reduced exercises this file on a CPU", file=sys.stderr)
        return 2
    run = Run(options.reduced, options.minutes)
    if options.sanitized:
        sanitized_case(run)
        return 0
    document: Json = {"environment": environment(run)}
    for name, section in SECTIONS.items():
        start = time.monotonic()
        if name not in options.only:
            document[name] = not_run("not asked for")
        elif run.left() <= 0:
            document[name] = not_run("the time was used up")
        else:
            try:
                document[name] = section(run)
            except Exception as error:  # a section that breaks must not take the others' figures with it
                document[name] = not_run(f"{type(error).__name__}: {str(error)[:500]}") | {"broken": True}
        document[name]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{name}: {summary(document[name])}", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {options.out}")
    return 1 if failed(document) else 0


def summary(section: Json) -> str:
    if not section["ran"]:
        return f"not run: {section['why']}"
    return f"{section['seconds']} s" + (" WRONG" if wrong(section) else "")


def wrong(section: Json) -> bool:
    """Whether a section found the kernel wrong."""
    rows = [section, *section.get("rows", [])]
    verdicts = [v for row in rows if isinstance(row.get("oracle"), dict) for v in row["oracle"].values()]
    return (
        any(row.get("same bits") is False or row.get("violation") or row.get("gross") for row in rows)
        or any(row.get("triton", {}).get("ran") is False for row in rows)
        or any(v["outcome"] == "violated" for v in verdicts)
        or section.get("exit code", 0) != 0
    )


def failed(document: Json) -> bool:
    sections = [section for name, section in document.items() if name != "environment"]
    return any(section.get("broken") or (section["ran"] and wrong(section)) for section in sections)


if __name__ == "__main__":
    sys.exit(main())
