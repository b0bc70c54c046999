"""Contrastive objectives of CLIP and SigLIP on packs, in float32, over images and texts of all data-parallel ranks.

Each micro-batch (`data.micro_batch_size` packs on each rank) is contrasted as a whole, independently of the number of
ranks; accumulated micro-batches are not compared with one another.

Shapes: G segments of a pack (padding included), N pairs of a rank, M pairs of all ranks with their padding, E width of
embeddings.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megadit.models.megatron.parallelism.context import Shift, round_trip
from megadit.models.networks.clip import CLIP
from megadit.models.packing.segments import CPU
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.classify import sums_of_samples
from megadit.train.objectives.losses import LossSums
from megadit.train.objectives.networks import Networks


def match(networks: Networks, batch: PackedBatch) -> LossSums | Tensor:
    """`matching_loss` among the pairs of all ranks, with `train.contrast_rows`; or activations [S, 1, D]."""
    rows = networks.config.train.contrast_rows
    return matching_loss(networks.model.dit, batch, networks.readers, rows, networks.model.before)


def matching_loss(
    clip: CLIP,
    batch: PackedBatch,
    readers: ProcessGroup | None,
    rows: int | None = None,
    before: Tensor | None = None,
) -> LossSums | Tensor:
    """CLIP's or SigLIP's loss of the pairs of a micro-batch among those of all `readers` (None: of this rank); `rows`
    is `train.contrast_rows`.

    Model chunks before the last return activations [S, 1, D], from those of the chunk before, `before` [S, 1, D]: see
    `CLIP.forward_packed`.
    """
    embedded = clip.forward_packed(batch.tokens_S1P, batch.text_L1E, batch.layout, before)
    if not clip.part.is_last:
        return embedded
    images_GE, texts_GE = embedded
    index_N = batch.layout.on(batch.tokens_S1P.device).paired_N
    images_NE, texts_NE = (F.normalize(x_GE[index_N].float(), dim=-1) for x_GE in (images_GE, texts_GE))
    if clip.score_offset is None:
        loss_N, is_wrong_N = softmax_loss(images_NE, texts_NE, clip.scale, readers, rows)
    else:
        loss_N, is_wrong_N = pairwise_loss(images_NE, texts_NE, clip.scale, clip.score_offset.float(), readers)
    nothing_G = loss_N.new_zeros(batch.layout.num_segments)
    loss_G, is_wrong_G = (nothing_G.index_copy(0, index_N, x_N) for x_N in (loss_N, is_wrong_N))
    return sums_of_samples(batch, loss_G, loss_G.detach(), is_wrong_G)


def softmax_loss(
    images_NE: Tensor, texts_NE: Tensor, scale: Tensor, readers: ProcessGroup | None, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """-(ln p(text n | image n) + ln p(image n | text n)) / 2 over all pairs of all ranks (arXiv 2103.00020, figure 3),
    [N]; and 1 where another text is likelier, [N]. With `rows`, so many rows of the scores are computed at a time.

    The gradient is exact: that of an embedding comes from the losses of all ranks. `scale` is [1].
    """
    counts, rank = _counts(len(images_NE), readers)
    most = max(counts)
    padded = [F.pad(x_NE, (0, 0, 0, most - len(x_NE))) for x_NE in (images_NE, texts_NE)]
    all_images_ME, all_texts_ME = (_gathered(x, readers) for x in padded)
    place_m = torch.arange(most, device=images_NE.device)
    is_there_M = torch.cat([place_m < count for count in counts])
    own_N = rank * most + place_m[: len(images_NE)]
    losses, wrong = [], []
    for own, image, text in zip(*(x.split(rows or max(most, 1)) for x in (own_N, images_NE, texts_NE)), strict=True):
        inputs = image, text, all_images_ME, all_texts_ME, scale, is_there_M, own
        loss, is_wrong = checkpoint(_softmax_rows, *inputs, use_reentrant=False) if rows else _softmax_rows(*inputs)
        losses.append(loss)
        wrong.append(is_wrong)
    return torch.cat(losses), torch.cat(wrong)


def _softmax_rows(
    image_nE: Tensor,
    text_nE: Tensor,
    images_ME: Tensor,
    texts_ME: Tensor,
    scale: Tensor,
    is_there_M: Tensor,
    own_n: Tensor,
) -> tuple[Tensor, Tensor]:
    of_images, of_texts = (
        (scale * x_nE @ y_ME.T).masked_fill(~is_there_M, float("-inf"))
        for x_nE, y_ME in ((image_nE, texts_ME), (text_nE, images_ME))
    )
    loss_n = sum(F.cross_entropy(score_nM, own_n, reduction="none") for score_nM in (of_images, of_texts)) / 2
    scores_nM = of_images.detach()
    return loss_n, (scores_nM.amax(1) > scores_nM.gather(1, own_n[:, None])[:, 0]).float()


def _counts(count: int, readers: ProcessGroup | None) -> tuple[list[int], int]:
    """Number of pairs of each rank, and this rank's index. Exchanged between hosts, without GPU synchronization."""
    if readers is None or readers.size() == 1:
        return [count], 0
    counts = torch.zeros(readers.size(), dtype=torch.int64, device=CPU)
    dist.all_gather_into_tensor(counts, torch.tensor([count], device=CPU), group=readers)
    return counts.tolist(), readers.rank()


def _gathered(x_mE: Tensor, readers: ProcessGroup | None) -> Tensor:
    """Gather the rows of all ranks, [M, E]; the backward sums the gradients that all ranks have for this rank's."""
    if readers is None or readers.size() == 1:
        return x_mE
    return gather_from_sequence_parallel_region(x_mE, tensor_parallel_output_grad=True, group=readers)


def pairwise_loss(
    images_NE: Tensor, texts_NE: Tensor, scale: Tensor, offset: Tensor, readers: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Sigmoid loss of each image, the sum of -ln sigmoid(+-(scale cosine + offset)) over all texts of all ranks (arXiv
    2303.15343, eq. 1), + where image and text are a pair, [N]; and 1 where another text scores higher, else 0, [N].

    `scale` and `offset` are [1]. Texts are passed around the ring of ranks, so that none ever holds all of them, or
    more scores than those of two ranks' samples.
    """
    counts, _ = _counts(len(images_NE), readers)
    texts_mE = F.pad(texts_NE, (0, 0, 0, max(counts) - len(texts_NE)))
    return _RingSimilarity.apply(images_NE, texts_mE, scale, offset, counts, readers)


class _RingSimilarity(torch.autograd.Function):
    """Autograd function of `pairwise_loss`; the backward passes the texts around once more, with their gradients."""

    @staticmethod
    def forward(ctx, images_NE, texts_mE, scale, offset, counts, readers):
        ctx.save_for_backward(images_NE, texts_mE, scale, offset)
        ctx.counts, ctx.readers = counts, readers
        loss_N = images_NE.new_zeros(len(images_NE))
        best_N = torch.full_like(loss_N, float("-inf"))
        for is_own, now_nE in _passing(texts_mE, counts, readers):
            loss_N += _block_losses(images_NE, now_nE, scale, offset, is_own)
            cosine_Nn = images_NE @ now_nE.T
            if is_own:
                own_N = cosine_Nn.diagonal()
            best_N = torch.maximum(best_N, cosine_Nn.amax(1)) if cosine_Nn.numel() else best_N
        is_wrong_N = (best_N > own_N).float()
        ctx.mark_non_differentiable(is_wrong_N)
        return loss_N, is_wrong_N

    @staticmethod
    def backward(ctx, grad_N, _):
        images_NE, texts_mE, scale, offset = ctx.saved_tensors
        totals = [torch.zeros_like(x) for x in (images_NE, scale, offset)]
        grad_mE = torch.zeros_like(texts_mE)
        for is_own, now_nE in _passing(texts_mE, ctx.counts, ctx.readers):
            inputs = [x.detach().requires_grad_() for x in (images_NE, scale, offset, now_nE)]
            with torch.enable_grad():
                images, factor, shift, texts = inputs
                loss_N = _block_losses(images, texts, factor, shift, is_own)
            *parts, of_texts = torch.autograd.grad(loss_N, inputs, grad_N)
            for total, part in zip(totals, parts, strict=True):
                total += part
            grad_mE[: len(now_nE)] += of_texts
            if len(ctx.counts) > 1:
                grad_mE = Shift(grad_mE, ctx.readers).wait()  # travels with its texts; the last shift brings it back
        of_images, of_scale, of_offset = totals
        return of_images, grad_mE, of_scale, of_offset, None, None


def _passing(texts_mE: Tensor, counts: list[int], readers: ProcessGroup | None) -> Iterator[tuple[bool, Tensor]]:
    """(whether they are this rank's own, texts of a rank), from its own back through the ranks before it."""
    if len(counts) == 1:
        yield True, texts_mE
        return
    for source, now_mE in round_trip(texts_mE.contiguous(), readers):
        yield source == readers.rank(), now_mE[: counts[source]]


def _block_losses(images_NE: Tensor, texts_nE: Tensor, scale: Tensor, offset: Tensor, is_own: bool) -> Tensor:
    """Loss of each image, summed over the given texts, [N]."""
    score_Nn = scale * images_NE @ texts_nE.T + offset
    sign_Nn = torch.full_like(score_Nn, -1.0)
    if is_own:
        sign_Nn.fill_diagonal_(1.0)
    return F.softplus(-sign_Nn * score_Nn).sum(1)
