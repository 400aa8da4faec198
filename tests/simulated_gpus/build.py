"""Builds the library with g++ on first use, and caches it by torch's version and a source hash."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["library", "why_not"]

SOURCES = Path(__file__).parent / "src"
FLAGS = "-std=c++20 -O1 -fPIC -fvisibility=hidden -shared -w".split()


def why_not() -> str | None:
    """Returns why the library cannot be built, in one line; ``None`` if it can."""
    if shutil.which("g++") is None:
        return "simulated GPUs need g++: install it (Debian: apt install g++)"
    return None


def library() -> Path:
    """Returns the library for this torch, and builds it if it is not cached. Imports no torch.

    Raises:
        RuntimeError: if there is no g++, or it fails.
    """
    torch = _torch()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pipert"
    path = folder / f"simulated_gpus-{_version(torch)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "simulated_gpus.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of a test run may need it at once
        if not path.exists():
            _build(torch, path)
    return path


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("simulated GPUs need torch")
    return Path(spec.origin).parent


def _version(torch: Path) -> str:
    """Returns torch's version and a hash of everything that the library is built from."""
    found = hashlib.sha256(" ".join([*FLAGS, str(torch)]).encode())
    for file in sorted(SOURCES.iterdir()):
        found.update(file.read_bytes())
    return f"{importlib.metadata.version('torch')}-{found.hexdigest()[:16]}"


def _build(torch: Path, path: Path) -> None:
    missing = why_not()
    if missing is not None:
        raise RuntimeError(missing)
    draft = path.with_suffix(f".{os.getpid()}")
    include = torch / "include"
    command = [
        "g++", *FLAGS, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
        str(SOURCES / "interface.cpp"), "-o", str(draft),
        f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}",
    ]  # fmt: skip
    begin = time.monotonic()
    _say(f"building simulated GPUs for this torch, once, in half a minute: {path}\n")
    with tempfile.TemporaryFile("w+") as errors:
        compiler = subprocess.Popen(command, stdout=errors, stderr=errors)
        while _still_runs(compiler):
            if sys.stderr.isatty():
                _say(f"\r{time.monotonic() - begin:.0f} s ")
        if compiler.returncode != 0:
            errors.seek(0)
            raise RuntimeError(f"g++ failed to build simulated GPUs:\n{errors.read()[-4000:]}")
    draft.rename(path)
    _say(f"\rbuilt simulated GPUs in {time.monotonic() - begin:.0f} s\n")


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return True
    return False


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
