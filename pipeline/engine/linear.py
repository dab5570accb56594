"""Linear layers for CPUs: weights laid out once for the processor, as oneDNN wants them.

torch's own `linear` lays the weights out anew in every call or streams them badly, and for a few tokens at a
time, which is what decoding is, that is most of the cost. Knows nothing of attention or requests.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# The layout is chosen for this many tokens a pass: good from 2 to 256 (bench/linear.py), and with it (on AVX2) every
# row's result is the same bits however many rows there are. Laid out for 1, a few rows cost twice as much.
TOKENS = 16


class PackedLinear(nn.Module):
    """Computes what the nn.Linear that it was made from computes, up to the rounding of sums.

    Where the processor has no instructions for a 16-bit dtype, it multiplies in float32 with the same weights
    and rounds only its result.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.compute = self.dtype if packs_natively(self.dtype) else torch.float32
        with torch.no_grad():
            weight = linear.weight.detach().to(self.compute)
            # An opaque tensor in oneDNN's layout: neither a parameter nor a buffer, as no `.to` applies to it.
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS)
            self.bias = None if linear.bias is None else linear.bias.detach().to(self.compute)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if self.compute is not self.dtype:
            x = x.to(self.compute)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y if self.compute is self.dtype else y.to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, compute={self.compute}"


def packs_natively(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies in `dtype` itself. Asked of oneDNN, by packing one small matrix."""
    if dtype is torch.float32:
        return True
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), TOKENS)
    except RuntimeError:
        return False
    return True


def pack_linears(model: nn.Module) -> None:
    """Replaces every nn.Linear of a model on the CPU. On another device, or without oneDNN, leaves it as it is.

    Weights are released one layer at a time; a head that shares the embedding's gets a copy of its own.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu":
                setattr(module, name, PackedLinear(child))


class FusedNorm(nn.Module):
    """Root mean square normalisation in one call instead of six, in float32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


# transformers' classes that compute weight * x / sqrt(mean(x²) + epsilon); Gemma's is another formula.
PLAIN_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}


def fuse_norms(model: nn.Module) -> None:
    """Replaces a float32 model's normalisation layers; in other dtypes they round midway and stay."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in PLAIN_NORMS and child.weight.dtype is torch.float32:
                epsilon: float = child.variance_epsilon  # type: ignore[assignment]
                setattr(module, name, FusedNorm(child.weight.detach(), epsilon))
