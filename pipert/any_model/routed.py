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
5. The loss of a call with labels is the plain model's. It is computed in one micro-batch, unless
   those of micro-batches add up (``added_losses``).
6. A call with a cache of keys and values is one micro-batch, since the cache belongs to all rows.
   Training in several gets none, unless it asks. A call with ``adapter_names`` is one, too.
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipert._torch import backward_id
from pipert._typing import Value
from pipert.any_model.added_losses import LossesAddUp
from pipert.batch.microbatch import Replicate
from pipert.batch.tensors import describe, tensors_of
from pipert.layers.intercepted import (
    NotCopied,
    calls_of,
    current_thread,
    intercept,
    is_unseen,
    release,
)

_routed: WeakKeyDictionary[nn.Module, weakref.ref[Routed]] = WeakKeyDictionary()


class Routed(NotCopied):
    """The ``forward`` of a model in a pipe.

    Args:
        module: the model.
        pipe: its ``ModulePipe``, which so lives as long as the model, or until it is closed.
    """

    def __init__(self, module: nn.Module, pipe: Any) -> None:
        self._module = module
        self._pipe = pipe
        self.own = module.__dict__.get("forward")
        self._has_warned = False
        self.losses = LossesAddUp()
        self._signed: tuple[Any, inspect.Signature] | None = None
        module.__dict__["forward"] = self
        intercept([module])
        calls_of(module).route = self
        _routed[module] = weakref.ref(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # as in ``InterceptedCalls``
            disable: Any = torch.compiler.disable
            return disable(self.__call__)(*args, **kwargs)
        if self.is_outside():
            return self.send(self._plain(), *args, **kwargs)
        has_config = getattr(self._module, "config", None) is not None
        if has_config and self._pipe is not None and self._pipe.splits_or_recomputes():
            kwargs |= self._use_cache(self.named(args, kwargs), not torch.is_grad_enabled(), False)
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
        if pipe is None or pipe.is_inside() or current_thread.is_trial or backward_id() >= 0:
            return False
        return self._module not in current_thread.around

    def send(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the module through its pipe; ``call`` calls it for each micro-batch."""
        pipe, first = self._pipe, _first_tensor((*args, *kwargs.values()))
        if pipe is None:  # closed in this moment
            return call(*args, **kwargs)
        y = self.run_in(pipe, call, args, kwargs)
        return y if first is None else _on(first.device, y)

    def run_in(
        self, pipe: Any, call: Callable[..., Any], args: Any, kwargs: dict[str, Any],
        seconds: float | None = None,
    ) -> Any:  # fmt: skip
        """Call the module in its pipe, as ``call`` does for each micro-batch."""
        arguments, first = self.named(args, kwargs), _first_tensor((*args, *kwargs.values()))
        check = None if pipe.chunks == 1 else self.losses.check_of(self._module, arguments)
        makes_cache = self._makes_cache(arguments)
        why, whole = self._why_in_one(arguments, first, check is not None, makes_cache), None
        if not why and pipe.chunks > 1:
            whole = self.with_whole(args, kwargs)
            rows = {len(x) for x in tensors_of(whole)[0] if x.dim()}
            if check is not None and len(rows) > 1:
                why, whole = _UNKNOWN_LOSS, None  # labels that cannot be split, as beside images
        if why == _UNKNOWN_LOSS:
            self.warn_of_loss(pipe)
        positional, named = whole or (args, kwargs)
        keeps = not torch.is_grad_enabled() or not pipe.splits_or_recomputes(bool(why))
        if getattr(self._module, "config", None) is not None:
            named = named | self._use_cache(arguments, keeps)
        if check is None or why:
            return pipe.call_model(call, positional, named, why, _refuse_numbers, seconds)
        named = named | {"num_items_in_batch": check.number}
        checked = check.around(call, self.named)
        run = partial(pipe.call_model, checked, positional, named, "", _Sum(), seconds)
        y = self.losses.take(check, run)
        return self.run_in(pipe, call, args, kwargs, seconds) if y is None else y

    def warn_of_loss(self, pipe: Any) -> None:
        """Warn once of a loss that is computed in one micro-batch."""
        if not self._has_warned and torch.is_grad_enabled() and pipe.chunks > 1:
            warnings.warn(
                f"{type(self._module).__name__} with labels runs in one micro-batch of "
                f"{pipe.chunks} asked for, because {_UNKNOWN_LOSS}; take a step with "
                "pipe.forward_backward(step=...), or compute the loss from outputs without labels",
                stacklevel=5,
            )
            self._has_warned = True

    def with_whole(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a mini-batch, with those that have no rows in ``Replicate``.

        Raises:
            ValueError: a mask has as many rows as the mini-batch, and may be one of times.
        """
        arguments = self.named(args, kwargs)
        first = _rows_in(arguments, _first_tensor((*args, *kwargs.values())))
        rows = len(first) if first is not None and first.dim() else 0
        whole = {id(x) for name, x in arguments.items() if _is_whole(name, x, rows)}
        if not whole:
            return args, kwargs
        return (
            tuple([Replicate(x) if id(x) in whole else x for x in args]),
            {k: Replicate(x) if id(x) in whole else x for k, x in kwargs.items()},
        )

    def _why_in_one(
        self, arguments: dict[str, Any], first: Any, adds_up: bool, makes_cache: bool
    ) -> str:
        """Return why a call is one micro-batch; empty if it is split."""
        rows = _rows_in(arguments, first)
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

    def named(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, as far as positional ones have names."""
        names = self.__signature__.parameters if args else ()
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _use_cache(
        self, arguments: Mapping[str, Any], keeps: bool, makes: bool = True
    ) -> dict[str, bool]:
        """Return the ``use_cache`` for a module of transformers, if nobody has asked for one.

        Args:
            arguments: those of the call.
            keeps: whether a decoder inside, which may have a config of its own, may make a cache.
            makes: whether the module may make one itself.
        """
        if self._makes_cache(arguments):
            return {"use_cache": makes and keeps or _refuse_packed(self._module, arguments)}
        is_open = not keeps and "use_cache" in self.__signature__.parameters
        return {"use_cache": False} if is_open and not _has_cache(arguments) else {}

    def _makes_cache(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the module, one of transformers, makes a cache that nobody has asked for."""
        config = getattr(self._module, "config", None)
        text_config = getattr(config, "get_text_config", lambda: config)()
        if not getattr(text_config, "use_cache", False) or _has_cache(arguments):
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
_MASKS = {"attn_mask", "mask", "memory_mask", "src_mask", "tgt_mask"}


def _rows_in(arguments: Mapping[str, Any], first: Tensor | None) -> Tensor | None:
    """Return the argument whose rows are the mini-batch's."""
    return next((arguments[k] for k in _FIRST if isinstance(arguments.get(k), Tensor)), first)


def _has_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether a call says whether to use a cache."""
    return any([arguments.get(name) is not None for name in ("use_cache", "past_key_values")])


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    for value in values:
        if tensors := tensors_of(value)[0]:
            return tensors[0]
    return None


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _is_whole(name: str, value: Any, rows: int) -> bool:
    """Return whether an argument of the model goes whole to each micro-batch of so many ``rows``.

    torch's masks of two dimensions may be times by times, or rows by times.
    """
    if name in ("attention_mask", "position_ids"):
        return _dim(value) > 0 and len(value) == 1
    if _dim(value) != 2 or name not in _MASKS:
        return _dim(value) > 0 and name in _WHOLE
    if len(value) != rows or rows == 1:
        return True
    if value.size(1) == rows or name in ("attn_mask", "memory_mask"):
        raise ValueError(
            f"{name} is {describe(value)}, and the mini-batch has {rows} rows, so it may have one "
            "for each of these, or one for each time. Wrap it in Replicate(...) if it goes whole "
            "to each micro-batch; if it is to be split, use another number of rows, or chunks=1"
        )
    return False


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
    found = [name for name in found if name != "class_labels"]  # of diffusers; others have more
    return any(["label" in name or name in named for name in found])


def _refuse_numbers(numbers: Sequence[Tensor]) -> Tensor:
    raise ValueError(
        f"the model returns a single number for each of {len(numbers)} micro-batches, such as a "
        "loss, and what it would be for the mini-batch is unknown; use chunks=1, or take a step "
        "with pipe.forward_backward, or return a tensor with an entry for each row"
    )


def _on(device: torch.device, y: Value) -> Value:
    tensors, rebuild = tensors_of(y)
    if all([tensor.device == device for tensor in tensors]):
        return y
    return rebuild(tuple([tensor.to(device) for tensor in tensors]))
