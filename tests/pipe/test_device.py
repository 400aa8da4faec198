"""Tests which devices a pipe runs on, and which worker serves which partition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipert.model.devices import default_devices, parse_devices, where_tensors_are
from pipert.workers.pool import assign_workers

CPU = torch.device("cpu")


def cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("no_cuda")
def test_default_without_cuda_is_a_logical_cpu_device_for_each_partition() -> None:
    assert default_devices(3) == [CPU] * 3


@pytest.mark.usefixtures("two_cuda")
def test_default_with_cuda_are_its_devices_in_order() -> None:
    assert default_devices(3) == [cuda(0), cuda(1)]


@pytest.mark.parametrize("name", ["cpu", "cpu:0", CPU, torch.device("cpu", 0)], ids=repr)
def test_cpu_is_one_device_under_every_name(name: str | torch.device) -> None:
    assert where_tensors_are(parse_devices([name])) == [CPU]


@pytest.mark.usefixtures("two_cuda")
def test_cuda_without_an_index_is_the_current_device() -> None:
    assert parse_devices(["cuda"]) == [cuda(1)]


@pytest.mark.usefixtures("two_cuda")
@pytest.mark.parametrize("name", ["cuda:2", 2, cuda(7)], ids=repr)
def test_cuda_device_that_is_not_there_is_refused(name: str | int | torch.device) -> None:
    with pytest.raises(ValueError, match="but 2 CUDA devices are available; name others"):
        parse_devices([name])


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", 0], ids=repr)
def test_cuda_is_refused_where_there_is_none(name: str | int) -> None:
    with pytest.raises(ValueError, match="names cuda.* 0 CUDA devices are available"):
        parse_devices([name])


@pytest.mark.parametrize("name", ["meta", "xpu:0", "mps"])
def test_other_kinds_of_device_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"must be CPU or CUDA devices, got {name}"):
        parse_devices([name])


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", ""])
def test_name_of_no_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"named 'cuda:0' or 'cpu', got {name!r}"):
        parse_devices([name])


@pytest.mark.parametrize("devices", ["cpu", CPU], ids=repr)
def test_single_device_is_refused_with_the_sequence_to_write(devices: Any) -> None:
    with pytest.raises(TypeError, match=r"write devices=\['cpu'\]"):
        parse_devices(devices)


def test_each_plain_cpu_entry_has_a_worker_of_its_own() -> None:
    assert assign_workers([CPU, CPU, CPU]) == [0, 1, 2]


@pytest.mark.parametrize("names", [("cpu:0", "cpu:1"), ("cpu:5", "cpu:2")])
def test_a_cpu_index_names_a_logical_device_with_one_worker(names: tuple[str, str]) -> None:
    one, other = names
    assert assign_workers(parse_devices([one, other, torch.device(one), "cpu"])) == [0, 1, 0, 2]
