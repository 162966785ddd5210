"""The text of a file of candidates that tests write into a project and load from there.

They are made from the NumPy kernel, so that no test has to import torch.
"""

KERNELS = '''
"""Candidates of a project."""

import os
from dataclasses import replace

from attncheck import Candidate
from attncheck.kernels.numpy_blocked import NUMPY_BLOCKED

right = replace(NUMPY_BLOCKED, name="right", takes_blocks=False)


def _wrong(case, presentation, want):
    result = NUMPY_BLOCKED.run(case, presentation, want)
    print("a kernel may print what it likes")
    return replace(result, o=result.o + result.o / 8)


def _warns(case, presentation, want):
    import warnings

    warnings.warn("this kernel is old", DeprecationWarning)
    return NUMPY_BLOCKED.run(case, presentation, want)


def _kills(case, presentation, want):
    os.kill(os.getpid(), 11)


def _raises(case, presentation, want):
    raise RuntimeError("no block size fits")


def _declines(case, presentation, want):
    raise NotImplementedError("not on a Sunday")


wrong = replace(right, name="wrong", run=_wrong)
warns = replace(right, name="warns", run=_warns)
kills = replace(right, name="kills", run=_kills)
raises = replace(right, name="raises", run=_raises)
declines = replace(right, name="declines", run=_declines)
only_o = replace(right, name="only-o", offers=frozenset({"o"}))
half_only = replace(right, name="half-only", dtypes=("float16",))
number = 3
'''

BROKEN = "import a_module_that_nobody_has\n\ndef f(case):\n    pass\n"
