"""The build itself, in a process of its own: parse, configure, build, write. Started by `exporter.trt.child`."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.errors import BuildFailed, MissingRequirement, one_line
from exporter.files import write_bytes
from exporter.tools import Clock, peak_memory
from exporter.trt import flavor as flavors
from exporter.trt.flavor import Flavor
from exporter.trt.job import BuildJob, Built, Phase
from exporter.validation.backends import INPUTS, OUTPUT
from exporter.validation.gpu import cuda_driver_version
from model.config import PATCH_VALUES
from plugins.fused_qk_rope.description import FUSED_QK_ROPE

if TYPE_CHECKING:
    from plugins.fused_qk_rope.triton_compile import CompiledRope

Trt = Any  # the tensorrt module has no annotations

# One name per function body and call is TensorRT's own bookkeeping; every export has as many as layers.
_NOISE = ("already exists, the output tensors of this new instance will not be queryable",)
_WIDE_PRODUCTS = (
    "TensorRT 8 sums half-precision products in half precision, with five times the error of PyTorch's; so they are "
    "computed in TF32, which holds their operands exactly, and the engine stores its weights in fp32"
)


def serve(connection: Connection) -> None:
    """Take one `BuildJob`, send `Phase` messages and at last `Built`.

    Raises:
        BuildFailed, MissingRequirement: sent to the parent by `exporter.trt.child`.
    """
    job = connection.recv()
    found = flavors.installed(job.flavor)
    if found is None:
        raise MissingRequirement(f"{job.flavor} is not installed")
    connection.send(_Build(job, found, connection).run())


class _Build:
    def __init__(self, job: BuildJob, flavor: Flavor, connection: Connection) -> None:
        self.job, self.flavor, self.trt = job, flavor, flavor.module
        self.connection = connection
        self.log = make_logger(self.trt)
        self.clock = Clock()

    def run(self) -> Built:
        try:
            builder = self.trt.Builder(self.log)
        except TypeError as error:  # what the bindings make of a null pointer
            raise MissingRequirement(
                f"{self.flavor} cannot start: {self.log.first_error()}; check nvidia-smi"
            ) from error
        with self.step("parse"):
            self._prepare_plugin()
            network, pinned = self._parse(builder)
        layers = _layer_types(network)
        self._check_plugins(layers)
        self._check_products(layers)
        self._check_inputs(network)
        with self.step("build"):
            self._build(builder, network, self._configure(builder))
        warnings = tuple(dict.fromkeys([*self.log.warnings, *([_WIDE_PRODUCTS] if pinned else [])]))
        return Built(warnings, layers, _plugin_layers(layers), pinned, self.clock.seconds, peak_memory())

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        self.connection.send(Phase(name))
        with self.clock.step(name):
            yield

    # ----------------------------------------------------------------------------------------------------- the network

    def _prepare_plugin(self) -> None:
        if self.job.plugin is None:
            return
        try:
            from plugins.fused_qk_rope import tensorrt_aot, tensorrt_v3
            from plugins.fused_qk_rope.ptx import strip_hidden_parameters
            from plugins.fused_qk_rope.tensorrt_kernels import forget_errors
            from plugins.fused_qk_rope.triton_compile import compile_ptx

            job = self.job
            kernel = strip_hidden_parameters(
                compile_ptx(
                    job.dtype,
                    job.head_dim,
                    job.plugin_target,
                    heads=job.heads,
                    ptx_version=_oldest_ptx(job.plugin_target),
                ),
                check=True,
            )
        except ModuleNotFoundError as error:
            raise MissingRequirement(
                f"the plugin's kernel is compiled with {error.name}, which is not installed; pip install {error.name}, "
                "or pass --no-plugin to build the RoPE from elementary operators"
            ) from error
        self._check_driver(kernel)
        forget_errors()
        if job.plugin == "aot":
            tensorrt_aot.register_aot(self.trt, kernel)
            return
        if self.flavor.name == "tensorrt_rtx":
            from exporter.trt.rtx_library import make_rtx_library_resolvable

            if not make_rtx_library_resolvable():
                raise BuildFailed(f"{self.flavor} aborts at a plugin on this system; pass --no-plugin")
        tensorrt_v3.register_v3(self.trt, kernel)

    def _check_driver(self, kernel: CompiledRope) -> None:
        """Where the engine will run here, refuse a kernel in a PTX that the driver does not know."""
        from plugins.fused_qk_rope.ptx import check_driver

        version = cuda_driver_version()
        if version is None or not self.flavor.needs_gpu:
            return
        try:
            check_driver(kernel, version)
        except RuntimeError as error:
            raise MissingRequirement(f"{error}; or pass --no-plugin") from error

    def _parse(self, builder: Any) -> tuple[Any, int]:  # noqa: ANN401
        trt, flags = self.trt, self.trt.NetworkDefinitionCreationFlag
        if self.flavor.strongly_typed:
            bits = 1 << int(flags.STRONGLY_TYPED)
            if self.job.plugin == "aot":
                bits |= 1 << int(flags.PREFER_AOT_PYTHON_PLUGINS)
            network = builder.create_network(bits)
            self._parse_file(trt.OnnxParser(network, self.log), Path(self.job.onnx))
            _allow_plain_attention(trt, network)
            return network, 0
        from exporter.passes.trt86 import lower_for_trt86

        network = builder.create_network(1 << int(flags.EXPLICIT_BATCH))
        folder = Path(self.job.engine).parent / ".lowered"
        folder.mkdir()
        lowered = lower_for_trt86(Path(self.job.onnx), folder)
        self._parse_file(trt.OnnxParser(network, self.log), lowered.path)
        pinned = 0
        if self.job.dtype == "float16":
            pinned = _pin_float32(trt, network, lowered.float32_nodes)
        return network, pinned

    def _parse_file(self, parser: Any, path: Path) -> None:  # noqa: ANN401
        # by its path, since weights are looked up beside the file and otherwise in the working directory
        if not parser.parse_from_file(str(path)):
            raise BuildFailed(f"{self.flavor} cannot parse {path.name}: {self._parser_error(parser)}")

    def _parser_error(self, parser: Any) -> str:  # noqa: ANN401
        if parser.num_errors == 0:
            return str(self.log.first_error())
        first = parser.get_error(0)
        name, operator = (getattr(first, key, lambda: "")() for key in ("node_name", "node_operator"))
        where = f"node {name} ({operator}): " if name or operator else f"node number {first.node()}: "
        hint = ""
        if operator == FUSED_QK_ROPE.onnx_name:
            hint = (
                f"; it needs the plugin {FUSED_QK_ROPE.onnx_name}, version {FUSED_QK_ROPE.version}, namespace "
                f"{FUSED_QK_ROPE.domain}: export again with this kvit-export, whose graphs also work without it"
            )
        return f"{where}{one_line(first.desc())[:300]}{hint}"

    def _check_plugins(self, layers: dict[str, int]) -> None:
        expected = self.job.plugin_layers if self.job.plugin is not None else 0
        found = _plugin_layers(layers)
        if found == expected:
            return
        reason = self._plugin_error() or "TensorRT took the function in the model instead and said nothing"
        raise BuildFailed(
            f"{found} of {expected} RoPE nodes became plugin layers of {self.flavor} ({reason}); pass --no-plugin to "
            "build without the plugin"
        )

    def _check_products(self, layers: dict[str, int]) -> None:
        """Refuse an engine whose products are not in the precision that was asked for."""
        wide = layers.get("MATRIX_MULTIPLY FLOAT", 0)
        if self.flavor.strongly_typed and self.job.dtype != "float32" and wide:
            raise BuildFailed(f"{wide} products of a {self.job.dtype} model are fp32 in {self.flavor}; report this")

    def _plugin_error(self) -> str:
        if self.job.plugin != "v3":
            return ""
        from plugins.fused_qk_rope.tensorrt_kernels import last_error

        error = last_error()
        return "" if error is None else one_line(str(error))[:200]

    def _check_inputs(self, network: Any) -> None:  # noqa: ANN401
        names = [network.get_input(i).name for i in range(network.num_inputs)]
        outputs = [network.get_output(i).name for i in range(network.num_outputs)]
        if set(names) != set(INPUTS) or outputs != [OUTPUT]:
            raise BuildFailed(f"the parsed network takes {names} and gives {outputs}; export it with kvit-export onnx")
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            if tensor.is_shape_tensor:
                raise BuildFailed(f"{tensor.name} became a shape input in {self.flavor}; report this")

    # ------------------------------------------------------------------------------------------------------- the build

    def _configure(self, builder: Any) -> Any:  # noqa: ANN401
        trt, job = self.trt, self.job
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)  # fp32 means fp32; it is on by default
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if job.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace)
        if job.opt_level is not None:
            config.builder_optimization_level = job.opt_level
        if not self.flavor.strongly_typed:
            _configure_weak_types(trt, config, job.dtype)
        if job.targets:
            members = flavors.capability_targets(trt)
            config.num_compute_capabilities = len(job.targets)
            for index, target in enumerate(job.targets):
                config.set_compute_capability(members[target], index)
        for profile in job.profiles:
            config.add_optimization_profile(_profile(builder, profile))
        if hasattr(trt, "IProgressMonitor"):
            config.progress_monitor = _monitor(trt, self.connection)
        return config

    def _build(self, builder: Any, network: Any, config: Any) -> None:  # noqa: ANN401
        cache = self._load_timing_cache(config)
        path = Path(self.job.engine)
        if self.flavor.stream_build:
            with path.open("xb") as file:
                done = builder.build_serialized_network_to_stream(network, config, _writer(self.trt, file))
        else:
            plan = builder.build_serialized_network(network, config)
            done = plan is not None
            if done:
                path.write_bytes(memoryview(plan))
        if not done or path.stat().st_size == 0:
            reason = self._plugin_error() or self.log.first_error()
            raise BuildFailed(f"{self.flavor} built no engine: {reason}")
        if cache is not None:
            write_bytes(Path(str(self.job.timing_cache)), bytes(memoryview(cache.serialize())))

    def _load_timing_cache(self, config: Any) -> Any:  # noqa: ANN401
        if self.job.timing_cache is None:
            return None
        path = Path(self.job.timing_cache)
        cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            raise BuildFailed(
                f"{path} is no timing cache of {self.flavor} on this GPU: {self.log.first_error()}; delete it or name "
                "another"
            )
        return cache


def _oldest_ptx(target: str) -> tuple[int, int] | None:
    """PTX 8.0 up to Hopper, so that every driver since CUDA 12.0 knows it; what Triton writes for newer GPUs."""
    return (8, 0) if int(target.removeprefix("sm_")) <= 90 else None


def make_logger(trt: Trt) -> Any:  # noqa: ANN401
    """Make a TensorRT logger that keeps warnings and errors instead of printing them.

    Args:
        trt: the module.

    Returns:
        An ``ILogger`` with ``warnings``, ``errors`` (lists of lines) and ``first_error()``.
    """

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.warnings: list[str] = []
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:  # noqa: ANN401
            line = one_line(message)
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(line)
            elif severity == trt.ILogger.WARNING and not any(noise in line for noise in _NOISE):
                self.warnings.append(line)

        def first_error(self) -> str:
            return self.errors[0][:300] if self.errors else "TensorRT gave no reason"

    return Log()


def _layer_types(network: Any) -> dict[str, int]:  # noqa: ANN401
    """Count layers by type, matrix products by element type too: half precision that was asked for must be there."""
    names = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        name = str(layer.type).rpartition(".")[2]
        if name == "MATRIX_MULTIPLY":
            name += " " + str(layer.get_input(0).dtype).rpartition(".")[2]
        names.append(name)
    return dict(Counter(names).most_common())


def _allow_plain_attention(trt: Trt, network: Any) -> None:  # noqa: ANN401
    """Let fused attention become elementary layers where no kernel fuses it, as in fp32; the build fails otherwise."""
    boundary = getattr(trt, "IAttentionInputLayer", None)
    if boundary is None:
        return
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if hasattr(trt.LayerType, "ATTENTION_INPUT") and layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = boundary  # layers come back as plain ILayer; this is TensorRT's own way to narrow them
            layer.attention.decomposable = True


def _plugin_layers(layers: dict[str, int]) -> int:
    return sum(count for name, count in layers.items() if name.startswith("PLUGIN"))


def _profile(builder: Any, profile: Any) -> Any:  # noqa: ANN401
    made = builder.create_optimization_profile()
    corners = (profile.min, profile.opt, profile.max)
    made.set_shape(INPUTS[0], *((shape.frames, shape.patches, PATCH_VALUES) for shape in corners))
    made.set_shape(INPUTS[1], *((shape.items, 2) for shape in corners))
    return made


def _configure_weak_types(trt: Trt, config: Any, dtype: str) -> None:  # noqa: ANN401
    """TensorRT 8: precision is a flag, and what must stay fp32 is pinned layer by layer."""
    if dtype == "float16":
        config.set_flag(trt.BuilderFlag.FP16)
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        config.set_flag(trt.BuilderFlag.TF32)  # which holds the half-precision operands of all fp32 products exactly
    sources = config.get_tactic_sources()
    for name in ("CUBLAS", "CUBLAS_LT", "CUDNN"):  # libraries that need not be installed
        if hasattr(trt.TacticSource, name):
            sources &= ~(1 << int(getattr(trt.TacticSource, name)))
    config.set_tactic_sources(sources)


def _pin_float32(trt: Trt, network: Any, names: frozenset[str]) -> int:  # noqa: ANN401
    """Pin the layers of fp32 nodes to fp32. By the graph's own types: TensorRT 8 calls nearly every tensor fp32."""
    kinds = {getattr(trt.LayerType, name) for name in _COMPUTING if hasattr(trt.LayerType, name)}
    pinned = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type in kinds and _node_name(layer.name, names) is not None:
            layer.precision = trt.float32
            pinned += 1
    return pinned


# never layers that move data, which TensorRT refuses to pin
_COMPUTING = ("ELEMENTWISE", "UNARY", "ACTIVATION", "REDUCE", "SOFTMAX", "SCALE", "SELECT", "NORMALIZATION",
              "MATRIX_MULTIPLY")  # fmt: skip


def _node_name(layer: str, names: frozenset[str]) -> str | None:
    """Find the node of a layer: its own name, or that with a suffix where a node became several layers."""
    if layer in names:
        return layer
    base = layer.rpartition("_")[0] if layer.rpartition("_")[2].isdigit() else ""
    return base if base in names else None


def _monitor(trt: Trt, connection: Connection) -> Any:  # noqa: ANN401
    lock = threading.Lock()

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase or num_steps == 1:  # the long ones: most of a build is one phase of one step
                with lock:  # TensorRT calls from several threads
                    connection.send(Phase(f"build: {phase_name}" if phase_name else "build"))

        def phase_finish(self, phase_name: str) -> None: ...

        def step_complete(self, phase_name: str, step: int) -> bool:
            return True

    return Monitor()


def _writer(trt: Trt, file: Any) -> Any:  # noqa: ANN401
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes) -> int:
            return int(file.write(data))

    return Writer()
