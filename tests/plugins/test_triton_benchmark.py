"""The benchmark script where there is no GPU, its arithmetic, and the results that are kept in the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from scripts.bench_rope import SKETCH_US, VLLM_GRID, summarise  # noqa: E402  needs PyTorch
from scripts.rope_bench import report  # noqa: E402
from scripts.rope_bench.cases import Problem  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "rope-h200.json"
SIZES = ROOT / "benchmarks" / "results" / "rope-h200-launch-sizes.json"


def run_script(*arguments):
    command = [sys.executable, "scripts/bench_rope.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_exits_8_and_says_why_in_one_line(tmp_path):
    done = run_script("--output", tmp_path / "new.json")
    assert done.returncode == 8
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []


def timing(median):
    return {"median_us": median, "min_us": median - 1, "max_us": median + 1, "replays": 3}


def test_a_row_compares_with_the_best_copy_and_the_best_pair():
    tokens, heads, head_dim = 1024, 16, 72
    q, cos = torch.zeros(tokens, heads, head_dim, dtype=torch.bfloat16), torch.zeros(tokens, head_dim // 2)
    problem = Problem(tokens, heads, head_dim, "bfloat16", [(q, q, cos, cos, q, q)], [])
    times = {
        "fused": timing(10.0),
        "fused, no dependent launch": timing(12.0),
        "native": timing(50.0),
        "copy: 64 threads, no dependent launch": timing(11.5),
        "copy: 128 threads, no dependent launch": timing(11.0),
        "copy: 128 threads, dependent launch": timing(9.0),
        "two launches: 128 threads, no dependent launch": timing(20.0),
        "two launches: 256 threads, dependent launch": timing(15.0),
    }
    row = summarise(problem, times, {"fused": timing(9.5), "fused, no dependent launch": timing(11.0)})
    assert row["ratio_to_copy"] == 9.0 / 10.0
    assert row["ratio_to_copy_plain"] == 11.0 / 12.0
    assert row["speedup_to_native"] == 5.0
    assert row["speedup_to_two_launches"] == 1.5
    assert row["copy"]["what"] == "copy: 128 threads, dependent launch"
    # q and k read and written in 2 bytes, cos and sin read in 4
    assert row["bytes"] == 4 * 1024 * 16 * 72 * 2 + 2 * 1024 * 36 * 4
    assert row["fused"]["gb_per_s"] == pytest.approx(row["bytes"] / 10e-6 / 1e9)
    assert row["sketch_us"] == 4.51


@pytest.fixture(scope="module")
def kept():
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_kept_results_say_where_they_come_from(kept):
    assert kept["gpu"] == "NVIDIA H200"
    for key in ("date", "command", "torch", "triton", "cuda", "multiprocessors", "copy_gb_per_s", "method"):
        assert kept[key]
    assert kept["method"]["rotated_bytes"] > 3 * kept["l2_bytes"]
    shapes = {(row["tokens"], row["heads"], row["head_dim"], row["dtype"]) for row in kept["rows"]}
    assert shapes >= set(VLLM_GRID)
    assert {row["head_dim"] for row in kept["rows"]} == {64, 72, 80, 96, 128}


def test_the_kept_results_meet_what_the_kernel_was_required_to_reach(kept):
    large = 4 * 4096 * 16 * 72 * 2
    checked = 0
    for row in kept["rows"]:
        assert row["speedup_to_two_launches"] > 1
        if row["bytes"] >= large:
            assert row["ratio_to_copy"] >= 0.92
            assert row["ratio_to_copy_plain"] >= 0.92
            checked += 1
        sketch = SKETCH_US.get((row["tokens"], row["heads"], row["head_dim"]))
        if sketch and row["dtype"] == "bfloat16":
            assert row["fused"]["median_us"] < sketch
            checked += 1
        # no number that bandwidth makes impossible
        assert row["fused"]["gb_per_s"] < 1.02 * kept["copy_gb_per_s"]
    assert checked >= len(SKETCH_US) + 8


def test_the_launch_size_is_within_2_percent_of_the_best_measured():
    sweep = json.loads(SIZES.read_text(encoding="utf-8"))["sweep"]
    assert len(sweep) == 34
    for row in sweep:
        times = row["threads_x_vectors_us"]
        assert times["128x1"] <= 1.02 * min(times.values())


def test_tables_hold_every_row(kept):
    text = report.tables(kept)
    for row in kept["rows"]:
        assert f"**{row['fused']['median_us']:.2f}**" in text
    lines = sum(line.startswith("|") for line in text.splitlines())
    # two tables of shapes, one of layers, one of five host calls; each with a header and a rule
    assert lines == 2 * len(kept["rows"]) + len(kept["layers"]) + 5 + 4 * 2
    assert "shipped" in report.tables(json.loads(SIZES.read_text(encoding="utf-8")))


def test_the_documents_hold_the_numbers_that_were_kept(kept):
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("benchmarks*.md"))
    for line in report.tables(kept).splitlines():
        assert line in text


def test_draws_a_picture(kept, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the picture was NOT drawn")
    report.draw(kept, tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["roof.png"]
