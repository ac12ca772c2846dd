"""The PyTorch operators: which implementation runs, what tracing sees, gradients, and life without Triton."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from plugins.fused_qk_rope import torch_op  # noqa: E402  needs PyTorch
from plugins.fused_qk_rope.torch_op import fused_qk_rope, fused_qk_rope_  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = torch.ops.kvit.fused_qk_rope.default
IN_PLACE = torch.ops.kvit.fused_qk_rope_.default


def problem(tokens=5, heads=3, head_dim=72, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(tokens, 3, heads, head_dim, generator=generator).to(dtype)
    angle = torch.rand(tokens, head_dim // 2, generator=generator) * 6
    return packed[:, 0], packed[:, 1], angle.cos(), angle.sin()


def exact(x, cos, sin):
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())[:, None]).flatten(-2)


def close(result, wanted, dtype):
    # fp32 arithmetic in all dtypes, then one rounding; measured over the whole tensor, so far below its bound
    return (result.double() - wanted).norm() <= (torch.finfo(dtype).eps + 2.0**-22) * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_runs_on_a_cpu(dtype):
    q, k, cos, sin = problem(dtype=dtype)
    rotated = fused_qk_rope(q, k, cos, sin)
    for y, x in zip(rotated, (q, k), strict=True):
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert close(y, exact(x, cos, sin), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_in_place_writes_q_and_k_alone(dtype):
    q, k, cos, sin = problem(dtype=dtype)
    v = torch.ones_like(q)
    packed = torch.stack((q, k, v), 1)
    result = fused_qk_rope_(packed[:, 0], packed[:, 1], cos, sin)
    assert result is None
    assert close(packed[:, 0], exact(q, cos, sin), dtype)
    assert close(packed[:, 1], exact(k, cos, sin), dtype)
    assert torch.equal(packed[:, 2], v)


@pytest.mark.parametrize("operator", [OPERATOR, IN_PLACE], ids=str)
def test_is_registered_as_pytorch_demands(operator):
    for dtype in (torch.float32, torch.bfloat16):
        results = torch.library.opcheck(operator, problem(dtype=dtype))
        assert set(results.values()) == {"SUCCESS"}


def test_in_place_counts_as_a_change_and_survives_inference_mode():
    q, k, cos, sin = (x.clone() for x in problem())
    versions = q._version, k._version, cos._version
    fused_qk_rope_(q, k, cos, sin)
    assert q._version > versions[0]
    assert k._version > versions[1]
    assert cos._version == versions[2]
    with torch.inference_mode():
        fused_qk_rope_(*(x.clone() for x in (q, k, cos, sin)))


def test_in_place_refuses_memory_that_would_be_rotated_twice():
    q, k, cos, sin = problem()
    with pytest.raises(ValueError, match="same memory"):
        fused_qk_rope_(q, q, cos, sin)
    with pytest.raises(ValueError, match="expanded"):
        fused_qk_rope_(q, k[:, :1].expand_as(k), cos, sin)


def test_gradients_are_those_of_the_rotation():
    q, k, cos, sin = problem(3, 2, 8)
    weights = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(2))
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    rotated = fused_qk_rope(*leaves, cos, sin)
    gradients = torch.autograd.grad((torch.stack(rotated) * weights).sum(), leaves)
    for gradient, weight in zip(gradients, weights, strict=True):
        # the derivative of a product with a fixed complex number is the product with its conjugate
        assert close(gradient, exact(weight, cos, -sin), torch.float32)


def test_gradients_survive_compilation():
    q, k, cos, sin = problem(3, 2, 8)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()

    def loss(q, k):
        a, b = fused_qk_rope(q, k, cos, sin)
        return (a * a * a).sum() + (b * torch.arange(8.0)).sum()

    wanted = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for gradient, other in zip(torch.autograd.grad(compiled(*leaves), leaves), wanted, strict=True):
        assert torch.equal(gradient, other)


def test_a_gradient_is_never_lost_without_a_word():
    q, k, cos, sin = problem()
    q = q.clone().requires_grad_()
    for call in (OPERATOR, fused_qk_rope_):
        with pytest.raises(RuntimeError, match="carries no gradient"):
            call(q, k, cos, sin)
    with pytest.raises(RuntimeError, match="no gradient with respect to cos"):
        fused_qk_rope(q, k, cos.clone().requires_grad_(), sin)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(24, 3 * 3 * 8)

    def forward(self, x, cos, sin):
        q, k, v = self.projection(x).unflatten(1, (3, 3, 8)).unbind(1)
        q, k = fused_qk_rope(q, k, cos, sin)
        return q * k + v


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operator_although_weights_need_gradients(strict):
    tokens = torch.export.Dim("tokens", min=2)
    arguments = torch.randn(5, 24), torch.randn(5, 4), torch.randn(5, 4)
    program = torch.export.export(
        Layer(), arguments, dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}), strict=strict
    )
    for graph in (program.graph, program.run_decompositions().graph):
        targets = [node.target for node in graph.nodes if node.op == "call_function"]
        assert targets.count(OPERATOR) == 1
        assert not any("grad" in str(target) for target in targets)


def test_compiles_as_one_graph_with_both_operators():
    def step(x, cos, sin):
        packed = (x + 1).unflatten(1, (3, 3, 72))
        fused_qk_rope_(packed[:, 0], packed[:, 1], cos, sin)
        return fused_qk_rope(packed[:, 1], packed[:, 2], cos, sin)[0] * packed[:, 0]

    x = torch.randn(5, 648, generator=torch.Generator().manual_seed(1))
    _, _, cos, sin = problem()
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x, cos, sin), step(x, cos, sin))


def test_fake_tensors_are_checked_and_contiguous():
    q, k, cos, sin = (x.to("meta") for x in problem(dtype=torch.bfloat16))
    result = fused_qk_rope(q, k, cos, sin)
    assert [x.shape for x in result] == [q.shape, k.shape]
    assert result[0].is_contiguous()
    assert result[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="cos and sin must be"):
        fused_qk_rope(q, k, cos[:2], sin)


def test_refuses_wrong_arguments_by_name():
    q, k, cos, sin = problem()
    with pytest.raises(ValueError, match="even d"):
        fused_qk_rope(q[..., :71], k[..., :71], cos, sin)
    with pytest.raises(ValueError, match="q and k must both be"):
        fused_qk_rope(q, k[:2], cos, sin)
    with pytest.raises(ValueError, match="one device"):
        fused_qk_rope(q, k.to("meta"), cos, sin)
    with pytest.raises(TypeError, match="share one of"):
        fused_qk_rope(q, k.half(), cos, sin)
    with pytest.raises(TypeError, match="float64"):
        fused_qk_rope(q.double(), k.double(), cos, sin)
    with pytest.raises(TypeError, match="cos and sin must be float32"):
        fused_qk_rope(q, k, cos.double(), sin.double())


def run_python(code, **environment):
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_importing_and_calling_on_a_cpu_does_not_import_triton():
    code = (
        "import sys, torch; from plugins.fused_qk_rope.torch_op import fused_qk_rope; x = torch.ones(2, 1, 4);"
        "fused_qk_rope(x, x, torch.ones(2, 2), torch.ones(2, 2)); print('triton' in sys.modules)"
    )
    assert run_python(code) == "False"


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "plugins.fused_qk_rope.triton_kernel", raising=False)
    torch_op._triton_form.cache_clear()
    yield
    torch_op._triton_form.cache_clear()


@pytest.mark.usefixtures("without_triton")
def test_without_triton_a_gpu_runs_the_reference_and_warns_once():
    q, k, cos, sin = problem()
    with pytest.warns(RuntimeWarning, match="pip install triton"):
        first = torch_op._rotate_on_gpu(q, k, cos, sin)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = torch_op._rotate_on_gpu(q, k, cos, sin)
        packed = torch.stack((q, k), 1)
        torch_op._rotate_in_place_on_gpu(packed[:, 0], packed[:, 1], cos, sin)
    assert close(first[0], exact(q, cos, sin), torch.float32)
    assert torch.equal(again[0], first[0])
    assert torch.equal(packed[:, 1], first[1])


def test_with_triton_a_gpu_runs_the_kernel(monkeypatch):
    calls = []

    def kernel(q, k, cos, sin, **options):
        calls.append(options)
        return q, k

    monkeypatch.setattr(torch_op, "_triton_form", lambda: kernel)
    q, k, cos, sin = (x.clone() for x in problem())
    assert torch_op._rotate_on_gpu(q, k, cos, sin)[0] is q
    versions = q._version, k._version
    torch_op._rotate_in_place_on_gpu(q, k, cos, sin)
    assert calls == [{}, {"inplace": True}]
    # autograd must notice the change, although no PyTorch operation made it
    assert (q._version, k._version) == (versions[0] + 1, versions[1] + 1)


def test_the_gpu_key_has_an_implementation_of_its_own():
    for name in ("kvit::fused_qk_rope", "kvit::fused_qk_rope_"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd")
        registered = torch._C._dispatch_dump_table(name)
        kernels = {line.split(":")[0]: line.split(":", 1)[1] for line in registered.splitlines() if ":" in line}
        assert "[kernel]" in kernels["CUDA"]
        assert "default backend kernel" in kernels["CPU"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so nothing is missing")
def test_the_kernel_itself_refuses_a_cpu():
    pytest.importorskip("triton", reason="Triton is not installed")
    from plugins.fused_qk_rope.triton_kernel import fused_qk_rope_triton

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("under the interpreter a CPU is what it runs on")
    with pytest.raises(ValueError, match="on a CUDA or ROCm device, got cpu"):
        fused_qk_rope_triton(*problem())
