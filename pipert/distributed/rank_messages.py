"""Sends values between ranks, and lets all agree whether to go on.

A rank that raises alone leaves the others waiting for it. So before anything is sent, and again at
the end of each mini-batch, all ranks report their state over a process group of their own, which is
on CPU so that no device waits for it. If one rank reports a failure, all raise.

torch's stages send tuples of tensors of the same shapes for each micro-batch. A value here is any
pytree together with the skips that travel along, and no two micro-batches need be alike:

1. The header has the value with a meta tensor for each tensor, so it tells the structure, whatever
   is no tensor, and each tensor's shape, dtype, strides and ``requires_grad``. The receiver
   allocates by it. Of a partition that has failed it says so, and no tensor follows.
2. A tensor is sent as the bytes of its memory, since not every backend accepts every dtype. So a
   dense tensor keeps its memory format, such as ``channels_last``. One that occurs twice is sent
   once.
3. Tensors that shared memory no longer do behind the boundary. They may be read there, but not
   changed in place, as the plain module would change both. The header says which these are.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipert._typing import Device, Tensors, Value
from pipert.batch.tensors import tensors_of
from pipert.batch.trees import ORDINARY, flatten
from pipert.errors import PipertError
from pipert.schedules.action import FORWARD, Action
from pipert.skip.store import parts_of
from pipert.stage.shared_memory import find_shared

__all__ = ["RankError"]


class RankError(PipertError):
    """Another rank failed, or did not answer. The message says which one, where, and why."""


class Agreement:
    """The process group in which ranks agree. All ranks call its methods together.

    If the other ranks cannot be reached, a method raises :class:`RankError`, and from then on every
    method raises it at once: a rank that missed a message would mistake the next one for it.

    Args:
        ranks: all ranks that train one model, data-parallel replicas included.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(ranks)  # the order of a process group
        self._lost = ""
        world: Any = dist.group.WORLD
        some = len(self.ranks) < dist.get_world_size()  # the others do not take part
        store, me = world.get_group_store(), dist.get_rank()
        limit = store.timeout
        with self.talking():
            # Wait until all ranks are here: gloo would try five times as long to reach one.
            number = store.add(f"pipert/{self.ranks}/{me}", 1)  # of one rank alone
            store.set(f"pipert/{self.ranks}/{number}/{me}", "here")
            store.wait([f"pipert/{self.ranks}/{number}/{rank}" for rank in self.ranks], limit)
            self._group = dist.new_group(
                self.ranks, limit, "gloo", use_local_synchronization=some
            )

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Talk to other ranks in the block; after an error there, this rank talks no more."""
        if self._lost:
            raise RankError(f"{self._lost}; start all ranks anew")
        try:
            yield
        except BaseException as error:
            why = error.__cause__ or error  # torch's stages wrap it, and print their inputs
            self._lost = f"rank {dist.get_rank()} lost the others: {_text_of(why)}"
            if not isinstance(error, Exception):
                raise
            raise RankError(f"a rank ended or did not answer: {self._lost}") from error

    @contextmanager
    def agreeing(self, to: str = "") -> Iterator[list[Any]]:
        """Run a block that may fail on some ranks; if it fails on one, all raise.

        To the list that it yields, this rank may append one object. After the block, the list has
        the objects of all ranks, in their order. For ``to`` see :meth:`agree`.
        """
        reports: list[Any] = []
        failed: BaseException | None = None
        try:
            yield reports
        except BaseException as error:
            if self._lost:
                raise
            failed = error
        try:
            reports[:] = self.agree(reports[0] if reports else None, failed, to=to)
        finally:
            del failed  # it references this frame

    def agree(
        self,
        own: Any,
        error: BaseException | None = None,
        action: Action | None = None,
        to: str = "",
    ) -> list[Any]:
        """Exchange objects and errors; return the objects of all ranks, in their order.

        Args:
            own: this rank's object, which can be pickled.
            error: this rank's error, if it failed.
            action: the action that failed.
            to: what the ranks begin, if a rank might begin it alone.

        Raises:
            ValueError: the ranks begin different things.
            BaseException: this rank's own error.
            RankError: another rank has an error that comes first.
        """
        failure = None if error is None else (_order_of(action), _text_of(error))
        with self.talking():
            reports = self._gather((to, failure, own))
        try:
            self.require_same("call", [begun for begun, _, _ in reports])
        except ValueError as differs:
            raise differs from error
        pairs = zip(reports, self.ranks, strict=True)
        failed = [(other, rank) for (_, other, _), rank in pairs if other is not None]
        if not failed:
            return [report for _, _, report in reports]
        (first, text), rank = min(failed)
        try:
            if failure is not None and error is not None and failure[0] == first:
                raise error
            raise RankError(f"rank {rank} failed: {text}") from error
        finally:
            del error  # it references this frame

    def require_same(self, what: str, given: Sequence[Any]) -> None:
        """Raise a ``ValueError`` on all ranks unless all have ``given`` the same."""
        if any(one != given[0] for one in given):
            by_rank = "; ".join(f"{r}: {one}" for r, one in zip(self.ranks, given, strict=True))
            raise ValueError(f"all ranks must give the same {what}, but by rank they are {by_rank}")

    def of(self, rank: int, reports: Sequence[Any]) -> Any:
        """Return a rank's object of those that :meth:`agree` returned."""
        return reports[self.ranks.index(rank)]

    def _gather(self, own: Any) -> list[Any]:
        """Gather an object from each rank, as ``all_gather_object`` does, but without NumPy."""
        data = pickle.dumps(own)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in self.ranks]
        dist.all_gather(sizes, torch.tensor([len(data)]), self._group)
        longest = max(map(int, sizes))
        found = [bytearray(longest) for _ in self.ranks]
        dist.all_gather(list(map(_tensor, found)), _tensor(data.ljust(longest)), self._group)
        return list(map(pickle.loads, found))  # which ignores what is behind an object

    def send(self, data: bytes, rank: int) -> list[dist.Work | None]:
        """Send bytes to one rank, which receives them in the order of sending; do not wait."""
        parts = torch.tensor([len(data)]), _tensor(data)
        return [dist.isend(part, rank, self._group) for part in parts]

    def receive(self, rank: int) -> bytes:
        """Receive the bytes that a rank sends."""
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, rank, self._group)
        data = bytearray(int(size))
        dist.recv(_tensor(data), rank, self._group)
        return bytes(data)


class RankPlace:
    """The ranks that train a model, and this rank's place among them. Made by all of them together.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the mesh has more than two dimensions.
    """

    def __init__(self, mesh: DeviceMesh | None, device: Device | None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "there is no process group; start with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        if mesh is None:
            device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
            mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        if mesh.ndim > 2:
            raise ValueError(
                f"mesh must have one dimension, or two: the pipeline's and the data-parallel one's;"
                f" got {mesh}"
            )
        self.group = mesh.get_group(0)
        """The ranks of this pipeline."""
        _, *self.replica = mesh.get_coordinate() or ()
        """The number of this pipeline among data-parallel ones, if there are any."""
        self.agreement = Agreement(mesh.mesh.flatten().tolist())
        self.ranks = dist.get_process_group_ranks(self.group)
        with self.agreement.agreeing():
            self.device = _device_of(mesh, device)
        self.homes: Sequence[int] = ()
        """The rank of each partition, once that is known."""

    @property
    def own(self) -> list[int]:
        """This rank's partitions."""
        return [j for j, home in enumerate(self.homes) if home == dist.get_rank()]


def _device_of(mesh: DeviceMesh, device: Device | None) -> torch.device:
    """Return this rank's device: the one given, or else the default for the mesh."""
    if device is not None:
        return torch.device(device)
    if mesh.device_type != "cuda":
        return torch.device(mesh.device_type)
    number = os.environ.get("LOCAL_RANK")
    return torch.device("cuda", torch.cuda.current_device() if number is None else int(number))


def _tensor(data: bytes | bytearray) -> Tensor:
    """Return a tensor of bytes, which shares the memory of a ``bytearray``."""
    writable = data if isinstance(data, bytearray) else bytearray(data)
    return torch.frombuffer(writable, dtype=torch.uint8)


def _order_of(action: Action | None) -> tuple[int, ...]:
    """Return what orders the failures of one mini-batch as its schedule does.

    Within a micro-batch, a cause comes before its possible consequences.
    """
    if action is None:
        return (sys.maxsize,)
    is_forward = action.kind == FORWARD
    return action.i, not is_forward, action.j if is_forward else -action.j


def _text_of(error: BaseException) -> str:
    """Return the error's message with its notes, even if its own ``str()`` fails."""
    return "".join(traceback.format_exception_only(error)).strip()


class Parcel(NamedTuple):
    """A value ready to be sent."""

    header: bytes
    tensors: Sequence[Tensor]
    """Its tensors, dense and without a graph."""


FAILED = b"failed"
"""The header that a partition sends after a failure."""


def pack(value: Value) -> Parcel:
    """Make a parcel of the output of a partition."""
    tensors, rebuild = tensors_of(value)
    if sparse := [t.layout for t in tensors if t.layout != torch.strided]:
        raise TypeError(f"a tensor of layout {sparse[0]} cannot be sent to a rank; make it dense")
    metas = tuple([torch.empty_like(t, device="meta", requires_grad=t.requires_grad)
                   for t in tensors])  # fmt: skip
    structure = pickle.dumps(rebuild(metas))
    header = pickle.dumps((metas, structure, [*map(find_shared, parts_of(value))]))
    return Parcel(header, list(map(_dense_like, tensors, metas)))


class Arrived:
    """A value that arrives from another partition.

    Args:
        header: the header of its parcel.
        device: where memory is allocated for its tensors.
    """

    def __init__(self, header: bytes, device: torch.device) -> None:
        metas, self._structure, self.shared = pickle.loads(header)
        self.tensors = [_empty_like(meta, device) for meta in metas]
        self._grads = [meta.requires_grad and torch.is_grad_enabled() for meta in metas]

    def rebuild(self, tensors: Tensors) -> Value:
        """Return the value with these tensors; this alone runs code of the value's classes."""
        return tensors_of(pickle.loads(self._structure))[1](tensors)

    def leaves(self) -> Tensors:
        """Return the tensors; those that required grad are leaves that do."""
        pairs = zip(self.tensors, self._grads, strict=True)
        return tuple([tensor.requires_grad_(grad) for tensor, grad in pairs])

    def gradients(self, dxs: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients to send back of leaves that came with grad: zeros where ``None``."""
        # Not of all that require grad now, which a layer that changes a leaf in place may cause.
        leaves = [leaf for leaf, grad in zip(self.tensors, self._grads, strict=True) if grad]
        return [
            torch.zeros_like(leaf) if dx is None else _dense_like(dx, leaf)
            for leaf, dx in zip(leaves, dxs, strict=True)
        ]


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _dense_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor without a graph, in memory laid out as that of ``like``."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:  # a gradient
        tensor = tensor.to_dense()
    if tensor.stride() == like.stride() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return _empty_like(like, tensor.device).copy_(tensor)


def transfers(
    operation: Callable[..., dist.Work | None],
    tensors: Iterable[Tensor],
    rank: int,
    group: dist.ProcessGroup,
) -> list[dist.P2POp]:
    """Return operations that send dense tensors to a rank, or receive them from it, as bytes."""
    memories = [t.detach().as_strided((t.numel(),), (1,)) for t in tensors if t.numel()]
    return [dist.P2POp(operation, m.view(torch.uint8), rank, group) for m in memories]


def checksum_of(value: Value) -> int:
    """Return a checksum of a value: of the structure, and of some elements of tensors on CPU."""
    leaves, spec = flatten(value)
    found = zlib.crc32(str(spec).encode())
    for leaf in leaves:
        shown: Any = leaf if type(leaf) in ORDINARY else type(leaf)
        if isinstance(leaf, Tensor):
            shown = leaf.dtype, tuple(leaf.shape)
            if leaf.device.type == "cpu" and leaf.layout == torch.strided:
                some = leaf.detach().flatten()[:: 1 + leaf.numel() // 1024].contiguous()
                found = zlib.crc32(bytes(some.view(torch.uint8).tolist()), found)
        found = zlib.crc32(repr(shown).encode(), found)
    return found


def share(site: RankPlace, inputs: list[Value]) -> Arrived | None:
    """Send the first rank's inputs to all ranks of its pipeline; return them on the others."""
    first = site.homes[0]
    with site.agreement.agreeing() as headers:
        parcel = pack(inputs)
        headers.append(parcel.header)
    arrived = None
    if first != dist.get_rank():
        arrived = Arrived(site.agreement.of(first, headers), site.device)
    tensors = parcel.tensors if arrived is None else arrived.tensors
    with site.agreement.talking():
        for sent in transfers(dist.isend, tensors, first, site.group):
            dist.broadcast(sent.tensor, first, site.group)
    return arrived
