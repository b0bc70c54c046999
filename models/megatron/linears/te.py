"""TransformerEngine's linears in place of Megatron's: the same layout, with NVIDIA's kernels.

With `config.fp8` those of the blocks have FP8 products. Scales are computed from the current values (`tensorwise`,
`blockwise`, `mxfp8`), never from earlier steps (`delayed`): no state must be saved or exchanged between ranks, and
skipped steps and resumed runs change nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megadit.models.megatron.plan import COLUMN_OF_TEXT, ROW, Role
from megadit.models.shared.errors import UserError


class _TELinear(nn.Module):
    """A TransformerEngine linear under the canonical keys `weight` and `bias`.

    TransformerEngine's module is not registered as a submodule: its state has further keys, which no checkpoint needs.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias if linear.use_bias else None
        object.__setattr__(self, "linear", linear)

    def forward(self, x_SBD: Tensor) -> Tensor:
        # casts, moves and FSDP replace parameters by other tensors
        self.linear._parameters["weight"] = self.weight
        if self.bias is not None:
            self.linear._parameters["bias"] = self.bias
        return self.linear(x_SBD)


def te_linear(plain: nn.Linear, role: Role, config: TransformerConfig) -> nn.Module:
    """Replace `plain` by TransformerEngine's linear, whose matrix ranks share as `role` says."""
    import transformer_engine.pytorch as te

    group = parallel_state.get_tensor_model_parallel_group()
    linear = te.Linear(
        plain.in_features,
        plain.out_features,
        bias=plain.bias is not None,
        parallel_mode="row" if role is ROW else "column",
        tp_group=group,
        tp_size=group.size(),
        sequence_parallel=config.sequence_parallel and role is not COLUMN_OF_TEXT,
        fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
        params_dtype=config.params_dtype,
        device=torch.get_default_device().type,
    )
    return _TELinear(linear)


def fp8_arithmetic(config: TransformerConfig) -> Callable[[], AbstractContextManager]:
    """Return the context manager of a block's computation: FP8 where a backward follows, if `config.fp8` is set.

    Without a backward (validation, sampling) the network computes as in a bundle. The context is entered again for
    recomputation in backward, which is safe: the recipes have no state.

    Raises:
        UserError: if this GPU does not support the recipe.
    """
    if config.fp8 is None:
        return nullcontext
    recipe = _fp8_recipe(config)

    def arithmetic() -> AbstractContextManager:
        if not torch.is_grad_enabled():
            return nullcontext()
        import transformer_engine.pytorch as te

        return te.autocast(enabled=True, recipe=recipe)

    return arithmetic


def _fp8_recipe(config: TransformerConfig) -> object:
    """TransformerEngine's recipe for `config.fp8` and `config.fp8_recipe`.

    Raises:
        UserError: if this GPU does not support the recipe.
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
