"""Imports go down only, and importing the package is light. Each check is shown to fail."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: layer -> the layers it may import beside itself
BELOW: dict[str, set[str]] = {
    "attncheck": {"properties", "kernels", "fixtures", "oracle"},
    "properties": {"kernels", "fixtures", "oracle"},
    "kernels": {"oracle"},
    "fixtures": {"oracle"},
    "oracle": set(),
}

#: what kernels may know of the oracle: the data, never the answers
DATA = {"case", "formats", "profile", "result", "features"}

#: what may be imported at import time only where nothing works without it: module or folder
HEAVY: dict[str, tuple[str, ...]] = {
    "torch": ("kernels/triton_attention/",),
    "triton": ("kernels/triton_attention/",),
    "jax": (),
    "hypothesis": ("properties/strategies.py", "properties/draws.py", "properties/campaign.py"),
}

#: modules of kernels/ that are not kernels, and may be imported by one another and by kernels
SHARED_BY_KERNELS = ("candidate", "loading", "adapters", "isolated", "presenting")


def layer_of(module: str) -> str:
    """The layer of a file by its path below the package: "oracle/case.py" is oracle, "cli.py" attncheck."""
    return module.split("/")[0] if "/" in module else "attncheck"


def imports(module: str, source: str) -> Iterator[tuple[str, int, bool]]:
    """(path below the package or outside name, line, at import time) of each import of a file.

    Names inside the package come as paths ("oracle/case"); the others as they are ("numpy").
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folder = ["attncheck", *module.split("/")[:-1]]
                base = ".".join([*folder[: len(folder) - node.level + 1], *([base] if base else [])])
            # "from ..oracle import bounds" names a module, "from ..oracle.case import Case" does not
            names = [
                f"{base}.{a.name}" if base.count(".") <= 1 and base.startswith("attncheck") else base
                for a in node.names
            ]
        else:
            continue
        for name in names:
            inside = name == "attncheck" or name.startswith("attncheck.")
            yield (
                name.removeprefix("attncheck").strip(".").replace(".", "/") if inside else name,
                node.lineno,
                at_import_time(node),
            )


def at_import_time(node: ast.AST) -> bool:
    """False inside a function and under TYPE_CHECKING."""
    while (parent := getattr(node, "parent", None)) is not None:
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(parent, ast.If) and "TYPE_CHECKING" in ast.dump(parent.test):
            return False
        node = parent
    return True


def wrong_imports(module: str, source: str) -> list[str]:
    """What a file imports and may not, one sentence each."""
    layer, found = layer_of(module), []
    for name, line, now in imports(module, source):
        where = f"{module}, line {line}"
        outside = name.split(".")[0]
        if outside in HEAVY:
            if now and not module.startswith(HEAVY[outside]):
                found.append(f"{where}: imports {outside} when it is imported")
            continue
        if "/" not in name and name not in BELOW:
            continue  # another package, or the front door's own modules
        target = layer_of(name) if "/" in name else name
        if target in BELOW and target != layer and target not in BELOW[layer]:
            found.append(f"{where}: {layer} imports {target}, which lies above or beside it")
        if layer == "kernels" and target == "oracle" and name.split("/")[1] not in DATA:
            found.append(f"{where}: a kernel imports {name}, which knows the answers")
        if layer == "kernels" and target == "kernels" and "/" in name:
            other, own = name.split("/")[1], Path(module).parts[1].removesuffix(".py")
            if other not in (*SHARED_BY_KERNELS, own) and own not in SHARED_BY_KERNELS:
                found.append(f"{where}: one kernel imports another, {name}")
    return found


def files() -> list[tuple[str, Path]]:
    found = [(str(path.relative_to(ROOT)), path) for layer in BELOW for path in sorted((ROOT / layer).rglob("*.py"))]
    return found + [(path.name, path) for path in sorted((ROOT / "src" / "attncheck").glob("*.py"))]


@pytest.mark.parametrize(("module", "path"), files(), ids=[module for module, _ in files()])
def test_imports_go_down_only(module: str, path: Path) -> None:
    assert wrong_imports(module, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("oracle/planted.py", "from ..kernels.candidate import Candidate", "oracle imports kernels"),
        ("oracle/planted.py", "from .. import properties", "oracle imports properties"),
        ("oracle/planted.py", "import attncheck.fixtures", "oracle imports fixtures"),
        ("fixtures/planted.py", "from attncheck.kernels import loading", "fixtures imports kernels"),
        ("kernels/planted.py", "from ..fixtures.format import read", "kernels imports fixtures"),
        ("kernels/planted.py", "from ..oracle.visibility import visible", "knows the answers"),
        ("kernels/planted.py", "from ..oracle import enclosure", "knows the answers"),
        ("kernels/adapters/planted.py", "from ...oracle.bounds import Bound", "knows the answers"),
        ("kernels/planted.py", "def f():\n    from .numpy_blocked import NUMPY_BLOCKED", "one kernel imports another"),
        ("properties/planted.py", "from .. import cli", ""),
        ("properties/planted.py", "import torch", "imports torch when it is imported"),
        ("cli.py", "from hypothesis import given", "imports hypothesis when it is imported"),
    ],
)
def test_the_probe_works_a_planted_import_is_caught(module: str, source: str, says: str) -> None:
    found = wrong_imports(module, source)
    assert [sentence for sentence in found if says in sentence] if says else True


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("oracle/fine.py", "from .case import Case\nimport numpy as np"),
        ("kernels/fine.py", "from ..oracle.case import Case\nfrom .candidate import Candidate"),
        ("kernels/fine.py", "def run():\n    import torch"),
        ("kernels/fine.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("properties/fine.py", "from ..oracle.bounds import bounds"),
        ("cli.py", "from attncheck.properties.catalogue import PROPERTIES"),
    ],
)
def test_what_is_allowed_is_not_caught(module: str, source: str) -> None:
    assert wrong_imports(module, source) == []


# -- light to import ------------------------------------------------------------------------

#: an interpreter in which these cannot be imported
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
{code}
"""

NEVER = {"torch", "triton", "jax", "hypothesis"}
HELP = {*NEVER, "flint", "mpmath", "pytest", "_pytest", "numpy", "rich"}


def run_without(names: set[str], code: str) -> subprocess.CompletedProcess[str]:
    script = BLOCKED.format(names=names, code=code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (HELP, "import attncheck; assert 'Case' in dir(attncheck)"),
        (NEVER, "import attncheck.plugin"),
        (NEVER, "import attncheck\nfrom attncheck import Case, Candidate, Result, exact, assert_close, verify"),
        (NEVER, "import attncheck.kernels.loading, attncheck.properties.catalogue, attncheck.fixtures"),
        (HELP, "import sys\nsys.argv = ['attncheck', '--help']\nfrom attncheck.cli import main\nmain()"),
        (HELP, "import sys\nsys.argv = ['attncheck', 'verify', '--help']\nfrom attncheck.cli import main\nmain()"),
    ],
)
def test_importing_is_light(names: set[str], code: str) -> None:
    done = run_without(names, code)
    assert done.returncode == 0, done.stderr


def test_the_probe_works_a_blocked_module_cannot_be_imported() -> None:
    for name in sorted(HELP):
        done = run_without(HELP, f"import {name}")
        assert done.returncode != 0
        assert f"{name} is blocked" in done.stderr
