"""Sends calls of a model through its pipe, whoever makes them.

As ``fully_shard(model)`` and accelerate's ``dispatch_model(model)`` do, a pipe changes what a call
of the *model* does. So trainers, ``generate`` and evaluation harnesses, which hold the model, run
it in the pipe:

1. The call of the model is intercepted, as those of layers are, so a library may put another
   ``forward`` into the model. ``model.forward`` is replaced by a callable with the same effect, as
   accelerate's is.
2. Parts of the model that are called by themselves, such as its head or an encoder, are not: their
   layers bring arguments to their own devices, as accelerate's hooks do.
3. Code that runs inside of the pipe gets the plain ``forward``: the model's own, if it had one, or
   what its class has now. So do a copy and a pickled model.
4. Outputs are on the device of the inputs, as the plain model's would be.
5. The loss of a call with labels is the plain model's. It is computed in one micro-batch, unless it
   is a sum divided by ``num_items_in_batch``, which the caller gives or labels show.
6. A call with a cache of keys and values is one micro-batch, since the cache belongs to all rows.
   Training in several gets none, unless it asks. A call with ``adapter_names`` is one, too.
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipert._torch import backward_id
from pipert._typing import Value
from pipert.batch.joining import JoinNumbers
from pipert.batch.microbatch import Replicate
from pipert.batch.tensors import tensors_of
from pipert.layers.intercepted import (
    Guest,
    calls_of,
    here,
    intercept,
    is_unseen,
    release,
)


class Runs(Protocol):
    """A pipe, as far as calls of its model need it: see ``ModulePipe``."""

    chunks: int

    def is_inside(self) -> bool: ...
    def splits_or_recomputes(self, in_one: bool = False) -> bool: ...

    def call_model(
        self, call: Callable[..., Value], args: Any, kwargs: dict[str, Any],
        why_in_one: str, join_numbers: JoinNumbers,
    ) -> Value: ...  # fmt: skip


_routed: WeakKeyDictionary[nn.Module, weakref.ref[Routed]] = WeakKeyDictionary()


class Routed(Guest):
    """The ``forward`` of a model in a pipe.

    Args:
        module: the model.
        pipe: its pipe, which so lives as long as the model, or until it is closed.
    """

    def __init__(self, module: nn.Module, pipe: Runs) -> None:
        self._module = module
        self._pipe: Runs | None = pipe
        self.own = module.__dict__.get("forward")
        self._has_warned = False
        self._signed: tuple[Any, inspect.Signature] | None = None
        module.__dict__["forward"] = self
        intercept([module])
        calls_of(module).route = self
        _routed[module] = weakref.ref(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # as in ``Calls``
            disable: Any = torch.compiler.disable
            return disable(self.__call__)(*args, **kwargs)
        if self.is_outside():
            return self.send(self._plain(), *args, **kwargs)
        pipe, has_config = self._pipe, getattr(self._module, "config", None) is not None
        if pipe is not None and has_config and pipe.splits_or_recomputes():
            if self._makes_cache(arguments := self._named(args, kwargs)):
                kwargs["use_cache"] = _refuse_packed(self._module, arguments)
        return self._plain()(*args, **kwargs)

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call as the function of a bound method is called: accelerate wraps and binds it."""
        call = self if module is self._module else type(module).forward.__get__(module)
        return call(*args, **kwargs)

    __func__ = forward  # pickle finds what is bound to a model by the name of the function

    @property
    def __signature__(self) -> inspect.Signature:
        plain = self._plain()
        function = getattr(plain, "__func__", plain)
        if self._signed is None or self._signed[0] is not function:
            self._signed = function, inspect.signature(plain)
        return self._signed[1]

    def _plain(self) -> Any:
        return self.own or type(self._module).forward.__get__(self._module)

    def is_outside(self) -> bool:
        """Whether the current code does not run inside of the pipe, which is open.

        Nor does it run inside of the pipe of a model around this one, which is cut in here, nor is
        it a checkpoint that repeats the call in a backward.
        """
        pipe = self._pipe
        if pipe is None or pipe.is_inside() or here.is_trial or backward_id() >= 0:
            return False
        return self._module not in here.around

    def send(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the module through its pipe; ``call`` calls it for each micro-batch."""
        pipe = self._pipe
        if pipe is None:  # closed in this moment
            return call(*args, **kwargs)
        arguments, first = self._named(args, kwargs), _first_tensor((*args, *kwargs.values()))
        number = number_of_items(self._module, arguments)
        makes_cache = self._makes_cache(arguments)
        why = self._why_in_one(arguments, first, number is not None, makes_cache)
        is_training = torch.is_grad_enabled()
        if why == _UNKNOWN_LOSS and not self._has_warned and is_training and pipe.chunks > 1:
            warnings.warn(
                f"{type(self._module).__name__} with labels runs in one micro-batch of "
                f"{pipe.chunks} asked for, because {why}; take a step with "
                "pipe.forward_backward(step=...), or compute the loss from outputs without labels",
                stacklevel=5,
            )
            self._has_warned = True
        if number is not None and not why and pipe.chunks > 1:
            kwargs = {**kwargs, "num_items_in_batch": number}
        if makes_cache:  # by default without gradients only
            keeps = not is_training or not pipe.splits_or_recomputes(bool(why))
            kwargs = {**kwargs, "use_cache": keeps or _refuse_packed(self._module, arguments)}
        if not why:
            whole = {id(value) for name, value in arguments.items() if _is_whole(name, value)}
            args = tuple([Replicate(x) if id(x) in whole else x for x in args])
            kwargs = {k: Replicate(x) if id(x) in whole else x for k, x in kwargs.items()}
        join = _refuse_numbers if number is None else _Sum()
        y = pipe.call_model(call, args, kwargs, why, join)
        return y if first is None else _on(first.device, y)

    def _why_in_one(
        self, arguments: dict[str, Any], first: Any, adds_up: bool, makes_cache: bool
    ) -> str:
        """Return why a call is one micro-batch; empty if it is split."""
        rows = next((arguments[k] for k in _FIRST if isinstance(arguments.get(k), Tensor)), first)
        has_cache = arguments.get("use_cache") or arguments.get("past_key_values") is not None
        has_cache = has_cache or not torch.is_grad_enabled() and makes_cache
        reasons = {
            "its first argument has one row": rows is not None and rows.shape[:1] == (1,),
            "position_ids has its rows in dimension 1": _dim(arguments.get("position_ids")) > 2,
            "it has a cache of keys and values, which use_cache=False turns off": has_cache,
            # For these peft registers hooks on layers, in which one micro-batch has its own.
            "it has adapter_names": arguments.get("adapter_names") is not None,
            _UNKNOWN_LOSS: not adds_up and _asks_for_loss(arguments),
        }
        return next((why for why, applies in reasons.items() if applies), "")

    def _named(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, as far as positional ones have names."""
        names = self.__signature__.parameters if args else ()
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _makes_cache(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the module, one of transformers, makes a cache that nobody has asked for."""
        if "use_cache" in arguments or arguments.get("past_key_values") is not None:
            return False
        config = getattr(self._module, "config", None)
        text_config = getattr(config, "get_text_config", lambda: config)()
        if not getattr(text_config, "use_cache", False):
            return False
        parameters = self.__signature__.parameters.values()
        return any([p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in parameters])

    def remove(self) -> None:
        """Call the plain ``forward`` from now on, also if someone has wrapped this one."""
        if self._pipe is None:
            return
        self._pipe = None
        if not is_unseen(self._module):
            calls_of(self._module).route = None
        release([self._module])
        if self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]
            if self.own is not None:
                self._module.__dict__["forward"] = self.own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.deepcopy(self._module, memo)
        return super().__deepcopy__(memo) or type(copied).forward.__get__(copied)


def pipe_of(model: nn.Module) -> Any:
    """Return the pipe that a model, or one inside it, is in; ``None`` if it is in none."""
    routes = [_routed[module]() for module in model.modules() if module in _routed]
    pipes = [routed._pipe for routed in routes if routed is not None]
    return next((pipe for pipe in pipes if pipe is not None), None)


def divides_by_number_of_items(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return whether the loss of a model of transformers is a sum over ``num_items_in_batch``.

    Others take that argument and compute a mean all the same, or add the mean of something else,
    such as the balance loss of experts, which a call may ask for.
    """
    config: Any = getattr(model, "config", None)
    adds = getattr(config, "output_router_logits", False) or arguments.get("output_router_logits")
    adds = adds or getattr(config, "z_loss_coefficient", 0)
    loss: Any = getattr(model, "loss_function", None)
    is_of_library = getattr(loss, "__module__", "").startswith("transformers.")
    is_sum = is_of_library and getattr(loss, "__name__", "") == "ForCausalLMLoss"
    is_used = getattr(model, "loss_type", None) == "ForCausalLM"  # others may have it for nothing
    return is_sum and is_used and not adds and _calls_loss_function(model)


def _calls_loss_function(model: Any) -> bool:
    """Return whether the loss comes from ``loss_function`` alone.

    All classes ``...ForCausalLM`` have one, but the decoders of models such as BART take a mean of
    their own, and so does CPT of peft. Tuners of peft with a ``forward``, as AdaLoRA, add terms.
    """
    if (config := getattr(model, "active_peft_config", None)) is not None:
        tuner = type(model.base_model).forward.__qualname__
        adds = tuner != "BaseTuner.forward" and not config.is_prompt_learning
        if adds or config.peft_type == "CPT":
            return False
        model = model.get_base_model()
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def number_of_items(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """Return the number that divides the loss of a call; ``None`` if that is not known to be a sum.

    If the caller gives none, it is the number of labels that ``ForCausalLMLoss`` counts. A model
    that is not of transformers may change them, and peft's prompts add some.
    """
    number, labels = arguments.get("num_items_in_batch"), arguments.get("labels")
    if number is not None or not isinstance(labels, Tensor):
        return number if divides_by_number_of_items(model, arguments) else None
    config: Any = getattr(model, "active_peft_config", None)
    base: Any = model.get_base_model() if config is not None else model  # type: ignore[operator]
    is_changed = not type(base).forward.__module__.startswith("transformers.")
    is_changed = is_changed or getattr(config, "is_prompt_learning", False)
    if is_changed or not divides_by_number_of_items(model, arguments):
        return None
    shifted = arguments.get("shift_labels")
    shifted = labels[..., 1:] if shifted is None else shifted
    return (shifted != arguments.get("ignore_index", -100)).sum()


def _refuse_packed(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether to make a cache: no; refuse rows in which that would separate texts."""
    positions = arguments.get("position_ids")
    is_packed = _dim(positions) and arguments.get("attention_mask") is None
    if is_packed and "flash" not in (getattr(model.config, "_attn_implementation", None) or ""):
        if bool((positions.diff() != 1).any()):  # type: ignore[union-attr]
            raise ValueError(
                "position_ids start again, and there is no attention_mask: the model separates "
                "such texts only without the cache that it makes by default, which a pipe can "
                "neither split nor recompute; say use_cache=False, in the call or in model.config"
            )
    return False


_UNKNOWN_LOSS = "what its loss for all labels would be is not known from those of micro-batches"

_FIRST = ("input_ids", "inputs_embeds")

# What has no rows, or one that belongs to all, by the names of transformers and torch.
_WHOLE = {
    "cache_position", "cross_attn_head_mask", "cu_seq_lens_k", "cu_seq_lens_q", "cu_seqlens",
    "decoder_head_mask", "head_mask", "logits_to_keep", "num_logits_to_keep",
}  # fmt: skip
_OF_TIMES = {"attn_mask", "memory_mask", "src_mask", "tgt_mask"}


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    for value in values:
        if tensors := tensors_of(value)[0]:
            return tensors[0]
    return None


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _is_whole(name: str, value: Any) -> bool:
    """Return whether an argument in place goes whole to each micro-batch."""
    if name in ("attention_mask", "position_ids"):
        return _dim(value) > 0 and len(value) == 1
    if _dim(value) != 2 or name != "mask" or len(value) != value.size(1):
        return _dim(value) > 0 and name in _WHOLE or _dim(value) == 2 and name in _OF_TIMES
    causal = torch.ones_like(value, dtype=torch.bool).tril()  # as no padding of rows looks
    return torch.equal(value, torch.where(causal, value[0, 0], value[0, -1]))


class _Sum:
    """Adds up the losses of micro-batches, which the number of items of all has divided."""

    def __init__(self) -> None:
        self._has_joined = False

    def __call__(self, numbers: Sequence[Tensor]) -> Tensor:
        if self._has_joined:
            _refuse_numbers(numbers)
        self._has_joined = True
        return torch.stack(list(numbers)).sum()


def _asks_for_loss(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has labels, under one of the names that models of transformers have."""
    named = ("start_positions", "end_positions", "return_loss")
    found = [name for name, value in kwargs.items() if value is not None and value is not False]
    return any(["label" in name or name in named for name in found])


def _refuse_numbers(numbers: Sequence[Tensor]) -> Tensor:
    raise ValueError(
        f"the model returns a single number for each of {len(numbers)} micro-batches, such as a "
        "loss, and what it would be for the mini-batch is unknown; use chunks=1, take a step "
        "with pipe.forward_backward(step=...), or call the pipe, which returns them all"
    )


def _on(device: torch.device, y: Value) -> Value:
    tensors, rebuild = tensors_of(y)
    if all([tensor.device == device for tensor in tensors]):
        return y
    return rebuild(tuple([tensor.to(device) for tensor in tensors]))
