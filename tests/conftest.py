"""What several test files ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attncheck.cli import main


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command line runs in; test files put their own files into it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def attncheck(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line: exit code, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["attncheck", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run
