"""Right kernels under the whole suite: every violation is a false alarm.

Kernels are judged in step, as planted faults are (``power``): they share cases, exact answers and bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..kernels.candidate import Candidate
from ..kernels.faulty import right
from ..kernels.loading import LoadError, load
from ..kernels.numpy_blocked import candidate as numpy_blocked
from .campaign import known_fault
from .power import Stream, plans
from .systematic import Bets
from .verdict import Outcome

#: third-party and compiled kernels that are held to be right, but for what they declare (``Known``)
LOADED = ("torch-sdpa-math", "torch-sdpa-flash", "triton")

#: slow kernels judge only so many cases of each plan
FEWER: Mapping[str, int] = {"triton": 8}


@dataclass(frozen=True)
class Alarm:
    """The first violation of a property by a right kernel; case ``number`` of its plan's draws."""

    kernel: str
    property: str
    dtype: str
    seed: int
    number: int
    sentence: str


@dataclass
class Counts:
    """Cases put to a kernel, and the verdicts: holds, vacuous, declined, known (faults it declares), violated."""

    cases: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    alarms: list[Alarm] = field(default_factory=list)


def right_kernels() -> tuple[dict[str, Candidate], list[str]]:
    """Every right kernel that can be loaded here, by name, and why each of the others cannot."""
    found = {"zoo:right": right()}
    for accumulator in ("float32", "float64"):
        for round_p in (False, True):
            name = f"numpy-blocked ({accumulator}{', P rounded' if round_p else ''})"
            kernel = numpy_blocked(accumulator=accumulator, round_p=round_p, name=name)
            # P in the accumulator's own format is not rounded: that is the other kernel
            dtypes = tuple(d for d in kernel.dtypes if not (round_p and d == accumulator))
            found[name] = replace(kernel, dtypes=dtypes)
    missing = []
    for name in LOADED:
        try:
            found[name] = load(name)
        except LoadError as error:
            missing.append(str(error))
    return found, missing


def judge_right(kernels: Mapping[str, Candidate], dtype: str, seed: int, cases: int) -> dict[str, Counts]:
    """Judge ``cases`` cases of every plan in a dtype by all properties that apply."""
    kernels = {name: kernel for name, kernel in kernels.items() if dtype in kernel.dtypes}
    judged = {name: plans(kernel, dtype) for name, kernel in kernels.items()}
    counts = {name: Counts() for name in kernels}
    bets: dict[tuple[str, str], Bets] = {}
    stream = Stream(seed)
    for number in range(cases):
        for name, kernel in kernels.items():
            if number >= FEWER.get(name, cases):
                continue
            for plan, properties in judged[name].items():
                due = [prop for prop in properties if number % prop.every == 0]
                if not due:
                    continue
                case, presentation = stream.pair(plan, number)
                counts[name].cases += 1
                for prop in due:
                    verdict = prop.judge(kernel, case, presentation)
                    known = known_fault(kernel, prop.name, case, presentation) is not None
                    bet = bets.setdefault((name, prop.name), Bets())
                    leaning = bool(verdict.leans) and not known and bet.add(verdict.leans)
                    sentence = bet.sentence(prop.title) if leaning else verdict.sentence
                    if verdict.outcome is not Outcome.VIOLATED and not leaning:
                        counts[name].verdicts[verdict.outcome.value] += 1
                    elif known:
                        counts[name].verdicts["known"] += 1
                    else:
                        counts[name].verdicts["violated"] += 1
                        if all(alarm.property != prop.name for alarm in counts[name].alarms):
                            counts[name].alarms.append(Alarm(name, prop.name, dtype, seed, number, sentence))
    return counts
