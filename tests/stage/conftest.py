"""Provides logging streams to the tests of stages between devices."""

from __future__ import annotations

import pytest
import torch

from tests.stages import META, FakeStreams


@pytest.fixture(scope="session")
def meta() -> None:
    """Runs a first operation on the meta device, whose many imports no test should pay for."""
    x = torch.ones(2, device=META, requires_grad=True)
    torch.autograd.backward((torch.zeros_like(x, device=META) * x).clone().sum())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, meta: None) -> FakeStreams:
    return FakeStreams(monkeypatch)
