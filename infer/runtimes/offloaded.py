"""Block offloading: weights of most blocks stay on the host and are copied in before use.

At most `resident` + 1 blocks are on the device at any time: those that stay, the one that computes, and the next one,
which is copied meanwhile. On a GPU they come from pinned host memory, in a separate stream; on a CPU from the file.
Results are the same to the last bit.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from megadit.models.networks.blocks import BlockStack
from megadit.models.networks.dit import DiT
from megadit.models.shared.documents import parse_json
from megadit.models.storage.components import TENSOR_FILE, check_shapes, load_config, network_shapes
from megadit.models.storage.tensor_source import DTYPES, open_safetensors

Tensors = dict[str, Tensor]


class OffloadedBlocks(BlockStack):
    """Stack of blocks without memory (on the meta device); called like the original stack."""

    def __init__(self, blocks: Mapping[str, nn.Module], fetch: Callable[[str], Tensors], resident: int) -> None:
        """`fetch` gives the weights of a block, on the device and in the precision of the computation."""
        super().__init__(dict(blocks.items()))
        self._fetch = fetch
        self._empty = {name: block.state_dict() for name, block in self.items()}
        # the block that computes counts among the residents, the next one is the extra one
        stay, self._visitors = list(self)[: resident - 1], list(self)[resident - 1 :]
        for name in stay:
            self[name].load_state_dict(fetch(name), assign=True)
        self._thread = ThreadPoolExecutor(1, "blocks")
        self._coming: tuple[str, Future[Tensors]] | None = None

    def forward(self, x: Tensor, *context) -> Tensor:
        """Tokens [S, B, D] after all blocks, of tokens [S, B, D]."""
        for name, block in self.items():
            if name not in self._visitors:
                x = block(x, *context)
                continue
            block.load_state_dict(self._arrived(name), assign=True)
            self._ask_for(self._visitors[(self._visitors.index(name) + 1) % len(self._visitors)])
            x = block(x, *context)
            block.load_state_dict(self._empty[name], assign=True)
        return x

    def _ask_for(self, name: str) -> None:
        self._coming = name, self._thread.submit(self._fetch, name)

    def _arrived(self, name: str) -> Tensors:
        if self._coming is None or self._coming[0] != name:  # the first pass, or an interrupted one
            self._ask_for(name)
        (_, weights), self._coming = self._coming, None
        tensors = weights.result()
        for tensor in tensors.values():
            if tensor.is_cuda:  # copied in another stream, which must not reuse the memory too early
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensors

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OffloadedBlocks":
        """Leaves the weights where `fetch` put them."""
        return self


def load_offloaded_dit(directory: Path, *, device: torch.device, dtype: torch.dtype, resident: int) -> DiT:
    """The network saved in `directory`, in evaluation mode, with at most `resident` + 1 blocks in memory.

    Raises:
        UserError: if a file is missing or broken, or its tensors are not those that config.json calls for.
    """
    config, path = load_config(directory), directory / TENSOR_FILE
    shapes = open_safetensors(path).shapes
    check_shapes(shapes, network_shapes(config), f"the tensors of {path}")
    with torch.device("meta"):
        dit = DiT(config)
    read = _reader(path)

    def block(name: str) -> Tensors:
        prefix = f"blocks.{name}."
        return {key.removeprefix(prefix): read(key).to(dtype) for key in shapes if key.startswith(prefix)}

    fetch = block
    if device.type == "cuda":
        pinned = {name: {key: value.pin_memory() for key, value in block(name).items()} for name in dit.blocks}
        fetch = _from_host(pinned, device)
    around = {name: read(name).to(device, dtype) for name in shapes if not name.startswith("blocks.")}
    dit.load_state_dict(around, strict=False, assign=True)
    dit.blocks = OffloadedBlocks(dit.blocks, fetch, resident)
    return dit.eval()


def _reader(path: Path) -> Callable[[str], Tensor]:
    """Reads tensors of a safetensors file into new memory: a mapped file would keep what was read in memory."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(start - 8).decode(), f"the header of {path}")

    def read(name: str) -> Tensor:
        begin, end = header[name]["data_offsets"]
        content = bytearray(end - begin)
        with path.open("rb") as file:
            file.seek(start + begin)
            file.readinto(content)
        return torch.frombuffer(content, dtype=DTYPES[header[name]["dtype"]]).reshape(header[name]["shape"])

    return read


def _from_host(pinned: Mapping[str, Tensors], device: torch.device) -> Callable[[str], Tensors]:
    stream = torch.cuda.Stream(device)

    def fetch(name: str) -> Tensors:
        with torch.cuda.stream(stream):
            tensors = {key: value.to(device, non_blocking=True) for key, value in pinned[name].items()}
        stream.synchronize()  # only this thread waits
        return tensors

    return fetch
