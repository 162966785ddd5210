"""The Triton kernel, judged in its interpreter: by the properties, by its own ways of being called, by faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from attncheck.kernels.candidate import Candidate, Unsupported
from attncheck.kernels.isolated import Died, isolated
from attncheck.kernels.loading import load
from attncheck.kernels.triton_attention.candidate import INTERPRETER, profile
from attncheck.kernels.triton_attention.tiles import DTYPES
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.result import Result
from attncheck.properties import campaign
from attncheck.properties.catalogue import PROPERTIES
from attncheck.properties.verdict import Outcome

from .triton_faults import FAULTS

HERE = Path(__file__).resolve().parent
ALL = frozenset({"o", "lse", "dq", "dk", "dv"})


@cache
def way(name: str) -> Candidate:
    """A function of triton_ways.py in a child process with the interpreter."""
    like = {} if name == "right" else {"like": "case"}
    return isolated(f"{HERE / 'triton_ways.py'}:{name}", environment=INTERPRETER, **like)


def case(
    dtype: str = "float32",
    *,
    b: int = 1,
    heads: tuple[int, int] = (2, 1),
    rows: int = 9,
    keys: int = 6,
    d: int = 5,
    dv: int = 3,
    **fields: object,
) -> Case:
    rng = np.random.default_rng(rows * keys)
    shapes = {"q": (b, heads[0], rows, d), "k": (b, heads[1], keys, d), "v": (b, heads[1], keys, dv)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays["do"] = rng.standard_normal((b, heads[0], rows, dv))
    stored = {name: x.astype(FORMATS[dtype].dtype) for name, x in arrays.items()}
    return Case(**stored, **fields)  # type: ignore[arg-type]


def run(candidate: Candidate, case: Case, want: frozenset[str] = ALL) -> Result:
    return candidate.run(case, Presentation(), want)


def assert_same_bits(a: Result, b: Result, names: frozenset[str] = ALL) -> None:
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and x.shape == y.shape, name
        np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"), err_msg=name)


# -- the properties -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_violated(dtype: str) -> None:
    candidate = load("triton")
    judged = 0
    for name in PROPERTIES:
        tally = campaign.check(candidate, name, dtype, examples=3, seed=1)
        assert tally.failure is None, tally.failure.verdict.sentence  # type: ignore[union-attr]
        assert tally.judged + tally.vacuous + tally.declined == tally.examples
        judged += tally.judged
    assert judged > 30


@pytest.mark.parametrize(("d", "dv"), [(17, 3), (3, 130), (256, 256)])
def test_wide_heads_hold_their_bounds(d: int, dv: int) -> None:
    bias = np.linspace(-1, 1, 6, dtype=np.float32)
    given = case(d=d, dv=dv, rows=4, heads=(1, 1), bias=bias, causal="top-left")
    for name in ("output", "lse", "dq", "dk", "dv", "dbias"):
        verdict = PROPERTIES[name].judge(load("triton"), given, Presentation())
        assert verdict.outcome is Outcome.HOLDS, verdict.sentence


def test_it_says_where_it_runs() -> None:
    about = load("triton").about
    assert "interpreter" in about or "on " in about


@pytest.mark.parametrize("like", ["sdpa", "flash_attn"])
def test_its_calls_follow_the_conventions_of_others(like: str) -> None:
    name = {"sdpa": "scaled_dot_product_attention", "flash_attn": "flash_attn_func"}[like]
    profiles = {dtype: profile(dtype, "interpreter") for dtype in DTYPES}
    candidate = isolated(
        f"attncheck.kernels.triton_attention.functional:{name}",
        like=like,
        dtypes=DTYPES,
        profiles=profiles,
        environment=INTERPRETER,
    )
    assert {"o", "dq", "dk", "dv"} <= candidate.offers
    for dtype, prop in (("float32", "dq"), ("float16", "output"), ("bfloat16", "dk")):
        tally = campaign.check(candidate, prop, dtype, examples=8, seed=2)
        assert tally.failure is None, tally.failure.verdict.sentence  # type: ignore[union-attr]
        assert tally.judged


def test_its_call_over_a_cache_follows_the_convention() -> None:
    candidate = isolated(
        "attncheck.kernels.triton_attention.functional:flash_attn_with_kvcache",
        like="flash_attn_with_kvcache",
        dtypes=DTYPES,
        profiles={dtype: profile(dtype, "interpreter") for dtype in DTYPES},
        promises=["layout-invariant", "padding-not-read"],
        environment=INTERPRETER,
    )
    assert candidate.takes_pages
    wanted = (("float32", "output", 40), ("float16", "lse", 40), ("bfloat16", "output", 40), ("float16", "layouts", 5))
    for dtype, prop, least in wanted:
        tally = campaign.check(candidate, prop, dtype, examples=60, seed=2)
        assert tally.failure is None, tally.failure.verdict.sentence  # type: ignore[union-attr]
        assert tally.judged >= least


# -- bit for bit ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fields", [{}, {"causal": "bottom-right"}, {"window": (3, 2)}], ids=["dense", "causal", "window"]
)
def test_packed_is_padded(dtype: str, fields: dict[str, object]) -> None:
    ragged = case(dtype, b=4, heads=(1, 1), q_lengths=(9, 3, 0, 8), k_lengths=(6, 5, 5, 0), **fields)
    assert_same_bits(run(way("packed"), ragged), run(way("right"), ragged))


def test_memory_between_elements_is_not_read() -> None:
    given = case(causal="top-left", bias=np.ones((1, 2, 9, 6), dtype=np.float32))
    assert_same_bits(
        run(way("strided"), given, ALL | {"dbias"}), run(way("right"), given, ALL | {"dbias"}), ALL | {"dbias"}
    )


def test_views_with_stride_0_are_read_as_they_are() -> None:
    given = case("float16", heads=(3, 3))
    same = Case(q=given.q, **{n: np.repeat(getattr(given, n)[:, :1], 3, axis=1) for n in ("k", "v", "do")})
    assert_same_bits(run(way("expanded"), given), run(way("right"), same))


def test_calling_twice_is_calling_once() -> None:
    given = case("bfloat16", bias=np.zeros((1, 1, 1, 6), dtype=np.float32), softcap=2.0)
    run(way("twice"), given, ALL | {"dbias"})


def test_offsets_pass_32_bits() -> None:
    q = np.arange(12, dtype=np.float16).reshape(1, 1, 3, 4) / 8
    given = Case(q=q, k=q, v=q)
    near = run(way("right"), given, frozenset({"o", "lse"}))
    assert_same_bits(run(way("far"), given), near, frozenset({"o", "lse"}))
    try:
        wrong = run(way("far_narrow"), given)
    except Died as death:
        assert "SIG" in str(death)
    else:
        with pytest.raises(AssertionError):
            assert_same_bits(wrong, near, frozenset({"o", "lse"}))


# -- refusals -------------------------------------------------------------------------------


REFUSAL = """
import torch
from attncheck.kernels.triton_attention import functional as f
q = torch.zeros(1, 2, 3, 4)
def said(call):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_what_it_does_not_take_is_one_sentence() -> None:
    calls = {
        "f.attention(q.double(), q, q)": "q is torch.float64; accepted are torch.float32, torch.float16",
        "f.attention(q, q.half(), q)": "k is torch.float16 but q is torch.float32; they must agree",
        "f.attention(*3 * [torch.zeros(1, 1, 1, 257)])": "D is 257; it must be from 1 to 256",
        "f.attention(q, q[:, :0], q[:, :0])": "q has 2 heads and k has 0; the first must be a multiple of it",
        "f.attention(q, q, q, scale=1e-45)": "which float32 does not hold to full precision",
        "f.attention(q, q, q, softcap=-1.0)": "softcap is -1.0; it must be None or positive",
        "f.attention(q, q, q, causal='left')": "causal is 'left'; accepted are None, 'top-left' and 'bottom-right'",
        "f.attention(q, q, q, window=(-2, 0))": "window is (-2, 0); each side must be None or at least 0",
        "f.attention(q, q, q, mask=torch.zeros(2, 3))": "mask is torch.float32; accepted are torch.bool",
        "f.attention(q, q, q, bias=torch.zeros(2, 3))": "bias has shape [1, 1, 2, 3], which does not broadcast",
        "f.attention(q, q, q, precision='fp8')": "precision is 'fp8'; accepted are ieee, tf32, tf32x3",
        "f.attention(q, q, q, k_lengths=torch.tensor([3]))": "k_ranges is torch.int64 of shape [1]; it must be int32",
        "f.flash_attn_func(q, q, q, dropout_p=0.1)": "dropout_p is 0.1; this kernel has no dropout",
        "f.scaled_dot_product_attention(q, q[:, :1], q[:, :1])": "that needs enable_gqa=True",
        "f.flash_attn_with_kvcache(q, q, q, block_table=torch.zeros(1, 2))": (
            "pages are torch.float32 of shape [1, 2]; they must be int32 of shape [B, most]"
        ),
        "f.flash_attn_with_kvcache(q, q[:, :0], q[:, :0], block_table=torch.zeros(1, 2, dtype=torch.int32))": (
            "a page holds 0 keys; it must hold at least 1"
        ),
    }
    lines = "\n".join(f"said(lambda: {call})" for call in calls)
    found = in_child(REFUSAL + lines).splitlines()
    assert len(found) == len(calls)
    for sentence, (call, wanted) in zip(found, calls.items(), strict=True):
        assert wanted in sentence, call


def test_without_gpu_and_interpreter_it_says_what_it_needs() -> None:
    code = REFUSAL + "said(lambda: f.attention(q, q, q))\nprint(torch.cuda.is_available())"
    sentence = in_child(code, interpreter=False)
    assert "the tensors are on cpu; the kernel needs a GPU" in sentence


def test_importing_the_package_imports_neither_torch_nor_triton() -> None:
    code = "import sys, attncheck.kernels.triton_attention.tiles\nprint({'torch', 'triton'} & set(sys.modules))"
    assert in_child(code) == "set()"


def test_a_scale_it_cannot_multiply_by_is_declined() -> None:
    with pytest.raises(Unsupported, match="float32 does not hold"):
        run(way("right"), case(scale=float(np.float32(1e-40))))


def in_child(code: str, *, interpreter: bool = True) -> str:
    environment = {**os.environ, **(INTERPRETER if interpreter else {})}
    if not interpreter:
        environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- faults ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What the properties found in each faulty copy of the kernel, and in an unchanged one."""
    folder = tmp_path_factory.mktemp("copies")
    command = [sys.executable, str(HERE / "triton_faults.py"), str(folder)]
    done = subprocess.run(command, env={**os.environ, **INTERPRETER}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_kernel_is_caught(searched: dict[str, dict[str, object]], name: str) -> None:
    assert searched[name]["found"], f"{FAULTS[name].about}: not found in {searched[name]['cases']} cases"


def test_the_unchanged_kernel_passes_where_the_faulty_ones_fall(searched: dict[str, dict[str, object]]) -> None:
    assert searched["unchanged"]
    for result in searched["unchanged"].values():
        assert result["found"] is None  # type: ignore[index]
