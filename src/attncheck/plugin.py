"""The pytest plug-in. Loaded in every pytest session of everyone who has attncheck installed.

So it registers its options and, without ``--candidate``, does nothing else and imports nothing.
With it, ``pytest --pyargs attncheck --candidate TARGET`` collects one item per (candidate,
property, dtype); what happens then is in ``collecting.py``.
"""

from __future__ import annotations

import argparse

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attncheck", "attncheck: judge attention kernels")
    prefix = "--attncheck-"
    group.addoption(
        "--candidate",
        action="append",
        default=[],
        dest="attncheck_candidate",
        metavar="TARGET",
        help="a kernel to judge, with --pyargs attncheck; may be repeated. Options as of `attncheck verify --help`:",
    )
    group.addoption(f"{prefix}like", metavar="CONVENTION", help="calling convention of a plain callable")
    for name, help_text in (
        ("supports", "a feature the candidate has after all"),
        ("lacks", "a feature the candidate declines"),
        ("dtype", "judge only this dtype"),
        ("property", "judge only this property"),
        ("require", "an output that must be offered and judged"),
    ):
        group.addoption(f"{prefix}{name}", action="append", default=[], metavar="NAME", help=f"{help_text}; repeatable")
    group.addoption(f"{prefix}forward-only", action="store_true", help="the candidate has no gradients")
    group.addoption(f"{prefix}device", default="cpu", metavar="DEVICE", help="where tensors are put (default: cpu)")
    group.addoption(f"{prefix}isolate", action="store_true", help="run each candidate in a child process")
    group.addoption(f"{prefix}timeout", type=float, metavar="S", help="seconds per case with --attncheck-isolate")
    group.addoption(f"{prefix}examples", type=int, metavar="N", help="cases per candidate and property")
    group.addoption(f"{prefix}seconds", type=float, metavar="S", help="stop drawing after about S seconds")
    group.addoption(f"{prefix}seed", type=int, default=0, metavar="N", help="which cases are drawn (default: 0)")
    group.addoption(f"{prefix}block", metavar="N[,N]", help="the kernel's own block size, to draw lengths around")
    group.addoption(f"{prefix}save", metavar="DIR", help="where failing cases go (default: .attncheck/failures)")
    group.addoption(f"{prefix}waivers", metavar="FILE", help="violations that are settled, one a line")
    group.addoption(f"{prefix}strict-waivers", action="store_true", help="a stale waiver fails the run")
    group.addoption(f"{prefix}json", metavar="FILE", help="write the machine-readable report there")
    group.addoption(f"{prefix}events", metavar="FILE", help=argparse.SUPPRESS)


def pytest_configure(config: pytest.Config) -> None:
    named = config.option.pyargs and any(a == "attncheck" or a.startswith("attncheck.") for a in config.args)
    if not config.option.attncheck_candidate:
        if named:
            raise pytest.UsageError("--pyargs attncheck judges nothing without --candidate TARGET")
        return
    from attncheck.collecting import Run

    config.pluginmanager.register(Run(config), "attncheck-run")
