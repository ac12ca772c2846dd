"""The rewritings that `exporter.passes.trt86` makes, one per operator; each keeps values and places of rounding.

Written against the parser's list of operators (docs/operators.md of onnx-tensorrt, release 8.5: "operators up to Opset
17", with the types that each takes) and its importers: what it reads differently from ONNX is not left to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from exporter.errors import BuildFailed
from exporter.validation.backends import INPUTS

if TYPE_CHECKING:
    import onnx

FLOAT, _INT64, _FLOAT16 = 1, 7, 10  # onnx.TensorProto.DataType
_FRAMES, _PATCHES, _TOKENS = "frames", "patches", "tokens"  # the symbolic axes of pixel_values, and their product


def rewrite(graph: onnx.GraphProto) -> None:
    """Replace what the parser of TensorRT 8.6 does not take, and name every node, in place.

    Args:
        graph: without calls of functions, all types inferred. What nothing reads afterwards stays in it.

    Raises:
        BuildFailed: names the node that has no form for TensorRT 8.6.
    """
    Rewriting(graph).run()


def element_types(graph: onnx.GraphProto) -> dict[str, int]:
    """Element type of every value that the graph declares, by name; nodes' results are there once inferred."""
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


class Rewriting:
    """Rebuilds the list of nodes, one rewriting per operator; what has none is copied."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.types = element_types(graph)
        typed = (*graph.input, *graph.output, *graph.value_info)
        self.shapes = {
            v.name: [dim.dim_value if dim.HasField("dim_value") else None for dim in v.type.tensor_type.shape.dim]
            for v in typed
            if v.type.tensor_type.HasField("shape")
        }
        self.symbols = {
            v.name: [
                dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in v.type.tensor_type.shape.dim
            ]
            for v in typed
            if v.type.tensor_type.HasField("shape")
        }
        self.sizes: dict[str, str] = {}
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.nodes: list[onnx.NodeProto] = []
        self.made: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self.names: set[str] = set()
        self.values = set(self.types).union(*(node.output for node in graph.node))
        self.base = ""

    def run(self) -> None:
        """Rewrite the graph in place."""
        for node in list(self.graph.node):
            self.base = node.name or (node.output[0] if node.output else node.op_type)
            _REWRITES.get(node.op_type, Rewriting.copy)(self, node)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)

    def constant(self, values: Any, dtype: type[np.generic]) -> str:  # noqa: ANN401 - whatever NumPy takes
        """Return the name of an initializer of these values; equal ones are shared."""
        import onnx

        array: NDArray[Any] = np.asarray(values, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.made:
            self.made[key] = self._fresh("trt86_constant")
            self.graph.initializer.append(onnx.numpy_helper.from_array(array, self.made[key]))
        return self.made[key]

    def add(self, operator: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:  # noqa: ANN401
        """Append a node; return the name of its output, a new one unless it is given."""
        import onnx

        output = output or self._fresh(f"{self.base}/{operator}")
        node = onnx.helper.make_node(operator, list(inputs), [output], self._node_name(operator), **attributes)
        self.nodes.append(node)
        return output

    def copy(self, node: onnx.NodeProto, drop: Collection[str] = ()) -> None:
        """Append a node as it is, but for its name, attributes to drop, and what IR 8 does not have."""
        kept = [attribute for attribute in node.attribute if attribute.name not in drop]
        del node.attribute[:]
        node.attribute.extend(kept)
        for field in ("metadata_props", "overload", "device_configurations"):
            if field in node.DESCRIPTOR.fields_by_name:
                node.ClearField(field)
        node.name = self._node_name(node.op_type)
        self.nodes.append(node)

    def ints(self, name: str) -> list[int] | None:
        """Values of a small constant of whole numbers; None where it is none."""
        import onnx

        tensor = self.constants.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.data_type != _INT64:
            return None
        return [int(value) for value in onnx.numpy_helper.to_array(tensor).reshape(-1)]

    def scalar(self, name: str) -> float | None:
        """Value of a constant of one element; None where it is none."""
        import onnx

        tensor = self.constants.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL or math.prod(tensor.dims) != 1:
            return None
        return float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0])

    def size(self, symbol: str) -> str:
        """Return the name of a vector of one element: how many frames, patches, or tokens there are."""
        if symbol not in self.sizes:
            if symbol == _TOKENS:
                made = self.add("Mul", [self.size(_FRAMES), self.size(_PATCHES)])
            else:
                axis = (_FRAMES, _PATCHES).index(symbol)
                bounds = [self.constant([bound], np.int64) for bound in (axis, axis + 1, 0)]
                made = self.add("Slice", [self.add("Shape", [INPUTS[0]]), *bounds])
            self.sizes[symbol] = made
        return self.sizes[symbol]

    def widen(self, name: str) -> str:
        """Cast to fp32; what is fp32 already stays."""
        return name if self.types.get(name) == FLOAT else self.add("Cast", [name], to=FLOAT)

    def narrow(self, name: str, node: onnx.NodeProto) -> None:
        """Round the fp32 value made last to the type of the node that it replaces, under that node's output name."""
        to = self.types.get(node.output[0])
        if to is None:
            raise BuildFailed(f"{self.base}: the type of {node.op_type} cannot be inferred; export it again")
        if to == FLOAT:
            self.nodes[-1].output[0] = node.output[0]
        else:
            self.add("Cast", [name], node.output[0], to=to)

    def _node_name(self, operator: str) -> str:
        """A name that ends in the operator: were it to end in a number, it could be taken for a layer's suffix."""
        name, number = f"{self.base}/{operator}", 1
        while name in self.names:
            number += 1
            name = f"{self.base}.{number}/{operator}"
        self.names.add(name)
        return name

    def _fresh(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self.values:
            number += 1
            name = f"{wanted}.{number}"
        self.values.add(name)
        return name


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    import onnx

    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def _constant(low: Rewriting, node: onnx.NodeProto) -> None:
    """Constant -> initializer: the parser reads lists of whole numbers as if they were floats."""
    import onnx

    ((name, value),) = _attributes(node).items()
    if name == "value":
        tensor = onnx.TensorProto()
        tensor.CopyFrom(value)
        tensor.name = node.output[0]
    elif name in ("value_int", "value_ints"):
        tensor = onnx.numpy_helper.from_array(np.asarray(value, dtype=np.int64), node.output[0])
    elif name in ("value_float", "value_floats"):
        tensor = onnx.numpy_helper.from_array(np.asarray(value, dtype=np.float32), node.output[0])
    else:
        raise BuildFailed(f"a Constant with {name} has no form for TensorRT 8.6; export it with kvit-export onnx")
    low.graph.initializer.append(tensor)
    low.constants[tensor.name] = tensor
    low.types[tensor.name] = tensor.data_type


def _shape(low: Rewriting, node: onnx.NodeProto) -> None:
    """Shape(start, end) -> Shape, Slice: the attributes are of opset 15, which the parser overlooks."""
    attributes = _attributes(node)
    if not attributes:
        low.copy(node)
        return
    whole = low.add("Shape", node.input)
    bounds = (attributes.get("start", 0), attributes.get("end", np.iinfo(np.int32).max))
    start, end = (low.constant([bound], np.int64) for bound in bounds)
    low.add("Slice", [whole, start, end, low.constant([0], np.int64)], node.output[0])


def _squeeze(low: Rewriting, node: onnx.NodeProto) -> None:
    """Name the axes: the parser cannot tell them where a size is symbolic."""
    shape = low.shapes.get(node.input[0])
    if len(node.input) == 1 and shape is not None:
        axes = [axis for axis, size in enumerate(shape) if size == 1]
        node.input.append(low.constant(axes, np.int64))
    low.copy(node)


def _reduce(low: Rewriting, node: onnx.NodeProto) -> None:
    """Axes as attribute, as before opset 18."""
    import onnx

    given = len(node.input) > 1 and node.input[1] != ""
    axes = low.ints(node.input[1]) if given else []
    if axes is None:
        raise BuildFailed(f"{low.base}: the axes of {node.op_type} are no constant; TensorRT 8.6 needs one")
    if not axes and _attributes(node).get("noop_with_empty_axes", 0):
        low.add("Identity", node.input[:1], node.output[0])
        return
    del node.input[1:]
    low.copy(node, drop=("noop_with_empty_axes",))
    if axes:
        node.attribute.append(onnx.helper.make_attribute("axes", axes))


def _reshape(low: Rewriting, node: onnx.NodeProto) -> None:
    """Say the size of every axis of what has one row per token.

    An axis of -1 is a size that TensorRT 8.6 cannot show to equal that of another such axis as soon as there may be
    several frames, and it finds no kernel for the sum of the two.
    """
    shape = [_TOKENS if _is_tokens(size) else size for size in low.symbols.get(node.output[0], [])]
    known = all(isinstance(size, int) or size in (_TOKENS, _FRAMES, _PATCHES) for size in shape)
    if not known or not (_TOKENS in shape or (_FRAMES in shape and _PATCHES in shape)):
        low.copy(node)
        return
    parts = [low.constant([size], np.int64) if isinstance(size, int) else low.size(size) for size in shape]
    low.add("Reshape", [node.input[0], low.add("Concat", parts, axis=0)], node.output[0])


def _is_tokens(size: int | str) -> bool:
    return isinstance(size, str) and sorted(part.strip() for part in size.split("*")) == [_FRAMES, _PATCHES]


def _wide(low: Rewriting, node: onnx.NodeProto) -> None:
    """Half-precision operands, computed in fp32 and rounded once: TensorRT 8.6 sums half-precision products in fp16.

    Measured on an H200 with two layers of real width: a relative error of 0.0045 where PyTorch has 0.0008, whatever the
    norms are computed in. TF32 holds an fp16 operand exactly, so tensor cores can take this form without a loss.
    """
    if low.types.get(node.input[0]) != _FLOAT16:
        low.copy(node)
        return
    wide = [low.widen(name) if name else name for name in node.input]
    low.narrow(low.add(node.op_type, wide, **_attributes(node)), node)


def _split(low: Rewriting, node: onnx.NodeProto) -> None:
    """Equal parts are the default; the attribute that says how many is of opset 18."""
    low.copy(node, drop=("num_outputs",))


def _cast(low: Rewriting, node: onnx.NodeProto) -> None:
    low.copy(node, drop=("saturate", "round_mode"))  # of opsets 19 and 24; they concern fp8 only


def _clip(low: Rewriting, node: onnx.NodeProto) -> None:
    """Clip of whole numbers -> Max, Min."""
    value, bounds = node.input[0], [*node.input[1:], "", ""]
    if low.types.get(value) != _INT64 or not any(bounds):
        low.copy(node)
        return
    steps = [(operator, bound) for operator, bound in zip(("Max", "Min"), bounds[:2], strict=True) if bound]
    for index, (operator, bound) in enumerate(steps):
        value = low.add(operator, [value, bound], node.output[0] if index == len(steps) - 1 else "")


def _mod(low: Rewriting, node: onnx.NodeProto) -> None:
    """Mod -> a - a / b * b, which is the same where a is not negative, as every index of a token is."""
    left, right = node.input
    divisor = low.scalar(right)
    if low.types.get(left) != _INT64 or divisor is None or divisor <= 0:
        raise BuildFailed(f"{low.base}: only Mod of whole numbers by a positive constant has a form for TensorRT 8.6")
    whole = low.add("Mul", [low.add("Div", [left, right]), right])
    low.add("Sub", [left, whole], node.output[0])


def _cumsum(low: Rewriting, node: onnx.NodeProto) -> None:
    """CumSum of a vector of whole numbers -> masked sums: the parser knows it for floats only, as a loop.

    The vector has one element per item of a call, so that the square that arises is small.
    """
    attributes, shape = _attributes(node), low.shapes.get(node.input[0])
    plain = not attributes.get("exclusive", 0) and not attributes.get("reverse", 0)
    if low.types.get(node.input[0]) != _INT64 or shape is None or len(shape) != 1 or not plain:
        raise BuildFailed(f"{low.base}: only a plain CumSum of a vector of whole numbers has a form for TensorRT 8.6")
    first, second = (low.constant([axis], np.int64) for axis in (0, 1))
    length = low.add("Squeeze", [low.add("Shape", node.input[:1]), first])
    index = low.add("Range", [low.constant(0, np.int64), length, low.constant(1, np.int64)])
    below = low.add("GreaterOrEqual", [low.add("Unsqueeze", [index, second]), low.add("Unsqueeze", [index, first])])
    terms = low.add("Mul", [low.add("Cast", [below], to=_INT64), low.add("Unsqueeze", [node.input[0], first])])
    low.add("ReduceSum", [terms, second], node.output[0], keepdims=0)


def _pow(low: Rewriting, node: onnx.NodeProto) -> None:
    """Square -> Mul, which is exact for negative numbers too."""
    if low.scalar(node.input[1]) == 2:
        low.add("Mul", [node.input[0], node.input[0]], node.output[0])
    else:
        low.copy(node)


def _gelu(low: Rewriting, node: onnx.NodeProto) -> None:
    """Gelu (opset 20) by its formula, in fp32 and rounded once.

    x/2 (1 + erf(x / sqrt 2)), or with ``approximate="tanh"`` x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    """

    def number(value: float) -> str:
        return low.constant(value, np.float32)

    x = low.widen(node.input[0])
    if _attributes(node).get("approximate", b"none") == b"tanh":
        cube = low.add("Mul", [low.add("Mul", [x, x]), x])
        inner = low.add("Add", [x, low.add("Mul", [cube, number(0.044715)])])
        bent = low.add("Tanh", [low.add("Mul", [inner, number(math.sqrt(2 / math.pi))])])
    else:
        bent = low.add("Erf", [low.add("Mul", [x, number(math.sqrt(0.5))])])
    halved = low.add("Mul", [x, number(0.5)])
    low.narrow(low.add("Mul", [halved, low.add("Add", [bent, number(1)])]), node)


def _layer_normalization(low: Rewriting, node: onnx.NodeProto) -> None:
    """LayerNormalization by its formula, in fp32 and rounded once, as PyTorch computes it."""
    attributes = _attributes(node)
    axes = _last_axes(low, node, attributes)
    x = low.widen(node.input[0])
    centred = low.add("Sub", [x, low.add("ReduceMean", [x], axes=axes, keepdims=1)])
    low.narrow(_scaled(low, node, centred, axes, attributes), node)


def _rms_normalization(low: Rewriting, node: onnx.NodeProto) -> None:
    """RMSNormalization (opset 23) likewise."""
    attributes = _attributes(node)
    low.narrow(
        _scaled(low, node, low.widen(node.input[0]), _last_axes(low, node, attributes), attributes),
        node,
    )


def _last_axes(low: Rewriting, node: onnx.NodeProto, attributes: dict[str, Any]) -> list[int]:
    """Axes from the node's ``axis`` to the last, counted from the end."""
    axis = attributes.get("axis", -1)
    shape = low.shapes.get(node.input[0])
    if axis >= 0 and shape is None:
        raise BuildFailed(f"{low.base}: the shape of the input of {node.op_type} cannot be inferred; export it again")
    first = axis if axis < 0 else axis - len(shape or ())
    return list(range(first, 0))


def _scaled(low: Rewriting, node: onnx.NodeProto, x: str, axes: list[int], attributes: dict[str, Any]) -> str:
    """Append x / sqrt(mean(x^2) + epsilon) * scale + bias in fp32; scale and bias are the node's further inputs."""
    mean = low.add("ReduceMean", [low.add("Mul", [x, x])], axes=axes, keepdims=1)
    epsilon = low.constant(attributes.get("epsilon", 1e-5), np.float32)
    y = low.add("Div", [x, low.add("Sqrt", [low.add("Add", [mean, epsilon])])])
    y = low.add("Mul", [y, low.widen(node.input[1])])
    return low.add("Add", [y, low.widen(node.input[2])]) if len(node.input) > 2 and node.input[2] else y


_REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
               "ReduceProd", "ReduceSumSquare")  # fmt: skip  # ReduceSum took its axes as an input from opset 13 on

_REWRITES: dict[str, Callable[[Rewriting, Any], None]] = {
    "Constant": _constant,
    "Shape": _shape,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    **dict.fromkeys(("MatMul", "Gemm", "Softmax"), _wide),
    "Split": _split,
    "Cast": _cast,
    "Clip": _clip,
    "Mod": _mod,
    "CumSum": _cumsum,
    "Pow": _pow,
    "Gelu": _gelu,
    "LayerNormalization": _layer_normalization,
    "RMSNormalization": _rms_normalization,
    **dict.fromkeys(_REDUCTIONS, _reduce),
}
