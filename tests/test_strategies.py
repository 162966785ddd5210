"""What is drawn: every axis, small first, the same everywhere; nothing that a candidate lacks."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from attncheck.oracle.case import Case
from attncheck.oracle.enclosure import exact
from attncheck.oracle.features import FEATURES, features
from attncheck.oracle.formats import FORMATS
from attncheck.properties.draws import drawn
from attncheck.properties.strategies import Plan

FULL = frozenset({"backward"})


def draw(plan: Plan, n: int = 200, seed: int = 0) -> list[Case]:
    return [case for case, _ in islice(drawn(plan, seed), n)]


def test_every_feature_is_drawn() -> None:
    cases = draw(Plan("float32", needs=FULL), 400) + draw(Plan("float32", needs=FULL | {"dlse"}), 40)
    used = Counter(feature for case in cases for feature in features(case))
    assert set(used) == set(FEATURES)


@pytest.mark.parametrize("feature", sorted(set(FEATURES) - {"backward"}))
def test_what_a_candidate_lacks_is_not_drawn(feature: str) -> None:
    plan = Plan("float32", needs=FULL, avoid=frozenset({feature}))
    bad = [case for case in draw(plan, 150) if feature in features(case)]
    # a few features come about in ways that cannot be steered; those cases are declined, not judged
    assert len(bad) <= (15 if feature in ("empty-row", "causal-square") else 0)


@pytest.mark.parametrize("need", ["dlse", "bias", "empty-row"])
def test_what_a_property_needs_is_drawn(need: str) -> None:
    cases = draw(Plan("float32", needs=FULL | {need}), 100)
    share = np.mean([need in features(case) for case in cases])
    assert share == 1 if need != "empty-row" else share > 0.8


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_dtype_and_axes(dtype: str) -> None:
    plan = Plan(dtype, needs=FULL, takes_blocks=True)
    pairs = list(islice(drawn(plan, 0), 500))
    cases = [case for case, _ in pairs]
    assert {case.dtype for case in cases} == {dtype}
    shapes = [case.shape for case in cases]
    assert any(sq > sk for *_, sq, sk, _, _ in shapes) and any(sq < sk for *_, sq, sk, _, _ in shapes)
    assert {0, 1} <= {shape[3] for shape in shapes} and {0, 1} <= {shape[4] for shape in shapes}
    assert any(d & (d - 1) for *_, d, _ in shapes), "a head dimension that is no power of two"
    assert {case.group for case in cases} >= {1, 2, 3}
    presentations = [presentation for _, presentation in pairs]
    assert {p.route for p in presentations} == {"flags", "mask"}
    assert any(p.k_blocks is not None and len(set(p.k_blocks)) > 1 for p in presentations), "ragged blocks"
    scores = [np.abs(case.q.astype(float)).max(initial=0) for case in cases]
    assert max(scores) > 1e3
    assert any(
        case.bias is not None and case.bias.shape[0] == case.shape[0] and case.bias.ndim == 4 for case in cases
    ), "a bias per batch entry"


def test_lengths_lie_around_the_declared_blocks() -> None:
    cases = draw(Plan("float32", needs=FULL, blocks=(32,)), 300)
    assert {31, 32, 33} <= {n for case in cases for n in case.shape[3:5]}


def test_most_softmaxes_are_neither_flat_nor_saturated() -> None:
    """A flat softmax hides dropped keys, a saturated one hides gradients: most rows must be in between."""
    between = []
    for case in draw(Plan("float32", needs=FULL), 150):
        logp = exact(case).logp
        assert logp is not None
        seen = np.isfinite(logp)
        rows = seen.sum(axis=-1) >= 2
        if rows.any():
            p = np.exp(logp)
            top = p.max(axis=-1)[rows]
            low = np.where(seen, p, np.inf).min(axis=-1)[rows]
            between.append(np.mean((top < 0.9999) & (top > 1.0001 * low)))
    assert len(between) > 75 and np.mean(between) > 0.5


def test_the_stream_is_a_prefix_of_itself_and_depends_on_the_seed() -> None:
    plan = Plan("float16", needs=FULL)
    short, long = draw(plan, 30), draw(plan, 90)
    assert [c.digest for c in short] == [c.digest for c in long[:30]]
    assert len({c.digest for c in long}) == len(long)
    assert short != draw(plan, 30, seed=1)


def test_the_same_draws_in_another_process() -> None:
    """Neither PYTHONHASHSEED nor earlier draws change what is drawn."""
    program = (
        "from itertools import islice; from attncheck.properties.draws import drawn;"
        "from attncheck.properties.strategies import Plan;"
        "print(' '.join(c.digest for c, _ in islice(drawn(Plan('float32', needs=frozenset({'backward'})), 5), 70)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [c.digest for c in draw(Plan("float32", needs=FULL), 70, seed=5)]
