"""The build names what is missing; a library is kept per version of its sources."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.simulated_gpus import build


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a source that was never built, and an empty cache."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "interface.cpp").write_text("int sim_nothing() { return 0; }\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_the_build_without_a_compiler_says_what_to_install(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert build.why_not() == "simulated GPUs need g++: install it (Debian: apt install g++)"
    with pytest.raises(RuntimeError, match="need g\\+\\+: install it"):
        build.library()
