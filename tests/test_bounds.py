"""The error bounds, attacked: no right kernel passes them, every term is needed, wrong kernels do.

Terms that no test here can isolate, because others are always as large in NumPy, and why they stand:

- the roundings of raw scores (3 or 4 u), of bias and ALiBi (3 u), of each addition and of the score
  (u): one for each operation that a kernel performs, counted in oracle/bounds where it is added;
  log2(e) counts twice, as a constant and as a product. ``test_roundings_compound`` checks the sum.
- exp(Lambda) on the errors of the weights: sum w >= exp(-Lambda) sum p, by Cauchy-Schwarz on
  sum p exp(x) sum p exp(-x) >= 1. ``test_the_weights_bound_holds_for_every_sign`` tries all signs.
- the argument of exp in the recomputation, 3 u |log p| + 2 u |lambda|: a difference, log2(e) on it, or
  on the stored log-sum-exp. The log-sum-exp's own roundings are never smaller in these kernels.
- P kept from the forward pass: exp and division of a second path; the stored log-sum-exp's bound is
  mostly larger.
- the two roundings of a sink's score: it meets scores that round as often, and a log-sum-exp no smaller.
- the distance of a sink from a maximum that it was left out of: 3 u of it in its weight and in the
  maximum, where the log of the sum errs as much in these kernels. Its log has a test.
- D brought down below the smallest normal number, 2 / (1 - p) of it: the products of dP underflow alike.
- products of errors, u_p with that of dropout: smaller by a unit than what they multiply.
- a pairwise tree over the axis: an element is added log2(places) times at most and n - 1 times at
  most; a tree deep enough to tell the two apart needs a million keys.
  ``test_growth_counts_what_an_element_passes_through`` counts by brute force.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncheck.oracle import bounds as bounds_package
from attncheck.oracle.bounds import bounds, growth
from attncheck.oracle.bounds.scores import _larger
from attncheck.oracle.bounds.terms import _of_dropout, roundings
from attncheck.oracle.case import Case
from attncheck.oracle.enclosure import exact
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.profile import Conventions, Profile
from attncheck.properties.judge import judge
from attncheck.properties.verdict import Outcome, Verdict

from .attack import climb, errors, pairs, ratio, verdicts
from .right import PLAIN, Choices, choices, solve

OUTPUTS = ("o", "lse", "dq", "dk", "dv", "dbias", "dsink")


def case_of(dtype: str, *, bias_dtype: str | None = None, **fields: Any) -> Case:
    """A case from nested lists; q, k, v, do as rows of one head, or with all four axes. Dropout keeps all."""
    storage, wide = FORMATS[dtype].dtype, FORMATS["float64" if dtype == "float64" else "float32"].dtype
    for name in ("q", "k", "v", "do"):
        if name in fields:
            x = np.array(fields[name], dtype=np.float64)
            fields[name] = x.reshape((1,) * (4 - x.ndim) + x.shape).astype(storage)
    if "dlse" in fields:
        x = np.array(fields["dlse"], dtype=np.float64)
        fields["dlse"] = x.reshape((1,) * (3 - x.ndim) + x.shape).astype(wide)
    if "sinks" in fields:
        fields["sinks"] = np.array(fields["sinks"], dtype=wide)
    if "dropout" in fields:
        fields["keep"] = np.ones((1, 1), dtype=bool)
    if "bias" in fields:
        fields["bias"] = np.array(fields["bias"]).astype(FORMATS[bias_dtype or dtype].dtype)
    return Case(**fields)


def judged(case: Case, c: Choices, output: str, profile: Profile, bound: Callable[..., Any] = bounds) -> Verdict:
    """The verdict on one output of a kernel under a profile and a (perhaps altered) bound."""
    answer = exact(case)
    allowed = bound(case, answer, profile)[output]
    return judge(case, output, getattr(solve(case, c), output), answer, allowed, Conventions(), profile)


# -- no right kernel passes ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS)
def test_right_kernels_hold_on_drawn_cases(dtype: str, record_property: Callable[[str, object], None]) -> None:
    worst: dict[str, float] = {}
    for case, c in islice(pairs(dtype, seed=1), 150):
        for output, verdict in verdicts(case, c).items():
            assert verdict.outcome is not Outcome.VIOLATED, f"{verdict.sentence}; {verdict.worst}; {c}"
            worst[output] = max(worst.get(output, 0.0), ratio(verdict))
    record_property("worst", worst)
    assert set(worst) == set(OUTPUTS)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_right_kernels_hold_where_cases_are_bent_against_them(
    dtype: str, output: str, record_property: Callable[[str, object], None]
) -> None:
    rng = np.random.default_rng(2)
    small = (
        (case, c)
        for case, c in pairs(dtype, seed=2)
        if case.q.size * case.k.size > 0
        and math.prod(case.shape[:5]) <= 60
        and (output != "dbias" or case.bias is not None)
        and (output != "dsink" or case.sinks is not None)
    )
    worst = 0.0
    for start, first in islice(small, 3):
        found, case, c = climb(start, first, output, rng, 40)
        assert found <= 1, f"{verdicts(case, c)[output].sentence}; {c}"
        worst = max(worst, found)
    record_property("worst", worst)


# -- every term is needed -----------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """A term of the bound, as its source says it, what is left without it, and a kernel that needs it."""

    name: str
    source: str
    without: str
    output: str
    case: Case
    choices: Choices


def right(**changes: Any) -> Choices:
    return replace(PLAIN, **changes)


def one_key(dtype: str, *, dlse: float = 0.0, **fields: Any) -> Case:
    """One query, one key: P is 1, and dlse is dS."""
    zero = [[0.0]]
    return case_of(dtype, **({"q": zero, "k": zero, "v": zero, "do": zero, "dlse": [dlse]} | fields))


def ties(n: int, unit: float = 2.0**-24) -> list[float]:
    """1 and then numbers that are each lost when added to it in turn, to even."""
    return [1.0] + [unit] * (n - 1)


T16, T32 = FORMATS["float16"].tiny, FORMATS["float32"].tiny
SPREAD = (np.arange(512) % 8 == 0)[None, :]  # one visible key in each chain of eight
#: the seed of planted errors that all point the same way where keys are "far" apart
ALIKE = 296
BELOW_A_TIE = -16.6356  # exp of it is a little less than 2^-24


def terms() -> list[Term]:
    zero, two = [[0.0]], [[0.0], [0.0]]
    # the third key's probability is off by exp, division and the row sum, whose second term alone errs
    far = {"q": [[1.0]], "k": [[0.0], [-0.1], [-8.0]], "scale": 1.0}
    first_tie = {"q": [[1.0]], "k": [[0.0]] + [[BELOW_A_TIE]] * 63, "do": [[0.0]], "scale": 1.0}
    return [
        Term(
            "a chain is as long as the axis makes it",
            "profile.chain + math.ceil(places / profile.chain)",
            "profile.chain + np.ceil(n / profile.chain)",
            "o",
            case_of(
                "float32",
                q=zero,
                k=np.zeros((512, 1)),
                v=np.array([1.0] + [2.0**-24] * 511)[:, None],
                mask=SPREAD,
            ),
            right(order="chain", chain=8, exp_units=1.0),
        ),
        Term(
            "sum of the product q.k",
            "growth(p, d, d) * qk",
            "0 * qk",
            "lse",
            one_key("float32", q=[[1.0]], k=[[2.56169056892395]]),
            right(operands="tf32 cut"),
        ),
        Term(
            "q times the scale underflows",
            "s.tiny_u * (qk + s.root * q_and_k)",
            "s.tiny_u * qk",
            "lse",
            one_key("float32", q=[[1.9 * T32]], k=[[0.9 / T32]], scale=0.125),
            right(prescale="q", flush=True),
        ),
        Term(
            "inputs read as 0",
            "+ s.tiny_in * q_and_k",
            "",
            "lse",
            one_key("float16", q=[[0.9 * T16]], k=[[60000.0]], scale=1.0),
            right(flush=True),
        ),
        Term(
            "q stored with the scale",
            "p.u_prescale * s.scale * qk",
            "0 * qk",
            "lse",
            one_key("float16", q=[[1.0]], k=[[1.0]], scale=float(np.float32(0.3337))),
            right(prescale="q", prescale_stored=True),
        ),
        Term(
            "q stored with the scale underflows",
            "+ p.tiny * s.root * q_and_k",
            "",
            "lse",
            one_key("float16", q=[[1.0]], k=[[60000.0]], scale=2.0**-15),
            right(prescale="q", prescale_stored=True, flush=True),
        ),
        Term(
            "tanh",
            "times(e_raw, slope) + tanh",
            "times(e_raw, slope)",
            "lse",
            one_key("float64", q=[[1.0]], k=[[1.0]], softcap=1.0),
            right(tanh_units=1024.0),
        ),
        Term(
            "bias stored",
            "+ p.u_bias * bias",
            "",
            "lse",
            one_key("bfloat16", bias=[1.140663981437683], bias_dtype="float32"),
            right(bias_stored=True),
        ),
        Term(
            "bias stored underflows",
            "e = e + p.tiny\n",
            "pass\n",
            "lse",
            one_key("float16", bias=[5e-5], bias_dtype="float32"),
            right(bias_stored=True, flush=True, accumulator="float64"),
        ),
        Term(
            "exp",
            "(1 + raised) * p.u_exp",
            "0 * raised",
            "o",
            case_of("float64", q=[[1.0]], k=[[0.0], [1.0]], v=[[1.0], [0.0]]),
            right(exp_units=64.0),
        ),
        Term(
            "errors of the weights move the row sum",
            "moved - from_scores + _relative(row_sum)",
            "_relative(row_sum)",
            "lse",
            case_of("float64", q=[[1.0]], k=[[1.0], [0.0]], v=two),
            right(exp_units=1024.0, sign="+"),
        ),
        Term(
            "log of the mean, not the mean",
            "np.where(error.max(axis=3, initial=0.0) > 1.0, _logsumexp(r.logp + error), np.log1p(grown))",
            "(r.prob * error).sum(axis=3)",
            "lse",
            # 2^30 - 31 rounds to 2^30: the second score is computed as 0
            case_of("float32", q=[[1.0] * 3], k=[[0.0] * 3, [2.0**30, -31.0, -(2.0**30)]], v=two, scale=1.0),
            right(order="up"),
        ),
        Term(
            "division by the row sum",
            "growth(p, r.keys, places) + divided\n",
            "growth(p, r.keys, places)\n",
            "o",
            one_key("float64", v=[[1.0]]),
            right(exp_units=64.0),
        ),
        Term(
            "sums of P V",
            "summed = growth(p, r.keys, places) + ",
            "summed = 0 * r.keys + ",
            "o",
            case_of("float32", q=[[-1.0]], k=[[0.0], [-0.125]], v=[[1.0], [0.0]]),
            right(operands="tf32 cut"),
        ),
        Term(
            "row sum, in o",
            "row_sum = growth(p, r.count, places, matmul=False) + ",
            "row_sum = ",
            "o",
            # both sums lose every term after the first, in directions that add up in the quotient
            case_of("float32", **first_tie, v=[[1.5]] + [[-1.0]] * 63),
            right(order="up", exp_units=1.0),
        ),
        Term(
            "row sum, in lse",
            "+ _relative(row_sum) + r.count * s.tiny_u",
            "",
            "lse",
            case_of("float32", **first_tie, v=np.zeros((64, 1))),
            right(order="up", exp_units=1.0),
        ),
        Term(
            "a row summed first weighs each key twice",
            "twice = (most * twice).sum(axis=3)",
            "twice = 0 * row_sum",
            "o",
            case_of("float64", q=[[1.0]], k=np.arange(32.0)[:, None] / 64, v=np.ones((32, 1)), scale=1.0),
            right(softmax="two-pass", key_block=1, exp_units=64.0, sign="+"),
        ),
        Term(
            "P rounded",
            "inexact = p.u_p + s.u_z * (1 + p.u_p)",
            "inexact = s.u_z",
            "o",
            case_of("float16", q=[[1.0]], k=[[0.0], [0.125]], v=[[-1.0], [1.0]]),
            right(rounds_p="cut"),
        ),
        Term(
            "P underflows",
            "np.minimum(most, s.tiny_p) @ v_abs",
            "0 * (most @ v_abs)",
            "o",
            case_of("float16", q=[[1.0]], k=[[0.0], [-10.0]], v=[[0.0], [60000.0]], scale=1.0),
            right(rounds_p="nearest", flush=True),
        ),
        Term(
            "V read as 0",
            "+ s.tiny_in * most.sum(axis=3)[..., None])",
            ")",
            "o",
            case_of("float16", q=zero, k=two, v=[[1.9 * T16], [0.99 * T16]]),
            right(flush=True),
        ),
        Term(
            "products P V underflow",
            "((2 * r.count + 1) * s.tiny_u)",
            "(0 * r.count)",
            "o",
            case_of(
                "float32",
                q=[[1.0]],
                k=[[0.0]] + [[-20.0]] * 8,
                v=[[0.0]] + [[0.9 * T32 * math.exp(20)]] * 8,
                scale=1.0,
            ),
            right(flush=True, order="up"),
        ),
        Term(
            "log",
            "max(p.u_exp, u) * (log_sum + np.abs(r.apart) + moved + sums_and_exp)",
            "0",
            "lse",
            case_of("float64", q=zero, k=np.zeros((64, 1)), v=np.zeros((64, 1))),
            right(exp_units=64.0, order="pairwise"),
        ),
        Term(
            "lse below its format's range",
            "p.tiny if p.lse == p.storage else lse.tiny",
            "0.0",
            "lse",
            one_key("float16", q=[[1.0]], k=[[17 * 2.0**-24]], scale=float(np.float32(0.3))),
            right(lse="float16", accumulator="float64"),
        ),
        Term(
            "P again, from a log-sum-exp that was stored",
            "r.e + lse_bound.allowed[..., None]",
            "r.e",
            "dv",
            case_of("float16", q=[[1.0]], k=[[3.7]], v=zero, do=[[1.0]]),
            right(lse="bfloat16"),
        ),
        Term(
            "products dO.V",
            "growth(p, dv, dv) * dov + dv * s.tiny_u",
            "0 * dov",
            "dq",
            case_of("float32", q=zero, k=[[1.0], [-1.0]], v=[ties(64), [-x for x in ties(64)]], do=np.ones((1, 64))),
            right(order="up", exp_units=1.0),
        ),
        Term(
            "dO and V read as 0 in dP",
            "dp_error + s.tiny_in * (do_abs",
            "dp_error + 0 * (do_abs",
            "dq",
            case_of("float16", q=zero, k=[[1.0], [-1.0]], v=[[60000.0], [-60000.0]], do=[[0.9 * T16]]),
            right(flush=True),
        ),
        Term(
            "D from O",
            "np.fmax(from_o, from_p)",
            "from_p",
            "dk",
            case_of("float16", q=[[1.0]], k=two, v=[[0.0], [1.0]], do=[[1.0]], bias=[-1.0, 1.0]),
            PLAIN,
        ),
        Term(
            "D from P",
            "np.fmax(from_o, from_p)",
            "from_o",
            "dk",
            # one value: O is exact but for the division, P is not
            case_of("float64", q=[[1.0]], k=[[-8.0], [-8.0]], v=[[1.0], [1.0]], do=[[1.0]]),
            right(delta="p", base2="fma", exp_units=64.0, sign=0),
        ),
        Term(
            "dS rounded",
            "(p.u_p + u * (1 + p.u_p)) * (ds + y)",
            "0",
            "dq",
            one_key("float16", k=[[1.0]], dlse=-10.123372077941895),
            right(rounds_p="cut"),
        ),
        Term(
            "dS underflows",
            "+ np.minimum(s.z_max * s.tiny_p, ds + y)",
            "",
            "dq",
            one_key("float16", k=[[1000.0]], dlse=5e-5, scale=1.0),
            right(rounds_p="nearest", flush=True),
        ),
        Term(
            "dS times the cap's slope underflows",
            "+ np.minimum(s.z_max * s.tiny_p, through)",
            "",
            "dq",
            one_key("float16", q=[[4.0]], k=[[3.0]], dlse=1.0, softcap=2.0),
            right(rounds_p="nearest", flush=True),
        ),
        Term(
            "the cap's slope at a score that is off",
            "slope_error = np.minimum(times(slope, np.expm1(moved)), 1.0)",
            "slope_error = 0 * slope",
            "dq",
            # 4097 * 2047.75 rounds by a quarter, so that 5.75 is computed as 6
            one_key("float32", q=[[4097.0, 1.0]], k=[[2047.75, -8389626.0]], dlse=1.0, scale=1.0, softcap=1.0),
            right(order="up"),
        ),
        Term(
            "the cap's slope: tanh",
            "2 * p.u_tanh * (1 + p.u_tanh)",
            "0",
            "dk",
            one_key("float32", q=[[1.0]], k=[[64.0]], dlse=1.0, softcap=1.0),
            right(tanh_units=1024.0, sign="-"),
        ),
        Term(
            "sums of dQ",
            '"sums": s.scale * (growth(p, n, places) + roundings(4, u)) * ds_k',
            '"sums": 0 * ds_k',
            "dq",
            one_key("float32", k=[[1.0]], dlse=-0.5082716941833496),
            right(operands="tf32 cut"),
        ),
        Term(
            "sums of dK",
            '"sums": s.scale * (growth(p, n, places) + roundings(4, p.u)) * total',
            '"sums": 0 * total',
            "dk",
            one_key("float32", q=[[1.0]], dlse=-0.5082716941833496),
            right(operands="tf32 cut"),
        ),
        Term(
            "sums of dV",
            '"sums": growth(p, n, places) * self.dv["total"] * (1 + p.u_p) * (1 + s.u_z)',
            '"sums": 0 * self.dv["total"]',
            "dv",
            one_key("float32", do=[[1.3040000200271606]]),
            right(operands="tf32 cut"),
        ),
        Term(
            "sums of dbias",
            '"sums": growth(p, bias["count"], self._places_of_bias(), matmul=False) * bias["total"]',
            '"sums": 0 * bias["total"]',
            "dbias",
            case_of("float32", q=np.zeros((64, 1)), k=zero, v=zero, do=np.zeros((64, 1)), dlse=ties(64), bias=[[0.0]]),
            right(order="up", exp_units=1.0),
        ),
        Term(
            "k stored with the scale, in dQ",
            'parts["k stored with the scale"] = p.u_prescale * s.scale * ds_k + p.tiny * s.root * mass',
            "pass",
            "dq",
            case_of("bfloat16", q=[[0.0, 0.0]], k=[[0.0, 1.5], [0.0, 0.0]], v=[[-1.0], [1.0]], do=[[1.0]]),
            right(prescale="roots", prescale_stored=True),
        ),
        Term(
            "q stored with the scale, in dK",
            's.scale * p.u_prescale * total + p.tiny * s.root * self.mass["dk"]',
            'p.tiny * s.root * self.mass["dk"]',
            "dk",
            one_key("bfloat16", q=[[1.40625]], dlse=1.922008752822876, scale=0.7809918522834778),
            right(prescale="q", prescale_stored=True, accumulator="float64"),
        ),
        Term(
            "q stored with the scale underflows, in dK",
            '+ p.tiny * s.root * self.mass["dk"]',
            "",
            "dk",
            one_key("float16", q=[[1.0]], dlse=60000.0, scale=2.0**-15),
            right(prescale="q", prescale_stored=True, flush=True),
        ),
        Term(
            "k and q read as 0, in dQ and dK",
            "(s.scale * s.tiny_in + s.root * s.tiny_u) * mass",
            "0 * mass",
            "dq",
            one_key("float16", k=[[0.9 * T16]], dlse=1000.0, scale=1.0),
            right(flush=True),
        ),
        Term(
            "dO read as 0, in dV",
            '+ s.tiny_in * self.mass["dv"]',
            "",
            "dv",
            case_of("float16", q=np.zeros((8, 1)), k=zero, v=zero, do=np.full((8, 1), 0.9 * T16)),
            right(flush=True),
        ),
        Term(
            "P underflows, in dV",
            'self.dv["underflow"] += s.z_max * over_rows(np.minimum(pairs.most, s.tiny_p), do_abs)',
            "pass",
            "dv",
            case_of("float16", q=[[3.0]], k=[[32.0], [0.0]], v=two, do=[[128.0]], scale=0.125),
            right(rounds_p="nearest", flush=True),
        ),
        Term(
            "P rounded, in dV",
            '"rounding of P": self.dv["rounding of P"]',
            '"rounding of P": 0 * self.dv["rounding of P"]',
            "dv",
            case_of("bfloat16", q=zero, k=two, v=two, do=[[-1.9375]]),
            right(rounds_p="cut"),
        ),
        Term(
            "dK and dQ underflow",
            "+ max(1.0, s.scale) * n * s.z_max * s.tiny_u + s.p.tiny",
            "",
            "dk",
            case_of("float16", q=[[0.0009765625]], k=two, v=[[0.0], [0.000244140625]], do=[[-1.5]]),
            PLAIN,
        ),
        Term(
            "dV underflows",
            '* self.mass["dv"] + p.tiny + n * s.z_max * s.tiny_u',
            '* self.mass["dv"]',
            "dv",
            case_of("float16", q=[[32.0]], k=[[1.0], [0.0]], v=two, do=[[1.0]], scale=0.5),
            PLAIN,
        ),
        Term(
            "dS scaled before it is rounded, in dQ",
            'parts["dS scaled before it is rounded"] = np.minimum(s.z_max * s.tiny_p, s.scale * largest) @ k_abs',
            "pass",
            "dq",
            one_key("float16", k=[[1000.0]], dlse=1.0, scale=2.0**-15),
            right(rounds_p="nearest", ds_scaled_first=True, flush=True),
        ),
        Term(
            "dS scaled before it is rounded, in dK",
            'parts["dS scaled before it is rounded"] = self.dk["scaled first"]',
            "pass",
            "dk",
            one_key("float16", q=[[1000.0]], dlse=1.0, scale=2.0**-15),
            right(rounds_p="nearest", ds_scaled_first=True, flush=True),
        ),
        Term(
            "dQ summed in storage",
            'parts["sums kept in storage"] = kept_in_storage(s, parts, _in_storage_over_keys(s, signed), blocks)',
            "pass",
            "dq",
            case_of("bfloat16", q=zero, k=[[1.0], [1.0]], v=[[4.0], [-3.875]], do=[[-0.71875]]),
            right(grads_in_storage=(1, 1)),
        ),
        Term(
            "dV summed in storage",
            'parts["sums kept in storage"] = kept_in_storage(self.s, parts, running, steps)',
            "pass",
            "dv",
            case_of("bfloat16", q=np.zeros((8, 1)), k=zero, v=zero, do=np.array(ties(8, 2.0**-8))[:, None]),
            right(grads_in_storage=(1, 1)),
        ),
        Term(
            "dV summed in storage over a group",
            "self.storage[name] + self._over_group(name)",
            "self.storage[name]",
            "dv",
            case_of(
                "bfloat16", q=np.zeros((1, 8, 1, 1)), k=zero, v=zero, do=np.reshape(ties(8, 2.0**-8), (1, 8, 1, 1))
            ),
            right(grads_in_storage=(64, 64)),
        ),
        Term(
            "storing",
            'parts["storing"] = unit * (np.abs(exact) + w)',
            'parts["storing"] = 0 * w',
            "o",
            case_of("float16", q=[[1.0]], k=[[0.0], [1.0]], v=[[1.0], [0.0]]),
            PLAIN,
        ),
        # what makes elements vacuous, because a right kernel may overflow
        Term(
            "scores may overflow",
            "over = ~within.all(axis=3)",
            "over = np.zeros(within.shape[:3], dtype=bool)",
            "o",
            case_of("float32", q=[[1e20]], k=[[1e20], [9e19]], v=[[1.0], [2.0]]),
            PLAIN,
        ),
        Term(
            "q times the scale may overflow",
            "over = over | ~(largest <= (min(most, s.acc_max) if p.u_prescale else s.acc_max))",
            "pass",
            "lse",
            one_key("float16", q=[[32.0]], scale=4096.0),
            right(prescale="q", prescale_stored=True),
        ),
        Term(
            "a stored O may be infinite, and D with it",
            "row_over = row_over | _may_overflow(o, o_bound, format_of(p.storage).max).any(axis=3)",
            "pass",
            "dq",
            # 1/27 rounds up: the sum of 27 of them times the largest number rounds to infinity
            case_of("float16", q=zero, k=np.zeros((27, 1)), v=np.full((27, 1), FORMATS["float16"].max), do=[[1.0]]),
            right(softmax="normalised", rounds_p="nearest"),
        ),
        Term(
            "dbias in the format that the bias was stored in may be infinite",
            "(format_of(p.storage).max if p.u_bias else s.acc_max)",
            "s.acc_max",
            "dbias",
            one_key("float16", bias=[[1.0]], bias_dtype="float32", dlse=1e6),
            right(bias_stored=True),
        ),
        Term(
            "a sum of unnormalised weights may overflow",
            "sums = (z * r.seen) @ v_abs > s.acc_max",
            "sums = np.zeros(o.shape, dtype=bool)",
            "o",
            case_of("float32", q=zero, k=two, v=[[3e38], [3e38]]),
            PLAIN,
        ),
        # sinks
        Term(
            "a sink is a step of its own",
            " + (s.sinks is not None)\n",
            "\n",
            "lse",
            case_of("float64", q=[[1.0]], k=[[-0.4]] + [[-0.5]] * 16, v=np.zeros((17, 1)), scale=1.0, sinks=[0.0]),
            right(sink="last", exp_units=1024.0, sign="+"),
        ),
        Term(
            "log of a sum that a sink left out of the maximum dominates",
            "(log_sum + np.abs(r.apart) + moved",
            "(log_sum + moved",
            "lse",
            case_of("float64", q=[[1.0]], k=[[-20.0]], v=zero, scale=1.0, sinks=[0.0]),
            right(sink="end", exp_units=64.0),
        ),
        Term(
            "log of a sum that is the sink alone",
            "np.maximum(logp[..., -1] - of_keys, 0.0), lam)",
            "np.maximum(logp[..., -1] - of_keys, 0.0), 0.0)",
            "lse",
            case_of("float64", q=zero, k=zero, v=zero, sinks=[10.0], mask=np.zeros((1, 1), dtype=bool)),
            right(sink="end", exp_units=64.0),
        ),
        Term(
            "errors of the sink's dS",
            '"errors of dS": sink["error"]',
            '"errors of dS": 0 * sink["error"]',
            "dsink",
            case_of("float64", q=zero, k=zero, v=zero, do=zero, dlse=[1.0], sinks=[0.5]),
            right(exp_units=64.0),
        ),
        Term(
            "sums of dsink",
            '"sums": growth(p, sink["count"], b * sq, matmul=False) * sink["total"]',
            '"sums": 0 * sink["total"]',
            "dsink",
            case_of(
                "float32", q=np.ones((64, 1)), k=[[-200.0]], v=zero, do=np.zeros((64, 1)), dlse=ties(64), sinks=[0.0]
            ),
            right(order="up", exp_units=1.0),
        ),
        Term(
            "dsink underflows",
            '"underflow": np.full_like(sink["error"], stored.tiny)',
            '"underflow": np.full_like(sink["error"], s.tiny_u)',
            "dsink",
            case_of("float32", q=[[1.0]], k=[[-200.0]], v=zero, do=zero, dlse=[0.9 * T32], scale=1.0, sinks=[0.0]),
            right(accumulator="float64", flush=True),
        ),
        Term(
            "storing dsink",
            "stored_bound(exact, parts, stored.unit,",
            "stored_bound(exact, parts, s.tiny_u,",
            "dsink",
            case_of(
                "float32",
                q=[[1.0]] * 2,
                k=[[-200.0]],
                v=zero,
                do=two,
                dlse=[1.0, 0.9 * 2.0**-24],
                scale=1.0,
                sinks=[0.0],
            ),
            right(accumulator="float64"),
        ),
        # dropout
        Term(
            "the factor of dropout, in o",
            "inexact = p.u_p + s.u_z * (1 + p.u_p)",
            "inexact = p.u_p",
            "o",
            one_key("float64", v=[[1.0]], dropout=0.5),
            right(dropout="divided", exp_units=64.0, sign="+"),
        ),
        Term(
            "the factor of dropout, in dV",
            "(p.u_p + s.u_z * (1 + p.u_p)) * over_rows(pairs.most_z, do_abs)",
            "p.u_p * over_rows(pairs.most_z, do_abs)",
            "dv",
            case_of("float64", **far, v=np.zeros((3, 1)), do=[[1.0]], dropout=0.5),
            right(dropout="divided", kept_p=True, exp_units=1024.0, sign=ALIKE),
        ),
        Term(
            "the factor of dropout, in dP",
            "+ s.u_z * dov)",
            ")",
            "dk",
            case_of("float64", **far, v=[[0.0], [0.0], [1.0]], do=[[1.0]], dropout=0.5),
            right(dropout="divided", kept_p=True, exp_units=1024.0, sign=ALIKE),
        ),
        Term(
            "dS waits for the factor of dropout",
            "dp_delta + (s.u_z + u) * (delta_abs + delta_error[..., None] + dlse_abs)",
            "dp_delta",
            "dk",
            case_of("float64", **far, v=np.zeros((3, 1)), do=[[0.0]], dlse=[1.0], dropout=0.5),
            right(dropout="end", kept_p=True, exp_units=1024.0, sign=ALIKE),
        ),
        Term(
            "P underflows before the factor of dropout",
            "s.z_max * (np.minimum(most, s.tiny_p) @ v_abs",
            "(np.minimum(most, s.tiny_p) @ v_abs",
            "o",
            case_of("float16", q=[[1.0]], k=[[0.0], [-10.0]], v=[[0.0], [15000.0]], scale=1.0, dropout=0.75),
            right(rounds_p="nearest", flush=True, dropout="end"),
        ),
        Term(
            "P underflows before the factor of dropout, in dV",
            'self.dv["underflow"] += s.z_max * over_rows(',
            'self.dv["underflow"] += over_rows(',
            "dv",
            case_of("float16", q=[[3.0]], k=[[32.0], [0.0]], v=two, do=[[128.0]], scale=0.125, dropout=0.75),
            right(rounds_p="nearest", flush=True, dropout="end"),
        ),
        Term(
            "dS underflows before the factor of dropout",
            "+ np.minimum(s.z_max * s.tiny_p, ds + y)",
            "+ np.minimum(s.tiny_p, ds + y)",
            "dq",
            one_key("float16", k=[[1000.0]], dlse=2e-4, scale=1.0, dropout=0.75),
            right(rounds_p="nearest", flush=True, dropout="end"),
        ),
        Term(
            "dS times the cap's slope underflows before the factor of dropout",
            "+ np.minimum(s.z_max * s.tiny_p, through)",
            "+ np.minimum(s.tiny_p, through)",
            "dq",
            one_key("float16", q=[[2.0**-7]], k=[[1024.0]], dlse=1.0, softcap=2.0, dropout=0.96875),
            right(rounds_p="nearest", flush=True, dropout="end"),
        ),
        Term(
            "dS scaled before it is rounded, and before the factor of dropout, in dQ",
            "np.minimum(s.z_max * s.tiny_p, s.scale * largest) @ k_abs",
            "np.minimum(s.tiny_p, s.scale * largest) @ k_abs",
            "dq",
            one_key("float16", k=[[1000.0]], dlse=1.0, scale=2.0**-13, dropout=0.75),
            right(rounds_p="nearest", ds_scaled_first=True, flush=True, dropout="end"),
        ),
        Term(
            "dS scaled before it is rounded, and before the factor of dropout, in dK",
            "over_rows(np.minimum(s.z_max * s.tiny_p, s.scale * pairs.ds_most), r.q_abs)",
            "over_rows(np.minimum(s.tiny_p, s.scale * pairs.ds_most), r.q_abs)",
            "dk",
            one_key("float16", q=[[1000.0]], dlse=1.0, scale=2.0**-13, dropout=0.75),
            right(rounds_p="nearest", ds_scaled_first=True, flush=True, dropout="end"),
        ),
        Term(
            "products of dQ underflow before the factor of dropout",
            "n * s.z_max * s.tiny_u + s.p.tiny)",
            "n * s.tiny_u + s.p.tiny)",
            "dq",
            one_key("float32", k=[[0.99 * 2.0**-26]], dlse=2.0**-98, scale=1.0, dropout=0.75),
            right(flush=True, dropout="end"),
        ),
        Term(
            "the factor of dropout may overflow",
            "return over | s.z_over",
            "return over",
            "o",
            one_key("float16", v=[[0.01]], dropout=1 - 2.0**-18),
            right(rounds_p="nearest"),
        ),
    ]


TERMS = {term.name: term for term in terms()}


def altered(term: Term) -> Callable[..., Any]:
    """bounds() without the term."""
    sources = {path.name: path.read_text() for path in Path(bounds_package.__file__).parent.glob("*.py")}
    count = sum(source.count(term.source) for source in sources.values())
    assert count == 1, f"{term.name}: its source is there {count} times"
    name = "attncheck.oracle.bounds_without"  # beside the package itself, whose neighbours it imports
    with tempfile.TemporaryDirectory() as folder:
        for file, source in sources.items():
            (Path(folder) / file).write_text(source.replace(term.source, term.without))
        spec = spec_from_file_location(name, Path(folder) / "__init__.py", submodule_search_locations=[folder])
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            for loaded in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
                del sys.modules[loaded]
    return module.bounds  # type: ignore[no-any-return]


@pytest.mark.parametrize("term", TERMS.values(), ids=list(TERMS))
def test_without_this_term_a_right_kernel_is_accused(term: Term) -> None:
    profile = term.choices.profile(term.case.dtype)
    assert judged(term.case, term.choices, term.output, profile).outcome is not Outcome.VIOLATED
    verdict = judged(term.case, term.choices, term.output, profile, altered(term))
    assert verdict.outcome is Outcome.VIOLATED, f"{verdict.worst}"


# -- every declaration does something -------------------------------------------------------------


@dataclass(frozen=True)
class Declaration:
    """A field of the profile, what a kernel that keeps silent about it would say, and one that must not."""

    field: str
    silent: object
    term: str  # whose case and choices show it


DECLARATIONS = (
    Declaration("u_in", 0.0, "sum of the product q.k"),
    Declaration("u_p", 0.0, "dS rounded"),
    Declaration("u_exp", 0.0, "division by the row sum"),
    Declaration("u_tanh", 0.0, "tanh"),
    Declaration("lse", "float32", "lse below its format's range"),
    Declaration("tiny", 0.0, "V read as 0"),
    Declaration("u_prescale", 0.0, "q stored with the scale"),
    Declaration("u_bias", 0.0, "bias stored"),
    Declaration("chain", 0, "row sum, in o"),
    Declaration("key_block", 1 << 20, "a row summed first weighs each key twice"),
    Declaration("grads_in_storage", None, "dV summed in storage"),
    Declaration("ds_scaled_first", False, "dS scaled before it is rounded, in dQ"),
)


@pytest.mark.parametrize("declared", DECLARATIONS, ids=[d.field for d in DECLARATIONS])
def test_what_a_profile_declares_is_allowed_for(declared: Declaration) -> None:
    term = TERMS[declared.term]
    profile = term.choices.profile(term.case.dtype)
    assert getattr(profile, declared.field) != declared.silent
    silent = replace(profile, **{declared.field: declared.silent})
    assert judged(term.case, term.choices, term.output, profile).outcome is not Outcome.VIOLATED
    assert judged(term.case, term.choices, term.output, silent).outcome is Outcome.VIOLATED


def test_a_bound_that_reaches_both_ends_of_the_format_excuses_either_infinity() -> None:
    """An exact 0 whose bound passes the largest number may come out as inf or -inf, but not as NaN."""
    case = one_key("float16", do=[[1.0]])
    answer, profile = exact(case), right().profile("float16")
    allowed = bounds(case, answer, profile)["dq"]
    wide = replace(allowed, allowed=np.full_like(allowed.allowed, 2 * FORMATS["float16"].max))
    for value, outcome in ((np.inf, False), (-np.inf, False), (np.nan, True)):
        got = np.full(case.q.shape, value, dtype=np.float16)
        verdict = judge(case, "dq", got, answer, wide, Conventions(), profile)
        assert (verdict.outcome is Outcome.VIOLATED) is outcome
        assert judge(case, "dq", got, answer, allowed, Conventions(), profile).outcome is Outcome.VIOLATED


def test_nan_is_wrong_where_any_number_would_do() -> None:
    """A bound as large as the values judges no ratio; a right kernel still owes a finite number."""
    case = case_of("float32", q=[[1e5, 1e5]], k=[[1e5, -1e5], [1e5, -1e5 - 0.01]], v=[[1.0], [2.0]])
    answer, profile = exact(case), right().profile("float32")
    allowed = bounds(case, answer, profile)["o"]
    assert allowed.vacuous.all() and not allowed.overflow.any()
    for value in (np.nan, np.inf):
        got = np.full((1, 1, 1, 1), value, dtype=np.float32)
        assert judge(case, "o", got, answer, allowed, Conventions(), profile).kind == "non-finite"


def test_the_accumulator_is_read_off_its_unit() -> None:
    case = case_of("float32", q=[[1.0]], k=[[0.0]] + [[BELOW_A_TIE]] * 63, v=np.zeros((64, 1)), scale=1.0)
    c = right(order="up", exp_units=1.0)
    profile = c.profile("float32")
    finer = replace(profile, u=FORMATS["float64"].unit, u_exp=FORMATS["float64"].unit)
    assert judged(case, c, "lse", profile).outcome is Outcome.HOLDS
    assert judged(case, c, "lse", finer).outcome is Outcome.VIOLATED


def test_an_absolute_tanh_may_err_where_a_relative_one_may_not() -> None:
    case = one_key("float32", q=[[1.0]], k=[[2.0**-12]], softcap=1.0)
    c = right(cap="exp")
    profile = c.profile("float32")
    assert judged(case, c, "lse", profile).outcome is Outcome.HOLDS
    relative = judged(case, c, "lse", replace(profile, tanh_is_absolute=False, u_exp=0.0))
    assert relative.worst is not None and judged(case, c, "lse", profile).worst is not None
    assert relative.worst.allowed < judged(case, c, "lse", profile).worst.allowed  # type: ignore[union-attr]


# -- formulas against brute force -----------------------------------------------------------------


def depth(n: int, chain: int | None, seen: tuple[int, ...]) -> int:
    """Roundings that the worst-placed visible term passes through: its product, and each addition of
    something that is not 0."""

    def add(a: int | None, b: int | None) -> int | None:
        if a is None or b is None:
            return b if a is None else a
        return max(a, b) + 1

    nodes: list[int | None] = [1 if i in seen else None for i in range(n)]
    if chain == 0:
        while len(nodes) > 1:
            odd = nodes[-1:] if len(nodes) % 2 else []
            nodes = [add(a, b) for a, b in zip(nodes[:-1:2], nodes[1::2], strict=False)] + odd
        return nodes[0] or 0

    def along(terms: list[int | None]) -> int | None:
        total = None
        for term in terms:
            total = add(total, term)
        return total

    size = chain or n
    return along([along(nodes[i : i + size]) for i in range(0, n, size)]) or 0


@pytest.mark.parametrize("chain", [None, 0, 1, 2, 3, 4])
def test_growth_counts_what_an_element_passes_through(chain: int | None) -> None:
    u = 2.0**-24
    profile = replace(right().profile("float32"), chain=chain)
    for n in range(1, 10):
        for visible in range(1, n + 1):
            deepest = max(depth(n, chain, seen) for seen in itertools.combinations(range(n), visible))
            allowed = float(growth(profile, visible, n)) / u
            assert deepest <= allowed
            if chain is None:
                assert deepest == allowed  # and no more than is needed


def test_scores_that_may_come_out_larger_are_counted() -> None:
    """Against all pairs, and against the maximum's raises in every order of the keys."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        n = int(rng.integers(1, 6))
        score = np.round(2 * rng.standard_normal(n)) / 2
        e, seen = rng.choice([0.0, 1e-3, 0.25, 0.5, np.inf], size=n), rng.random(n) < 0.8
        found = _larger(score[None, None, None], e[None, None, None], seen[None, None, None])[0, 0, 0]
        off = np.where(np.isfinite(e), e, 10.0) * rng.uniform(-1, 1, n)
        computed = score + off
        for j in np.flatnonzero(seen):
            others = [k for k in np.flatnonzero(seen) if k != j]
            assert found[j] >= sum(score[k] + e[k] >= score[j] - e[j] for k in others)
            most = sum(score[k] + e[k] >= score[j] - e[j] - 1e-9 for k in others)
            assert min(found[j], len(others)) <= most
            for order in itertools.permutations(np.flatnonzero(seen)):
                highest = np.maximum.accumulate(computed[list(order)])[order.index(j) :]
                raises = int((np.diff(highest) > 0).sum()) + (highest[0] > computed[j])
                assert raises <= found[j]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_factor_of_dropout_rounds_no_more_than_is_counted(dtype: Any) -> None:
    rng = np.random.default_rng(6)
    profile = replace(right().profile(dtype.__name__), u_exp=0.0)
    largest = 0.0
    for _ in range(2000):
        chance = float(np.float32(rng.choice([rng.random(), rng.random() / 2, 2.0 ** -rng.integers(1, 30)])))
        left, x = dtype(1) - dtype(chance), dtype(1 + rng.random())
        exactly = Fraction(float(x)) / (1 - Fraction(chance))
        for got in (x * (dtype(1) / left), x / left):
            off = abs(float(Fraction(float(got)) / exactly - 1))
            allowed = _of_dropout(chance, profile)
            assert off <= allowed
            largest = max(largest, off / allowed)
    assert largest > 0.6  # and not many more


def test_roundings_compound() -> None:
    for k in range(1, 8):
        for unit in (2.0**-8, 2.0**-24, 2.0**-53):
            exactly = math.expm1(k * math.log1p(unit))
            assert exactly <= roundings(k, unit) <= exactly * (1 + k * unit)


def test_the_weights_bound_holds_for_every_sign() -> None:
    """sum (w - p)(v - o) / sum w with w = p exp(±x), over all signs, against what o's bound says of it."""
    rng = np.random.default_rng(3)
    for _ in range(100):
        n = int(rng.integers(2, 6))
        p, v, x = rng.dirichlet(np.ones(n)), rng.standard_normal(n), rng.uniform(0, 1, n) ** 4
        o = p @ v
        largest = 0.0
        for signs in itertools.product((-1.0, 1.0), repeat=n):
            w = p * np.exp(np.array(signs) * x)
            largest = max(largest, abs(w @ v / w.sum() - o))
        moved = math.log(p @ np.exp(x))
        by_weights = math.exp(moved) * (p * np.expm1(x)) @ np.abs(v - o)
        assert largest <= by_weights * (1 + 2.0**-50)


# -- wrong kernels do pass it ---------------------------------------------------------------------

FAULTS: dict[str, Callable[[Case], Case]] = {
    "scale off by a half": lambda case: replace(
        case, scale=float(np.float32(1.5 * (case.scale or case.q.shape[3] ** -0.5)))
    ),
    "last key dropped": lambda case: replace(case, mask=np.arange(case.k.shape[2])[None, :] < case.k.shape[2] - 1),
    "values shifted by one key": lambda case: replace(case, v=np.roll(case.v, 1, axis=2)),
    "cap left out": lambda case: replace(case, softcap=None),
    "upstream gradient shifted by one row": lambda case: replace(case, do=np.roll(case.do, 1, axis=2)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_wrong_kernels_pass_the_bound(dtype: str, fault: str) -> None:
    """The same kernels on a case that was tampered with, judged as if it had not been."""
    rng = np.random.default_rng(4)
    fmt = FORMATS[dtype].dtype
    q, k, v, do = (rng.standard_normal((1, 2, 6, 8)).astype(fmt) for _ in range(4))
    case = Case(q, k, v, do=do, softcap=2.0)
    answer = exact(case)
    gradients = ("dq", "dk", "dv")
    expected = {"upstream gradient shifted by one row": gradients, "values shifted by one key": ("o", "dq", "dk")}
    for _ in range(5):
        c = choices(rng, dtype)
        profile = c.profile(dtype)
        allowed, got = bounds(case, answer, profile), solve(FAULTS[fault](case), c)
        for output in expected.get(fault, ("o", *gradients)):
            # a wrong answer in the right form: nothing but the ratio can tell
            verdict = judge(case, output, getattr(got, output), answer, allowed[output], Conventions(), profile)
            assert verdict.outcome is Outcome.VIOLATED and verdict.kind == "bound", f"{output} of {c}"
            assert (errors(case, output, got, answer, allowed[output]) > allowed[output].allowed).any()
