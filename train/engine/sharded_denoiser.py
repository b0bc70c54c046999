"""Sampling with the network in training, in its parallel layout.

Shapes: B batch, C latent channels, T/H/W latent frames, height, width, S video tokens, P patch dim, G segments.
"""

import torch
from torch import Tensor

from megadit.models.host_to_device import levels_on
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dense_packs import gather_tokens, pack_dense, pad_segments, unpack_dense
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.engine.schedule import evaluate, from_last_stage
from megadit.train.engine.setup import Training
from megadit.train.objectives.networks import denoiser_of


class ShardedDenoiser:
    """D(x; sigma) on all ranks of a model replica, which call it together and all get the result.

    The batch is packed like training data, padded so that it divides among the ranks. Call it within
    `schedule.evaluation`.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._model = training.config.model
        self.device = training.groups.device

    @torch.no_grad()
    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on `device`); inputs may be on any device."""
        x_BCTHW = x_BCTHW.to(self.device, torch.float32)
        batch = self._pack(x_BCTHW, conditioning.to(self.device))
        sigma_G = pad_segments(levels_on(sigma_B.float(), self.device), batch.layout, value=1.0)
        groups = self._training.groups
        mine = batch.shard(groups.mesh)
        found = evaluate(self._training, lambda part, pack: denoiser_of(part)(pack, pack.tokens_S1P, sigma_G), [mine])
        D_S1P = from_last_stage(self._training, found[0] if found else None, like=mine.tokens_S1P)
        D_S1P = gather_tokens(D_S1P, mine.layout, groups.context.group)
        return unpack_dense(D_S1P, batch.layout, x_BCTHW, self._model)

    def _pack(self, x_BCTHW: Tensor, conditioning: Conditioning) -> PackedBatch:
        multiple = self._training.config.parallel.sizes.sequence_multiple
        pack = pack_dense(x_BCTHW, conditioning, self._model, multiple)
        return PackedBatch(
            tokens_S1P=pack.tokens_S1P,
            text_L1E=pack.text_L1E,
            layout=pack.layout,
            fps_G=pack.fps_G,
            guidance_G=pack.guidance_G,
            noise_key_G=torch.zeros_like(pack.fps_G, dtype=torch.long),
            loss_weight_G=torch.ones_like(pack.fps_G),
            sample_ids=("",) * pack.layout.num_segments,
        )
