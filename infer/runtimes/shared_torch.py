"""Denoiser in torch on several ranks: tensor parallelism, context parallelism, or both.

Shapes: B batch, C latent channels, T/H/W latent frames, height, width, S video tokens, P patch dim, G segments.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megadit.infer.runtimes.torch import AdaptableDenoiser, TorchDenoiser
from megadit.models.diffusion.parameterization import denoise_packed
from megadit.models.host_to_device import levels_on
from megadit.models.lora.adapters import load_adapter
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dense_packs import gather_tokens, pack_dense, pad_segments, unpack_dense
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.storage.components import load_config


class ContextParallelDenoiser(AdaptableDenoiser):
    """D(x; sigma) by ranks that hold a CP shard of every video's tokens; they call it together and all get the result.

    The batch is a pack, whose segments are cut evenly (`TokenMesh.span`).
    """

    def __init__(
        self,
        dit: DiT,
        groups,
        *,
        multiple: int,
        device: torch.device,
        dtype: torch.dtype,
        load: Callable[..., None] = load_adapter,
    ) -> None:
        """`groups` are Megatron's (`megatron.groups.Groups`); packs have a multiple of `multiple` tokens."""
        super().__init__(dit, load)
        self.device = device
        self.dtype = dtype
        self._groups = groups
        self._multiple = multiple

    @torch.no_grad()
    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on `device`); inputs may be on any device."""
        x_BCTHW, sigma_B = x_BCTHW.to(self.device, torch.float32), levels_on(sigma_B.float(), self.device)
        conditioning = conditioning.to(self.device, self.dtype)
        alike = _alike(conditioning)  # a pack has one scale of each adapter for all of its tokens
        if len(alike) == 1:
            self._scale_adapters(alike[0][0])
            return self._denoised(x_BCTHW, sigma_B, conditioning)
        D_BCTHW = torch.empty_like(x_BCTHW)
        for scales, places in alike:
            self._scale_adapters(scales)
            D_BCTHW[places] = self._denoised(x_BCTHW[places], sigma_B[places], conditioning.at(places))
        return D_BCTHW

    def _denoised(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        pack = pack_dense(x_BCTHW, conditioning, self.dit.config, self._multiple)
        layout = pack.layout
        sigma_G = pad_segments(sigma_B, layout, value=1.0)
        mine = layout.shard(self._groups.mesh)
        own_S = mine.on(self.device).index_S
        attached_S1Q = None if pack.attached_S1Q is None else pack.attached_S1Q[own_S]
        own = (pack.tokens_S1P[own_S], sigma_G, pack.text_L1E, pack.fps_G, mine)
        D_S1P = denoise_packed(self.dit, *own, attached_S1Q=attached_S1Q, guidance_G=pack.guidance_G)
        D_S1P = gather_tokens(D_S1P, mine, self._groups.context.group)
        return unpack_dense(D_S1P, layout, x_BCTHW, self.dit.config)


def _alike(conditioning: Conditioning) -> list[tuple[dict[str, float], list[int]]]:
    """The distinct adapter scales in a batch, each with the indices of its videos."""
    names = list(conditioning.adapter_scale_B)
    if not names:
        return [({}, list(range(len(conditioning))))]
    by_scales: dict[tuple[float, ...], list[int]] = {}
    scales = [scale_B.tolist() for scale_B in conditioning.adapter_scale_B.values()]
    for place, own in enumerate(zip(*scales, strict=True)):
        by_scales.setdefault(own, []).append(place)
    return [(dict(zip(names, own, strict=True)), places) for own, places in by_scales.items()]


def load_shared_denoiser(
    directory: Path, *, tensor: int, context: int, device: torch.device, dtype: torch.dtype, compile: bool
) -> TorchDenoiser | ContextParallelDenoiser:
    """The denoiser by the network in `directory`, of which this rank holds its shard. Without a GPU, Megatron is
    patched to use the CPU.

    Raises:
        UserError: if the network cannot be divided this way.
    """
    from megadit.models.megatron import cpu_shim

    cpu_shim.install()
    from megadit.models.megatron.load import load_split_adapter, load_split_dit
    from megadit.models.megatron.parallel_sizes import ParallelSizes

    config = load_config(directory)
    if context > 1 and config.image_size is not None:
        raise UserError("a network that reads image features does not support cp_size: leave it out, or use tp_size")
    if tensor > 1 and config.experts.num_experts:
        raise UserError(f"tp_size={tensor} does not divide mixture-of-experts layers; use cp_size instead")
    layout = ParallelSizes(tensor=tensor, context=context, context_comm="both")
    dit, groups = load_split_dit(directory, layout, device=device, dtype=dtype)
    of_torch = {"device": device, "dtype": dtype, "load": partial(load_split_adapter, groups=groups)}
    if context == 1:
        return TorchDenoiser(dit, compile=compile, **of_torch)
    return ContextParallelDenoiser(dit, groups, multiple=layout.sequence_multiple, **of_torch)
