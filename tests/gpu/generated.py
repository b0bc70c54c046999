"""What inductor makes for a Hopper GPU of each fused chain: its kernels, and the bytes that they move; needs no GPU.

    python tests/gpu/generated.py [--out FOLDER]      the table of docs/kernels.md, and the sources it was counted in

The chains run as in a block of 7B, on a CPU. For the graph of each, inductor is told that its tensors are a GPU's, and
writes Triton; nothing of that is compiled or run. Bytes are counted in the text that it wrote.
"""

import argparse
import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, config, graph, scheduler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._subclasses import fake_tensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _triton

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.embeddings import rotary_table
from megadit.models.ops import fusion, row_sums
from megadit.models.ops.reference import gated_residual, modulated_norm, qk_norm_rope
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.train.optim.adamw import HalfMomentAdamW

HOPPER = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)


@dataclass(frozen=True)
class Kernel:
    """A launch: its name, and of each tensor that it reads or writes, how many bytes and how often."""

    name: str
    bytes_of: dict[str, int]
    accesses: dict[str, int]

    @property
    def moved(self) -> int:
        """Bytes, if what a program of it touches again is in a cache."""
        return sum(self.bytes_of.values())

    @property
    def again(self) -> int:
        """Bytes that its programs ask for more than once."""
        return sum((self.accesses[name] - 1) * size for name, size in self.bytes_of.items())


@dataclass(frozen=True)
class Generated:
    """What became of one chain."""

    name: str
    source: str
    kernels: list[Kernel]
    least: int
    """Bytes of the chain's inputs and outputs, each once."""
    guards: tuple[str, ...] = ()
    """What inductor asked of sizes: where it is otherwise, the chain is compiled anew."""

    @property
    def ratio(self) -> float:
        return sum(kernel.moved for kernel in self.kernels) / self.least


class _WrittenError(Exception):
    """Ends inductor's work where the source is known."""


@contextmanager
def told_of_a_gpu() -> Iterator[None]:
    """Everything that inductor asks about the machine is answered as by one Hopper GPU."""
    nothing = {"return_value": None}
    answers = [
        (torch.cuda, "is_available", {"return_value": True}),
        (torch.cuda, "_lazy_init", nothing),
        (torch.cuda, "device_count", {"return_value": 1}),
        (torch.cuda, "current_device", {"return_value": 0}),
        (torch.cuda, "_get_device_properties", {"return_value": HOPPER, "create": True}),
        (torch.cuda, "get_device_capability", {"return_value": (9, 0)}),
        (torch.cuda, "_exchange_device", {"return_value": 0}),
        (torch.cuda, "_maybe_exchange_device", {"return_value": 0}),
        (torch.cuda, "get_rng_state", {"return_value": torch.zeros(1)}),
        (torch.cuda, "set_rng_state", nothing),
        (torch.version, "cuda", {"new": "13.0"}),
        (fake_tensor, "init_gpu_context", nothing),
        (joint_graph, "lazy_init", nothing),  # patterns of attention and of padded products, tried on a real GPU
        (post_grad, "lazy_init", nothing),
        (scheduler, "has_triton", {"return_value": True}),
        (_triton, "has_triton", {"return_value": True}),
        (_triton, "triton_hash_with_backend", {"return_value": ""}),
    ]
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, **answer))
        # constants would be folded by computing them on the GPU
        by_hand = {"compile_threads": 1, "joint_graph_constant_folding": False}
        stack.enter_context(config.patch({**by_hand, **fusion.options_there()}))
        yield


def source_of(module: fx.GraphModule, inputs: list) -> str:
    """What inductor writes for a graph of aten's operations on fake tensors of a CPU, were they a GPU's."""
    for node in module.graph.nodes:
        node.kwargs = {key: torch.device("cuda:0") if key == "device" else of for key, of in node.kwargs.items()}
    module.recompile()

    def end(source: str) -> None:
        raise _WrittenError(source)

    mode = detect_fake_mode(inputs)
    with told_of_a_gpu(), mock.patch.object(graph.GraphLowering, "save_output_code", end):
        with mode:
            inputs = [_on_gpu(x) if isinstance(x, Tensor) else x for x in inputs]
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
        joint_graph.joint_graph_passes(module, torch.device("cuda:0"))
        try:
            compile_fx.compile_fx_inner(module, inputs)
        except Exception as error:
            written = error
            while written is not None and not isinstance(written, _WrittenError):
                written = written.__cause__ or written.__context__
            if written is None:
                raise
            return written.args[0]
    raise AssertionError("inductor wrote nothing")


def _on_gpu(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def generated(run: Callable[[], object]) -> list[Generated]:
    """What becomes of each chain that `run` computes on tensors of a CPU, in order, were they a GPU's.

    The compiled chains are computed uncompiled; Triton kernels of our own are asked for, and compute nothing.
    """
    found: list[Generated] = []
    names: list[str] = []
    plain = fusion.compiled.__wrapped__

    def compiled(function: FunctionType, kinds: tuple) -> Callable:
        names.append(f"{function.__module__.rpartition('.')[2]}.{function.__name__}")
        return plain(function, kinds)

    def compiler(module: fx.GraphModule, inputs: list) -> Callable:
        least = _least(module)
        shapes = detect_fake_mode(inputs).shape_env
        known = len(shapes.guards)
        source = source_of(copy.deepcopy(module), inputs)
        guards = tuple(str(guard.expr) for guard in shapes.guards[known:])
        found.append(Generated(names[-1], source, kernels_of(source), least, guards))
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=compiler, decompositions=select_decomp_table(), keep_inference_input_mutations=True
    )
    with ExitStack() as stack:
        answers = {"COMPILED_ON": {"cpu"}, "KERNELS_ON": {"cpu"}, "BACKEND": backend, "compiled": compiled}
        answers["triton_works"] = lambda device: True
        for name, value in answers.items():
            stack.enter_context(mock.patch.object(fusion, name, value))
        for name in ("norm_backward", "gate_backward"):
            stack.enter_context(_asked_for(name, found))
        run()
    return found


@contextmanager
def _asked_for(name: str, found: list[Generated]) -> Iterator[None]:
    """Calls of a function of `row_sums` become entries of `found`."""
    function = getattr(row_sums, name)

    def noted(*inputs):
        with ExitStack() as stack:
            launches = [
                stack.enter_context(mock.patch.object(row_sums, kernel, _Launches(getattr(row_sums, kernel))))
                for kernel in (f"_{name}", "_sum_runs")
            ]
            outputs = function(*inputs)
        tensors = {id(x): x.nbytes for x in (*inputs, *outputs) if isinstance(x, Tensor)}
        kernels = [kernel for launch in launches for kernel in launch.kernels]
        found.append(Generated(f"row_sums.{name}", inspect.getsource(row_sums), kernels, sum(tensors.values())))
        return outputs

    with mock.patch.object(row_sums, name, noted):
        yield


class _Launches:
    """A Triton kernel that notes what it is called with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.kernels = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        text = inspect.getsource(self.kernel.fn)

        def launch(*inputs, **options):
            given = {n: x for n, x in zip(self.kernel.arg_names, inputs, strict=False) if isinstance(x, Tensor)}
            self.kernels.append(_kernel(self.kernel.fn.__name__, text, {n: x.nbytes for n, x in given.items()}))

        return launch


def _kernel(name: str, text: str, bytes_of: dict[str, int]) -> Kernel:
    """A kernel by its text and the bytes of its parameters, of which some may be unused."""
    counts = {n: len(re.findall(rf"tl\.(?:load|store)\({n} \+", text)) for n in bytes_of}
    return Kernel(name, {n: size for n, size in bytes_of.items() if counts[n]}, {n: c for n, c in counts.items() if c})


def _least(module: fx.GraphModule) -> int:
    """Bytes of what a graph reads and writes at least: its inputs, its outputs, and inputs that it changes."""
    nodes = module.graph.nodes
    read = [node for node in nodes if node.op == "placeholder" and any(_reads(user, node) for user in node.users)]
    written = [x for x in next(iter(reversed(nodes))).args[0] if isinstance(x, fx.Node)]
    written += [node.args[0] for node in nodes if node.target is torch.ops.aten.copy_.default]
    return sum(_bytes(node.meta["val"]) for node in (*read, *written))


def _reads(user: fx.Node, node: fx.Node) -> bool:
    is_copy = user.target in (torch.ops.aten.copy.default, torch.ops.aten.copy_.default)
    return user.op != "output" and not (is_copy and user.args[0] is node)


def _bytes(x: object) -> int:
    if not isinstance(x, Tensor):
        return 0
    return prod(n.node.hint if isinstance(n, torch.SymInt) else n for n in x.shape) * x.itemsize


def kernels_of(source: str) -> list[Kernel]:
    """The launches of a source, in order."""
    bodies = dict(re.findall(r"^def (triton_\w+)(\(.*?)^'''", source, re.M | re.S))
    size = _sizes(source)
    kernels = []
    for name, text in re.findall(r"^ +(triton_\w+|extern_kernels)\.(?:run|\w+)\((.*)\)$", source, re.M):
        given = [argument.partition("=")[2] or argument for argument in _split(text)]
        tensors = {
            n: argument for n, argument in enumerate(given) if re.match(r"(arg|buf|reinterpret|workspace)", argument)
        }
        if name in bodies:
            parameters = _split(bodies[name][1 : bodies[name].index("):")])
            bytes_of = {parameters[n]: size(argument) for n, argument in tensors.items()}
            kernels.append(_kernel(name, bodies[name], bytes_of))
        else:  # a product of torch's own
            kernels.append(Kernel(name, {x: size(x) for x in tensors.values()}, dict.fromkeys(tensors.values(), 1)))
    for name, parts, _ in re.findall(_SUM_OF_PARTS, source, re.M):  # of what the programs of a kernel have found
        kernels.append(Kernel("sum", {parts: size(parts), name: size(name)}, {parts: 1, name: 1}))
    return kernels


_SUM_OF_PARTS = r"^ +(buf\d+) = (workspace_\d+)\[.*\.sum\(dim=0\)\.view\((\[.*?\])\)$"


def _split(text: str) -> list[str]:
    """Arguments, at the commas outside of parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _sizes(source: str) -> Callable[[str], int]:
    """Bytes of a tensor that the wrapper names, or of a view that it takes."""
    numbers: dict[str, Any] = {name: int(n) for name, n in re.findall(r"^    (arg\w+) = (\d+)$", source, re.M)}
    for name, shape in re.findall(r"^    (arg\w+) = rand_strided\((\(.*?\)),", source, re.M):
        numbers[f"{name}_size"] = eval(shape)
    for name, of in re.findall(r"^ +(s\d+) = (.+)$", source, re.M):
        numbers[name] = eval(of, {}, numbers)
    made = re.findall(r"^ +(\w+) = (?:rand_strided|empty_strided_cuda)\((.*)\)$", source, re.M)
    width = {name: getattr(torch, re.search(r"torch\.(\w+)$", text)[1]).itemsize for name, text in made}
    sizes = {name: width[name] * _numel(_split(text)[0], numbers) for name, text in made}

    def size(argument: str) -> int:
        if argument.startswith("reinterpret_tensor"):
            of, shape, *_ = _split(argument[len("reinterpret_tensor(") : -1])
            return width[of] * _numel(shape, numbers)
        return sizes[argument]

    for name, of, shape in re.findall(_SUM_OF_PARTS, source, re.M):
        sizes[name], width[name] = width[of] * _numel(shape, numbers), width[of]
    for name, of in re.findall(r"^ +(buf\d+) = ((?:buf|arg|reinterpret).*?)(?:;.*|  #.*)?$", source, re.M):
        sizes[name], width[name] = size(of), width[re.search(r"(?:buf|arg)\w+", of)[0]]
    return size


def _numel(shape: str, numbers: dict[str, Any]) -> int:
    return prod(eval(shape, {"math": math}, numbers))


# --- the chains of a block of 7B ----------------------------------------------------------------------------------

TOKENS, WIDTH, HEADS, TEXT = 8192, 3072, 24, 512


def chains() -> None:
    """Computes each chain, forward and backward, as a block of 7B does, of a pack of seven samples and padding."""
    layout = PackLayout.pack([Segment((1, 1, TOKENS // 8), TEXT // 8)] * 7, capacity=TOKENS, text_capacity=TEXT)
    x, y = (_normal(TOKENS, 1, WIDTH) for _ in range(2))
    shift, scale, gate = (_normal(layout.num_segments, WIDTH) for _ in range(3))
    config = DiTConfig(hidden_size=WIDTH, num_attention_heads=HEADS)
    rotary = rotary_table(torch.stack([torch.arange(TOKENS)] * 3, dim=-1) % 32, config, torch.bfloat16)
    of_video, of_text = (_normal(size, 1, HEADS, 3, WIDTH // HEADS) for size in (TOKENS, TEXT))
    weight = _normal(WIDTH // HEADS)
    for out in (
        modulated_norm(x, shift, scale, 1e-6, layout.rows),
        gated_residual(x, gate, y, layout.rows),
        qk_norm_rope(of_video[:, :, :, 0], weight, *rotary, 1e-6),
        qk_norm_rope(of_text[:, :, :, 0], weight, None, None, 1e-6),
    ):
        out.backward(torch.randn_like(out))
    parameter = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
    parameter.grad = torch.zeros_like(parameter)
    adamw = HalfMomentAdamW([{"params": [parameter]}], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    adamw.rounded = {parameter: torch.empty_like(parameter, dtype=torch.bfloat16)}
    adamw.step()


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def table(found: list[Generated]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| chain | kernels | MB moved | MB at least | ratio | MB again from caches |"
    yield "|---|---|---|---|---|---|"
    for chain in found:
        moved, again = (sum(getattr(kernel, of) for kernel in chain.kernels) / 1e6 for of in ("moved", "again"))
        numbers = f"{len(chain.kernels)} | {moved:.1f} | {chain.least / 1e6:.1f} | {chain.ratio:.2f} | {again:.1f}"
        yield f"| `{chain.name}` | {numbers} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="generated.py", allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="a folder for the sources")
    options = parser.parse_args(argv)
    found = generated(chains)
    print(*table(found), sep="\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for index, chain in enumerate(found):
            (options.out / f"{index}_{chain.name}.py").write_text(chain.source)


if __name__ == "__main__":
    main()
