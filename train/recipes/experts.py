"""Networks with experts, under the names of NeMo's factories."""

from megadit.models.configs.block import ExpertConfig
from megadit.train.config.schema import ParallelConfig, RunConfig
from megadit.train.recipes.moviegen import pretrain_ditllama1b
from megadit.train.recipes.registry import recipe, variant


@recipe
def pretrain_ecditllama1b() -> RunConfig:
    """MovieGen-1B with 64 experts that choose their tokens (EC-DiT, arXiv 2410.02098), on single images of 256 pixels.

    The numbers are those of NeMo's `pretrain_ecditllama1b`: each expert is an eighth as wide as the MLP it stands for,
    and a token has eight on average. What ranks share is ours: NeMo's needs a Megatron of its own.

    Command: torchrun --nnodes 4 --nproc-per-node 8 -m megadit.train --recipe pretrain_ecditllama1b data.path=FOLDER
    Hardware: 32 GPUs with 80 GB; the experts are spread over the eight of a node.
    Tokens: 589,824 a step (2,304 packs of 256, one image each).
    Memory: 60 GiB a rank.
    """
    experts = ExpertConfig(num_experts=64, routing="expert_choice", capacity_factor=8.0, ffn_hidden_size=1024)
    return variant(
        pretrain_ditllama1b(),
        model=dict(experts=experts),
        data=dict(micro_batch_size=72, global_batch_size=2304, min_aesthetic_score=5.0),
        parallel=ParallelConfig(data_parallel="fsdp", expert_model_parallel_size=8),
    )
