"""Python imports this when it starts, if it is on the path: threads are switched at every chance.

``PYTHONPATH=$PWD/tests/switching python -m pytest`` repeats the tests that way, the processes that
they start included. By default a thread may run for 5 ms before another gets the interpreter, which
hides races in code that takes microseconds.
"""

import sys

sys.setswitchinterval(1e-6)
