"""Training objective of classifiers on packs, in float32; without mixup the samples are independent.

Shapes: S tokens, D width, G segments of a pack (padding included), K classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.networks.embeddings import class_index
from megadit.models.networks.vit import ViT
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.losses import LossSums
from megadit.train.objectives.networks import Networks


def classify(networks: Networks, batch: PackedBatch) -> LossSums | Tensor:
    """`classification_loss` with `train.label_smoothing`, or activations [S, 1, D]."""
    model = networks.model
    return classification_loss(model.dit, batch, networks.config.train.label_smoothing, model.before)


def classification_loss(
    vit: ViT, batch: PackedBatch, label_smoothing: float = 0.0, before: Tensor | None = None
) -> LossSums | Tensor:
    """Cross-entropy -sum_k q_k ln p_k with label smoothing (arXiv 1512.00567, section 7); mixup mixes q too.

    Model chunks before the last return activations, from those of the chunk before (`before` [S, 1, D]): see
    `ViT.forward_packed`.
    """
    logits_GK = vit.forward_packed(batch.tokens_S1P if vit.part.is_first else before, batch.layout)
    if not vit.part.is_last:
        return logits_GK
    logits_GK, tensors = logits_GK.float(), batch.layout.on(logits_GK.device)
    class_G = class_index(batch.text_L1E[tensors.first_text_G, 0], vit.config.num_classes)
    entropy_G = F.cross_entropy(logits_GK, class_G, reduction="none")
    objective_G = F.cross_entropy(logits_GK, class_G, reduction="none", label_smoothing=label_smoothing)
    if "partner" in batch.extra_G:
        other_G = class_G[batch.extra_G["partner"] + torch.arange(len(class_G), device=class_G.device)]
        of_others_G = F.cross_entropy(logits_GK, other_G, reduction="none", label_smoothing=label_smoothing)
        objective_G = torch.lerp(of_others_G, objective_G, batch.extra_G["own_share"])
    return sums_of_samples(batch, objective_G, entropy_G, logits_GK.detach().argmax(-1) != class_G)


def sums_of_samples(batch: PackedBatch, objective_G: Tensor, weighted_G: Tensor, is_wrong_G: Tensor) -> LossSums:
    """Losses of samples, weighted by their tokens, because means are over tokens; samples without a label count 0."""
    tensors = batch.layout.on(objective_G.device)
    tokens_G = torch.zeros_like(weighted_G).index_add_(0, tensors.segment_of_token_S, tensors.is_target_S.float())
    tokens_G = tokens_G.masked_fill(tensors.has_no_text_G, 0.0)
    sums = tokens_G * batch.loss_weight_G * objective_G, tokens_G * weighted_G.detach(), tokens_G * is_wrong_G
    return LossSums(*(values_G.sum() for values_G in sums))
