"""Check what a wheel would install: one import name, all of the package, nothing beside it.

python tests/wheel_contents.py dist/attncheck-*.whl
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("oracle", "kernels", "fixtures", "properties")


def product_files(root: Path = ROOT) -> set[str]:
    """The names under which the product's files must lie in the wheel."""
    kinds = {".py", ".json", ".ini", ".safetensors", ".typed"}
    found = {f"attncheck/{p.name}" for p in (root / "src" / "attncheck").iterdir() if p.suffix in kinds}
    found.add("attncheck/py.typed")
    for folder in FOLDERS:
        found |= {
            f"attncheck/{p.relative_to(root).as_posix()}" for p in (root / folder).rglob("*") if p.suffix in kinds
        }
    return found


def complaints(names: list[str], wanted: set[str]) -> list[str]:
    """What is wrong with a wheel that holds these files."""
    found = []
    top = {name.split("/")[0] for name in names}
    beside = sorted(name for name in top if name != "attncheck" and not name.endswith(".dist-info"))
    if beside:
        found.append(f"it would install {', '.join(beside)} beside attncheck")
    inside = {name for name in names if name.startswith("attncheck/")}
    found += [f"{name} is missing" for name in sorted(wanted - inside)]
    found += [f"{name} is not part of the product" for name in sorted(inside - wanted)]
    return found


def main(paths: list[str]) -> int:
    if not paths:
        print("usage: python tests/wheel_contents.py WHEEL...")
        return 2
    found = []
    for path in paths:
        with zipfile.ZipFile(path) as wheel:
            found += [f"{Path(path).name}: {line}" for line in complaints(wheel.namelist(), product_files())]
    print("\n".join(found) if found else f"{len(paths)} wheel(s) hold attncheck, all of it, and nothing else")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
