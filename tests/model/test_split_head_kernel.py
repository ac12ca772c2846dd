"""The kernel for heads of two parts without a GPU: its arithmetic under Triton's interpreter, and its compilation."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
triton = pytest.importorskip("triton", reason="Triton is not installed: the kernel was NOT run under its interpreter")

from tests.triton_interpreter import ROOT, interpreted, refusals_of  # noqa: E402

# heads of the released towers, of two other pairs of parts, and rows that do not fill the last program
SHAPES = [(64, 2, 72, 80), (192, 2, 72, 80), (320, 1, 40, 48), (128, 3, 88, 96)]
# Triton's interpreter keeps bf16 as integers and its products take them for such; tests/gpu have bf16
DTYPES = ("float16",)
STDS = (1.0, 3.0)  # of the logits


def draw(tokens: int, heads: int, head_dim: int, padded: int, dtype: Any, std: float) -> Any:
    """q, k and v as one projection makes them, with the spare elements that the kernel is given."""
    from tests.model.attention_float64 import draw_qkv

    packed = torch.zeros(tokens, 3, heads, padded, dtype=dtype)
    for index, x in enumerate(draw_qkv(tokens, heads, head_dim, dtype, std)):
        packed[:, index, :, :head_dim] = x
    packed[:, 2, :, -1] = 1
    return packed


def cases() -> list[dict[str, Any]]:
    """Run under the interpreter."""
    return [
        case(*shape, dtype, std, rows) for shape in SHAPES for dtype in DTYPES for std in STDS for rows in (64, 128)
    ]


def case(tokens: int, heads: int, head_dim: int, padded: int, dtype: str, std: float, rows: int) -> dict[str, Any]:
    from model.cuda.split_head_kernel import split_head_attention
    from tests.model.attention_float64 import attend_float64, errors_of, limits_for

    packed = draw(tokens, heads, head_dim, padded, getattr(torch, dtype), std)
    hidden = tokens - 20  # keys that the spare pair masks, as the rotation of the tables for padding leaves them
    packed[:, 0, :, head_dim] = 1
    packed[:hidden, 1, :, head_dim + 1] = 1
    packed[hidden:, 1, :, head_dim] = -29952
    q, k, v = packed.unbind(1)
    out = split_head_attention(q, k, v, head_dim, rows).unflatten(1, (heads, padded))
    exact = attend_float64(*(x[:hidden, :, :head_dim] for x in (q, k, v)))
    errors = errors_of(out[:hidden, :, :head_dim].flatten(1), exact, heads)
    limits = limits_for(q.dtype, hidden, head_dim, std)
    return {
        "name": f"{tokens} {heads} {head_dim} {padded} {dtype} {std} {rows}",
        "whole": errors.whole / limits.whole,
        "row": errors.row / limits.row,
        "sum": bool((out[..., -1] == 1).all()),
        "finite": bool(out.isfinite().all()),
    }


def refusals() -> list[str]:
    """What the launcher says to what the kernel would misread."""
    from model.cuda.split_head_kernel import split_head_attention

    half = torch.zeros(64, 3, 2, 80, dtype=torch.bfloat16)
    q, k, v = half.unbind(1)
    wrong = [
        (q[:60], k[:60], v[:60]),  # a block of keys would reach past the end
        (q, k.contiguous(), v),
        (q, k, v.half()),
        half.float().unbind(1),
        torch.zeros(64, 3, 2, 64, dtype=torch.bfloat16).unbind(1),
        torch.zeros(64, 3, 2, 72, dtype=torch.bfloat16).unbind(1),
        torch.zeros(64, 3, 80, 2, dtype=torch.bfloat16).transpose(2, 3).unbind(1),
    ]
    return refusals_of(lambda q, k, v: split_head_attention(q, k, v, 72, 64), wrong)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return interpreted("tests.model.test_split_head_kernel", "cases", "refusals")


def test_every_case_is_as_near_to_float64_as_its_roundings_allow(results: dict[str, Any]):
    found = results["cases"]
    assert len(found) == len(SHAPES) * len(DTYPES) * len(STDS) * 2
    assert [entry["name"] for entry in found if not (entry["whole"] <= 1 and entry["row"] <= 1)] == []
    # the limits are for the worst scatter; a wrong scale, mask or sum shows as 10 and more
    assert min(entry["whole"] for entry in found) > 0.1


def test_weights_sum_to_one_and_padding_stays_finite(results: dict[str, Any]):
    assert [entry["name"] for entry in results["cases"] if not (entry["sum"] and entry["finite"])] == []


def test_what_the_kernel_would_misread_is_refused(results: dict[str, Any]):
    assert ["views of one projection" in said for said in results["refusals"]] == [True] * 7


def test_parts():
    from model.cuda.split_head_kernel import parts

    split = {width: parts(width) for width in (16, 32, 48, 64, 72, 80, 96, 112, 128, 144)}
    assert {width: found for width, found in split.items() if found} == {
        48: (32, 16),
        80: (64, 16),
        96: (64, 32),
        144: (128, 16),
    }


def test_rows_are_chosen_by_waves():
    """On 132 multiprocessors, 16 heads: sizes at which the choice was measured to be the better one."""
    from model.cuda.split_head_kernel import rows_for

    assert {tokens: rows_for(tokens, 16, 132) for tokens in (512, 1024, 1536, 2176, 3072, 7680)} == dict.fromkeys(
        (512, 1024, 1536, 2176, 3072, 7680), 64
    )
    # 1600: 400 programs of 64 rows are one too many waves for 396 places
    assert {tokens: rows_for(tokens, 16, 132) for tokens in (1600, 2048, 4096, 8192, 16384)} == dict.fromkeys(
        (1600, 2048, 4096, 8192, 16384), 128
    )


def test_what_was_measured_bears_the_choice_out():
    """The claims of docs/benchmarks.md, from the run that is kept."""
    from model.cuda.split_head_kernel import rows_for
    from scripts import bench_split_head

    result = json.loads((ROOT / "benchmarks" / "results" / "split-head-h200.json").read_text(encoding="utf-8"))
    assert "H200" in result["gpu"]
    lost, of_cudnn = [], []
    for row in result["bf16"]:
        rows = rows_for(row["tokens"], result["heads"], result["multiprocessors"])
        lost.append(row[f"rows{rows}_us"] / min(row["rows64_us"], row["rows128_us"]))
        of_cudnn.append(row[f"rows{rows}_us"] / row["cudnn_us"])
    assert (len(lost), sum(share == 1 for share in lost), sum(share < 1 for share in of_cudnn)) == (76, 68, 72)
    assert max(lost) < 1.09
    assert 0.62 < min(of_cudnn) < max(of_cudnn) < 1.09
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert bench_split_head.tables(result) in text


# -------------------------------------------------------------------------------------------------------- compilation


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing can be compiled under the interpreter")
@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", [64, 128])
def test_compiles_to_warp_group_products(element: str, rows: int, own_triton_cache: None):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from model.cuda.split_head_kernel import COMPILE_OPTIONS, KEYS, PROGRAMS, split_head_kernel

    constants = {"HEADS": 16, "WIDE": 64, "REST": 16, "ROWS": rows, "KEYS": KEYS}
    blocks = {"q_wide": (rows, 64), "q_rest": (rows, 16), "kv_wide": (KEYS, 64), "kv_rest": (KEYS, 16)}
    types = {name: f"tensordesc<{element}[{height}, {width}]>" for name, (height, width) in blocks.items()}
    types |= {"out": f"*{element}", "tokens": "i32", "scale": "fp32"}
    names = split_head_kernel.arg_names
    source = ASTSource(
        split_head_kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ("out", "tokens")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=COMPILE_OPTIONS[rows])
    text = compiled.asm["ptx"]
    assert ".target sm_90a" in text
    # both parts of both products, in units of 64 rows
    for columns in (64, 16):
        assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element.replace('fp', 'f')}" in text
    # so many programs fit into a multiprocessor with 227 KB of shared memory; each takes 1 KB more than it asks for
    assert PROGRAMS[rows] * (compiled.metadata.shared + 1024) <= 227 << 10
    assert PROGRAMS[rows] * 128 * COMPILE_OPTIONS[rows]["maxnreg"] <= 65536
