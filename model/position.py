"""Where a token stands, and the learned and temporal embeddings of that place.

Two forms of the learned part: the live tower's :func:`get_rope_shape` resamples the table to one grid;
:func:`sample_table` takes the same taps token by token, so that no dimension depends on a value (the exported graph).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom

from model import platform

CUBIC_A = -0.75  # PyTorch's bicubic; Pillow's is -0.5


class TokenLayout(NamedTuple):
    """Place of every token of one frame of packed items; each field is [patches] int64.

    Attributes:
        item: index of the item that the token belongs to.
        start: index of that item's first token.
        height: rows of the item's grid.
        width: columns of the item's grid.
        y: row of the token.
        x: column of the token.
    """

    item: Tensor
    start: Tensor
    height: Tensor
    width: Tensor
    y: Tensor
    x: Tensor


def token_layout(grid_hws: Tensor, patches: int) -> TokenLayout:
    """Lay out the tokens of packed items: item after item, each in raster order.

    Args:
        grid_hws: [items, 2] int64, rows and columns of each item's patch grid.
        patches: sum of rows * columns; a plain or symbolic size, never read from ``grid_hws``.
    """
    areas = grid_hws[:, 0] * grid_hws[:, 1]
    ends = areas.cumsum(0)
    token = torch.arange(patches, device=grid_hws.device)
    item = (token.unsqueeze(1) >= ends.unsqueeze(0)).to(torch.int64).sum(1)
    start = (ends - areas).index_select(0, item)
    height, width = grid_hws[:, 0].index_select(0, item), grid_hws[:, 1].index_select(0, item)
    y, x = raster(token - start, height, width)
    return TokenLayout(item, start, height, width, y, x)


def raster(local: Tensor, height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of the ``local``-th token of a grid; the height is not needed, but belongs to the place."""
    y = torch.div(local, width, rounding_mode="trunc")
    return y, local - y * width


# ------------------------------------------------------------------------------------------------ the learned table


def get_rope_shape(
    table: Tensor,
    mode: str,
    shape: tuple[int, int],
    *,
    compile: bool | None = None,  # noqa: A002 - PyTorch's own word
) -> Tensor:
    """Resample the position table to an image's grid.

    Half-pixel centres, edge taps clamped, no antialiasing when shrinking: ``interpolate(align_corners=False)``.
    :mod:`model.platform` decides, by the table's device, whether it is compiled and which of two equal forms runs.
    A grid of the table's own size gets a copy of the table, which is what resampling would give, bit for bit.

    Args:
        table: [rows, columns, width], any floating dtype.
        mode: ``bicubic`` or ``bilinear``.
        shape: (h, w) in patches.
        compile: True or False overrides that decision; see :func:`model.platform.plan_rope_shape`.

    Returns:
        [h * w, width] fp32.

    Raises:
        InputError: the environment variable KVIT_COMPILE_ROPE_SHAPE has a value that means nothing.
    """
    plan = platform.plan_rope_shape(table, shape, compile)
    if not plan.tokenwise and tuple(shape) == tuple(table.shape[:2]):
        # every fraction is 0 and every weight 0 or 1; by tokens it would be one more program for XLA to compile
        return table.to(torch.float32, copy=True).flatten(0, 1)
    resample: platform.Resample = _resample_tokens if plan.tokenwise else _resample_grid
    if plan.compiled:
        resample = platform.compiled_rope_shape(resample, table, mode, forced=plan.forced)
    return resample(table, mode, *shape)


def _resample_grid(table: Tensor, mode: str, height: int, width: int) -> Tensor:
    planes = table.to(torch.float32).permute(2, 0, 1).unsqueeze(0)
    resampled = F.interpolate(planes, size=(height, width), mode=mode, align_corners=False)
    return resampled.squeeze(0).permute(1, 2, 0).flatten(0, 1)


def _resample_tokens(table: Tensor, mode: str, height: int, width: int) -> Tensor:
    # the grid comes as data and not as constants: XLA then has one program for all grids of as many tokens
    grid = torch.tensor([[height, width]], device=table.device)
    return sample_table(table, mode, token_layout(grid, height * width))


def kernel_polynomials(mode: str, a: float = CUBIC_A) -> tuple[int, list[list[float]]]:
    """Interpolation kernel as one polynomial in the fraction f per tap.

    Bicubic is Keys' kernel with PyTorch's ``a`` (IEEE TASSP 29, 1981, eq. 4): near taps ``(a+2)z^3 - (a+3)z^2 + 1``,
    far taps ``a z^3 - 5a z^2 + 8a z - 4a`` at distances 1 + f, f, 1 - f, 2 - f, multiplied out.

    Args:
        mode: ``bicubic`` or ``bilinear``.
        a: slope of the cubic kernel at distance 1.

    Returns:
        Offset of the first tap from the floor of the source position, and the coefficients: [degree + 1][taps], from
        the constant upwards.
    """
    if mode == "bilinear":
        return 0, [[1.0, 0.0], [-1.0, 1.0]]
    return -1, [[0.0, 1.0, 0.0, 0.0], [a, 0.0, -a, 0.0], [-2 * a, -a - 3, 2 * a + 3, a], [a, a + 2, -a - 2, -a]]


def source_position(position: Tensor, size: Tensor, table_size: int) -> tuple[Tensor, Tensor]:
    """Split the half-pixel source coordinate ``(position + 0.5) * table_size / size - 0.5`` into floor and fraction.

    In whole numbers, so that the floor is exact on every runtime: the coordinate is above -1/2, hence one ``size`` is
    added before dividing and 1 taken off afterwards, which keeps every operand positive.

    Args:
        position: [tokens] int64.
        size: [tokens] int64, length of the axis that ``position`` runs along.
        table_size: length of the table along that axis.

    Returns:
        floor, [tokens] int64, and fraction, [tokens] fp32 in [0, 1).
    """
    numerator = (2 * position + 1) * table_size + size
    denominator = 2 * size
    quotient = torch.div(numerator, denominator, rounding_mode="trunc")
    remainder = numerator - quotient * denominator
    return quotient - 1, remainder.to(torch.float32) / denominator.to(torch.float32)


def axis_taps(position: Tensor, size: Tensor, table_size: int, mode: str) -> tuple[Tensor, Tensor]:
    """Indices into one axis of the table and their weights; taps beyond the edge are the edge.

    (``interpolate`` clamps a negative linear coordinate to 0. Both its taps are then row 0, as they are here.)

    Returns:
        Index, [tokens, taps] int64, and weight, [tokens, taps] fp32.
    """
    floor, fraction = source_position(position, size, table_size)
    first, polynomials = kernel_polynomials(mode)
    offsets = torch.arange(first, first + len(polynomials[0]), device=position.device)
    coefficients = torch.tensor(polynomials, dtype=torch.float32, device=position.device)
    fraction = fraction.unsqueeze(1)
    weight = coefficients[-1].expand(fraction.shape[0], -1)
    for power in range(len(polynomials) - 2, -1, -1):
        weight = weight * fraction + coefficients[power]
    return (floor.unsqueeze(1) + offsets).clamp(0, table_size - 1), weight


def sample_table(table: Tensor, mode: str, layout: TokenLayout) -> Tensor:
    """Take each token's own row of the resampled table.

    Equal to :func:`get_rope_shape` of the token's grid, without a dimension that depends on that grid.

    Args:
        table: [rows, columns, width], any floating dtype.
        mode: ``bicubic`` or ``bilinear``.
        layout: places of the tokens.

    Returns:
        [tokens, width] fp32.
    """
    rows, columns, width = table.shape
    flat = table.reshape(rows * columns, width)
    row, row_weight = axis_taps(layout.y, layout.height, rows, mode)
    column, column_weight = axis_taps(layout.x, layout.width, columns, mode)
    taps = column.shape[1]
    total = torch.zeros(1, dtype=torch.float32, device=table.device)
    # one table row after another: all taps at once would hold 16 times the result
    for i in range(row.shape[1]):
        index = row[:, i : i + 1] * columns + column
        values = flat.index_select(0, index.flatten()).to(torch.float32).reshape(-1, taps, width)
        weight = row_weight[:, i : i + 1] * column_weight
        total = total + (values * weight.unsqueeze(-1)).sum(1)
    return total


# ------------------------------------------------------------------------------------------------- time


def time_embedding(frames: int, width: int) -> list[list[float]]:
    """Sinusoidal embedding of frames 0, 1, ...: all sines, then all cosines (not interleaved).

    ``omega_j = 10000 ** (-j / (width / 2))``, as in MAE's 1-D embedding from which the hub code takes it.
    """
    half = width // 2
    omega = [10000.0 ** (-j / half) for j in range(half)]
    return [[math.sin(k * w) for w in omega] + [math.cos(k * w) for w in omega] for k in range(frames)]


def add_time(pos: Tensor, frames: int, config_frames: int) -> Tensor:
    """Give every frame of a clip its own embedding; an image gets none.

    The embedding of frame 0 is not zero, so one frame and a clip differ. The choice is arithmetic (a factor 0 or 1)
    and not a branch, because ``frames`` is symbolic at export.

    Args:
        pos: [patches, width] fp32.
        frames: frames of the items.
        config_frames: frames for which the config has an embedding; 1 means the family has no time axis.

    Returns:
        [frames, patches, width] fp32.
    """
    if config_frames == 1:
        return pos.unsqueeze(0).expand(frames, -1, -1)
    time = torch.tensor(time_embedding(config_frames, pos.shape[-1]), dtype=torch.float32, device=pos.device)
    frame = torch.arange(frames, device=pos.device)
    return pos.unsqueeze(0) + (time.index_select(0, frame) * is_clip(frame)).unsqueeze(1)


def is_clip(frame: Tensor) -> Tensor:
    """1.0 where there is more than one frame, 0.0 for an image; [1] fp32."""
    return (frame.sum(0, keepdim=True) > 0).to(torch.float32)
