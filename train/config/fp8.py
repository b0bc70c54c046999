"""What 8-bit products (`train.fp8`) ask of a run: whose linears, and sizes that the kernels can take."""

from typing import TYPE_CHECKING

from megadit.models.shared.errors import UserError
from megadit.train.config.value_checks import nearest_multiples

if TYPE_CHECKING:
    from megadit.train.config.schema import RunConfig

MULTIPLE = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""`train.fp8_recipe` -> what rows and columns of every matrix are a multiple of, on each rank."""


def check_fp8(config: "RunConfig") -> None:
    """Raises UserError if a run asks for 8-bit products that it cannot have."""
    if config.train.fp8 == "none":
        return
    asked, parallel = f"train.fp8={config.train.fp8}", config.parallel
    if parallel.transformer_impl != "transformer_engine":
        raise UserError(f"{asked} is TransformerEngine's; give parallel.transformer_impl=transformer_engine, too")
    if config.train.precision != "bf16":
        raise UserError(f"{asked} stands beside train.precision=bf16, not {config.train.precision}; set that")
    if parallel.data_parallel == "fsdp":
        raise UserError(f"{asked} does not go with parallel.data_parallel=fsdp; use distributed_optimizer")
    if config.model.experts.num_experts:
        raise UserError(f"{asked} does not reach experts, which would stay in bf16; leave it out")
    cut = parallel.sizes.sequence_multiple
    if config.model.structure.block == "st_dit" and cut > 1:
        raise UserError(f"{asked} needs equally many tokens on each of {cut} ranks, which st_dit's attentions change")
    _check_sizes(config, asked, MULTIPLE[config.train.fp8_recipe])


def _check_sizes(config: "RunConfig", asked: str, multiple: int) -> None:
    """`multiple` divides the sides of the matrices of a block, and the tokens they meet, as one rank has them."""
    model, data, tensor = config.model, config.data, config.parallel.sizes.tensor
    split = multiple * tensor
    heads, keys = model.attention_size, model.key_heads * model.dim_per_head
    sizes = [
        ("model.hidden_size", model.hidden_size, multiple),
        ("model.ffn_hidden_size", model.mlp_size, split),
        ("model.num_attention_heads x model.head_dim", heads, split),
        ("rows of queries, keys and values", heads + 2 * keys, split),
        ("data.seq_length", data.seq_length, multiple * config.parallel.sizes.sequence_multiple),
    ]
    if model.structure.cross_attention:
        sizes += [
            ("model.crossattn_emb_size", model.text_size, multiple),
            ("data.text_seq_length", data.text_seq_length, multiple),
        ]
    for name, size, factor in sizes:
        if size % factor:
            recipe = config.train.fp8_recipe
            raise UserError(
                f"{name}={size} is not a multiple of {factor}, which {asked} with train.fp8_recipe={recipe} needs on "
                f"{config.parallel.sizes.model_parallel_size} rank(s); use {nearest_multiples(size, factor)}"
            )
