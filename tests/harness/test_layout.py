"""What a module's memory format is read back as."""

import pytest
import torch
from torch import nn

from autotune.harness.apply import module as apply_module
from autotune.harness.protocol import APPLIED, OVERRIDDEN, KnobReport


def read_back(model: nn.Module, asked: bool):
    """Returns the report of `layout.channels_last`."""
    noted = {apply_module.LAYOUT: KnobReport(APPLIED)}
    return apply_module.verify({apply_module.LAYOUT: asked}, noted, [model], 0)[apply_module.LAYOUT]


@pytest.mark.parametrize("asked", [True, False])
def test_depthwise_convolutions_say_nothing_of_the_format(asked):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))
    if asked:
        model.to(memory_format=torch.channels_last)
    assert read_back(model, asked).status == APPLIED
    assert read_back(model, not asked).status == OVERRIDDEN
    assert read_back(nn.Conv2d(8, 8, 3, groups=8), asked).status == APPLIED
