"""How a module's memory format is read back."""

import pytest
import torch
from torch import nn

from autotune.harness.knobs.layout import verify_layout
from autotune.harness.protocol import APPLIED, OVERRIDDEN


@pytest.mark.parametrize("asked", [True, False])
def test_depthwise_convolutions_are_ignored_when_the_format_is_read_back(asked):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))
    if asked:
        model.to(memory_format=torch.channels_last)
    assert verify_layout([model], asked).status == APPLIED
    assert verify_layout([model], not asked).status == OVERRIDDEN
    assert verify_layout([nn.Conv2d(8, 8, 3, groups=8)], asked).status == APPLIED
