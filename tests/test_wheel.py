"""The check of the wheel's contents works; `make wheel` runs it on a wheel that was built."""

from __future__ import annotations

import tomllib
from pathlib import Path

from .wheel_contents import FOLDERS, ROOT, complaints, product_files


def test_a_wheel_that_holds_the_product_and_no_more_is_right() -> None:
    wanted = product_files()
    assert {"attncheck/cli.py", "attncheck/oracle/case.py", "attncheck/verify.ini", "attncheck/py.typed"} <= wanted
    assert complaints([*wanted, "attncheck-0.1.0.dist-info/METADATA"], wanted) == []


def test_a_folder_beside_attncheck_a_missing_file_and_a_stray_one_are_told() -> None:
    names = ["kernels/candidate.py", "attncheck/cli.py", "attncheck/notes.md"]
    assert complaints(names, {"attncheck/cli.py", "attncheck/plugin.py"}) == [
        "it would install kernels beside attncheck",
        "attncheck/plugin.py is missing",
        "attncheck/notes.md is not part of the product",
    ]


def test_every_folder_with_code_is_a_package_of_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"attncheck"}
    for folder in FOLDERS:
        found |= {
            "attncheck." + ".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / folder).rglob("*.py")
        }
    assert set(listed) == found


def test_the_links_of_the_package_lead_to_the_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "src" / "attncheck" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("../..") / folder
