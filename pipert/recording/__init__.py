"""Recording what a pipe does: when each task began and ended, on its device's own clock.

``event`` is what comes out, ``stamp`` the moments it is made of, ``recorder`` what the lanes of a
run tell, ``backward`` how ``B[i,j]`` is seen, ``ranges`` what profilers get to see.
"""

from __future__ import annotations

__all__: list[str] = []
