"""The private names of torch, and one of Python, that pipert uses, and what happens without one.

Any release of torch may drop such a name. So each is looked up here, once, at import:

1. Without a *needed* name no pipe would be right. If one is missing, importing pipert raises an
   ``ImportError``, which names torch's version and all that is missing.
2. Any other name has a *fallback*: a public way that is slower, or one feature less.

``test_private_names.py`` takes each of them away, before pipert is imported. No other file of
the package reads private names of torch, but for ``_modules``, ``_parameters``, ``_buffers`` and
``_version``.
"""

from __future__ import annotations

import importlib
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler
from torch.nn.utils import parametrize

Flag = Callable[[], bool]
Get = Callable[[], Any]

NEEDED: list[str] = []
OTHERS: list[str] = []
"""All needed names, and all with a fallback."""
_missing: list[str] = []


def _look_up(path: str, owner: Any) -> Any:
    """Return the attribute at ``path`` of ``owner``, or of the module that ``path`` begins with."""
    if owner is not None:
        return getattr(owner, path)
    name, _, rest = path.partition(":")
    found: Any = importlib.import_module(name)
    for part in rest.split("."):
        found = getattr(found, part)
    return found


def _needed(path: str, owner: Any = None) -> Any:
    NEEDED.append(path)
    try:
        return _look_up(path, owner)
    except (AttributeError, ImportError):
        _missing.append(path.replace(":", "."))


def _or(fallback: Any, path: str, owner: Any = None) -> Any:
    OTHERS.append(path)
    try:
        return _look_up(path, owner)
    except (AttributeError, ImportError):
        return fallback


with torch.inference_mode(False), torch.enable_grad():  # wherever pipert is imported
    _leaf = torch.ones(1, device="cpu", requires_grad=True)
    _node: Any = _leaf.view_as(_leaf).grad_fn


# Graphs -------------------------------------------------------------------------------------------

AccumulateGrad: Any = type(_node.next_functions[0][0])
"""The class of the node that adds to a leaf's ``.grad``."""

node_count: Callable[[], int] = _needed("torch._C:_autograd._get_sequence_nr")
"""The sequence number of the next node that the current thread creates."""

_needed("_sequence_nr", _node)
sequence_nr: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The number of a node, counted by the thread that created it."""


def sequence_nrs(nodes: Iterable[Any]) -> list[int]:
    """Return the numbers of many nodes, in a third of the time that a call for each takes."""
    numbers = list[int]()
    for node in nodes:  # up to Python 3.11 a comprehension is one more call
        numbers.append(node._sequence_nr())
    return numbers


_outputs = operator.attrgetter("_input_metadata")
outputs_of: Callable[[Any], Sequence[Any]] = (
    _outputs if _or((), "_input_metadata", _node) else lambda _: ()
)
"""What a node knows of each of its outputs. The fallback knows nothing."""

set_sequence_nr: Callable[[Any, int], None] = _needed("torch._C:_FunctionBase._set_sequence_nr")
"""Sets the number of the node of a ``Function``, given its context."""


def _make_node() -> object:
    with torch.inference_mode(False), torch.enable_grad():
        return _leaf.view_as(_leaf)


make_node: Callable[[], object] = _or(_make_node, "torch._C:_functions.UndefinedGrad")
"""Creates a node of no use, in 0.1 us; the fallback takes 30 times as long."""

run_backward: Callable[..., Any] = _needed("torch.autograd.graph:_engine_run_backward")
"""Runs the engine, without ``torch.autograd.grad``'s checks of its arguments."""

call_after_backward: Callable[[Callable[[], None]], None] = _needed(
    "torch.autograd:Variable._execution_engine.queue_callback"
)
"""Calls its argument once the current backward has succeeded; with the caller's streams only if a
gradient has arrived on a GPU."""

will_execute: Callable[[Any], bool] = _or(lambda _: True, "torch._C:_will_engine_execute_node")
"""Whether the current backward executes a node. The fallback computes what nobody asked for."""

COMPILED_KEY = "_compiled_autograd_key"
"""The method of a function that compiled autograd calls before it captures a graph with it."""
_needed(COMPILED_KEY, torch.autograd.Function)

keeps_graph: Flag = _or(lambda: True, "torch._C:_autograd._get_current_graph_task_keep_graph")
"""Whether the current backward retains the graph. The fallback frees memory later."""

backward_id: Callable[[], int] = _or(lambda: 0, "torch._C:_current_graph_task_id")
"""The number of the current backward, for recordings. The fallback takes all for one."""

top_hooks: Callable[[bool], Any] = _needed("torch._C:_autograd._top_saved_tensors_default_hooks")
"""The innermost saved-tensor hooks of this thread, or ``None``."""
pop_hooks: Callable[[], None] = _needed("torch._C:_autograd._pop_saved_tensors_default_hooks")
push_hooks: Callable[..., None] = _needed("torch._C:_autograd._push_saved_tensors_default_hooks")

# Tensors, storages and modules --------------------------------------------------------------------

_needed("_backward_hooks", Tensor)
tensor_hooks: Callable[[Tensor], Any] = operator.attrgetter("_backward_hooks")
"""The hooks of a tensor, by the numbers of their handles, or ``None``."""

_needed("_post_accumulate_grad_hooks", Tensor)
hooks_on_grad: Callable[[Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""The hooks called once a leaf's ``.grad`` has been added to, or ``None``."""

_handles = _needed("torch.utils.hooks:RemovableHandle")
next_hook: Callable[[], int] = partial(getattr, _handles, "next_id")
"""The number of the next hook that anyone registers."""

_needed("_cdata", _leaf.untyped_storage())
identity: Callable[[Any], int] = operator.attrgetter("_cdata")
"""What two Python objects for one storage have in common."""

weak_storage: Callable[[Any], Any] = _needed("torch.multiprocessing.reductions:StorageWeakRef")
"""Refers to a storage weakly; as long as it does, no other storage gets that ``cdata``."""


def storage_of(tensor: Tensor) -> int:
    """Return a number that tensors with the same storage have in common."""
    return identity(tensor.untyped_storage())


COMPILED_CALL = "_compiled_call_impl"
"""The slot in which ``nn.Module.__call__`` looks for the compiled call of a module."""
_needed(COMPILED_CALL, nn.Identity())
_needed("_call_impl", nn.Identity())
plain_call: Callable[[nn.Module], Callable[..., Any]] = operator.attrgetter("_call_impl")
"""The call of a module, hooks included, that is not compiled."""

HOOK_TABLES = tuple([name for name in vars(nn.Identity()) if "_hooks" in name])
"""The attributes of a module that hold hooks of any kind."""
STATE_TABLES = tuple(
    [k for k, v in vars(nn.Identity()).items() if isinstance(v, dict | set) and "_hooks" not in k]
)
"""Those that hold its parameters, buffers and modules, and which buffers are not persistent."""
_needed("_forward_pre_hooks", nn.Identity())
forward_pre_hooks: Callable[[nn.Module], Any] = operator.attrgetter("_forward_pre_hooks")
_needed("_backward_pre_hooks", nn.Identity())
backward_hooks: Callable[[nn.Module], Any] = operator.attrgetter(
    "_backward_hooks", "_backward_pre_hooks"
)
"""The hooks of a module's backward, by the numbers of their handles, in two dicts."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of any kind."""
    return any(map(vars(module).get, HOOK_TABLES))


have_modules_hooks: Get = _or(lambda: True, "torch.nn.modules.module:_has_any_global_hook")
"""Whether there are hooks of all modules. With the fallback, any layer counts as one that draws."""

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

    BatchNorm: TypeAlias = _BatchNorm
    NormBase: TypeAlias = _NormBase
else:
    BatchNorm, NormBase = nn.BatchNorm1d.__mro__[1:3]

LEFT_ALIGNED = _or(None, "torch:_nested_tensor_from_mask_left_aligned")
"""The function that ``nn.TransformerEncoder`` calls before it takes its fast path."""

add_in_place: Callable[..., object] = _or(
    lambda xs, ys: [x.add_(y) for x, y in zip(xs, ys, strict=True)], "torch:_foreach_add_"
)
"""Adds the tensors of a second list to those of a first; the fallback makes a call for each."""

# Pytrees ------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    pytree = torch.utils._pytree
else:
    pytree = _needed("torch.utils:_pytree")
_needed("torch.utils._pytree:SUPPORTED_NODES")

# Meta tensors to which the casts of a device apply
FakeTensorMode: Any = _needed("torch._subclasses.fake_tensor:FakeTensorMode")

# Modes of a thread --------------------------------------------------------------------------------

function_modes: Get = _needed("torch.overrides:_get_current_function_mode_stack")
function_mode_count: Get = _needed("torch._C:_len_torch_function_stack")
function_mode_at: Callable[[int], Any] = _needed("torch._C:_get_function_stack_at")
push_function_mode: Callable[[Any], None] = _needed("torch._C:_push_on_torch_function_stack")
pop_function_mode: Get = _needed("torch._C:_pop_torch_function_stack")

dispatch_modes: Get = _needed("torch.utils._python_dispatch:_get_current_dispatch_mode_stack")
push_dispatch_mode: Callable[[Any], None] = _needed("torch.utils._python_dispatch:_push_mode")
pop_dispatch_mode: Get = _needed("torch.utils._python_dispatch:_pop_mode")

DispatchMode: Any = _needed("torch.utils._python_dispatch:TorchDispatchMode")
flop_formulas: dict[Any, Callable[..., int]] = _or({}, "torch.utils.flop_counter:flop_registry")
"""Floating point operations by operator. With the fallback only bytes are counted."""
flash_attention: Any = _or(None, "torch:ops.aten._scaled_dot_product_flash_attention")
efficient_attention: Any = _or(None, "torch:ops.aten._scaled_dot_product_efficient_attention")
"""The kernels that CUDA chooses. With the fallback, a plan counts a matrix of scores."""

# torch.func and tools that make graphs ------------------------------------------------------------

transforms: Get = _needed("torch._C:_functorch.get_interpreter_stack")
"""The ``torch.func`` transforms of this thread, or ``None``."""
is_wrapped: Callable[[Tensor], bool] = _needed("torch._C:_functorch.is_functorch_wrapped_tensor")
"""Whether a transform tracks a tensor."""

_needed("_current_level", forward_ad)
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", -1)
"""The level of forward-mode differentiation of the process; -1 if there is none."""

is_traced_by_jit: Flag = getattr(torch.jit, "is_tracing", lambda: False)  # public
"""Deprecated with ``torch.jit``. The fallback lets ``torch.jit.trace`` trace a pipe, in which it
sees no layers."""
is_traced_by_fx: Flag = _or(lambda: False, "torch.fx._symbolic_trace:is_fx_symbolic_tracing")
"""Before torch 2.14 also true while others compile; the fallback lets torch refuse a call then."""
watcher: Get = _or(lambda: None, "torch._C:_dynamo.eval_frame.get_eval_frame_callback")
"""What torch.compile watches this thread with. The fallback lets it watch a pipe."""


def compile_lock() -> Any:
    """Return the lock that dynamo compiles under, if it is loaded, or a block of no effect."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return getattr(dynamo, "compile_lock", None) or nullcontext()


def is_autograd_compiled() -> bool:
    """Whether compiled autograd is on. If torch differs, it is not."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "compiled_autograd_enabled", False) is True


_or(True, "_cache_enabled", parametrize)
is_caching_parametrizations: Flag = partial(getattr, parametrize, "_cache_enabled", True)
"""Whether ``torch.nn.utils.parametrize.cached`` may be on."""


# Dispatch and thread-local objects ----------------------------------------------------------------

autograd_key: Any = _or(None, "torch._C:DispatchKey.Autograd")
higher_order: dict[str, Any] = _or({}, "torch._ops:_higher_order_ops")
"""The operators such as ``torch.cond``, by name, each with its kernels. With the fallback, those of
layers that run at the same time fail with torch's own errors."""

WithoutFunctions: Any = _needed("torch._C:DisableTorchFunction")
WithFunctions: Any = _or(nullcontext, "torch._C:_EnableTorchFunction")
"""With the fallback, a call whose loss is of another class recomputes with plain tensors."""
WithoutDispatch: Any = _needed("torch._C:_DisableTorchDispatch")

get_object: Callable[[str], Any] = _needed("torch._C:_get_obj_in_tls")
has_object: Callable[[str], bool] = _needed("torch._C:_is_key_in_tls")
set_object: Callable[[str, Any], None] = _needed("torch._C:_stash_obj_in_tls")
remove_object: Callable[[str], None] | None = _or(None, "torch._C:_remove_obj_from_tls")
"""What ``autograd/engine.py`` is made of; the last is new in torch 2.13."""

# Profilers and names ------------------------------------------------------------------------------

_or(False, "_is_profiler_enabled", profiler)
profiler_is_on: Flag = partial(getattr, profiler, "_is_profiler_enabled", False)
"""Whether ``torch.profiler`` is on in the process; if torch differs, it is not."""
set_thread_name: Callable[[str], None] = _or(
    lambda _: None, "torch.multiprocessing:_set_thread_name"
)
"""Names the current thread for the operating system."""

if _missing:
    raise ImportError(
        f"pipert does not support torch {torch.__version__}, which lacks {', '.join(_missing)}; "
        "README says which versions of torch are tested. Use one of these, or a newer pipert"
    )

# Python -------------------------------------------------------------------------------------------


def import_awaited(thread: int | None) -> str:
    """Return the module whose import ``thread`` waits for while this thread imports it, or ''.

    Where Python lacks the name, a call waits until its time limit.
    """
    awaited: dict[int | None, Any] = getattr(importlib._bootstrap, "_blocking_on", {})
    locks = awaited.get(thread, ())
    locks = locks if isinstance(locks, list | tuple) else [locks]  # Python 3.11 has one lock
    return next((lock.name for lock in locks if lock.owner == threading.get_ident()), "")
