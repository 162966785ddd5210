"""Each calling convention against a naive reference with index code of its own, and what adapters report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from attncheck.kernels.adapters import sdpa
from attncheck.kernels.adapters.tensors import nan_in_fresh_memory, place, same_bits, to_array, to_tensor
from attncheck.kernels.candidate import Candidate, Unsupported
from attncheck.kernels.loading import LoadError, from_callable, load
from attncheck.kernels.presenting import buffer, lay_out
from attncheck.oracle.case import LAYOUTS, Case, Presentation
from attncheck.oracle.result import Result

SDPA = torch.nn.functional.scaled_dot_product_attention
EVERYTHING = frozenset({"o", "lse", "dq", "dk", "dv", "dbias"})
FLAGS, MASK = Presentation(route="flags"), Presentation(route="mask")
UNIT = 2.0**-53


# -- the naive reference: one pair at a time -------------------------------------------------


def sees(case: Case, b: int, h: int, i: int, j: int) -> bool:
    nq, nk = case.q_length[b], case.k_length[b]
    if i >= nq or j >= nk:
        return False
    at = i if case.causal == "top-left" else i + nk - nq
    if case.causal is not None and j > at:
        return False
    left, right = case.window or (None, None)
    if left is not None and j < at - left:
        return False
    if right is not None and j > at + right:
        return False
    if case.mask is not None and not np.broadcast_to(case.mask, full(case))[b, h, i, j]:
        return False
    return case.bias is None or np.broadcast_to(case.bias, full(case))[b, h, i, j] != -np.inf


def full(case: Case) -> tuple[int, int, int, int]:
    b, hq, _, sq, sk, _, _ = case.shape
    return b, hq, sq, sk


def reference(case: Case) -> dict[str, np.ndarray]:
    """o, lse and, where the case has do, the gradients, in float64 from the formulas."""
    nb, hq, hk, sq, sk, d, dv = case.shape
    q, k, v = (getattr(case, name).astype(np.float64) for name in ("q", "k", "v"))
    scale = 1 / math.sqrt(d) if case.scale is None else case.scale
    out = {
        "o": np.zeros((nb, hq, sq, dv)),
        "lse": np.full((nb, hq, sq), -np.inf),
        "dq": np.zeros(q.shape),
        "dk": np.zeros(k.shape),
        "dv": np.zeros(v.shape),
    }
    ds_all = np.zeros(full(case))
    for b in range(nb):
        for h in range(hq):
            g = h // (hq // hk)
            for i in range(sq):
                seen = [j for j in range(sk) if sees(case, b, h, i, j)]
                if not seen:
                    continue
                s, slope = [], []
                for j in seen:
                    raw = scale * float(q[b, h, i] @ k[b, g, j])
                    t = 0.0 if case.softcap is None else math.tanh(raw / case.softcap)
                    s.append(raw if case.softcap is None else case.softcap * t)
                    slope.append(1 - t * t)
                    if case.bias is not None:
                        s[-1] += float(np.broadcast_to(case.bias, full(case))[b, h, i, j])
                    if case.alibi_slopes is not None:
                        shift = 0 if case.causal == "top-left" else case.k_length[b] - case.q_length[b]
                        s[-1] -= float(np.broadcast_to(case.alibi_slopes, (nb, hq))[b, h]) * abs(i + shift - j)
                p = np.exp(np.array(s) - max(s))
                lse = max(s) + math.log(p.sum())
                p = p / p.sum()
                out["o"][b, h, i] = p @ v[b, g, seen]
                out["lse"][b, h, i] = lse
                if case.do is None:
                    continue
                do = case.do[b, h, i].astype(np.float64)
                dlse = 0.0 if case.dlse is None else float(case.dlse[b, h, i])
                dp = v[b, g, seen] @ do
                ds = p * (dp - do @ out["o"][b, h, i] + dlse)
                ds_all[b, h, i, seen] = ds
                ds = ds * slope
                out["dq"][b, h, i] = scale * ds @ k[b, g, seen]
                for j, x, w in zip(seen, ds, p, strict=True):
                    out["dk"][b, g, j] += scale * x * q[b, h, i]
                    out["dv"][b, g, j] += w * do
    if case.do is None:
        return {name: out[name] for name in ("o", "lse")}
    if case.bias is not None:
        padded = (1,) * (4 - case.bias.ndim) + case.bias.shape
        axes = tuple(n for n in range(4) if padded[n] == 1)
        out["dbias"] = ds_all.sum(axis=axes, keepdims=True).reshape(case.bias.shape)
    return out


def allowed(case: Case) -> float:
    """Largest difference of two right float64 computations of any output of these cases.

    All inputs are at most 2 in magnitude, |scale| too, so with n = max(D, Dv) products per dot a
    score is at most M = 8 n + 16 (bias, ALiBi over 6 steps) and carries (n + 8) u M; that is an
    absolute error of a score, so a relative one of P. P, dP, D, dS (each at most 8 n + 2) and a
    sum over at most G Sq or Sk terms with factors of at most 4 follow, with 8 further roundings
    per term. Both sides may err by so much.
    """
    _, hq, hk, sq, sk, d, dv = case.shape
    n, terms = max(d, dv), max(sk, sq * (hq // hk) * case.q.shape[0] * hk)
    largest = 8 * n + 16
    relative = 2 * (n + 8) * largest + terms + 2 * n + 8
    return 2 * UNIT * relative * terms * 4 * largest


def differs(case: Case, result: Result, outputs: tuple[str, ...]) -> str | None:
    """The first output that differs from the reference, padded query rows left out; None where all agree."""
    expected = reference(case)
    for name in outputs:
        if name not in expected:
            continue
        got, want = getattr(result, name), expected[name]
        if got is None or got.shape != want.shape:
            return name
        keep = np.ones(want.shape, dtype=bool)
        if name in ("o", "lse", "dq"):
            for b, n in enumerate(case.q_length):
                keep[b, :, n:] = False
        with np.errstate(invalid="ignore"):
            off = np.where(got == want, 0.0, np.abs(got - want))
        if not (off[keep] <= allowed(case)).all():
            return name
    return None


# -- the cases -------------------------------------------------------------------------------


def draw(seed: int = 0, *, b: int = 2, hq: int = 4, hk: int = 2, sq: int = 3, sk: int = 5, **fields: Any) -> Case:
    rng = np.random.default_rng(seed)

    def uniform(*shape: int) -> np.ndarray:
        return rng.uniform(-2, 2, shape)

    fields = {name: value(rng) if callable(value) else value for name, value in fields.items()}
    return Case(
        q=uniform(b, hq, sq, 3), k=uniform(b, hk, sk, 3), v=uniform(b, hk, sk, 3), do=uniform(b, hq, sq, 3), **fields
    )


def masked(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.random(shape) < 0.6


def added(*shape: int, hidden: float = 0.3) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.where(rng.random(shape) < hidden, -np.inf, rng.uniform(-2, 2, shape))


CASES: dict[str, Case] = {
    "plain": draw(),
    "scale": draw(scale=-0.5),
    "scale 0": draw(scale=0.0),
    "causal square": draw(sq=4, sk=4, causal="bottom-right"),
    "causal top-left": draw(causal="top-left"),
    "causal bottom-right": draw(causal="bottom-right"),
    "causal bottom-right, more queries than keys": draw(sq=5, sk=3, causal="bottom-right"),
    "window": draw(window=(1, 0)),
    "window, one side": draw(window=(None, 1)),
    "window, top-left": draw(causal="top-left", window=(1, 2)),
    "alibi": draw(alibi_slopes=np.array([0.5, 1.0, -0.25, 2.0])),
    "alibi per entry, causal": draw(causal="top-left", alibi_slopes=np.linspace(-1, 1, 8).reshape(2, 4)),
    "lengths": draw(q_lengths=(2, 3), k_lengths=(5, 2)),
    "lengths, causal, window": draw(q_lengths=(2, 3), k_lengths=(4, 1), causal="bottom-right", window=(2, None)),
    "length 0": draw(k_lengths=(0, 5)),
    "mask, one axis": draw(mask=masked(5)),
    "mask, two axes": draw(mask=masked(3, 5)),
    "mask, three axes": draw(mask=masked(4, 1, 5)),
    "mask, batch only": draw(hk=2, mask=masked(2, 1, 1, 5)),
    "mask and lengths": draw(mask=masked(3, 1), q_lengths=(1, 3), k_lengths=(5, 3)),
    "bias": draw(bias=added(2, 4, 3, 5)),
    "bias, one axis": draw(bias=added(5)),
    "bias, one number": draw(bias=added(1, hidden=0.0)),
    "bias, two axes": draw(bias=added(3, 5)),
    "bias, three axes": draw(bias=added(4, 3, 1, hidden=0.0)),
    "bias, mask, causal, lengths, alibi": draw(
        bias=added(4, 3, 5),
        mask=masked(2, 1, 3, 5),
        causal="bottom-right",
        q_lengths=(3, 2),
        k_lengths=(3, 5),
        alibi_slopes=np.array([0.5, 1.0, -0.25, 2.0]),
    ),
    "no batch": draw(b=0),
    "no queries": draw(sq=0),
    "no keys": draw(sk=0),
    "softcap": draw(softcap=1.5),
    "dlse": draw(dlse=lambda rng: rng.uniform(-2, 2, (2, 4, 3))),
}


def cases(*left_out: str) -> list[Any]:
    return [pytest.param(case, id=name) for name, case in CASES.items() if name not in left_out]


# -- sdpa ------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["flags", "mask"])
@pytest.mark.parametrize("case", cases("softcap", "dlse"))
def test_sdpa_agrees_with_the_reference(case: Case, route: str) -> None:
    result = from_callable(SDPA, "sdpa").run(case, Presentation(route=route), EVERYTHING)
    assert differs(case, result, ("o", "dq", "dk", "dv", "dbias")) is None
    assert result.mutated == ()


class Spy:
    """An sdpa callable that remembers how it was called."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **keywords: Any) -> torch.Tensor:
        self.query, self.keywords = query, keywords
        return SDPA(query, key, value, **keywords)


def spied(case: Case, presentation: Presentation = FLAGS, want: frozenset[str] = EVERYTHING) -> Spy:
    spy = Spy()
    from_callable(spy, "sdpa").run(case, presentation, want)
    return spy


def test_is_causal_is_used_only_where_it_says_the_same() -> None:
    assert spied(CASES["causal square"]).keywords["is_causal"]
    assert spied(CASES["causal top-left"]).keywords["is_causal"]
    for case, presentation in (
        (CASES["causal top-left"], MASK),
        (CASES["causal bottom-right"], FLAGS),
        (CASES["window, top-left"], FLAGS),
        (draw(sq=4, sk=4, causal="top-left", q_lengths=(3, 4)), FLAGS),
        (draw(sq=4, sk=4, causal="top-left", mask=masked(4, 4)), FLAGS),
    ):
        keywords = spied(case, presentation).keywords
        assert "is_causal" not in keywords and keywords["attn_mask"] is not None


def test_is_causal_is_used_on_either_route_where_there_is_no_mask() -> None:
    seen: list[bool] = []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
        seen.append(is_causal)
        return SDPA(query, key, value, is_causal=is_causal)

    from_callable(attention, "sdpa", supports=["gqa"]).run(draw(hk=4, causal="top-left"), MASK, frozenset({"o"}))
    assert seen == [True]


def test_defaults_are_passed_where_named_and_left_out_where_not() -> None:
    assert spied(draw(hk=4)).keywords == {}
    named: dict[str, Any] = {}

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float = 1.0, enable_gqa: bool = True
    ) -> torch.Tensor:
        named.update(scale=scale, enable_gqa=enable_gqa)
        return SDPA(query, key, value, scale=scale)

    from_callable(attention, "sdpa").run(draw(hk=4), FLAGS, frozenset({"o"}))
    assert named == {"scale": None, "enable_gqa": False}


def as_dtype(case: Case, dtype: Any, **fields: Any) -> Case:
    arrays = {name: getattr(case, name).astype(dtype) for name in ("q", "k", "v", "do")}
    return replace(case, **arrays, **fields)


def test_mask_dtypes() -> None:
    bias = np.zeros((3, 5), dtype=np.float16)
    slopes = np.ones(4, dtype=np.float32)
    half = as_dtype(CASES["plain"], np.float16)
    table = [
        (replace(half, mask=np.ones((3, 5), dtype=bool)), torch.bool),
        (replace(half, causal="bottom-right"), torch.bool),
        (replace(half, bias=bias), torch.float16),
        (replace(half, bias=bias.astype(np.float32)), torch.float32),
        (replace(half, alibi_slopes=slopes), torch.float32),
        (replace(half, bias=bias, alibi_slopes=slopes, causal="bottom-right"), torch.float32),
        (replace(CASES["plain"], alibi_slopes=slopes.astype(np.float64)), torch.float64),
    ]
    for case, dtype in table:
        assert spied(case, want=frozenset({"o", "dq"})).keywords["attn_mask"].dtype == dtype
    # hiding keeps the storage type too, except where a gradient would be rounded before it is summed
    case = replace(half, bias=bias, causal="bottom-right")
    assert spied(case, want=frozenset({"o", "dq"})).keywords["attn_mask"].dtype == torch.float16
    assert spied(case, want=frozenset({"o", "dbias"})).keywords["attn_mask"].dtype == torch.float32


def test_masks_keep_their_axes() -> None:
    shapes = {
        "mask, one axis": (1, 5),
        "mask, two axes": (3, 5),
        "mask, three axes": (1, 4, 1, 5),
        "mask, batch only": (2, 1, 1, 5),
        "bias, two axes": (3, 5),
        "lengths": (2, 1, 1, 5),
        "causal bottom-right": (1, 1, 3, 5),
    }
    for name, shape in shapes.items():
        assert tuple(spied(CASES[name]).keywords["attn_mask"].shape) == shape, name


def test_only_what_is_wanted_requires_grad() -> None:
    case = CASES["bias"]
    spy = spied(case, want=frozenset({"o"}))
    assert not spy.query.requires_grad and not spy.keywords["attn_mask"].requires_grad
    spy = spied(case, want=frozenset({"o", "dk"}))
    assert spy.query.requires_grad and not spy.keywords["attn_mask"].requires_grad
    assert spied(case, want=frozenset({"o", "dbias"})).keywords["attn_mask"].requires_grad
    result = from_callable(SDPA, "sdpa").run(case, FLAGS, frozenset({"o", "dk"}))
    assert result.dk is not None and result.dq is None and result.dbias is None


def test_padded_rows_see_the_valid_keys_so_that_nan_rows_cannot_reach_the_gradients() -> None:
    def nan_where_empty(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None) -> Any:
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        added = (
            torch.zeros_like(scores).masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else attn_mask
        )
        return (scores + added).softmax(-1) @ value

    kernel = from_callable(nan_where_empty, "sdpa")
    padding = {"q_lengths": (1, 3), "k_lengths": (5, 4), "hk": 4}
    for case in (
        draw(causal="bottom-right", **padding),
        draw(mask=lambda rng: np.triu(np.ones((3, 5), dtype=bool)), window=(0, 0), **padding),
        draw(
            bias=lambda rng: np.where(np.arange(3) > 0, -np.inf, 0.5)[None, None, :, None] + np.zeros((2, 4, 3, 5)),
            **{**padding, "q_lengths": (1, 1)},
        ),
    ):
        result = kernel.run(case, FLAGS, EVERYTHING)
        assert differs(case, result, ("o", "dq", "dk", "dv", "dbias")) is None


# -- flash_attn ------------------------------------------------------------------------------


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: bool = False,
) -> Any:
    """A right kernel of this convention: torch operations, [B, S, H, D], bottom-right."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    sq, sk = q.shape[2], k.shape[2]
    s = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    away = torch.arange(sk)[None, :] - (torch.arange(sq)[:, None] + sk - sq)
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.ndim == 2 else alibi_slopes[None]
        s = s - slopes[:, :, None, None] * away.abs()
    left, right = window_size
    hidden = torch.zeros(sq, sk, dtype=torch.bool)
    if causal or right >= 0:
        hidden |= away > (0 if causal else right)
    if left >= 0:
        hidden |= away < -left
    s = s.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    out = (p @ v).transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


FLASH_CASES = cases(
    *(name for name in CASES if any(word in name for word in ("lengths", "length 0", "mask", "bias", "top-left"))),
    "alibi per entry, causal",
)


@pytest.mark.parametrize("case", FLASH_CASES)
def test_flash_attn_agrees_with_the_reference(case: Case) -> None:
    candidate = from_callable(flash_attn_func, "flash_attn", supports=["dlse"])
    result = candidate.run(case, FLAGS, EVERYTHING - {"dbias"})
    assert differs(case, result, ("o", "lse", "dq", "dk", "dv")) is None
    assert result.mutated == ()


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: bool = False,
) -> Any:
    """A right kernel of this convention: one sequence after another."""
    rows, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(rows, default=0), max(keys, default=0))
    o, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(q.shape[1], q.shape[0])
    for b in range(len(rows)):
        of_q, of_k = (slice(int(at[b]), int(at[b + 1])) for at in (cu_seqlens_q, cu_seqlens_k))
        slopes = alibi_slopes[b : b + 1] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        own, of_rows, _ = flash_attn_func(
            *(x[None] for x in (q[of_q], k[of_k], v[of_k])),
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=slopes,
            return_attn_probs=True,
        )
        o, lse = o.index_put((torch.arange(*of_q.indices(len(q))),), own[0]), lse.clone()
        lse[:, of_q] = of_rows[0]
    return (o, lse, None) if return_attn_probs else o


VARLEN_CASES = cases(
    *(name for name in CASES if any(word in name for word in ("mask", "bias", "top-left"))),
    "alibi per entry, causal",
)


@pytest.mark.parametrize("case", VARLEN_CASES)
def test_flash_attn_varlen_agrees_with_the_reference(case: Case) -> None:
    candidate = from_callable(flash_attn_varlen_func, "flash_attn_varlen", supports=["dlse"])
    result = candidate.run(case, FLAGS, EVERYTHING - {"dbias"})
    assert differs(case, result, ("o", "lse", "dq", "dk", "dv")) is None
    assert result.mutated == ()


@pytest.mark.parametrize(
    ("wrong", "outputs"),
    [
        (
            lambda q, k, v, cq, ck, mq, mk: (q, k, v, torch.tensor([0, int(cq[-1])]), torch.tensor([0, int(ck[-1])])),
            "o",
        ),
        (lambda q, k, v, cq, ck, mq, mk: (q, k, v.roll(1, 0), cq, ck), "o"),
    ],
    ids=["one sequence of all", "values of the next row"],
)
def test_a_wrong_flash_attn_varlen_is_seen(wrong: Any, outputs: str) -> None:
    def function(*arrays: Any) -> Any:
        q, k, v, cq, ck = wrong(*arrays)
        return flash_attn_varlen_func(q, k, v, cq, ck, int(cq.diff().max()), int(ck.diff().max()))

    case = draw(hk=4, k_lengths=(3, 5), q_lengths=(3, 2))
    result = from_callable(function, "flash_attn_varlen").run(case, FLAGS, frozenset({"o"}))
    assert differs(case, result, (outputs,)) is not None


def test_flash_attn_varlen_takes_lengths_and_reports_wrong_shapes() -> None:
    candidate = from_callable(flash_attn_varlen_func, "flash_attn_varlen")
    assert candidate.convention == "flash_attn_varlen" and "lengths" not in candidate.lacks
    assert not candidate.takes_packed  # it is all that it takes: there is nothing to compare with
    flat = from_callable(lambda q, *rest: q.reshape(q.shape[0], -1), "flash_attn_varlen", forward_only=True)
    result = flat.run(CASES["plain"], FLAGS, frozenset({"o"}))
    assert result.o is not None and result.o.ndim == 2
    with pytest.raises(LoadError, match="takes 3 by position"):
        from_callable(lambda q, k, v: q, "flash_attn_varlen")


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    *,
    return_softmax_lse: bool = False,
) -> Any:
    """A right kernel of this convention: one sequence after another, its pages laid end to end."""
    assert cache_seqlens is not None and cache_seqlens.dtype == torch.int32
    found = []
    for b, n in enumerate(cache_seqlens.tolist()):
        own = []
        for cache in (k_cache, v_cache):
            whole = cache[b] if block_table is None else cache[block_table[b].long()].flatten(0, 1)
            own.append(whole[None, :n])
        slopes = alibi_slopes[b : b + 1] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        found.append(
            flash_attn_func(
                q[b : b + 1],
                *own,
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                softcap=softcap,
                alibi_slopes=slopes,
                return_attn_probs=True,
            )
        )
    o = torch.cat([x for x, _, _ in found]) if found else q.new_zeros(*q.shape[:3], v_cache.shape[3])
    lse = torch.cat([x for _, x, _ in found]) if found else q.new_zeros(0, q.shape[2], q.shape[1])
    return (o, lse) if return_softmax_lse else o


@pytest.mark.parametrize("page_size", [None, 1, 3, 256])
@pytest.mark.parametrize("case", VARLEN_CASES)
def test_flash_attn_with_kvcache_agrees_with_the_reference(case: Case, page_size: int | None) -> None:
    candidate = from_callable(flash_attn_with_kvcache, "flash_attn_with_kvcache")
    case = replace(case, q_lengths=None)
    result = candidate.run(case, replace(FLAGS, page_size=page_size, poison="nan"), frozenset({"o", "lse"}))
    assert differs(case, result, ("o", "lse")) is None
    assert result.mutated == ()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda table, lengths: (table.flip(1), lengths),
        lambda table, lengths: (table, torch.full_like(lengths, int(lengths.max()))),
    ],
    ids=["pages from the end", "lengths of the longest"],
)
def test_a_wrong_flash_attn_with_kvcache_is_seen(wrong: Any) -> None:
    def function(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, block_table: Any) -> Any:
        block_table, cache_seqlens = wrong(block_table, cache_seqlens)
        return flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table)

    case = draw(hk=4, k_lengths=(3, 5))
    candidate = from_callable(function, "flash_attn_with_kvcache")
    assert "its signature has no softcap" in candidate.lacks.values()
    result = candidate.run(case, replace(FLAGS, page_size=2), frozenset({"o"}))
    assert differs(case, result, ("o",)) is not None


def test_flash_attn_with_kvcache_offers_and_lacks() -> None:
    candidate = from_callable(flash_attn_with_kvcache, "flash_attn_with_kvcache")
    assert candidate.takes_pages and candidate.offers == {"o", "lse"}
    assert candidate.lacks.keys() == {"mask", "bias", "causal-top-left", "dlse", "sinks", "dropout"}
    with pytest.raises(Unsupported, match="flash_attn_with_kvcache has no query lengths"):
        candidate.run(draw(hk=4, q_lengths=(3, 2)), FLAGS, frozenset({"o"}))
    candidate.run(draw(hk=4, q_lengths=(3, 3)), FLAGS, frozenset({"o"}))
    bare = from_callable(lambda q, k_cache, v_cache: q, "flash_attn_with_kvcache")
    assert not bare.takes_pages and bare.offers == {"o"}
    # without lengths it would read the last page to its end
    assert not from_callable(lambda q, k, v, *, block_table: q, "flash_attn_with_kvcache").takes_pages
    assert bare.lacks["lengths"] == "its signature has no cache_seqlens"
    with pytest.raises(Unsupported, match="the flash_attn_with_kvcache convention has no pages"):
        bare.run(draw(hk=4), Presentation(page_size=2), frozenset({"o"}))


def test_flash_attn_offers_and_lacks() -> None:
    candidate = from_callable(flash_attn_func, "flash_attn")
    assert candidate.offers == {"o", "lse", "dq", "dk", "dv"}
    assert candidate.lacks.keys() == {"mask", "bias", "lengths", "causal-top-left", "dlse", "sinks", "dropout"}
    assert candidate.lacks["dlse"] == "it does not declare that its log-sum-exp carries a gradient"
    assert "dlse" not in from_callable(flash_attn_func, "flash_attn", supports=["dlse"]).lacks

    def without_lse(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False) -> Any:
        return q

    candidate = from_callable(without_lse, "flash_attn")
    assert candidate.offers == {"o", "dq", "dk", "dv"}
    assert {"window", "softcap", "alibi"} <= candidate.lacks.keys()


def test_flash_attn_asks_for_the_lse_only_where_it_is_wanted() -> None:
    asked: list[bool] = []

    def attention(q: Any, k: Any, v: Any, return_attn_probs: bool = False) -> Any:
        asked.append(return_attn_probs)
        return flash_attn_func(q, k, v, return_attn_probs=return_attn_probs)

    candidate = from_callable(attention, "flash_attn")
    assert candidate.run(CASES["plain"], FLAGS, frozenset({"o"})).lse is None
    assert candidate.run(CASES["plain"], FLAGS, frozenset({"o", "lse"})).lse is not None
    assert asked == [False, True]


def test_a_declared_lse_gradient_that_is_not_there() -> None:
    def detached(q: Any, k: Any, v: Any, return_attn_probs: bool = False) -> Any:
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
        return out, lse.detach(), None

    candidate = from_callable(detached, "flash_attn", supports=["dlse"])
    with pytest.raises(RuntimeError, match="the log-sum-exp carries no gradient; pass --lacks dlse"):
        candidate.run(CASES["dlse"], FLAGS, EVERYTHING - {"dbias"})


# -- numpy and case --------------------------------------------------------------------------


def numpy_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, mask: np.ndarray | None, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """A right kernel of the numpy convention."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = scale * (q @ k.swapaxes(2, 3))
    s = s if bias is None else s + bias
    s = s if mask is None else np.where(mask, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return p @ v / np.where(total == 0, 1, total), (top + np.log(total))[..., 0]


@pytest.mark.parametrize("case", cases("softcap"))
def test_numpy_agrees_with_the_reference(case: Case) -> None:
    result = from_callable(numpy_attention, "numpy").run(case, FLAGS, frozenset({"o", "lse"}))
    assert differs(case, result, ("o", "lse")) is None
    assert result.mutated == () and result.dq is None


def test_numpy_without_lse_and_with_another_return() -> None:
    result = from_callable(lambda q, k, v, **fields: q, "numpy").run(CASES["plain"], FLAGS, frozenset({"o", "lse"}))
    assert result.lse is None and result.o is not None
    with pytest.raises(TypeError, match="the kernel's output is a list; it must be a numpy array"):
        from_callable(lambda q, k, v, **fields: [1], "numpy").run(CASES["plain"], FLAGS, frozenset({"o"}))


def test_numpy_bias_is_in_the_wide_type() -> None:
    seen: list[Any] = []

    def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, mask: Any, bias: Any) -> np.ndarray:
        seen.append((type(scale), bias.dtype, q.dtype))
        return v

    half = as_dtype(CASES["plain"], np.float16, bias=np.ones((3, 5), dtype=np.float16))
    from_callable(attention, "numpy").run(half, FLAGS, frozenset({"o"}))
    from_callable(attention, "numpy").run(CASES["bias"], FLAGS, frozenset({"o"}))
    assert seen == [(float, np.float32, np.float16), (float, np.float64, np.float64)]


def test_case_functions() -> None:
    case = CASES["plain"]
    short = from_callable(lambda case: Result(o=case.q), "case")
    assert np.array_equal(short.run(case, FLAGS, EVERYTHING).o, case.q)  # type: ignore[arg-type]
    whole = from_callable(lambda case, presentation, want: Result(o=np.array(len(want))), "case")
    assert whole.run(case, MASK, frozenset({"o"})).o == 1
    with pytest.raises(TypeError, match="the kernel returned a int; it must return an attncheck Result"):
        from_callable(lambda case: 3, "case").run(case, FLAGS, EVERYTHING)


# -- wrong kernels are seen ------------------------------------------------------------------


def wrong_sdpa(change: Callable[[dict[str, Any]], dict[str, Any]], **before: Any) -> Candidate:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return SDPA(query, key, value, **change(keywords))

    return from_callable(attention, "sdpa")


def test_a_mask_of_the_other_polarity_is_seen() -> None:
    kernel = wrong_sdpa(lambda given: {**given, "attn_mask": ~given["attn_mask"]})
    assert differs(CASES["mask, two axes"], kernel.run(CASES["mask, two axes"], FLAGS, EVERYTHING), ("o",)) == "o"


def test_a_causal_flag_of_the_other_alignment_is_seen() -> None:
    def bottom_right(given: dict[str, Any]) -> dict[str, Any]:
        assert given.pop("is_causal")
        return {**given, "attn_mask": torch.ones(3, 5, dtype=torch.bool).tril(2)}

    case = CASES["causal top-left"]
    assert differs(case, wrong_sdpa(bottom_right).run(case, FLAGS, EVERYTHING), ("o",)) == "o"
    # and top-left where flash_attn wants bottom-right
    case = CASES["causal bottom-right"]
    kernel = from_callable(
        lambda q, k, v, causal=False: SDPA(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
        ).transpose(1, 2),
        "flash_attn",
    )
    assert differs(case, kernel.run(case, FLAGS, frozenset({"o"})), ("o",)) == "o"


def test_the_other_layout_is_seen() -> None:
    kernel = from_callable(lambda q, k, v, **rest: SDPA(q, k, v), "flash_attn")
    case = draw(hk=4, sq=4, sk=4)
    assert differs(case, kernel.run(case, FLAGS, frozenset({"o"})), ("o",)) == "o"


def test_the_other_log_base_is_seen() -> None:
    def base_2(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, mask: Any = None, bias: Any = None) -> Any:
        o, lse = numpy_attention(q, k, v, scale=scale, mask=mask, bias=bias)
        return o, lse / math.log(2)

    result = from_callable(base_2, "numpy").run(CASES["plain"], FLAGS, EVERYTHING)
    assert differs(CASES["plain"], result, ("o", "lse")) == "lse"


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dbias"])
def test_a_wrong_gradient_is_seen(name: str) -> None:
    result = from_callable(SDPA, "sdpa").run(CASES["bias"], FLAGS, EVERYTHING)
    wrong = replace(result, **{name: getattr(result, name) * (1 + 1e-6)})
    assert differs(CASES["bias"], wrong, ("o", "dq", "dk", "dv", "dbias")) == name


# -- what is reported rather than repaired ----------------------------------------------------


def test_an_output_without_gradient_says_what_to_do() -> None:
    kernel = from_callable(lambda q, k, v: SDPA(q, k, v).detach(), "sdpa")
    case = draw(hk=4)
    with pytest.raises(
        RuntimeError, match="the output carries no gradient; pass --forward-only if the kernel has none"
    ):
        kernel.run(case, FLAGS, EVERYTHING)
    assert kernel.run(case, FLAGS, frozenset({"o"})).o is not None


def test_an_input_left_out_of_the_graph_has_no_gradient() -> None:
    kernel = from_callable(lambda q, k, v: SDPA(q, k.detach(), v), "sdpa")
    result = kernel.run(draw(hk=4), FLAGS, EVERYTHING)
    assert result.dk is None and result.dq is not None


def test_wrong_shapes_and_dtypes_come_back_as_they_are() -> None:
    case = draw(hk=4)
    result = from_callable(lambda q, k, v: SDPA(q, k, v)[:, :, :1], "sdpa").run(case, FLAGS, EVERYTHING)
    assert result.o is not None and result.o.shape == (2, 4, 1, 3) and result.dq is None
    result = from_callable(lambda q, k, v: SDPA(q, k, v).bfloat16(), "sdpa").run(case, FLAGS, EVERYTHING)
    assert result.o is not None and result.o.dtype == ml_dtypes.bfloat16 and result.dq is not None
    with pytest.raises(TypeError, match=r"the kernel's output is a tuple; it must be a torch\.Tensor"):
        from_callable(lambda q, k, v: (SDPA(q, k, v), None), "sdpa").run(case, FLAGS, EVERYTHING)


class Scribbles(torch.autograd.Function):
    """Right, but writes into q on the way forward and into do on the way back."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q.data[0, 0, 0, 0] *= -1
        mask.data[..., 0] = True
        return v.clone()

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:  # type: ignore[override]
        do.data.fill_(3)
        return do, do, do, None


def test_changed_inputs_are_named() -> None:
    case = draw(hk=4, sq=5, mask=lambda rng: np.zeros((5, 5), dtype=bool))
    kernel = from_callable(lambda q, k, v, attn_mask=None: Scribbles.apply(q, k, v, attn_mask), "sdpa")
    assert set(kernel.run(case, FLAGS, EVERYTHING).mutated) == {"q", "attn_mask", "do"}

    def numpy_scribbles(q: np.ndarray, k: np.ndarray, v: np.ndarray, **fields: Any) -> np.ndarray:
        k[...] = -0.0
        return v

    assert from_callable(numpy_scribbles, "numpy").run(case, FLAGS, frozenset({"o"})).mutated == ("k",)


def test_refusals_decline_and_other_exceptions_pass() -> None:
    def raises(error: Exception) -> Candidate:
        def attention(q: Any, k: Any, v: Any) -> Any:
            raise error

        return from_callable(attention, "sdpa")

    case = draw(hk=4)
    with pytest.raises(Unsupported, match=r"RuntimeError: No available kernel\. Aborting execution\."):
        raises(RuntimeError("No available kernel. Aborting execution.")).run(case, FLAGS, EVERYTHING)
    for error in (NotImplementedError("no"), Unsupported("no"), RuntimeError("other"), TypeError("unexpected keyword")):
        with pytest.raises(type(error)) as caught:
            raises(error).run(case, FLAGS, EVERYTHING)
        assert caught.value is error


# -- memory ----------------------------------------------------------------------------------

MEMORIES = [
    Presentation(layouts=("transposed", "sliced", "contiguous", "sliced"), poison="nan"),
    Presentation(layouts=("sliced", "contiguous", "transposed", "transposed"), poison="inf"),
    Presentation(layouts=("contiguous", "transposed", "sliced", "expanded"), route="mask"),
    Presentation(layouts=("expanded", "expanded", "expanded", "transposed"), poison="huge"),
]


def repeated() -> Case:
    """Values that are equal along some axes, so that "expanded" has something to do."""
    case = CASES["plain"]
    same_rows = {name: np.repeat(getattr(case, name)[:, :, :1], getattr(case, name).shape[2], 2) for name in "qkv"}
    return replace(case, **same_rows, do=np.ones_like(case.do))


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("case", [*cases("softcap", "dlse"), pytest.param(repeated(), id="repeated")])
def test_sdpa_agrees_with_the_reference_in_any_memory(case: Case, memory: Presentation) -> None:
    result = from_callable(SDPA, "sdpa").run(case, memory, EVERYTHING)
    assert differs(case, result, ("o", "dq", "dk", "dv", "dbias")) is None
    assert result.mutated == ()


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("case", FLASH_CASES)
def test_flash_attn_agrees_with_the_reference_in_any_memory(case: Case, memory: Presentation) -> None:
    candidate = from_callable(flash_attn_func, "flash_attn", supports=["dlse"])
    result = candidate.run(case, memory, EVERYTHING - {"dbias"})
    assert differs(case, result, ("o", "lse", "dq", "dk", "dv")) is None
    assert result.mutated == ()


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("case", cases("softcap"))
def test_numpy_agrees_with_the_reference_in_any_memory(case: Case, memory: Presentation) -> None:
    result = from_callable(numpy_attention, "numpy").run(case, memory, frozenset({"o", "lse"}))
    assert differs(case, result, ("o", "lse")) is None and result.mutated == ()


class Watched(torch.autograd.Function):
    """Remembers the strides of what arrives on the way forward and back."""

    seen: dict[str, tuple[int, ...]]

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        Watched.seen = {"q": q.stride(), "k": k.stride(), "v": v.stride()}
        return torch.zeros_like(q, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:  # type: ignore[override]
        Watched.seen["do"] = do.stride()
        return do, None, None


def test_strides_arrive() -> None:
    case = replace(draw(hk=4, sq=5, sk=5), do=np.ones((2, 4, 5, 3)))
    for like, shape in (("sdpa", (2, 4, 5, 3)), ("flash_attn", (2, 5, 4, 3))):
        kernel = from_callable(Watched.apply, like)
        memory = Presentation(layouts=("contiguous", "transposed", "sliced", "expanded"))
        kernel.run(case, memory, frozenset({"o", "dq"}))
        one, two = shape[1:3]
        wide = (4, one + 2, two + 2, 3 + 16)
        assert Watched.seen == {
            "q": (one * two * 3, two * 3, 3, 1),
            "k": (one * two * 3, two * 3, 1, two),
            "v": (wide[1] * wide[2] * wide[3], wide[2] * wide[3], wide[3], 1),
            "do": (0, 0, 0, 0),
        }


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_placing_keeps_bits_and_strides(dtype: Any) -> None:
    for shape in ((2, 3, 4, 5), (1, 1, 1, 1), (0, 2, 3, 4), (2, 1, 0, 3)):
        for layout in LAYOUTS:
            view = lay_out(np.random.default_rng(0).standard_normal(shape).astype(dtype), layout, np.nan)
            tensor, whole = place(view)
            assert to_array(tensor).tobytes() == view.tobytes() and tuple(tensor.shape) == shape
            assert list(tensor.stride()) == [n // view.itemsize for n in view.strides]
            tensor.fill_(1)  # it is a view: what is written to it shows in the whole, and nowhere else
            assert int((whole == 1).sum()) == view.size


def packed(x: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that takes any tensor to be contiguous."""
    contiguous = [math.prod(x.shape[n + 1 :]) for n in range(x.ndim)]
    return x.as_strided(x.shape, contiguous)


class OfPackedGradient(torch.autograd.Function):
    """The identity, which hands back do as if it were contiguous."""

    @staticmethod
    def forward(ctx: Any, o: torch.Tensor) -> torch.Tensor:
        return o.clone()

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:  # type: ignore[override]
        return packed(do)


def test_kernels_that_ignore_strides_are_seen() -> None:
    case = draw(hk=4)
    memory = Presentation(layouts=("contiguous", "contiguous", "transposed", "contiguous"))
    of_v = from_callable(lambda q, k, v: SDPA(q, k, packed(v)), "sdpa")
    assert differs(case, of_v.run(case, FLAGS, frozenset({"o"})), ("o",)) is None
    assert differs(case, of_v.run(case, memory, frozenset({"o"})), ("o",)) == "o"
    memory = Presentation(layouts=("contiguous", "contiguous", "contiguous", "transposed"))
    of_do = from_callable(lambda q, k, v: OfPackedGradient.apply(SDPA(q, k, v)), "sdpa")
    assert differs(case, of_do.run(case, FLAGS, EVERYTHING), ("o", "dq", "dk", "dv")) is None
    assert differs(case, of_do.run(case, memory, EVERYTHING), ("o", "dq", "dk", "dv")) == "dq"
    of_q = from_callable(
        lambda q, k, v, scale: numpy_attention(np.resize(buffer(q), q.shape), k, v, scale=scale, mask=None, bias=None),
        "numpy",
    )
    assert differs(case, of_q.run(case, FLAGS, frozenset({"o"})), ("o",)) is None
    memory = Presentation(layouts=("sliced", "contiguous", "contiguous", "contiguous"))
    assert differs(case, of_q.run(case, memory, frozenset({"o"})), ("o",)) == "o"


def test_writing_beside_a_slice_changes_the_input() -> None:
    def torch_writes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k.as_strided((1,), (1,), 0).zero_()
        return SDPA(q, k, v)

    def numpy_writes(q: np.ndarray, k: np.ndarray, v: np.ndarray, **rest: Any) -> np.ndarray:
        np.lib.stride_tricks.as_strided(v, (v.shape[3] + 1,), v.strides[3:])[-1] = 0
        return v

    sliced = Presentation(layouts=("sliced", "sliced", "sliced", "sliced"), poison="nan")
    case = draw(hk=4)
    assert from_callable(torch_writes, "sdpa").run(case, sliced, frozenset({"o"})).mutated == ("k",)
    assert from_callable(numpy_writes, "numpy").run(case, sliced, frozenset({"o"})).mutated == ("v",)


def test_a_mask_does_not_owe_padding_but_hidden_poison_reaches_it() -> None:
    """0 times NaN is NaN in a right kernel that masks P: only who asks for hidden poison gets it."""
    case = CASES["lengths"]
    for poison in ("nan", "inf", "huge"):
        result = from_callable(SDPA, "sdpa").run(case, Presentation(poison=poison), EVERYTHING)
        assert differs(case, result, ("o", "dq", "dk", "dv")) is None
    hidden = Presentation(poison="nan", poison_hidden=True)
    assert differs(case, from_callable(SDPA, "sdpa").run(case, hidden, EVERYTHING), ("o",)) == "o"
    assert differs(case, from_callable(numpy_attention, "numpy").run(case, hidden, EVERYTHING), ("o",)) == "o"

    def selects(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        unseen = ~attn_mask.any(dim=-2)[..., None]
        return SDPA(query, key.masked_fill(unseen, 0), value.masked_fill(unseen, 0), attn_mask=attn_mask)

    whole = replace(case, k=np.repeat(case.k, 2, 1), v=np.repeat(case.v, 2, 1))
    result = from_callable(selects, "sdpa").run(whole, hidden, EVERYTHING)
    assert differs(whole, result, ("o", "dq", "dk", "dv")) is None


class LeavesRows(torch.autograd.Function):
    """Writes all rows but the last of its output and of its gradients."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = torch.empty_like(v)
        o[:, :, :-1] = v[:, :, :-1]
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:  # type: ignore[override]
        dv = torch.empty_like(do)
        dv[:, :, :-1] = do[:, :, :-1]
        return do, do, dv


def test_memory_that_is_never_written_shows() -> None:
    case = draw(hk=4, sq=5)
    result = from_callable(LeavesRows.apply, "sdpa").run(case, Presentation(poison="inf"), EVERYTHING)
    assert result.o is not None and result.dv is not None
    for array in (result.o, result.dv):
        assert np.isnan(array[:, :, -1]).all() and np.isfinite(array[:, :, :-1]).all()


def test_fresh_memory_is_as_before_afterwards() -> None:
    from torch.utils import deterministic

    def state() -> tuple[bool, bool, bool]:
        enabled = torch.are_deterministic_algorithms_enabled()
        return enabled, torch.is_deterministic_algorithms_warn_only_enabled(), deterministic.fill_uninitialized_memory

    before = state()
    for mode in ((False, False), (True, False), (True, True)):
        try:
            torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
            deterministic.fill_uninitialized_memory = False
            with pytest.raises(KeyError), nan_in_fresh_memory(True):
                assert torch.empty(3).isnan().all()
                raise KeyError
            with nan_in_fresh_memory(False):
                assert state() == (*mode, False)
            assert state() == (*mode, False)
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            deterministic.fill_uninitialized_memory = before[2]


def test_pages_sinks_and_dropout_are_declined() -> None:
    pages, case = Presentation(page_size=2), draw(hk=4)
    functions = {
        "sdpa": SDPA,
        "flash_attn": flash_attn_func,
        "flash_attn_varlen": flash_attn_varlen_func,
        "numpy": numpy_attention,
        "case": lambda case: Result(),
    }
    for like, function in functions.items():
        candidate = from_callable(function, like)
        words = "f(case)" if like == "case" else like
        assert not candidate.takes_pages and candidate.refuses(pages) == "it takes no pages of keys and values"
        with pytest.raises(Unsupported) as refusal:
            candidate.run(case, pages, frozenset({"o"}))
        assert str(refusal.value) == f"the {words} convention has no pages of keys and values"
        assert ({"sinks", "dropout"} <= candidate.lacks.keys()) == (like != "case")
        assert ("dsink" in candidate.offers) == (like == "case")
    told = from_callable(lambda case, presentation, want: Result(o=np.array(presentation.page_size)), "case")
    assert told.takes_pages and told.refuses(pages) is None and told.run(case, pages, EVERYTHING).o == 2
    assert told.takes_layouts == frozenset(LAYOUTS)
    assert from_callable(functions["case"], "case").takes_layouts == {"contiguous"}


def test_promises_are_declared_and_not_assumed() -> None:
    assert from_callable(SDPA, "sdpa").promises == frozenset()
    for like, function in (("sdpa", SDPA), ("flash_attn", flash_attn_func), ("numpy", numpy_attention)):
        assert from_callable(function, like, promises=["strided"]).promises == {"strided"}
    assert load("torch-sdpa-math", promises=["masked-not-read"]).promises == {
        "repeatable",
        "strided",
        "masked-not-read",
    }
    with pytest.raises(LoadError, match="promises names 'fast'; accepted are repeatable, batch-invariant, strided"):
        from_callable(SDPA, "sdpa", promises=["fast"])


# -- bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_conversion_keeps_every_bit(dtype: Any) -> None:
    integer = {8: np.uint64, 4: np.uint32, 2: np.uint16}[np.dtype(dtype).itemsize]
    if integer == np.uint16:
        bits = np.arange(1 << 16, dtype=integer)  # all there are, NaN payloads and -0 included
    else:
        bits = np.random.default_rng(0).integers(0, np.iinfo(integer).max, 4096, dtype=integer, endpoint=True)
    array = bits.view(dtype).reshape(16, -1)
    back = to_array(to_tensor(array))
    assert back.dtype == array.dtype and back.tobytes() == array.tobytes()
    assert to_array(to_tensor(array).T).tobytes() == array.T.tobytes()


def test_types_that_numpy_has_not_come_back_too() -> None:
    assert to_array(torch.ones(2, dtype=torch.float8_e4m3fn)).dtype == ml_dtypes.float8_e4m3fn


def test_same_bits_tells_zeros_apart_and_nan_the_same() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), math.nan)
    assert same_bits(nan, nan.clone()) and not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double()) and not same_bits(zero, zero[None])
    assert same_bits(torch.zeros(0, 3), torch.zeros(0, 3))


def test_alibi_and_bias_are_rounded_once() -> None:
    """In float32: the nearest to the exact sum, which two roundings would miss here."""
    slope, bias = np.float32(1 + 2**-23), np.float32(2**-24)
    case = Case(
        q=np.zeros((1, 1, 1, 1), np.float32),
        k=np.zeros((1, 1, 4, 1), np.float32),
        v=np.zeros((1, 1, 4, 1), np.float32),
        alibi_slopes=np.array([slope]),
        bias=np.array([bias]),
    )
    mask = sdpa.attention_mask(case, to_tensor(np.array([bias])), positional=True, device="cpu")
    assert mask is not None
    exact = [float(bias) - float(slope) * n for n in (3, 2, 1, 0)]
    assert mask.flatten().tolist() == np.array(exact).astype(np.float32).tolist()
    twice = (bias + np.array([-slope * np.float32(n) for n in (3, 2, 1, 0)], np.float32)).tolist()
    assert mask.flatten().tolist() != twice
