"""The kernel is compiled for every target without a GPU, and the compiled text is what a launcher may rely on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
triton = pytest.importorskip("triton", reason="Triton is not installed: nothing was compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET is set: nothing can be compiled in this process", allow_module_level=True)

from plugins.fused_qk_rope.launch_plan import LaunchConfig  # noqa: E402  these need PyTorch and Triton
from plugins.fused_qk_rope.triton_compile import TARGETS, compile_ptx  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "float16", "bfloat16")
NVIDIA = tuple(target for target in TARGETS if target.startswith("sm_"))
AMD = tuple(target for target in TARGETS if target.startswith("gfx"))


pytestmark = pytest.mark.usefixtures("own_triton_cache")


def test_the_targets_are_those_that_the_project_promises():
    assert TARGETS == ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", NVIDIA)
def test_ptx(target, dtype):
    rope = compile_ptx(dtype, 72, target, heads=16)
    entry = re.search(rf"\.visible \.entry {rope.kernel_name}\(([^)]*)\)(.*)", rope.text, re.DOTALL)
    declaration, body = entry.groups()
    parameters = re.findall(r"\.param\s+\.(u64|b64|u32|b32)\b.*?(\w+_param_\d+)", declaration)
    # four inputs, the number of tokens, two outputs; then what Triton adds for itself
    assert rope.arguments == ("q", "k", "cos", "sin", "tokens", "q_out", "k_out")
    assert [kind[1:] for kind, _ in parameters[:7]] == ["64"] * 4 + ["32"] + ["64"] * 2
    assert len(parameters) == 7 + rope.hidden_parameters
    read = [bool(re.search(rf"\b{name}\b", body)) for _, name in parameters]
    assert read == [True] * 7 + [False] * rope.hidden_parameters
    assert f".version {rope.ptx_version[0]}.{rope.ptx_version[1]}" in rope.text
    assert (8, 0) <= rope.ptx_version < (10, 0)
    assert f".target {rope.target}" in rope.text
    assert rope.target.rstrip("a") == target
    assert f".reqntid {rope.threads}" in rope.text
    assert rope.threads == rope.num_warps * 32
    assert rope.triton_version == triton.__version__
    assert rope.binary.startswith(b"\x7fELF")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", NVIDIA)
def test_ptx_moves_16_bytes_at_a_time_and_keeps_nothing_in_shared_memory(target, dtype):
    rope = compile_ptx(dtype, 72, target, heads=16)
    assert rope.shared == 0
    assert "bar.sync" not in rope.text
    wide_loads, wide_stores = (len(re.findall(rf"{kind}\.global\.v4\.b32", rope.text)) for kind in ("ld", "st"))
    # 8 elements of 16 bits come with 4 angles of 16 bytes each, 4 of fp32 with 2 angles of 8 bytes
    assert wide_loads == (2 if dtype == "float32" else 4)
    assert len(re.findall(r"ld\.global\.v2\.b32", rope.text)) == (2 if dtype == "float32" else 0)
    assert wide_stores == 2
    assert len(re.findall(r"\b(?:ld|st)\.global", rope.text)) == 6


@pytest.mark.parametrize("target", NVIDIA)
def test_ptx_rounds_as_the_reference_does_and_to_the_type_it_was_compiled_for(target):
    for dtype, convert in (("bfloat16", r"cvt\.rn\.bf16"), ("float16", r"cvt\.rn\.f16"), ("float32", None)):
        text = compile_ptx(dtype, 80, target, heads=2).text
        assert not re.search(r"\bfma\b", text)
        assert re.search(r"mul(\.rn)?\.f32", text)
        found = set(re.findall(r"cvt\.rn\.(?:bf16|f16)", text))
        assert found == ({convert.replace("\\", "")} if convert else set())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", AMD)
def test_amdgcn(target, dtype):
    pytest.importorskip("triton.backends.amd", reason="this Triton has no AMD back end: NOT compiled for it")
    rope = compile_ptx(dtype, 72, target, heads=16)
    assert rope.target == target
    # LLVM has spelt the triple in front of the target in more than one way
    assert re.search(rf'\.amdgcn_target "amdg\S+-{target}"', rope.text)
    assert rope.ptx_version is None
    assert rope.threads == rope.num_warps * 64 == rope.block
    assert rope.shared == 0
    assert rope.hidden_parameters >= 0
    assert rope.binary.startswith(b"\x7fELF")
    assert len(re.findall(r"(?:global|buffer)_store_dwordx4", rope.text)) == 2
    assert not re.search(r"v_(?:pk_)?fma|v_fmac", rope.text)


@pytest.mark.parametrize("head_dim", [2, 6, 64, 68, 72, 80, 96, 128])
def test_any_even_head_dim_compiles_and_has_its_own_name(head_dim):
    names = set()
    for dtype in DTYPES:
        for heads in (1, 3):
            rope = compile_ptx(dtype, head_dim, "sm_80", heads=heads)
            names.add(rope.kernel_name)
            assert rope.shared == 0
            assert rope.kernel_name in rope.text
            # vectors of one token cover it exactly
            assert (heads * head_dim) % rope.vectors_per_token == 0
    assert len(names) == 6


def test_launch_sizes_are_recorded():
    rope = compile_ptx("float16", 64, "sm_89", heads=4, config=LaunchConfig(threads=64, vectors_per_thread=2))
    assert (rope.threads, rope.num_warps, rope.block) == (64, 2, 128)
    assert rope.vectors_per_token == 4 * 64 // 8


@pytest.mark.parametrize(("dtype", "target"), [("bfloat16", "sm_90"), ("float32", "gfx942")])
def test_no_path_of_the_build_is_inside(dtype, target):
    rope = compile_ptx(dtype, 72, target, heads=16)
    for path in (str(ROOT), "triton_kernel", ".py"):
        assert path not in rope.text
        assert path.encode() not in rope.binary
    assert ".loc" not in rope.text


def test_line_information_is_switched_off_for_this_compilation_only(monkeypatch):
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    compile_ptx("float32", 8, "sm_80", heads=1)
    assert os.environ["TRITON_DISABLE_LINE_INFO"] == "0"
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO")
    compile_ptx("float32", 8, "sm_80", heads=2)
    assert "TRITON_DISABLE_LINE_INFO" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float64", 72, "sm_90"), "float64"),
        (("half", 72, "sm_90"), "half"),
        (("float16", 71, "sm_90"), "even"),
        (("float16", 0, "sm_90"), "even"),
        (("float16", 72, "sm90"), "sm_NN or gfxNNN"),
        (("float16", 72, "cuda"), "sm_NN or gfxNNN"),
    ],
)
def test_refuses_what_it_cannot_compile_for(arguments, message):
    with pytest.raises(ValueError, match=message):
        compile_ptx(*arguments, heads=16)


def test_says_so_where_the_interpreter_makes_compilation_impossible():
    code = "from plugins.fused_qk_rope.triton_compile import compile_ptx; compile_ptx('float16', 72, 'sm_80', heads=1)"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "TRITON_INTERPRET is set" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90"])
def test_an_older_ptx_language_can_be_asked_for(target):
    """A driver refuses PTX that is newer than itself, and the compiler's own choice is its newest."""
    kernel = compile_ptx("bfloat16", 72, target, heads=16, ptx_version=(8, 0))
    assert kernel.ptx_version == (8, 0)
    assert re.search(r"^\.version 8\.0$", kernel.text, re.MULTILINE)
