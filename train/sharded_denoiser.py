"""Sampling with the network in training, whichever way its ranks share it.

Shapes: B batch, C latent channels, T/H/W latent frames, height, width, S video tokens, P patch dim, L text tokens,
E text feature width, G segments.
"""

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from megadit.models.conditioning import Conditioning
from megadit.models.embeddings import patchify, unpatchify
from megadit.models.segments import Grid, Segment, SegmentLayout
from megadit.train.data.batch import PackedBatch
from megadit.train.schedule import evaluate, from_last_stage
from megadit.train.setup import Training


class ShardedDenoiser:
    """D(x; sigma) by all ranks of a copy of the model, who call it together and all get the result.

    The batch is packed like training data, with as much padding as makes it divide among the ranks: whatever trains
    can sample. Call it within `schedule.evaluation`.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._model = training.config.model
        self.device = training.groups.device

    @torch.no_grad()
    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on `device`); the inputs may lie anywhere."""
        x_BCTHW = x_BCTHW.to(self.device, torch.float32)
        batch = self._pack(x_BCTHW, conditioning.to(self.device))
        num_padding = batch.layout.num_segments - len(x_BCTHW)
        sigma_G = torch.cat([sigma_B.to(self.device).float(), torch.ones(num_padding, device=self.device)])
        mine = batch.shared(self._training.groups.context.share)
        found = evaluate(self._training, lambda part, pack: part(pack, sigma_G, is_noisy=True), [mine])
        D_S1P = from_last_stage(self._training, found[0] if found else None, like=mine.tokens_S1P)
        D_S1P = self._gather(D_S1P, mine.layout)[: batch.num_tokens]
        D_SBP = rearrange(D_S1P, "(B S) 1 P -> S B P", B=len(x_BCTHW))
        return unpatchify(D_SBP, self._grid(x_BCTHW), self._model)

    def _grid(self, x_BCTHW: Tensor) -> Grid:
        return self._model.token_grid(*x_BCTHW.shape[2:])

    def _pack(self, x_BCTHW: Tensor, conditioning: Conditioning) -> PackedBatch:
        """The samples one after another, and padding up to a multiple that all ranks can share."""
        grid, multiple = self._grid(x_BCTHW), self._training.config.parallel.sizes.sequence_multiple
        tokens_S1P = rearrange(patchify(x_BCTHW, self._model), "S B P -> (B S) 1 P")
        lengths = conditioning.text_length_B.tolist()
        segments = [Segment(grid, length) for length in lengths]
        text_capacity = sum(segment.text_slots for segment in segments)
        capacity = -(-len(tokens_S1P) // multiple) * multiple
        layout = SegmentLayout.pack(segments, capacity=capacity, text_capacity=text_capacity)
        padding = tokens_S1P.new_zeros(capacity - len(tokens_S1P), *tokens_S1P.shape[1:])
        text = [
            features_LE[: max(length, 1)] for features_LE, length in zip(conditioning.text_BLE, lengths, strict=True)
        ]
        num_padding = layout.num_segments - len(segments)
        return PackedBatch(
            tokens_S1P=torch.cat([tokens_S1P, padding]),
            text_L1E=torch.cat(text)[:, None],
            layout=layout,
            fps_G=torch.cat([conditioning.fps_B.float(), tokens_S1P.new_zeros(num_padding)]),
            noise_key_G=torch.zeros(layout.num_segments, dtype=torch.long, device=self.device),
            sample_ids=("",) * layout.num_segments,
        )

    def _gather(self, D_S1P: Tensor, layout: SegmentLayout) -> Tensor:
        """All tokens, from the shares of the context-parallel ranks."""
        context = self._training.groups.context
        if context.size == 1:
            return D_S1P
        whole = D_S1P.new_zeros(layout.whole.capacity, *D_S1P.shape[1:])
        whole[layout.token_index_S.to(self.device)] = D_S1P
        dist.all_reduce(whole, group=context.group)
        return whole
