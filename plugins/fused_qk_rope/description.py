"""The one description of the operator; the torch, ONNX, Triton and TensorRT forms are all made from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """One input or output: its name, its symbolic shape and whether it is always fp32."""

    name: str
    shape: tuple[str, str] | tuple[str, str, str]
    always_float32: bool = False

    @property
    def type_parameter(self) -> str:
        """ONNX type: the operator's own parameter ``T``, or plain fp32."""
        return "tensor(float)" if self.always_float32 else "T"


@dataclass(frozen=True)
class OperatorDescription:
    """Names, version and types of one operator."""

    domain: str
    onnx_name: str
    torch_name: str
    version: int
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    dtypes: tuple[str, ...]
    summary: str

    @property
    def torch_qualified_name(self) -> str:
        """Name under ``torch.ops``, as ``namespace::name``."""
        return f"{self.domain}::{self.torch_name}"

    @property
    def node_attributes(self) -> dict[str, str]:
        """Attributes by which TensorRT prefers the plugin to the function (TensorRT 10.7 and later, TensorRT-RTX)."""
        return {"plugin_namespace": self.domain, "plugin_version": str(self.version)}


_HEADS = ("tokens", "heads", "head_dim")
_ANGLES = ("tokens", "head_dim/2")

FUSED_QK_ROPE = OperatorDescription(
    domain="kvit",
    onnx_name="FusedQKRope",
    torch_name="fused_qk_rope",
    version=1,
    inputs=(
        Argument("q", _HEADS),
        Argument("k", _HEADS),
        Argument("cos", _ANGLES, always_float32=True),
        Argument("sin", _ANGLES, always_float32=True),
    ),
    outputs=(Argument("q_rotated", _HEADS), Argument("k_rotated", _HEADS)),
    dtypes=("float32", "float16", "bfloat16"),
    summary=(
        "Rotates adjacent pairs of q and k: (a, b) -> (a cos - b sin, b cos + a sin), pair m of every head by angle m "
        "of its token; computed in fp32, returned in the type of the input."
    ),
)
