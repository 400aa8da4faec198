"""Lists all families, in the order of the documentation's table."""

from __future__ import annotations

import pytest

from tests.any_model.families.adapters import ADAPTED
from tests.any_model.families.decoders import DECODERS
from tests.any_model.families.diffusion import DIFFUSION
from tests.any_model.families.encoder_decoders import ENCODER_DECODERS
from tests.any_model.families.encoders import ENCODERS
from tests.any_model.families.experts_and_state_space import EXPERTS_AND_STATE_SPACE
from tests.any_model.families.speech_and_vision import SPEECH_AND_VISION
from tests.any_model.families.vision import VISION
from tests.any_model.family import Family

__all__ = ["RUNNING", "ZOO", "each_family"]

ZOO: list[Family] = [
    *DECODERS,
    *ENCODERS,
    *ENCODER_DECODERS,
    *EXPERTS_AND_STATE_SPACE,
    *SPEECH_AND_VISION,
    *VISION,
    *DIFFUSION,
    *ADAPTED,
]

RUNNING = [family for family in ZOO if not family.why_not]

each_family = pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.sweep] * f.seldom, id=f.name) for f in RUNNING],
)
