"""What CUDA graphs (`parallel.cuda_graph_max_segments`) ask of a run: blocks that are the same in every step."""

from typing import TYPE_CHECKING

from megadit.models.shared.errors import UserError

if TYPE_CHECKING:
    from megadit.train.config.schema import RunConfig


def check_graphs(config: "RunConfig") -> None:
    """Raises UserError if a run asks for graphs of blocks that cannot be recorded."""
    parallel, model = config.parallel, config.model
    if parallel.cuda_graph_max_segments is None:
        return
    gathers = parallel.data_parallel == "distributed_optimizer" and parallel.overlap_param_gather
    hindrances = {
        "ranks that share a copy of the network: data parallelism alone": parallel.sizes.model_parallel_size > 1,
        "parallel.data_parallel=fsdp: use ddp": parallel.data_parallel == "fsdp",
        "weights gathered meanwhile: parallel.overlap_param_gather=false": gathers,
        "TransformerEngine: parallel.transformer_impl=local": parallel.transformer_impl != "local",
        "gradient_accumulation_fusion: leave that out": parallel.gradient_accumulation_fusion,
        "blocks computed again: parallel.recompute_granularity=none": parallel.recompute_granularity != "none",
        "experts, whose tokens are others each time": bool(model.experts.num_experts),
        "attention along one axis (st_dit)": model.structure.block == "st_dit",
        "float32: train.precision=bf16": config.train.precision != "bf16",
        "heads that the kernel for packs does not take: model.head_dim of 8 n <= 256": (
            model.dim_per_head % 8 > 0 or model.dim_per_head > 256
        ),
    }
    for hindrance, is_there in hindrances.items():
        if is_there:
            asked = f"parallel.cuda_graph_max_segments={parallel.cuda_graph_max_segments}"
            raise UserError(f"{asked} does not go with {hindrance}; or leave it out")
