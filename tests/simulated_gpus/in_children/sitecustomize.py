"""Python imports this when it starts, if it is on the path: the process gets the simulated GPUs.

``python -m pytest --simulated-gpus`` puts this folder on PYTHONPATH, for the programs that tests
start. What such a program's operations give rise to is appended to the file that the environment
variable ``SIMULATED_GPUS_REPORTS`` names, and fails the test.
"""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[2]))

from tests.simulated_gpus.child import start_with_torch  # noqa: E402

start_with_torch()

# Only the first of this name on the path is imported: run the next one, too (tests/switching).
for folder in sys.path:
    file = Path(folder or ".").resolve() / "sitecustomize.py"
    if file.parent != HERE and file.exists():
        runpy.run_path(str(file))
        break
