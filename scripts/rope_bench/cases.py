"""The tensors of one row of the benchmark, and what is run on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plugins.fused_qk_rope.launch_plan import LAUNCH, LaunchConfig, LaunchPlan, plan_launch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Problem:
    """Tensors of one row: so many sets that together they are several times the L2 cache."""

    tokens: int
    heads: int
    head_dim: int
    dtype: str
    sets: list[tuple[Tensor, ...]]  # (q, k, cos, sin, q_out, k_out)
    freqs: list[Tensor]  # complex64, for the native form

    @property
    def bytes_moved(self) -> int:
        """Bytes that must move: q and k read and written, cos and sin read."""
        q, _, cos, *_ = self.sets[0]
        return 4 * q.numel() * q.element_size() + 2 * cos.numel() * cos.element_size()

    def plan(self, config: LaunchConfig = LAUNCH) -> LaunchPlan:
        """The launch that the operator would make, or one with other launch sizes."""
        q = self.sets[0][0]
        strides = tuple(x.stride() for x in self.sets[0][:4])
        return plan_launch((self.tokens, self.heads, self.head_dim), strides, q.element_size(), config)


def make_problem(shape: tuple[int, int, int, str], rotated_bytes: int, *, same_outputs: bool) -> Problem:
    """Random q and k as views of packed projections [tokens, 3, heads, d], with the angles' cosines and sines."""
    import torch

    tokens, heads, head_dim, name = shape
    dtype = getattr(torch, name)
    element = tokens * heads * head_dim * dtype.itemsize
    per_set = (2 if same_outputs else 4) * element + tokens * head_dim * 4
    problem = Problem(tokens, heads, head_dim, name, [], [])
    outputs = tuple(torch.empty(tokens, heads, head_dim, dtype=dtype, device="cuda") for _ in range(2))
    for _ in range(max(3, -(-rotated_bytes // per_set))):
        packed = torch.randn(tokens, 3, heads, head_dim, device="cuda").to(dtype)
        angles = torch.rand(tokens, head_dim // 2, device="cuda") * 6.3
        out = outputs if same_outputs else tuple(torch.empty_like(x) for x in outputs)
        problem.sets.append((packed[:, 0], packed[:, 1], angles.cos(), angles.sin(), *out))
        problem.freqs.append(torch.polar(torch.ones_like(angles), angles))
    return problem


def native(q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation as one complex multiplication, the form that the fused kernel replaces."""
    import torch

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs.unsqueeze(-2)).flatten(-2).type_as(x)

    return rotate(q), rotate(k)


def prepare_fused(problem: Problem, *, dependent: bool, config: LaunchConfig = LAUNCH) -> Callable[[int], None]:
    """The fused kernel as the operator launches it, or with other launch sizes."""
    from plugins.fused_qk_rope import triton_kernel

    plan, device = problem.plan(config), problem.sets[0][0].get_device()
    flags = (False, dependent and triton_kernel.launches_dependently(device))
    prepared = triton_kernel.PreparedLaunch(plan, (*plan.constants, *flags), device)
    return lambda i: triton_kernel.launch(problem.sets[i], prepared)


def contenders(problem: Problem) -> dict[str, Callable[[int], Any]]:
    """Everything that one row compares, by name; the best of the copies and of the pairs of launches is taken later."""
    import torch

    from plugins.fused_qk_rope import triton_kernel
    from scripts.rope_bench import kernels as baselines

    sets, plan = problem.sets, problem.plan()
    steps: dict[str, Callable[[int], Any]] = {
        "fused": prepare_fused(problem, dependent=True),
        "fused, no dependent launch": prepare_fused(problem, dependent=False),
        "native": lambda i: native(sets[i][0], sets[i][1], problem.freqs[i]),
    }
    modes = sorted({False, triton_kernel.launches_dependently(torch.cuda.current_device())})
    for dependent in modes:
        for threads in (64, 128, 256):
            copy = baselines.Baseline(baselines.copy_kernel, threads, dependent)
            steps[f"copy: {copy.label}"] = lambda i, copy=copy: copy.copy(sets[i], plan)  # type: ignore[misc]
        for threads in (128, 256):
            pair = baselines.Baseline(baselines.one_tensor_kernel, threads, dependent)
            steps[f"two launches: {pair.label}"] = lambda i, pair=pair: pair.rotate_twice(sets[i], plan)  # type: ignore[misc]
    return steps


def check_outputs(problem: Problem, name: str, step: Callable[[int], Any]) -> None:
    """Refuse to time what computes something else: compare with float64 where it rotates, with q and k where it copies.

    Raises:
        RuntimeError: an element was not written, or is wrong.
    """
    import torch

    from plugins.fused_qk_rope.reference import fused_qk_rope_reference

    q, k, cos, sin, *out = problem.sets[0]
    for x in out:
        x.fill_(float("nan"))
    result = step(0) or out
    wanted = (
        (q, k)
        if name.startswith("copy")
        else fused_qk_rope_reference(q.double(), k.double(), cos.double(), sin.double())
    )
    allowed = torch.finfo(q.dtype).eps + 2**-22
    for x, y in zip(result, wanted, strict=True):
        if not bool((x.double() - y.double()).norm() <= allowed * y.double().norm()):
            raise RuntimeError(f"{name} is wrong at {problem.tokens} x {problem.heads} x {problem.head_dim}")
