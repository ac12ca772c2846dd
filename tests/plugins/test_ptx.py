"""The PTX that a launcher other than Triton's gets: exactly the declared arguments, and nothing else is changed."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("triton", reason="Triton is not installed: no PTX was made")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET is set: nothing can be compiled in this process", allow_module_level=True)

from plugins.fused_qk_rope import source
from plugins.fused_qk_rope.ptx import (
    MINIMAL_DRIVER,
    assemble,
    check_driver,
    driver_knows,
    entry_parameters,
    minimal_driver,
    strip_hidden_parameters,
)
from plugins.fused_qk_rope.tensorrt_launch import check_launchable, grid_size, launch_arguments
from plugins.fused_qk_rope.triton_compile import compile_ptx

DTYPES = ("float32", "float16", "bfloat16")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DECLARED = 7  # q, k, cos, sin, tokens and two outputs


@pytest.fixture(scope="module")
def kernel():
    return compile_ptx("bfloat16", 72, "sm_80", heads=16)


@pytest.fixture(scope="module")
def stripped(kernel):
    return strip_hidden_parameters(kernel)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_the_declared_arguments_are_left_and_ptxas_takes_it(target, dtype):
    before = compile_ptx(dtype, 72, target, heads=16)
    after = strip_hidden_parameters(before)
    declaration = re.search(r"\.entry [^(]*\(([^)]*)\)", after.text)[1]
    assert re.findall(r"\.param \.([a-z])\d\d\b", declaration) == ["u"] * DECLARED
    assert re.findall(r"\.param \.[a-z](\d\d)\b", declaration) == ["64"] * 4 + ["32"] + ["64"] * 2
    assert after.binary.startswith(b"\x7fELF")
    assert after.kernel_name.encode() in after.binary
    assert (after.hidden_parameters, after.arguments) == (0, before.arguments)
    assert replace(after, text="", binary=b"", hidden_parameters=0) == replace(
        before, text="", binary=b"", hidden_parameters=0
    )
    for line in (r"^\.version .*$", r"^\.target .*$", r"^\.address_size .*$"):
        assert re.findall(line, after.text, re.MULTILINE) == re.findall(line, before.text, re.MULTILINE) != []
    check_launchable(after)


def test_only_lines_of_the_parameter_list_change(kernel, stripped):
    changed = [
        line for line in difflib.ndiff(kernel.text.split("\n"), stripped.text.split("\n")) if line[0] in "+-"
    ]  # the last kept parameter loses its comma
    name = kernel.kernel_name
    kept = f"\t.param .u64 .ptr .global .align 1 {name}_param_{DECLARED - 1}"
    hidden = [
        f"\t.param .u64 .ptr .global .align 1 {name}_param_{DECLARED + n}" for n in range(kernel.hidden_parameters)
    ]
    assert kernel.hidden_parameters > 0
    assert sorted(changed) == sorted(
        [f"- {kept},", f"+ {kept}", *(f"- {line}," for line in hidden[:-1]), f"- {hidden[-1]}"]
    )


def test_the_cubin_declares_the_bytes_of_the_declared_arguments(kernel, stripped):
    """EIATTR_PARAM_CBANK in the cubin's .nv.info gives the size of the parameters; two pointers are gone."""
    assert parameter_bytes(kernel.binary) - parameter_bytes(stripped.binary) == 8 * kernel.hidden_parameters
    assert parameter_bytes(stripped.binary) == 4 * 8 + 8 + 2 * 8  # the int32 is padded to the pointer after it


def parameter_bytes(cubin):
    """EIATTR_CBANK_PARAM_SIZE: an attribute of format 3 and code 0x19, whose value is the size."""
    return max(int.from_bytes(match[1], "little") for match in re.finditer(rb"\x03\x19(..)", cubin, re.DOTALL))


def test_once_stripped_there_is_nothing_to_strip(stripped):
    again = strip_hidden_parameters(stripped)
    assert again.text == stripped.text
    assert again.binary == stripped.binary


def test_without_a_check_no_cubin_is_kept_that_has_other_parameters(kernel, stripped):
    unchecked = strip_hidden_parameters(kernel, check=False)
    assert unchecked.binary == b""
    assert unchecked.text == stripped.text


def test_refuses_a_kernel_that_reads_a_hidden_parameter(kernel):
    for number in range(kernel.hidden_parameters):
        name = f"{kernel.kernel_name}_param_{DECLARED + number}"
        text = kernel.text.replace("\tret;", f"\tld.param.b64 \t%rd1, [{name}];\n\tret;")
        assert text != kernel.text
        with pytest.raises(RuntimeError, match=f"reads its hidden parameter {name}"):
            strip_hidden_parameters(replace(kernel, text=text))


def test_a_read_of_another_parameter_is_not_taken_for_one_of_a_hidden_parameter(kernel):
    """..._param_70 is not ..._param_7."""
    text = kernel.text.replace("\tret;", f"\t// {kernel.kernel_name}_param_{DECLARED}0\n\tret;")
    assert strip_hidden_parameters(replace(kernel, text=text), check=False).hidden_parameters == 0


def test_refuses_a_hidden_parameter_that_is_no_pointer(kernel):
    last = f"{kernel.kernel_name}_param_{DECLARED}"
    text = re.sub(rf"\.u64 \.ptr \.global \.align 1 {last}\b", f".u32 {last}", kernel.text)
    assert text != kernel.text
    with pytest.raises(RuntimeError, match=last):
        strip_hidden_parameters(replace(kernel, text=text))


def test_refuses_parameters_in_another_number(kernel):
    with pytest.raises(RuntimeError, match=f"{DECLARED + kernel.hidden_parameters} parameters"):
        strip_hidden_parameters(replace(kernel, hidden_parameters=kernel.hidden_parameters + 1))


def test_refuses_text_with_two_entry_points(kernel):
    with pytest.raises(RuntimeError, match="alone"):
        strip_hidden_parameters(replace(kernel, text=kernel.text + "\n.visible .entry other()\n{\n\tret;\n}\n"))


def test_refuses_a_kernel_for_another_makers_gpu(kernel):
    with pytest.raises(ValueError, match="gfx942"):
        strip_hidden_parameters(replace(kernel, target="gfx942", ptx_version=None))


def test_refuses_what_ptxas_refuses(stripped):
    with pytest.raises(RuntimeError, match="ptxas refuses the kernel for sm_80"):
        assemble(stripped.text.replace("\tret;", "\treturn;"), "sm_80")


def test_unknown_declarations_are_named(stripped):
    text = stripped.text.replace(".param .u64", ".parameter .u64", 1)
    with pytest.raises(RuntimeError, match="unknown way"):
        entry_parameters(text, stripped.kernel_name)


@pytest.mark.parametrize(
    ("ptx", "cuda"),
    [
        ((7, 0), (11, 0)),
        ((7, 8), (11, 8)),
        ((8, 0), (12, 0)),
        ((8, 5), (12, 5)),
        ((8, 6), (12, 7)),
        ((8, 7), (12, 8)),
        ((8, 8), (12, 9)),
        ((9, 0), (13, 0)),
        ((6, 5), (11, 0)),  # older than the table: any driver that we meet
        ((8, 9), (13, 0)),  # never released, so between two rows
    ],
)
def test_the_driver_that_a_ptx_version_needs(ptx, cuda):
    assert minimal_driver(ptx) == cuda
    needed = 1000 * cuda[0] + 10 * cuda[1]
    assert driver_knows(ptx, needed)
    assert not driver_knows(ptx, needed - 10)
    assert driver_knows(ptx, needed + 1000)


def test_the_table_rises_and_a_newer_ptx_needs_a_newer_driver():
    versions = list(MINIMAL_DRIVER.items())
    assert versions == sorted(versions)
    assert [cuda for _, cuda in versions] == sorted({cuda for _, cuda in versions})
    newest = versions[-1][1]
    assert minimal_driver((99, 0)) > newest


def test_an_older_driver_is_named_with_what_to_do(stripped):
    kernel = replace(stripped, ptx_version=(8, 8), triton_version="3.8.0")
    check_driver(kernel, 12090)
    with pytest.raises(RuntimeError) as caught:
        check_driver(kernel, 12040)
    message = str(caught.value)
    for part in (kernel.kernel_name, "PTX 8.8", "CUDA 12.9", "CUDA 12.4", "update the driver", "3.8.0"):
        assert part in message


def test_the_version_of_the_installed_triton_is_in_the_table(kernel):
    assert kernel.ptx_version in MINIMAL_DRIVER, "add the PTX version of this Triton to MINIMAL_DRIVER"


def test_arguments_in_another_order_number_or_type_are_refused(stripped):
    swapped = ("q", "k", "tokens", "cos", "sin", "q_out", "k_out")
    renamed = (*stripped.arguments[:4], "scale", *stripped.arguments[5:])
    for arguments in (swapped, renamed, stripped.arguments[:-1], (*stripped.arguments, "scale")):
        with pytest.raises(ValueError, match="not inputs, tokens and outputs"):
            check_launchable(replace(stripped, arguments=arguments))
    for old, new in ((".u32", ".f32"), (".u32", ".u64"), (".u64", ".u32")):
        with pytest.raises(ValueError, match="parameters of types"):
            check_launchable(replace(stripped, text=stripped.text.replace(f".param {old}", f".param {new}", 1)))
    shorter = re.sub(r",\s*\.param [^,]*_param_6\b", "", stripped.text)
    with pytest.raises(ValueError, match="parameters of types"):
        check_launchable(replace(stripped, text=shorter))


def test_what_tensorrt_cannot_launch_is_refused(kernel, stripped):
    with pytest.raises(ValueError, match="strip_hidden_parameters"):
        check_launchable(kernel)
    with pytest.raises(ValueError, match="float64"):
        check_launchable(replace(stripped, dtype="float64"))
    with pytest.raises(ValueError, match="gfx942"):
        check_launchable(replace(stripped, target="gfx942", ptx_version=None))


@pytest.mark.parametrize(("tokens", "grid"), [(0, 0), (1, 2), (7, 8), (128, 144), (4096, 4608)])
def test_grid_covers_every_vector_once(stripped, tokens, grid):
    """16 heads of 72 bf16 are 144 vectors of 16 bytes, 128 to a program."""
    assert grid_size(stripped, tokens) == grid


def test_more_tokens_than_int32_counts_are_refused(stripped):
    most = (2**31 - 128) // 144
    assert grid_size(stripped, most) > 0
    for tokens in (most + 1, -1):
        with pytest.raises(ValueError, match=f"takes 0 to {most} tokens, not {tokens}"):
            grid_size(stripped, tokens)


def test_arguments_are_packed_in_declared_order(stripped):
    pointers = tuple(16 * number for number in (1, 2, 3, 4, 5, 6))
    values = launch_arguments(stripped, pointers, 77)
    assert [value.value for value in values] == [16, 32, 48, 64, 77, 80, 96]
    assert [memoryview(value).nbytes for value in values] == [8, 8, 8, 8, 4, 8, 8]
    with pytest.raises(ValueError, match="takes 6 addresses, not 5"):
        launch_arguments(stripped, pointers[:-1], 77)
    with pytest.raises(ValueError, match="needs cos at a multiple of 16 bytes: 0x38"):
        launch_arguments(stripped, (16, 32, 56, 64, 80, 96), 77)


def test_source_hash_depends_on_every_source_and_on_triton(monkeypatch, tmp_path):
    folder = tmp_path / "fused_qk_rope"
    folder.mkdir()
    for name in source.SOURCES:
        (folder / name).write_bytes((source.Path(source.__file__).with_name(name)).read_bytes())
    real = source.source_sha256()
    monkeypatch.setattr(source, "__file__", str(folder / "source.py"))
    assert source.source_sha256() == real
    seen = {real}
    for name in source.SOURCES:
        (folder / name).write_bytes((folder / name).read_bytes() + b"#")
        seen.add(source.source_sha256())
    monkeypatch.setattr(source.metadata, "version", lambda _: "0.0")
    seen.add(source.source_sha256())
    assert len(seen) == len(source.SOURCES) + 2
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in seen)


def test_source_hash_covers_every_module_that_a_tensorrt_form_imports():
    """A module that is imported and not hashed would let a changed kernel pass for the old one."""
    folder = source.Path(source.__file__).parent
    pending, reached = ["tensorrt_aot.py", "tensorrt_v3.py", "triton_kernel.py"], set()
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            text = (folder / name).read_text(encoding="utf-8")
            pending += [f"{module}.py" for module in re.findall(r"plugins\.fused_qk_rope\.(\w+) import", text)]
            pending += [f"{module}.py" for module in re.findall(r"from plugins\.fused_qk_rope import (\w+)", text)]
    # arguments.py holds checks of PyTorch tensors, which decide nothing about the kernel
    assert reached - {"arguments.py"} == set(source.SOURCES)
