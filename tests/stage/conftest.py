"""What tests of stages between devices share."""

from __future__ import annotations

import pytest
import torch

from tests.stage.skips import NamingStreams
from tests.stages import META, FakeStreams


@pytest.fixture(scope="session")
def meta() -> None:
    """The first operation on the meta device imports a lot; let no test pay for that."""
    x = torch.ones(2, device=META, requires_grad=True)
    torch.autograd.backward((torch.zeros_like(x, device=META) * x).clone().sum())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, meta: None) -> FakeStreams:
    return FakeStreams(monkeypatch)


@pytest.fixture
def naming(monkeypatch: pytest.MonkeyPatch, meta: None) -> NamingStreams:
    return NamingStreams(monkeypatch)
