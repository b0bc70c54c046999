"""What a training run is: one frozen dataclass per concern, gathered in `RunConfig`.

The dotted path of a field (`optimizer.lr`) is its name in YAML files and in `a.b=c` overrides. Each dataclass checks
what it can see of itself, `RunConfig` what two of them must agree on, and `config_checks.py` what depends on the number
of ranks and on files. All of them raise `UserError` with the offending value and a remedy.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from megadit.models.config import DiTConfig
from megadit.models.megatron.parallel_sizes import ContextComm, ParallelSizes
from megadit.models.shared.errors import UserError
from megadit.train.config.fp8 import check_fp8
from megadit.train.config.graphs import check_graphs
from megadit.train.config.upkeep import CheckpointConfig, HealthConfig, LoggerConfig, ValidationConfig
from megadit.train.config.value_checks import nearest_multiples, require_choice, require_not_negative, require_positive

Precision = Literal["fp32", "bf16"]
Fp8 = Literal["none", "e4m3", "hybrid"]
Fp8Recipe = Literal["tensorwise", "blockwise", "mxfp8"]
MatmulPrecision = Literal["ieee", "tf32", "bf16"]
OptimizerName = Literal["adamw", "muon"]
LRDecayStyle = Literal["cosine", "linear", "constant"]
DataParallel = Literal["ddp", "distributed_optimizer", "fsdp"]
Recompute = Literal["none", "selective", "full", "auto"]
TransformerImpl = Literal["local", "transformer_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where samples come from and how they are packed into rows of fixed size."""

    path: str | None = None
    """Folder written by `megadit prepare`: WebDataset shards with Energon's metadata and a megadit.json; or a YAML file
    of Energon's that blends several of them."""
    mock: bool = False
    """Endless random samples in place of `path`."""
    seq_length: int
    """Video tokens of one pack; the tail that no sample fills is masked."""
    text_seq_length: int
    """Text slots of one pack, at least one per sample (the null token of a sample without text uses one)."""
    micro_batch_size: int = 1
    """Packs that one data-parallel rank computes at a time."""
    global_batch_size: int
    """Packs of one optimizer step, over all data-parallel ranks and accumulation steps."""
    num_workers: int = 2
    """Reader processes per data-parallel rank; 0 reads in the training process."""
    packing_buffer_size: int = 100
    """Samples from which packs are filled; more waste less of each pack."""
    shuffle_buffer_size: int = 1000
    """Samples from which the next one is drawn at random."""
    text_dropout: float = 0.1
    """Share of samples trained without their text, 0..1; classifier-free guidance needs some (arXiv 2207.12598)."""
    mock_latent_shapes: tuple[tuple[int, int, int], ...] = ((1, 32, 32), (4, 32, 32))
    """(T, H, W) of mock samples, in latent frames and latent pixels, taken in turn."""
    use_train_split_for_val: bool = False
    """Validate on training samples, for datasets without a `val` split."""
    encode: Literal["precached", "on_the_fly"] = "precached"
    """Samples are latents, or pixels (`megadit prepare --store raw`) that the readers encode with the frozen encoders
    of the dataset."""
    max_frames: int | None = None
    """Latent frames of a sample; what lies beyond is cut off before its length is measured."""
    max_latent: float = 1000.0
    """Samples whose latent has a larger absolute value are skipped."""
    min_aesthetic_score: float | None = None
    """Samples with a lower `aesthetic_score`, or none, are skipped."""
    keep: tuple[str, ...] = ()
    """Shares of samples read in each pass, to mix by ratio: `[image:0.25, 256x448:0.5]`; all that is not named, 1."""

    def __post_init__(self) -> None:
        if self.encode not in ("precached", "on_the_fly"):
            raise UserError(f"data.encode={self.encode!r} is unknown; choose precached or on_the_fly")
        if self.max_frames is not None:
            require_positive("data", self, ["max_frames"])
        require_positive("data", self, ["max_latent"])
        require_positive("data", self, ["seq_length", "text_seq_length", "micro_batch_size", "global_batch_size"])
        require_positive("data", self, ["packing_buffer_size", "shuffle_buffer_size"])
        require_not_negative("data", self, ["num_workers"])
        if not 0 <= self.text_dropout <= 1:
            raise UserError(f"data.text_dropout={self.text_dropout} is a share of samples; give a value from 0 to 1")
        if self.global_batch_size % self.micro_batch_size:
            raise UserError(
                f"data.global_batch_size={self.global_batch_size} is not a multiple of "
                f"data.micro_batch_size={self.micro_batch_size}; "
                f"use {nearest_multiples(self.global_batch_size, self.micro_batch_size)}"
            )
        if not self.mock_latent_shapes or any(side < 1 for shape in self.mock_latent_shapes for side in shape):
            raise UserError(
                f"data.mock_latent_shapes={self.mock_latent_shapes} needs at least one (T, H, W), each side 1 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length, seed, place and arithmetic of a run."""

    train_iters: int
    """Optimizer steps of the whole run, those before a resume included."""
    seed: int = 1234
    """With a sample's id it decides the noise, sigma and text dropout of that sample; alone, the initial weights."""
    output_dir: str | None = None
    """Folder for config.yaml, metrics.jsonl, checkpoints/, tensorboard/ and samples/; a run found there is resumed."""
    precision: Precision = "bf16"
    """Arithmetic of the network; master weights, gradients, noise and loss are float32 in both."""
    matmul_precision: MatmulPrecision = "ieee"
    """How float32 matrix products may be computed: `tf32` on a GPU, `bf16` on a CPU that has such instructions."""
    fp8: Fp8 = "none"
    """Eight bits in the products of the blocks' matrices while training, by TransformerEngine: `e4m3`, or `hybrid` with
    e5m2 for gradients; embedders, modulation, attention, the last layer, validation and all that is kept stay bf16."""
    fp8_recipe: Fp8Recipe = "tensorwise"
    """Which numbers share a scale: a tensor's, a block's of 128, or 32 in a row (`mxfp8`: Blackwell)."""
    log_interval: int = 10
    """Steps between printed lines; metrics.jsonl has every step."""
    num_threads: int | None = None
    """CPU threads of one rank; None divides the machine's cores among its ranks."""

    def __post_init__(self) -> None:
        require_positive("train", self, ["train_iters", "log_interval"])
        require_choice("train.precision", self.precision, get_args(Precision))
        require_choice("train.fp8", self.fp8, get_args(Fp8))
        require_choice("train.fp8_recipe", self.fp8_recipe, get_args(Fp8Recipe))
        require_choice("train.matmul_precision", self.matmul_precision, get_args(MatmulPrecision))
        require_not_negative("train", self, ["seed"])
        if self.num_threads is not None:
            require_positive("train", self, ["num_threads"])


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig:
    """The distribution of noise levels in training and the weighting of their losses (EDM, arXiv 2206.00364)."""

    p_mean: float = 0.0
    """Mean of ln sigma."""
    p_std: float = 1.0
    """Standard deviation of ln sigma."""
    learned_uncertainty: bool = False
    """Divide each loss by a learned function of sigma, plus its logarithm (EDM2, arXiv 2312.02696, eq. 21)."""

    def __post_init__(self) -> None:
        require_positive("diffusion", self, ["p_std"])


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer, its learning-rate schedule and gradient clipping."""

    optimizer: OptimizerName = "adamw"
    """`muon` orthogonalises the updates of the block matrices; everything else takes AdamW in both cases."""
    lr: float
    """Highest learning rate, reached after the warm-up."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    moments: Precision = "fp32"
    """Precision of AdamW's two moments; bf16 halves them, rounded at random so that small changes add up."""
    muon_momentum: float = 0.95
    clip_grad: float = 1.0
    """Largest norm of the gradient over all parameters; 0 does not clip."""
    lr_warmup_iters: int = 0
    """Steps of linear increase from 0 to `lr`."""
    lr_decay_style: LRDecayStyle = "cosine"
    lr_decay_iters: int | None = None
    """Step at which `min_lr` is reached; None means `train.train_iters`."""

    def __post_init__(self) -> None:
        require_choice("optimizer.optimizer", self.optimizer, get_args(OptimizerName))
        require_choice("optimizer.moments", self.moments, get_args(Precision))
        if self.moments == "bf16" and self.optimizer == "muon":
            raise UserError("optimizer.moments=bf16 is for optimizer.optimizer=adamw; leave it out with muon")
        require_choice("optimizer.lr_decay_style", self.lr_decay_style, get_args(LRDecayStyle))
        require_positive("optimizer", self, ["lr", "adam_eps"])
        require_not_negative("optimizer", self, ["min_lr", "weight_decay", "clip_grad", "lr_warmup_iters"])
        for name in ("adam_beta1", "adam_beta2", "muon_momentum"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise UserError(f"optimizer.{name}={value} must be at least 0 and below 1")
        if self.min_lr > self.lr:
            raise UserError(f"optimizer.min_lr={self.min_lr} exceeds optimizer.lr={self.lr}; lower it")
        if self.lr_decay_iters is not None:
            require_positive("optimizer", self, ["lr_decay_iters"])
            if self.lr_decay_iters <= self.lr_warmup_iters:
                raise UserError(
                    f"optimizer.lr_decay_iters={self.lr_decay_iters} must exceed "
                    f"optimizer.lr_warmup_iters={self.lr_warmup_iters}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """Averages of the weights over training, kept side by side; which one to sample from is chosen afterwards."""

    sigma_rels: tuple[float, ...] = (0.05, 0.10)
    """Width of each power-function profile relative to the run so far (EDM2, arXiv 2312.02696, eq. 123)."""

    def __post_init__(self) -> None:
        # gamma -> 0 (a plain mean over the whole run) has sigma_rel = 1/sqrt(12); wider profiles do not exist.
        limit = 1 / math.sqrt(12)
        for sigma_rel in self.sigma_rels:
            if not 0 < sigma_rel < limit:
                raise UserError(
                    f"ema.sigma_rels={sigma_rel} must lie between 0 and {limit:.3f} (a plain mean over the whole run)"
                )
        if len(set(self.sigma_rels)) != len(self.sigma_rels):
            raise UserError(f"ema.sigma_rels={list(self.sigma_rels)} names one profile twice")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the ranks share the work, in Megatron's own words. What remains of the world is data parallel.

    Which of it goes together: `models.megatron.parallel_sizes`; which of it to choose: LAYOUTS.md.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    """Parts of the network on each pipeline stage, taken in turn."""
    context_parallel_size: int = 1
    context_parallel_comm: ContextComm = "ulysses"
    """What context-parallel ranks exchange for attention: heads, keys and values (`ring`), or `both`."""
    expert_model_parallel_size: int = 1
    """Ranks that hold different experts; they hold different tokens too, of one sample or of several copies."""
    expert_tensor_parallel_size: int = 1
    """Ranks that share the matrices of one expert; wide experts need it, never many small ones."""
    sequence_parallel: bool = False
    """Cut activations between the tensor-parallel regions along the sequence."""
    transformer_impl: TransformerImpl = "local"
    """Whose linears: Megatron's own, or TransformerEngine's (a GPU, and megadit[te])."""
    gradient_accumulation_fusion: bool = False
    """Add the gradient of a matrix to its sum over micro-batches in the product that makes it; needs a GPU, and
    TransformerEngine's linears or NVIDIA's apex (`fused_weight_gradient_mlp_cuda`)."""
    data_parallel: DataParallel = "ddp"
    """`distributed_optimizer` spreads AdamW's state and master weights over the data-parallel ranks (ZeRO-1), `fsdp`
    weights and gradients too (ZeRO-3). Muon divides whole matrices among them with the first two, and refuses fsdp."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward goes on; not with fsdp, which always does."""
    overlap_param_gather: bool = True
    """Gather updated weights while the forward begins; with `distributed_optimizer` alone."""
    recompute_granularity: Recompute = "none"
    """Compute again in the backward rather than keep: the attention (`selective`), or whole blocks (`full`); `auto`
    finds before the first step how many blocks the free memory demands (plan/recompute.py)."""
    recompute_num_layers: int | None = None
    """Blocks of each part of the network that `full` applies to; None means all."""
    cuda_graph_max_segments: int | None = None
    """Replay the blocks as CUDA graphs for packs of at most so many segments (samples, and one for the tail), where one
    GPU holds the network; None: never. It spares Python's time for each kernel, and keeps a gradient of all blocks."""

    def __post_init__(self) -> None:
        require_choice("parallel.data_parallel", self.data_parallel, get_args(DataParallel))
        require_choice("parallel.transformer_impl", self.transformer_impl, get_args(TransformerImpl))
        require_choice("parallel.context_parallel_comm", self.context_parallel_comm, get_args(ContextComm))
        require_choice("parallel.recompute_granularity", self.recompute_granularity, get_args(Recompute))
        if self.gradient_accumulation_fusion and self.data_parallel == "fsdp":
            raise UserError(
                "parallel.gradient_accumulation_fusion=true adds to sums that parallel.data_parallel=fsdp has not; use "
                "ddp or distributed_optimizer, or leave it out"
            )
        if self.cuda_graph_max_segments is not None:
            require_positive("parallel", self, ["cuda_graph_max_segments"])
        if self.recompute_num_layers is not None:
            require_positive("parallel", self, ["recompute_num_layers"])
            if self.recompute_granularity != "full":
                raise UserError(
                    f"parallel.recompute_num_layers={self.recompute_num_layers} needs "
                    "parallel.recompute_granularity=full"
                )

    @property
    def sizes(self) -> ParallelSizes:
        return ParallelSizes(
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            virtual_pipeline=self.virtual_pipeline_model_parallel_size,
            context=self.context_parallel_size,
            context_comm=self.context_parallel_comm,
            expert=self.expert_model_parallel_size,
            expert_tensor=self.expert_tensor_parallel_size,
            sequence_parallel=self.sequence_parallel,
            fully_sharded=self.data_parallel == "fsdp",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run, complete: saved as config.yaml in the run's folder and with every checkpoint."""

    recipe: str
    """Name of the recipe this run started from."""
    model: DiTConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    def __post_init__(self) -> None:
        self.parallel.sizes.check(self.model)
        self._check_sequence()
        check_fp8(self)
        check_graphs(self)
        if self.optimizer.optimizer == "muon" and self.parallel.data_parallel == "fsdp":
            raise UserError(
                "optimizer.optimizer=muon needs whole matrices, which parallel.data_parallel=fsdp cuts; use "
                "parallel.data_parallel=distributed_optimizer, or optimizer.optimizer=adamw"
            )
        if self.optimizer.optimizer == "muon" and self.model.experts.num_experts:
            raise UserError(
                "optimizer.optimizer=muon knows no experts, which are stacks of matrices on ranks of their own; use "
                "optimizer.optimizer=adamw"
            )
        if self.data.mock:
            self._check_mock_samples_fit()

    def _check_sequence(self) -> None:
        multiple = self.parallel.sizes.sequence_multiple
        if self.data.seq_length % multiple:
            raise UserError(
                f"data.seq_length={self.data.seq_length} is cut over {multiple} ranks by "
                "parallel.context_parallel_size and parallel.sequence_parallel; "
                f"use {nearest_multiples(self.data.seq_length, multiple)}"
            )

    def _check_mock_samples_fit(self) -> None:
        for shape in self.data.mock_latent_shapes:
            tokens = math.prod(self.model.token_grid(*shape))
            if tokens > self.data.seq_length:
                raise UserError(
                    f"data.mock_latent_shapes={list(shape)} has {tokens} tokens, more than "
                    f"data.seq_length={self.data.seq_length}; raise that or use smaller shapes"
                )

    @property
    def lr_decay_iters(self) -> int:
        """Step at which the decay of the learning rate ends: always after the warm-up, even in a run cut short."""
        return max(self.optimizer.lr_decay_iters or self.train.train_iters, self.optimizer.lr_warmup_iters + 1)
