"""What a run's configuration must agree on with the world around it: the number of ranks, the files it names."""

from megadit.models.shared.errors import UserError
from megadit.train.config.schema import ParallelConfig, RunConfig, ValidationConfig
from megadit.train.config.value_checks import nearest_multiples


def check_layout(config: RunConfig, world_size: int) -> int:
    """The data-parallel size of a world of `world_size` ranks.

    Raises:
        UserError: if the ranks cannot be divided among the copies of the model, or the batch among the copies.
    """
    sizes, data = config.parallel.sizes, config.data
    data_parallel = sizes.check(config.model, world_size)
    packs, words = data.micro_batch_size * data_parallel, f"{data_parallel} data-parallel ranks"
    if sizes.virtual_pipeline > 1:
        packs, words = packs * sizes.pipeline, f"{words} x {sizes.pipeline} stages, which take parts in turn"
    if data.global_batch_size % packs:
        raise UserError(
            f"data.global_batch_size={data.global_batch_size} is not a multiple of {packs} "
            f"(data.micro_batch_size={data.micro_batch_size} x {words}); "
            f"use {nearest_multiples(data.global_batch_size, packs)}"
        )
    return data_parallel


def check_inputs(config: RunConfig) -> None:
    """Raises UserError if this machine lacks the kernels asked for, or the samples, the run's folder, or the sampler or
    tokenizer of its videos cannot be used.
    """
    from megadit.train.second_copy import check_url

    _check_kernels(config.parallel)
    _check_sampling(config.validation)
    check_url(config.checkpoint.copy_to)
    if config.train.output_dir is None:
        raise UserError("train.output_dir is not set; give train.output_dir=FOLDER")
    if config.data.mock:
        return
    if config.data.path is None:
        raise UserError("data.path is not set; give data.path=FOLDER (see `megadit prepare`), or --mock")
    from megadit.train.data.dataset_info import DatasetInfo

    _check_tokenizer(config.validation.tokenizer_folder, DatasetInfo.read(config.data.path).tokenizer_fingerprint)


def _check_kernels(parallel: ParallelConfig) -> None:
    from megadit.models.megatron import extensions  # brings torch, which the rest does without

    if parallel.transformer_impl == "transformer_engine":
        extensions.check_transformer_engine()
    elif parallel.gradient_accumulation_fusion:
        extensions.check_gradient_accumulation_fusion()
    if parallel.cuda_graph_max_segments is not None:
        extensions.check_cuda_graphs()


def _check_sampling(validation: ValidationConfig) -> None:
    """Raises UserError for a sampler that does not exist, or cannot do what is asked of it."""
    from megadit.infer.resolve import resolve_settings
    from megadit.models.settings import SamplingSettings

    steps, size = validation.num_steps, {"num_frames": 1, "height": 1, "width": 1, "fps": 1.0}
    sampling = SamplingSettings(sampler=validation.sampler, num_steps=steps, guidance=validation.guidance, **size)
    resolve_settings(sampling, eta=validation.eta)


def _check_tokenizer(folder: str | None, expected: str) -> None:
    """Raises UserError if there is no tokenizer in `folder`, or another one than that of the data set."""
    if folder is None:
        return
    from megadit.models.tokenizers import load_tokenizer

    if load_tokenizer(folder).fingerprint() != expected:
        raise UserError(
            f"validation.tokenizer_folder={folder} holds another tokenizer than the data set's; leave it out"
        )
