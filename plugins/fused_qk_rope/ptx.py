"""What a launcher other than Triton's must know of a PTX text, and the one edit that it needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from plugins.fused_qk_rope.triton_compile import CompiledRope

MINIMAL_DRIVER = {
    (7, 0): (11, 0),
    (7, 1): (11, 1),
    (7, 2): (11, 2),
    (7, 3): (11, 3),
    (7, 4): (11, 4),
    (7, 5): (11, 5),
    (7, 6): (11, 6),
    (7, 7): (11, 7),
    (7, 8): (11, 8),
    (8, 0): (12, 0),
    (8, 1): (12, 1),
    (8, 2): (12, 2),
    (8, 3): (12, 3),
    (8, 4): (12, 4),
    (8, 5): (12, 5),
    (8, 6): (12, 7),
    (8, 7): (12, 8),
    (8, 8): (12, 9),
    (9, 0): (13, 0),
    (9, 1): (13, 1),
    (9, 2): (13, 2),
    (9, 3): (13, 3),
    (9, 4): (13, 4),
}
"""CUDA version of the first driver that reads a PTX version (PTX ISA, release notes, "PTX Release History")."""

_PARAMETER = re.compile(r"\.param\s+\.(?P<type>\w+)\b.*?(?P<name>[\w$]+)\s*", re.DOTALL)


def minimal_driver(ptx_version: tuple[int, int]) -> tuple[int, int]:
    """Return the CUDA version that a driver must have for a PTX version.

    Args:
        ptx_version: ``(major, minor)`` of the ``.version`` line.

    Returns:
        ``(major, minor)`` of CUDA. For a PTX version between or before those in the table that of the next one; for a
        newer one, which came with a newer CUDA, the first version after those in the table.
    """
    for version, cuda in MINIMAL_DRIVER.items():
        if ptx_version <= version:
            return cuda
    major, minor = max(MINIMAL_DRIVER.values())
    return major, minor + 1


def driver_knows(ptx_version: tuple[int, int], driver_version: int) -> bool:
    """Whether a driver reads a PTX version.

    Args:
        ptx_version: ``(major, minor)`` of the ``.version`` line.
        driver_version: as ``cuDriverGetVersion`` counts, 1000 * major + 10 * minor.
    """
    major, minor = minimal_driver(ptx_version)
    return driver_version >= 1000 * major + 10 * minor


def check_driver(kernel: CompiledRope, driver_version: int) -> None:
    """Refuse a driver that is older than the PTX.

    Args:
        kernel: a kernel for an NVIDIA GPU.
        driver_version: as ``cuDriverGetVersion`` counts, 1000 * major + 10 * minor.

    Raises:
        RuntimeError: the driver answers such a kernel with CUDA_ERROR_UNSUPPORTED_PTX_VERSION.
    """
    version = _ptx_version(kernel)
    if not driver_knows(version, driver_version):
        needed = ".".join(map(str, minimal_driver(version)))
        found = f"{driver_version // 1000}.{driver_version % 1000 // 10}"
        raise RuntimeError(
            f"kernel {kernel.kernel_name} is PTX {version[0]}.{version[1]}, which needs an NVIDIA driver of CUDA "
            f"{needed} or later, and this driver is of CUDA {found}: update the driver, or build with a triton older "
            f"than {kernel.triton_version}"
        )


def entry_parameters(text: str, kernel_name: str) -> tuple[tuple[str, str], ...]:
    """Return ``(type, name)`` of every parameter of an entry point, such as ``("u64", "kernel_param_0")``.

    Args:
        text: PTX.
        kernel_name: the entry point.

    Raises:
        RuntimeError: the text has no such entry point, or another one beside it.
    """
    start, end = _parameter_list(text, kernel_name)
    return tuple(_read_parameter(part) for part in text[start:end].split(","))


def strip_hidden_parameters(kernel: CompiledRope, *, check: bool = True) -> CompiledRope:
    """Remove the pointers that Triton appended to the parameters.

    TensorRT passes the declared arguments and no more: some of its versions would have the driver read past their
    array. The pointers are for scratch memory, which this kernel has none of, so nothing reads them. The parameter list
    is the only thing in the text that changes.

    Args:
        kernel: a kernel for an NVIDIA GPU.
        check: assemble the result with the ``ptxas`` that Triton ships.

    Returns:
        The kernel without hidden parameters. ``binary`` is what ``ptxas`` made, and empty without ``check``.

    Raises:
        ValueError: a kernel for another maker's GPU.
        RuntimeError: a hidden parameter is read, the parameters are not those that the kernel declares, or ``ptxas``
            refuses the result.
    """
    _ptx_version(kernel)
    parameters = entry_parameters(kernel.text, kernel.kernel_name)
    declared, hidden = len(kernel.arguments), parameters[len(kernel.arguments) :]
    if len(parameters) != declared + kernel.hidden_parameters:
        raise RuntimeError(
            f"kernel {kernel.kernel_name} has {len(parameters)} parameters in its PTX, not the {declared} that it "
            f"declares and {kernel.hidden_parameters} hidden ones"
        )
    start, end = _parameter_list(kernel.text, kernel.kernel_name)
    rest = kernel.text[end:]
    for kind, name in hidden:
        if not kind.endswith("64") or re.search(rf"{re.escape(name)}\b", rest):
            raise RuntimeError(
                f"kernel {kernel.kernel_name} reads its hidden parameter {name}: it cannot run without it"
            )
    kept = kernel.text[start:end].split(",")[:declared]
    text = kernel.text[:start] + ",".join(kept).rstrip() + "\n" + rest
    return replace(kernel, text=text, hidden_parameters=0, binary=assemble(text, kernel.target) if check else b"")


def assemble(text: str, target: str) -> bytes:
    """Assemble PTX with the ``ptxas`` that Triton ships.

    Args:
        text: PTX.
        target: architecture, such as ``sm_90a``.

    Returns:
        The cubin.

    Raises:
        RuntimeError: Triton has no ``ptxas`` for this version of PTX, or ``ptxas`` refuses the text.
    """
    version = _find_version(text)
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text, encoding="ascii")
        # as Triton does where enable_fp_fusion is off: the kernel rounds as the reference
        command = [_find_ptxas(version), f"--gpu-name={target}", "--fmad=false", str(source), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  Triton's own tool
        if done.returncode:
            raise RuntimeError(f"ptxas refuses the kernel for {target}: {done.stderr.strip()}")
        return result.read_bytes()


def _find_ptxas(ptx_version: tuple[int, int]) -> str:
    """Triton ships one ``ptxas`` for older and one for newer architectures, of different CUDA versions."""
    from triton import knobs

    needed = minimal_driver(ptx_version)
    seen = []
    for name in ("ptxas", "ptxas_blackwell"):
        tool = getattr(knobs.nvidia, name, None)
        if tool is not None:
            seen.append(tool.version)
            if tuple(int(number) for number in tool.version.split(".")) >= needed:
                return str(tool.path)
    raise RuntimeError(
        f"Triton's ptxas is of CUDA {' and '.join(seen) or 'no version'}; PTX {ptx_version} needs {needed}"
    )


def _find_version(text: str) -> tuple[int, int]:
    match = re.search(r"^\.version\s+(\d+)\.(\d+)", text, re.MULTILINE)
    if match is None:
        raise RuntimeError("the text has no .version line, so it is not PTX")
    return int(match[1]), int(match[2])


def _ptx_version(kernel: CompiledRope) -> tuple[int, int]:
    if kernel.ptx_version is None:
        raise ValueError(f"kernel {kernel.kernel_name} is for {kernel.target}, not PTX for an NVIDIA GPU")
    return kernel.ptx_version


def _parameter_list(text: str, kernel_name: str) -> tuple[int, int]:
    """Where the parameter list of the entry point starts and ends, without its parentheses."""
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", text))
    if [entry[1] for entry in entries] != [kernel_name]:
        raise RuntimeError(f"the PTX has entry points {[entry[1] for entry in entries]}, not {kernel_name} alone")
    return entries[0].span(2)


def _read_parameter(declaration: str) -> tuple[str, str]:
    match = _PARAMETER.fullmatch(declaration.strip())
    if match is None:
        raise RuntimeError(f"the PTX declares a parameter in an unknown way: {declaration.strip()!r}")
    return match["type"], match["name"]
