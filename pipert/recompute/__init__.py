"""Recomputes what a checkpointed forward did not keep, and checks that it is the same."""
