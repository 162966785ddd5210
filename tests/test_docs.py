"""What exists is documented, and what is documented exists."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from attncheck import cli
from attncheck.kernels.faulty import ZOO
from attncheck.kernels.loading import CONVENTIONS
from attncheck.properties.catalogue import PROPERTIES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

COMMANDS: dict[str, click.Command] = dict(cli.cli.commands)


def options(command: click.Command) -> list[str]:
    return [max(p.opts, key=len) for p in command.params if isinstance(p, click.Option) and p.name != "help"]


def undocumented(names: list[str], text: str) -> list[str]:
    """The names that the text does not hold in `code`, alone or at the start of a code span."""
    return [name for name in names if not re.search(rf"`{re.escape(name)}[`\s]", text)]


def row_of(command: str) -> str:
    """The line of the README's table of commands."""
    return next((line for line in README.splitlines() if line.startswith(f"| `{command}")), "")


def test_every_property_and_convention_is_documented() -> None:
    assert undocumented([*PROPERTIES, *CONVENTIONS], README) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_documented(command: str) -> None:
    assert undocumented(options(COMMANDS[command]), row_of(command)) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_documented_option_exists(command: str) -> None:
    documented = set(re.findall(r"`(--?[a-z][a-z-]*)`", row_of(command)))
    assert documented <= set(options(COMMANDS[command]))


def test_every_documented_property_exists() -> None:
    table = README.partition("## The properties")[2].partition("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)} == set(PROPERTIES)


def test_every_exit_code_is_documented_in_the_order_of_precedence() -> None:
    table = README.partition("Exit codes, in this order")[2]
    codes = [int(code) for code in re.findall(r"^\| (\d) \|", table, flags=re.MULTILINE)]
    assert codes == [cli.ERROR, cli.VIOLATED, cli.NOT_JUDGED, cli.HELD]
    assert [int(code) for code in re.findall(r"^  (\d)  ", cli.EXIT_CODES, flags=re.MULTILINE)] == codes


def test_the_plug_in_mirrors_the_options_of_verify() -> None:
    plugin = (ROOT / "src" / "attncheck" / "plugin.py").read_text(encoding="utf-8")
    # pytest has its own -x and -n, and a seed that is drawn cannot be shared by processes
    for option in sorted({*options(COMMANDS["verify"])} - {"--fail-fast", "-n", "--random"}):
        assert f'"{option[2:]}"' in plugin or f"{{prefix}}{option[2:]}" in plugin, option


def test_architecture_is_one_page() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) < 60


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}: .*## ", makefile, flags=re.MULTILINE)


def test_the_power_report_is_of_the_zoo_and_the_properties_that_there_are() -> None:
    page = (ROOT / "docs" / "POWER.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (?:K\d\d|cheat|sharp) \|", page, flags=re.MULTILINE)
    assert sorted(rows) == sorted(ZOO)
    caught = re.search(r"^- (\d+) of (\d+) faults caught under every seed", page, flags=re.MULTILINE)
    assert caught is not None and int(caught[2]) == len(ZOO)
    assert f"plants each of {caught[2]} faults" in README and f"all {caught[1]} are caught under every seed" in README


def test_the_probe_works_what_is_missing_is_told() -> None:
    assert undocumented(["--nothing"], README) == ["--nothing"]
    assert undocumented(["--di"], "`--digits`") == ["--di"]
    assert undocumented(["--digits"], "`--digits 3`") == []
