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

from tests.simulated_gpus import without_cuda

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
    for file in [*sorted(SOURCES.iterdir()), Path(without_cuda.__file__)]:
        found.update(file.read_bytes())
    return f"{importlib.metadata.version('torch')}-{found.hexdigest()[:16]}"


def _build(torch: Path, path: Path) -> None:
    missing = why_not()
    if missing is not None:
        raise RuntimeError(missing)
    draft = path.with_suffix(f".{os.getpid()}")
    include, lib = torch / "include", torch / "lib"
    headers = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    linked = [f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
    begin = time.monotonic()
    _say(f"building simulated GPUs for this torch, once, in half a minute: {path}\n")
    if without_cuda.is_cuda_build(torch):
        linked[:0] = _build_instead(begin, torch, path.with_suffix(""), [*headers, *linked])
    _compile(begin, *headers, str(SOURCES / "interface.cpp"), "-o", str(draft), *linked)
    draft.rename(path)
    _say(f"\rbuilt simulated GPUs in {time.monotonic() - begin:.0f} s\n")


def _build_instead(begin: float, torch: Path, folder: Path, common: list[str]) -> list[str]:
    """Builds the libraries that replace torch's; returns how to link with them."""
    folder.mkdir(exist_ok=True)
    sources = [without_cuda.source(torch)] + [""] * len(without_cuda.LIBRARIES[1:])
    for name, text in zip(without_cuda.LIBRARIES, sources, strict=True):
        source = folder / f"{name}.cpp"
        source.write_text(text)
        named = ["-o", str(folder / name), f"-Wl,-soname,{name}", "-fvisibility=default"]
        _compile(begin, str(source), *named, *common)
    found = [f"-l:{name}" for name in without_cuda.LIBRARIES]
    return [f"-L{folder}", "-Wl,--no-as-needed", *found, f"-Wl,-rpath,{folder}"]


def _compile(begin: float, *arguments: str) -> None:
    with tempfile.TemporaryFile("w+") as errors:
        compiler = subprocess.Popen(["g++", *FLAGS, *arguments], stdout=errors, stderr=errors)
        while _still_runs(compiler):
            if sys.stderr.isatty():
                _say(f"\r{time.monotonic() - begin:.0f} s ")
        if compiler.returncode != 0:
            errors.seek(0)
            raise RuntimeError(f"g++ failed to build simulated GPUs:\n{errors.read()[-4000:]}")


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return True
    return False


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
