"""How hypothesis runs here: the same examples each time, and nothing written into the tree.

Each test runs on a thread of its own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.own_thread import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]

# What hypothesis caches about characters and constants would go to .hypothesis otherwise.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "pipert-hypothesis")

settings.register_profile(
    "pipert",
    max_examples=60,
    derandomize=True,
    deadline=None,  # a machine that does other work too
    database=None,
    print_blob=False,
    # How long it takes to draw an example is the machine's business as well.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pipert")
