"""Pipelines a model that keeps its own ``forward``.

The layers of an ``nn.Sequential`` can be called one partition at a time. A model's own ``forward``
cannot: it is one function, whose stack spans all partitions. So each micro-batch runs the whole
``forward`` on a thread of its own, which stops at every cut:

* A *layer* is a module that runs as a whole in one partition; its calls are intercepted. The first
  call of a *cut* begins a partition.
* Each micro-batch has a *micro-batch thread*, which holds the stack of its ``forward``. The thread
  computes only while a worker, in ``F[i,j]``, *hands off* partition *j* to it, so the plan
  determines order and concurrency.
* A *boundary tensor* is used in place of a tensor of an earlier partition: it is on the device of
  the current one, and in a step the graph is cut there. Such tensors are found when they are used,
  by layers and by *the model's own code between its layers*, for short its own code.
* *Checkpointed calls* are the calls of layers that ``R[i,j]`` repeats.
"""
