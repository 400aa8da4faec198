"""Pipelines a model that keeps its own ``forward``.

The layers of an ``nn.Sequential`` can be called one partition at a time. A model's own ``forward``
cannot: it is one function, whose stack spans all partitions. So each micro-batch runs the whole
``forward`` on a thread of its own, which stops at every cut:

* A *layer* is a module that runs as a whole in one partition; its calls are intercepted. The
  model's own code between layers is *glue*. The first call of a *cut* begins a partition.
* A *driver* is a thread that holds the stack of one ``forward``. It computes only while a worker,
  in ``F[i,j]``, *lends* it the turn, so the plan determines order and concurrency.
* A *passage* is one micro-batch on its way through the model, on one driver. The passages of a run
  share a *journey*.
* A *crossing* finds the tensors of earlier partitions that a passage uses, and brings each into the
  current one: to its device, and in a step with the graph cut there. The tensor that is used in
  place of the original is its *stand-in*.
* A *tape* holds the calls of layers that ``R[i,j]`` repeats.
"""

from __future__ import annotations

__all__: list[str] = []
