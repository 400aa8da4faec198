"""Carries out ``F[i,j]``, ``R[i,j]`` and ``B[i,j]``: one partition's work on one micro-batch."""
