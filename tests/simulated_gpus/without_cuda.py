"""Makes a CUDA build of torch one without CUDA, as far as a simulation has to replace it.

Such a build brings kernels, hooks and a device guard for CUDA, which register themselves when its
libraries are loaded and would displace the simulation's. So ``build.py`` makes libraries of the
same names, which are loaded first and taken for torch's: they have the symbols that torch's Python
library looks for, as functions that end the process. Then torch's Python code has to find none of
the names that only a CUDA build has; it fills some of them in, and ``pretend.py`` others.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["LIBRARIES", "forget_names", "is_cuda_build", "source"]

LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so")
_NEEDED_BY_THEM = "libtorch_nvshmem.so"

_NAMES = re.compile("_(cuda_|cudart|Cuda|CUDA|nccl_|cudnn|cusparselt|nvtx|MemPool|.*CudaLauncher)")

_BEGIN = """
#include <cstdio>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/Backend.hpp>
extern void* class_type[] __asm__("_ZTVN10__cxxabiv117__class_type_infoE");
static void missing(const char* name) {
  std::fprintf(stderr, "not simulated: %s\\n", name);
  std::abort();
}
"""
_FUNCTION = 'extern "C" void f{n}() __asm__("{name}"); void f{n}() {{ missing("{name}"); }}'
# What the Python library calls while it is loaded.
_CALLED = {
    "_ZN4c10d15get_gil_checkerEv": """
static void* checker;
extern "C" void** f{n}() __asm__("{name}"); void** f{n}() {{ return &checker; }}
""",
    "_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb": """
extern "C" void f{n}(void* place, bool) __asm__("{name}");
void f{n}(void* place, bool) {{ new (place) c10d::Backend::Options("nccl"); }}
""",
}
_TYPE = """
extern const void* const d{n}[2] __asm__("{name}");
const void* const d{n}[2] = {{class_type + 2, "{of}"}};
"""
_DATA = 'extern void* d{n}[512] __asm__("{name}"); void* d{n}[512] = {{}};'


def is_cuda_build(torch: Path) -> bool:
    """Returns whether the torch in this folder was built with CUDA."""
    return (torch / "lib" / LIBRARIES[0]).exists()


def source(torch: Path) -> str:
    """Returns C++ that defines what torch's Python library takes from the CUDA libraries."""
    lib = torch / "lib"
    found = [lib / one for one in (*LIBRARIES, _NEEDED_BY_THEM) if (lib / one).exists()]
    defined = {name: kind for one in found for kind, name in _symbols(one, "--defined")}
    wanted = {name for _, name in _symbols(lib / "libtorch_python.so", "--undefined")}
    lines = [_BEGIN]
    for n, name in enumerate(sorted(wanted & defined.keys())):
        form = _TYPE if name.startswith("_ZTI") else _DATA
        if defined[name] in "TW":
            form = _CALLED.get(name, _FUNCTION)
        lines.append(form.format(n=n, name=name, of=name.removeprefix("_ZTI")))
    return "\n".join(lines)


def _symbols(library: Path, which: str) -> list[tuple[str, str]]:
    command = ["nm", "--dynamic", f"{which}-only", str(library)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = (line.split()[-2:] for line in found.stdout.splitlines())
    return [(kind, name.partition("@")[0]) for kind, name in lines]


def forget_names() -> None:
    """Makes torch, when it is imported, find no name that only a CUDA build has."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """An import hook: removes the names after ``torch._C`` is there, before ``torch.cuda`` is."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name != "torch.cuda":
            return
        sys.meta_path.remove(self)
        extension: Any = importlib.import_module("torch._C")
        version: Any = importlib.import_module("torch.version")
        for each in list(filter(_NAMES.match, dir(extension))):
            delattr(extension, each)
        extension._has_cuda = extension._has_cudnn = False
        version.cuda = None
