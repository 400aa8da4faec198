"""The autograd nodes of an action. Nothing here knows about threads, workers or partitions.

``order`` orders tasks, ``transfer`` moves tensors between devices on the copy ``streams``,
``checkpoint`` trades computation for memory, ``leaves`` keeps functions from deadlocking on a leaf.
"""
