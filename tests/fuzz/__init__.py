"""Fuzzes pipert: random models, placements and steps on simulated GPUs, against the plain module.

Run it by hand, for an hour::

    python -m tests.fuzz --minutes 60 --seed 1

A test runs it with a fixed number of cases, on simulated GPUs and on the CPU, and
``benchmarks/soak.py`` runs it to see whether anything grows. A case fails if its outputs, losses,
gradients, buffers or parameters differ from the reference's, if something is raised that the case
does not ask for, or if the simulated GPUs report anything. It is printed as one line that can be
pasted::

    python -m tests.fuzz --case 'Case(seed=5, units=("linear", "tanh"), ...)'

Cases are plain data, drawn from ``random.Random``, with a shrinker of forty lines. They are not
strategies of hypothesis, for three reasons:

* Thread timing differs from run to run, so a case may fail one time in ten. Hypothesis calls that
  flaky and shows no example; here a candidate for a smaller case is tried several times.
* The budget is a time, and cases run in several processes, one after the other, because the
  simulation keeps every stream that was ever made.
* A case is a line in a log that keeps its meaning when the generator changes.

The reference is the plain module on the CPU. For a model with BatchNorm it runs the micro-batches
one by one. A pipe draws other random numbers than the plain module, and autocast has other rules on
the CPU; for a model that draws random numbers and under autocast, the reference is therefore the
same pipe, from the same seed, without recomputation.

Left out, since it is known and documented: values at a boundary that share memory and are changed
in place behind it; and the effect of a call without a gradient on hooks and custom functions
(docs/contract.md). The gradients of tied weights are added in no fixed order, so everything is
compared with a tolerance.
"""
