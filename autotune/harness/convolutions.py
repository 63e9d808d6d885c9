"""Finds out whether the modules that the program calls contain convolutions, for which cuDNN chooses kernels."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from . import members

# Number of dimensions of the weights of two- and three-dimensional convolutions. Such weights also reveal a module that calls
# `torch.nn.functional.conv2d` itself.
DIMENSIONS = (4, 5)


class Convolutions:
    """Whether any of the modules seen so far contains a convolution.

    Attributes:
        is_found: whether one of the modules contains a convolution; None if no module was seen.
    """

    def __init__(self) -> None:
        self.is_found: Optional[bool] = None

    def see(self, module: Any) -> None:
        """Examines a module and all modules within it, unless a convolution was found before or a weight has no shape yet."""
        if self.is_found:
            return
        weights = [each for each in members.parameters(module) if isinstance(each, Tensor)]
        if not any(map(is_lazy, weights)):
            has_class = any(isinstance(each, _ConvNd) for each in members.modules(module))
            self.is_found = has_class or any(Tensor.dim(each) in DIMENSIONS for each in weights)
