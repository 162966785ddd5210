"""Candidates in a child process: same bits, and a verdict for whatever ends or hangs the child."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from attncheck.kernels.candidate import Candidate, Unsupported
from attncheck.kernels.isolated import Died, isolated
from attncheck.kernels.loading import LoadError, load
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.formats import FORMATS
from attncheck.properties import campaign, runs
from attncheck.properties.verdict import Outcome

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the pipes are handed over as file descriptors")

FORWARD = frozenset({"o", "lse"})

KERNELS = """
import ctypes, os, signal, sys, time
import numpy as np
from attncheck.kernels.candidate import Candidate, Known, Unsupported
from attncheck.kernels.numpy_blocked import solve
from attncheck.oracle.result import Result

def right(case, presentation, want):
    return solve(case, presentation, backward="dq" in want)

def echo(case):
    return Result(o=case.v, lse=case.q[..., 0])

def crashes(case):
    if case.q.shape[2] == 3:
        ctypes.string_at(0)
    return solve(case)

def hangs(case):
    while case.q.shape[2] == 3:
        pass
    return solve(case)

def leaves(case):
    print("no way to go on", file=sys.stderr, flush=True)
    os._exit(7)

def killed(case):
    os.kill(os.getpid(), signal.SIGKILL)

def declines(case):
    raise Unsupported("not today")

class Odd(Exception):
    pass

def raises(case):
    raise Odd("first line\\nsecond line")

def returns_nothing(case):
    return None

def environment(case):
    assert os.environ["ATTNCHECK_TEST"] == "set"
    print("this goes nowhere")
    return solve(case)

def writes(case):
    case.q[...] = 0

with_known = Candidate(
    name="with known", run=lambda case, presentation, want: Result(),
    known=(Known(("output",), ("float32",), lambda case, presentation: case.q.shape[2] == 2, "why", "1", "none"),),
)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return str(path)


def small(rows: int = 2, dtype: str = "float32") -> Case:
    rng = np.random.default_rng(rows)
    q, k, v, do = (rng.standard_normal((1, 1, n, 4)).astype(FORMATS[dtype].dtype) for n in (rows, 5, 5, rows))
    return Case(q=q, k=k, v=v, do=do)


def run(candidate: Candidate, case: Case, want: frozenset[str] = FORWARD) -> object:
    return candidate.run(case, Presentation(), want)


def test_results_are_the_same_bits(file: str) -> None:
    here, there = load(f"{file}:right", like="case"), isolated(f"{file}:right", like="case")
    assert {f: getattr(there, f) for f in ("name", "dtypes", "offers", "lacks", "profiles", "about")} == {
        f: getattr(here, f) for f in ("name", "dtypes", "offers", "lacks", "profiles", "about")
    }
    want = frozenset({"o", "lse", "dq", "dk", "dv"})
    for dtype in FORMATS:
        case = small(dtype=dtype)
        a, b = run(here, case, want), run(there, case, want)
        for name in want:
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_finite_pattern_survives_the_pipe(file: str, dtype: str) -> None:
    candidate = isolated(f"{file}:echo", like="case")
    fmt = FORMATS[dtype]
    specials = [0.0, -0.0, fmt.smallest, -fmt.smallest, fmt.tiny, fmt.max, -fmt.max, 1 + 2 * fmt.unit]
    v = np.array(specials).astype(fmt.dtype).reshape(1, 1, -1, 1)
    result = run(candidate, Case(q=v[:, :, :1], k=v, v=v))
    assert result.o.tobytes() == v.tobytes()  # type: ignore[attr-defined]


def test_a_crash_names_its_signal_and_the_next_case_is_served(file: str) -> None:
    candidate = isolated(f"{file}:crashes", like="case")
    run(candidate, small(2))
    with pytest.raises(Died, match=r"^died of SIGSEGV$"):
        run(candidate, small(3))
    run(candidate, small(2))


def test_a_hang_ends_at_the_time_limit(file: str) -> None:
    candidate = isolated(f"{file}:hangs", like="case", timeout=0.5)
    with pytest.raises(Died, match=r"^gave no answer within 0.5 s$"):
        run(candidate, small(3))
    run(candidate, small(2))


def test_an_exit_is_told_with_its_code_and_last_words(file: str) -> None:
    with pytest.raises(Died, match=r"^ended its process with exit code 7 \(no way to go on\)$"):
        run(isolated(f"{file}:leaves", like="case"), small())
    with pytest.raises(Died, match=r"^died of SIGKILL$"):
        run(isolated(f"{file}:killed", like="case"), small())


def test_exceptions_cross_with_their_names(file: str) -> None:
    with pytest.raises(Unsupported, match="not today"):
        run(isolated(f"{file}:declines", like="case"), small())
    for attribute, sentence in (
        ("raises", "Odd: first line"),
        ("returns_nothing", "TypeError: the kernel returned a NoneType; it must return an attncheck Result"),
        ("writes", "ValueError: assignment destination is read-only"),
    ):
        outcome = runs.call(isolated(f"{file}:{attribute}", like="case"), small(), Presentation(), FORWARD)
        assert outcome.raised == sentence


def test_the_environment_is_the_childs_alone(file: str, capfd: pytest.CaptureFixture[str]) -> None:
    run(isolated(f"{file}:environment", like="case", environment={"ATTNCHECK_TEST": "set"}), small())
    assert "ATTNCHECK_TEST" not in os.environ
    assert capfd.readouterr() == ("", "")


def test_known_faults_are_asked_of_the_child(file: str) -> None:
    (known,) = isolated(f"{file}:with_known").known
    assert (known.properties, known.reason) == (("output",), "why")
    assert known.when(small(2), Presentation()) and not known.when(small(3), Presentation())


def test_what_does_not_load_is_one_sentence(file: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="has no attribute 'missing'"):
        isolated(f"{file}:missing", like="case")
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos.abort()\n")
    with pytest.raises(LoadError, match="broken.py:f could not be loaded in a child process: it died of SIGABRT"):
        isolated(f"{broken}:f", like="case")
    with pytest.raises(LoadError, match="timeout is 0; it must be a positive number"):
        isolated(f"{file}:right", like="case", timeout=0)


def test_a_death_is_a_violation_that_is_shrunk(file: str) -> None:
    tally = campaign.check(isolated(f"{file}:killed", like="case"), "output", "float32", examples=3, seed=0)
    assert tally.failure is not None
    assert tally.failure.verdict.outcome is Outcome.VIOLATED and tally.failure.verdict.kind == "died"
    assert tally.failure.verdict.sentence == "it died of SIGKILL"
    assert tally.failure.case.q.size == 1
