"""``get_rope_shape`` on a real GPU: compiled by PyTorch's own compiler, once, with the values of the eager form."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: get_rope_shape was NOT compiled")

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU here: get_rope_shape was NOT compiled on hardware"),
]
if HAS_GPU:
    pytest.importorskip("triton", reason="Triton is not installed: get_rope_shape was NOT compiled")

from torch._dynamo.utils import counters  # noqa: E402

from model import platform  # noqa: E402
from model.position import get_rope_shape  # noqa: E402
from model.tower import build_tower  # noqa: E402
from tests.model.reference import resample  # noqa: E402
from tests.model.samples import UNIT_SCALE, largest_error, run, tower_of, weights_of  # noqa: E402

GRIDS = [(2, 2), (6, 512), (512, 6), (36, 46), (64, 64), (46, 36), (2, 512), (100, 100), (46, 46), (8, 64)]
ONE_SIDED = [(1, 46), (46, 1), (1, 1)]
# Source coordinates of up to 64 carry half an ulp of 3.8e-6 in fp32, two or three of them, on each axis; times a slope
# of the kernel below 1.5 and values up to 4.5. PyTorch's own CPU kernel is off float64 by 2.1e-5 on this very table;
# another may contract a * b + c or keep the scale in fp64.
RESAMPLED = 1e-4
# The same errors in the weights (eager fp32 on a CPU is off float64 by 3e-6), and atomic additions in any order.
GRADIENT = 3e-5


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(platform.ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(platform, "_READY", {})
    torch._dynamo.reset()


def table_of(width=8, dtype=None, requires_grad=False):
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(64, 64, width, generator=generator).to("cuda", dtype or torch.float32)
    return torch.nn.Parameter(table, requires_grad=requires_grad)


def compilations():
    """Graphs that torch.compile has made in this process."""
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_no_grid_compiles_after_the_first_and_all_equal_eager(mode, requires_grad, nothing_compiled):
    table = table_of(requires_grad=requires_grad)
    exact_table = table.detach().double().cpu().numpy()
    before = compilations()
    get_rope_shape(table, mode, (36, 46))
    assert compilations() == before + 1
    for grid in GRIDS + ONE_SIDED:
        ours = get_rope_shape(table, mode, grid)
        eager = get_rope_shape(table, mode, grid, compile=False)
        assert ours.shape == eager.shape
        assert ours.requires_grad == requires_grad
        assert (ours - eager).abs().max() <= RESAMPLED
        exact = torch.as_tensor(resample(exact_table, mode, *grid)).flatten(0, 1)
        assert (ours.detach().double().cpu() - exact).abs().max() <= RESAMPLED
        if requires_grad:
            weights = torch.randn(ours.shape, device="cuda")
            (mine,) = torch.autograd.grad((ours * weights).sum(), table)
            (wanted,) = torch.autograd.grad((eager * weights).sum(), table)
            assert (mine - wanted).norm() <= GRADIENT * wanted.norm()
    assert compilations() == before + 1
    assert len(platform._READY) == 1


@pytest.mark.slow
def test_gradient_mode_compiles_once_more_and_real_width_is_right(nothing_compiled):
    table = table_of(width=1152, dtype=torch.bfloat16)
    before = compilations()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            get_rope_shape(table, "bilinear", (2, 2))
            once = compilations()
            for grid in [*GRIDS, (512, 512)]:
                ours = get_rope_shape(table, "bilinear", grid)
                assert ours.dtype == torch.float32
                assert (ours - get_rope_shape(table, "bilinear", grid, compile=False)).abs().max() <= RESAMPLED
            assert compilations() == once
    assert compilations() == before + 2


def test_switched_off_by_variable_argument_or_pytorch_itself(monkeypatch, nothing_compiled):
    table, before = table_of(), compilations()
    get_rope_shape(table, "bicubic", (4, 6), compile=False)
    with torch._dynamo.config.patch(disable=True):
        get_rope_shape(table, "bicubic", (4, 6))
    monkeypatch.setenv(platform.ENVIRONMENT_VARIABLE, "0")
    get_rope_shape(table, "bicubic", (4, 6))
    assert compilations() == before
    assert platform._READY == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_tower_on_a_gpu_equals_the_cpu_and_new_grids_compile_nothing(name, nothing_compiled):
    tower = build_tower(weights_of(name), device="cuda")
    batches = [[(1, 4, 6)], [(1, 6, 4)], [(1, 36, 46)], [(3, 4, 6)], [(1, 2, 2), (2, 12, 8)], [(1, 6, 512)]]
    before = compilations()
    with torch.no_grad():
        for grids in batches:
            rows = [part.cpu() for part in run(tower, grids)]
            assert largest_error(rows, run(tower_of(name), grids)) <= UNIT_SCALE
            assert compilations() == before + 1


@pytest.mark.slow
def test_cuda_graphs_record_it_warm_and_cold(nothing_compiled):
    table = table_of()
    eager = get_rope_shape(table, "bilinear", (36, 46), compile=False)
    cold = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(cold):
        recorded = get_rope_shape(table, "bilinear", (36, 46))
    assert platform._READY == {}, "nothing can be compiled while a graph is recorded"
    recorded.fill_(float("nan"))
    cold.replay()
    assert torch.equal(recorded, eager)
    with torch.no_grad():
        get_rope_shape(table, "bilinear", (36, 46))
        assert len(platform._READY) == 1
        warm = torch.cuda.CUDAGraph()
        with torch.cuda.graph(warm):
            recorded = get_rope_shape(table, "bilinear", (36, 46))
    recorded.fill_(float("nan"))
    warm.replay()
    assert (recorded - eager).abs().max() <= RESAMPLED
