"""A real photo through a Kimi vision tower in PyTorch, the same tower as ONNX, and ONNX Runtime giving the same rows.

    python scripts/demo.py [--full] [--image FILE]

``--full`` takes the real size of Kimi-K2.5 instead of the tiny tower. The weights are random, drawn from a seed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"


def main() -> int:
    """Run the demo; returns the exit code of the export, 0 if the verdict is PASS."""
    parser = argparse.ArgumentParser(description="Kimi vision tower: photo -> PyTorch -> ONNX -> ONNX Runtime")
    parser.add_argument("--full", action="store_true", help="the real size of Kimi-K2.5 (466 M parameters)")
    parser.add_argument("--image", type=Path, help="a photo of your own")
    arguments = parser.parse_args()
    source = "random:kimi-k2.5?seed=0" if arguments.full else "random:tiny?seed=0"
    folder = OUT / ("kimi-k2.5" if arguments.full else "tiny")
    start = time.monotonic()

    photo = show_photo(source, arguments.image)
    print(f"\n== 2. The same tower to ONNX with the FusedQKRope operator: kvit-export onnx '{source}' -o {folder.name}")
    # cases of 4096 patches take their time; the demo leaves those to a plain `kvit-export onnx`
    limit = ["--max-patches", "512"]
    image = ["--image", str(arguments.image)] if arguments.image else []
    code = kvit("onnx", source, "-o", str(folder), "--force", *limit, *image)
    if code:
        return code
    print("\n== 3. ONNX Runtime on that photo")
    compare_rows(folder / "vision_tower.onnx", photo)
    print("\n== 4. Is it fit to ship? kvit-export verify")
    code = kvit("verify", str(folder))
    print(
        f"\n{time.monotonic() - start:.0f} s in all; look around with: kvit-export inspect {folder.relative_to(ROOT)}"
    )
    return code


def kvit(*arguments: str) -> int:
    """Run the installed command line."""
    program = Path(sys.executable).with_name("kvit-export")
    return subprocess.run([str(program), *arguments], check=False).returncode


@dataclass(frozen=True)
class PhotoRows:
    """A photo's patches and what PyTorch makes of them: pixels [1, patches, 588], grid [1, 2], rows [rows, width]."""

    pixels: NDArray[Any]
    grid: NDArray[Any]
    reference: NDArray[Any]
    native: NDArray[Any]


def show_photo(source: str, image: Path | None) -> PhotoRows:
    """Run PyTorch on the photo, in fp32 and in bf16."""
    import torch

    from exporter.validation.record import default_photo, preprocess_rule
    from model.checkpoint import open_source
    from model.preprocess import load_image, preprocess
    from model.tower import build_tower

    path = image or default_photo()
    weights = open_source(source)
    pixels, grid = preprocess(path, preprocess_rule(weights))
    photo = load_image(path)
    print(f"== 1. {path.name}, {photo.width}x{photo.height} pixels -> {grid[1]}x{grid[2]} patches, in PyTorch")
    rounded, thws = torch.from_numpy(pixels).to(torch.bfloat16), torch.from_numpy(grid).unsqueeze(0)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        tower = build_tower(weights, dtype=dtype)
        start = time.monotonic()
        with torch.inference_mode():
            rows.append(tower(rounded, thws)[0].float().numpy())
        name = str(dtype).removeprefix("torch.")
        print(f"   {name:<9} {rows[-1].shape[0]} rows of {rows[-1].shape[1]} in {time.monotonic() - start:.2f} s")
        del tower
    patches = rounded.float().numpy().reshape(1, len(pixels), -1)
    return PhotoRows(patches, grid[1:].reshape(1, 2), rows[0], rows[1])


def compare_rows(model: Path, photo: PhotoRows) -> None:
    """Run the exported file on the photo and print its error beside PyTorch's own."""
    import numpy as np

    from exporter.validation.backends import OrtBackend

    with OrtBackend(model) as backend:
        rows = backend.run(photo.pixels, photo.grid)
        print(f"   {backend.describe()}")
    size = np.linalg.norm(photo.reference)
    print(f"   relative L2 error against PyTorch fp32: {np.linalg.norm(rows - photo.reference) / size:.2e}")
    print(f"   PyTorch's own in bfloat16:              {np.linalg.norm(photo.native - photo.reference) / size:.2e}")


if __name__ == "__main__":
    sys.exit(main())
