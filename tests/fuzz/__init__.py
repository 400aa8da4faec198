"""A fuzzer: random models, placements and steps on simulated GPUs, against the plain module.

By hand, for an hour::

    python -m tests.fuzz --minutes 60 --seed 1

and in a test, with a fixed number of cases. A case fails if its outputs, losses, gradients, buffers
or parameters differ from the reference's, if something is raised that the case does not ask for,
or if the simulated GPUs report anything. It is printed as one line that can be pasted::

    python -m tests.fuzz --case 'Case(seed=5, units=("linear", "tanh"), ...)'

Cases are plain data, drawn from ``random.Random``, with a shrinker of forty lines, and not
strategies of hypothesis, for three reasons:

* What threads do differs from run to run, so a case may fail one time in ten. Hypothesis calls
  that flaky and shows no example; here a candidate for a smaller case is tried several times.
* The budget is one of time, and cases run in several processes, one after the other: the
  simulation keeps every stream that there ever was.
* A case is a line in a log that still means the same when the generator has changed.

The reference is the plain module on the CPU. For a model with BatchNorm it goes through the
micro-batches one by one. For one that draws random numbers, which are other numbers in a pipe, and
under autocast, which has other rules on the CPU, it is the same pipe, from the same seed, with
nothing recomputed.

Left out, since it is known and documented: values at a boundary that share memory and are changed
in place behind it; and what a call without a gradient does to hooks and custom functions
(docs/contract.md). The gradients of tied weights are added in no fixed order, so everything is
compared with a tolerance.
"""
