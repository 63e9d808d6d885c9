"""Computes linear layers in float8, with torchao.

Each nn.Linear is replaced by a Float8Linear that holds the same parameters, so the optimizer, checkpoints and the program's own
references to weights stay as they are. Weights, activations and gradients are rounded to 8 bits just before each product.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any, Dict, Optional, Tuple

import torch
from torch.nn import Linear

from .. import members

# A float8 product needs a second matrix whose number of columns is a multiple of this. In the three products of a forward and
# backward pass, this matrix has in_features or out_features columns. The batch size is an inner dimension, which torchao pads.
MULTIPLE = 16
CONVERTED = "Float8Linear"
CAPABILITY = (8, 9)  # first compute capability with float8 products (Ada); on older GPUs torch raises an error
NO_TORCHAO = "torchao is not installed in the program's environment (pip install torchao)"
NO_LINEAR = f"the module that trains contains no nn.Linear whose sizes are multiples of {MULTIPLE}"
IN_FLOAT8 = "the program computes its linear layers in float8 itself"
TOO_OLD = "compute capability {}.{}: float8 products need 8.9 (Ada, Hopper) or newer"
NOT_IN_BF16 = "rowwise scaling computes results in bf16: give precision.amp=bf16 as well"


def observe(module: Any) -> Dict[str, bool]:
    """Returns whether the module computes layers in float8, and whether it has layers that could be converted to float8."""
    layers = list(members.modules(module))
    return {"is_float8": is_in_float8(module), "has_linear": any(map(_fits, layers[1:]))}


def capability(module: Any) -> Optional[Tuple[int, int]]:
    """Returns the compute capability of the GPU that holds a module; None if no GPU does."""
    parameter = next(members.parameters(module), None)
    if parameter is None or parameter.device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(parameter.device)


def is_installed() -> bool:
    """Returns whether torchao can be imported here."""
    return importlib.util.find_spec("torchao") is not None


def convert(module: Any, scaling: str) -> None:
    """Replaces the linear layers below a module.

    Args:
        module: a module that has not been called yet.
        scaling: torchao's name of the recipe, "tensorwise" or "rowwise".
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(scaling), pad_inner_dim=True)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda layer, name: bool(name) and _fits(layer))


def is_in_float8(module: Any) -> bool:
    """Returns whether a layer of the module computes in float8."""
    return any(kind.__name__ == CONVERTED for each in members.modules(module) for kind in type(each).__mro__)


def _fits(module: Any) -> bool:
    """Whether a layer can be replaced: a plain nn.Linear without hooks, because the new layer would lose them."""
    if type(module) is not Linear or module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return False
    return not any(value for name, value in vars(module).items() if name.endswith("_hooks") and isinstance(value, dict))
