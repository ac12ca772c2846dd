"""Repeat the one traced block once a layer, so that the cost of an export does not grow with depth.

The trace holds one block between two marked values, the residual stream before and after it. The block is what lies
on the way from the first value, or from the block's own weights, to the second; everything else (angles, masks,
constants) is shared by all layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

_LAYER = re.compile(r"\.blocks\.0\.")


@dataclass(frozen=True)
class StampResult:
    """What was stamped.

    Attributes:
        layers: copies of the block, the traced one included.
        nodes_per_block: operators of one block.
    """

    layers: int
    nodes_per_block: int


def stamp_blocks(model: ir.Model, layers: int, *, block_in: str, block_out: str) -> StampResult:
    """Turn a graph of one block into a graph of ``layers`` blocks, in place.

    Args:
        model: weights are graph inputs; those of the block are named ``...blocks.0....``. ``block_in`` and
            ``block_out`` are graph outputs beside the real ones and are dropped.
        layers: number of blocks wanted.
        block_in: name of the value that enters the block.
        block_out: name of the value that leaves it.

    Raises:
        ValueError: a marked value is missing, or no node lies between the two.
    """
    graph = model.graph
    marked = {value.name: value for value in graph.outputs}
    if block_in not in marked or block_out not in marked:
        raise ValueError(f"the traced graph has no outputs {block_in} and {block_out}")
    enter, leave = marked[block_in], marked[block_out]
    graph.outputs[:] = [value for value in graph.outputs if value is not enter and value is not leave]
    weights = [value for value in graph.inputs if _LAYER.search(value.name or "")]
    block = _between(graph, [enter, *weights], leave)
    if not block:
        raise ValueError(f"no node lies between {block_in} and {block_out}")
    inner = set(block)
    later_uses = [(use.node, use.idx) for use in leave.uses() if use.node not in inner]

    stream, anchor = leave, block[-1]
    for layer in range(1, layers):
        copies, stream = _copy_block(graph, block, layer, {enter: stream}, weights, leave)
        graph.insert_after(anchor, copies)
        anchor = copies[-1]
    _prefix(block, 0)
    for node, index in later_uses:
        node.replace_input_with(index, stream)
    return StampResult(layers, len(block))


def _between(graph: ir.Graph, sources: Iterable[ir.Value], target: ir.Value) -> list[ir.Node]:
    """Nodes that depend on a source and that the target depends on, in the graph's order."""
    needed: set[ir.Node] = set()
    queue, sources = [target.producer()], set(sources)
    while queue:
        node = queue.pop()
        if node is None or node in needed:
            continue
        needed.add(node)
        queue += [value.producer() for value in node.inputs if value is not None and value not in sources]
    reached = set(sources)
    block = []
    for node in graph:
        if node in needed and any(value in reached for value in node.inputs):
            block.append(node)
            reached.update(node.outputs)
    return block


def _copy_block(
    graph: ir.Graph,
    block: list[ir.Node],
    layer: int,
    mapping: dict[ir.Value, ir.Value],
    weights: list[ir.Value],
    leave: ir.Value,
) -> tuple[list[ir.Node], ir.Value]:
    for weight in weights:
        name = _LAYER.sub(f".blocks.{layer}.", weight.name or "")
        mapping[weight] = ir.Value(name=name, shape=weight.shape, type=weight.type)
        graph.inputs.append(mapping[weight])
    copies = []
    for node in block:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [mapping.get(value, value) if value is not None else None for value in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=_named(node.name, layer),
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.shape, new.type = _named(old.name, layer), old.shape, old.type
            mapping[old] = new
        copies.append(copy)
    return copies, mapping[leave]


def _prefix(block: list[ir.Node], layer: int) -> None:
    for node in block:
        node.name = _named(node.name, layer)
        for value in node.outputs:
            value.name = _named(value.name, layer)


def _named(name: str | None, layer: int) -> str:
    return f"block_{layer}/{name}"
