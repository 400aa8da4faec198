"""Makes hypothesis try the same examples in each run, and write nothing into the tree."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

# Otherwise hypothesis would write its cache of characters and constants to .hypothesis.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "pipert-hypothesis")

settings.register_profile(
    "pipert",
    max_examples=60,
    derandomize=True,
    deadline=None,  # the machine may be busy
    database=None,
    print_blob=False,
    # Nor does the time to draw an example count.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pipert")
