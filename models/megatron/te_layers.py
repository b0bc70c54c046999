"""The layer kit on TransformerEngine's linears: the layout of `McoreLayers`, with NVIDIA's kernels."""

from contextlib import AbstractContextManager, nullcontext

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megadit.models.layers import Sequence
from megadit.models.megatron.extensions import has_transformer_engine
from megadit.models.megatron.linears import set_split
from megadit.models.megatron.mcore_layers import McoreLayers
from megadit.models.shared.errors import UserError


class _TELinear(nn.Module):
    """A TransformerEngine linear under the canonical keys `weight` and `bias`.

    TransformerEngine's module is kept out of the module tree: its state has more than these, which no checkpoint needs.
    """

    def __init__(self, linear: nn.Module, partition_dim: int) -> None:
        super().__init__()
        # TransformerEngine marks its weights itself, but not the same way in every version
        set_split(linear.weight, partition_dim)
        self.weight = linear.weight
        self.bias = linear.bias if linear.use_bias else None
        if self.bias is not None and partition_dim == 0:
            set_split(self.bias, 0)
        object.__setattr__(self, "linear", linear)

    def forward(self, x_SBD: Tensor) -> Tensor:
        # casts, moves and FSDP put other tensors in the place of parameters
        self.linear._parameters["weight"] = self.weight
        if self.bias is not None:
            self.linear._parameters["bias"] = self.bias
        return self.linear(x_SBD)


class TELayers(McoreLayers):
    """`McoreLayers` with TransformerEngine's linears.

    With `config.fp8` those of the blocks multiply in eight bits. Scales follow from the numbers at hand (`tensorwise`,
    `blockwise`, `mxfp8`), never from those of earlier steps (`delayed`): there is nothing to save, to exchange between
    ranks or to go wrong when a step is left out or a run resumed.

    Raises:
        UserError: if TransformerEngine is not installed, or there is no GPU, or none that has such arithmetic.
    """

    def __init__(self, config: TransformerConfig, **options) -> None:
        if not has_transformer_engine():
            raise UserError("TransformerEngine's linears need a GPU and TransformerEngine (megadit[te])")
        super().__init__(config, **options)
        self.recipe = None if config.fp8 is None else _fp8_recipe(config)

    def arithmetic(self) -> AbstractContextManager:
        """Eight bits where a backward follows. Without one (validation, sampling) the network is that of a bundle.

        Entered anew where a block is computed again in backward: the recipes have no state that this could disturb.
        """
        if self.recipe is None or not torch.is_grad_enabled():
            return nullcontext()
        import transformer_engine.pytorch as te

        return te.autocast(enabled=True, recipe=self.recipe)

    def column_linear(
        self, in_features: int, out_features: int, *, sequence: Sequence, bias: bool = False
    ) -> nn.Module:
        is_sharded = sequence == "sharded"
        return _TELinear(self._linear(in_features, out_features, "column", is_sharded, bias), partition_dim=0)

    def row_linear(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        return _TELinear(self._linear(in_features, out_features, "row", True, bias), partition_dim=1)

    def _linear(self, in_features: int, out_features: int, mode: str, is_sharded: bool, bias: bool) -> nn.Module:
        import transformer_engine.pytorch as te

        return te.Linear(
            in_features,
            out_features,
            bias=bias,
            parallel_mode=mode,
            tp_group=self.tensor_group,
            tp_size=self.tensor_group.size(),
            sequence_parallel=self.config.sequence_parallel and is_sharded,
            fuse_wgrad_accumulation=self.config.gradient_accumulation_fusion,
            params_dtype=self.config.params_dtype,
            device=torch.get_default_device().type,
        )


def _fp8_recipe(config: TransformerConfig) -> object:
    """TransformerEngine's word for `config.fp8` and `config.fp8_recipe`.

    Raises:
        UserError: if this GPU cannot compute so.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    kind, ask = {
        "tensorwise": (recipe.Float8CurrentScaling, te.is_fp8_available),
        "blockwise": (recipe.Float8BlockScaling, te.is_fp8_block_scaling_available),
        "mxfp8": (recipe.MXFP8BlockScaling, te.is_mxfp8_available),
    }[config.fp8_recipe]
    is_available, reason = ask(return_reason=True)
    if not is_available:
        raise UserError(f"train.fp8_recipe={config.fp8_recipe} cannot run on this GPU: {reason}")
    return kind(fp8_format=recipe.Format[config.fp8.upper()])
