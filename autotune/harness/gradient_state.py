"""Inspects gradients: their norms, whether they changed, which parameters have them."""

from __future__ import annotations

from typing import Any, Iterable, List

import torch

from . import members


def parameters_of(optimizer: Any) -> List[Any]:
    """Returns the parameters that an optimizer holds; [] if `optimizer` is None."""
    return [parameter for group in members.attribute(optimizer, "param_groups", ()) for parameter in group["params"]]


def has_gradients(parameters: List[Any]) -> bool:
    """Whether any of the parameters has a gradient."""
    return any(parameter.grad is not None for parameter in parameters)


def is_sharded(module: Any) -> bool:
    """Whether a module's parameters are sharded over ranks."""
    is_wrapped = any(type(each).__name__ == "FullyShardedDataParallel" for each in members.modules(module))
    return is_wrapped or any(hasattr(type(parameter), "to_local") for parameter in members.parameters(module))


def look(parameters: List[Any]) -> List[Any]:
    """Returns a fingerprint that changes when a gradient is modified or replaced. Waits for the device."""
    versions = [None if parameter.grad is None else parameter.grad._version for parameter in parameters]
    return [*versions, *norms(parameters)]


def norms(parameters: List[Any]) -> List[Any]:
    """Returns one None for each missing gradient, followed by the norms of the dense gradients as text, such as "1.5".

    Norms are text so that they can be compared even if they are NaN: "nan" equals itself.
    """
    found = [parameter.grad for parameter in parameters]
    # Only this rank's shards of distributed tensors, because torch does not mix these and plain tensors in one operation.
    dense = [members.local(gradient) for gradient in found if gradient is not None and not gradient.is_sparse]
    with torch.no_grad():
        each = torch._foreach_norm(dense) if dense else []
    return [*(None for gradient in found if gradient is None), *(repr(float(norm)) for norm in each)]


def total_norm(parameters: Any, norm_type: float) -> Any:
    """Returns the total norm of all gradients, as `clip_grad_norm_` does."""
    found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in found if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    each = [torch.linalg.vector_norm(gradient, norm_type).to(gradients[0].device) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(each), norm_type)


def is_constant(gradient: Any) -> bool:
    """Whether all elements of a gradient that the program passes to `backward()` are equal. Waits for the device."""
    if gradient is None or type(gradient) is not torch.Tensor:
        return gradient is None
    return gradient.numel() < 2 or bool((gradient == gradient.reshape(-1)[0]).all())


def divide(gradients: Iterable[Any], scale: Any) -> None:
    """Divides gradients, which may be on several GPUs, by a scale before the program uses them; NaN and inf become 0."""
    with torch.no_grad():
        for gradient in gradients:
            if gradient is not None:
                torch.nan_to_num_(gradient.div_(scale.to(gradient.device)), 0.0, 0.0, 0.0)
