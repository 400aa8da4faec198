"""Gives a process simulated GPUs: Python imports this when it starts, if it is on the path.

``python -m pytest --simulated-gpus`` puts this folder on PYTHONPATH, for the programs that tests
start. The reports of such a program are appended to the file named by the environment variable
``SIMULATED_GPUS_REPORTS``, and fail the test.
"""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[2]))

from tests.simulated_gpus.child import start_with_torch  # noqa: E402

start_with_torch()

# Python imports only the first sitecustomize on the path: run the next one, too (tests/switching).
for folder in sys.path:
    file = Path(folder or ".").resolve() / "sitecustomize.py"
    if file.parent != HERE and file.exists():
        runpy.run_path(str(file))
        break
