"""Write a checkpoint with random vision weights in the layout of the hub: for demos and tests without a download.

    python scripts/make_checkpoint.py OUT --preset tiny --seed 0 --shards 3

The folder can then stand for SOURCE in ``kvit-export onnx OUT -o build/``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a fresh clone, before any installation

from model.checkpoint_writer import write_checkpoint
from model.config import PRESETS, parameter_count, preset
from model.errors import InputError
from model.random_weights import random_weights

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write; must not exist, or be empty")
    parser.add_argument("--preset", default="tiny", choices=PRESETS, help="which tower (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="another number of blocks than the preset's")
    parser.add_argument("--outliers", action="store_true", help="four channels 50 times as large")
    parser.add_argument("--shards", type=int, default=1, help="1 writes no index (default: %(default)s)")
    parser.add_argument("--dtype", default="bf16", choices=_DTYPES, help="of the vision tensors (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the checkpoint that the command line describes.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        0, or 3 after one line on stderr.
    """
    options = _arguments(argv)
    try:
        config = preset(options.preset, layers=options.layers)
        weights = random_weights(config, options.seed, options.preset, options.outliers)
        write_checkpoint(weights, options.out, shards=options.shards, dtype=_DTYPES[options.dtype])
    except (InputError, ValueError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 3
    tower, projector = parameter_count(config)
    print(f"{options.out}: {weights.source}, {tower:,} + {projector:,} parameters, shards: {options.shards}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
