"""Configuration of a training run: one frozen dataclass per concern, gathered in `RunConfig`.

The dotted path of a field (`optimizer.lr`) is its name in YAML files and in `a.b=c` overrides. A field declares the
bounds of its value; what several fields must keep together is in `rules.py`. Both raise `UserError` with the offending
value and a remedy.
"""

from dataclasses import dataclass, field
from typing import Literal

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.megatron.parallel_sizes import ContextComm, ParallelSizes
from megadit.models.shared.cli.setting import check_settings, setting
from megadit.train.config.distill import DistillConfig
from megadit.train.config.rules import check_config
from megadit.train.config.upkeep import CheckpointConfig, HealthConfig, LoggerConfig, ValidationConfig

Precision = Literal["fp32", "bf16", "fp16"]
Moments = Literal["fp32", "bf16"]
NoiseLevels = Literal["log_normal", "uniform", "mode"]
Fp8 = Literal["none", "e4m3", "hybrid"]
Fp8Recipe = Literal["tensorwise", "blockwise", "mxfp8"]
MatmulPrecision = Literal["ieee", "tf32", "bf16"]
BasePrecision = Literal["same", "int8"]
OptimizerName = Literal["adamw", "muon"]
LRDecayStyle = Literal["cosine", "linear", "constant"]
DataParallel = Literal["ddp", "distributed_optimizer", "fsdp"]
Recompute = Literal["none", "selective", "full", "auto"]
TransformerImpl = Literal["local", "transformer_engine"]
WIDEST_PROFILE = 1 / 12**0.5
"""The sigma_rel of gamma -> 0, a plain mean over the whole run; wider profiles do not exist."""
MOST_TOKENS = 10_000_000
"""Maximum capacity of a pack: far beyond any training, and small enough to be counted before memory runs out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Source of the samples, and how they are packed into rows of fixed size."""

    path: str | None = None
    """Folder written by `megadit prepare`: WebDataset shards with Energon's metadata and a megadit.json; or a YAML file
    of Energon's that blends several of them."""
    mock: bool = False
    """Endless random samples in place of `path`."""
    seq_length: int = setting(above=0, high=MOST_TOKENS)
    """Video tokens of one pack; the tail that no sample fills is masked."""
    text_seq_length: int = setting(above=0, high=MOST_TOKENS)
    """Text slots of one pack, at least one per sample (the null token of a sample without text uses one)."""
    micro_batch_size: int = setting(1, above=0)
    """Packs that one data-parallel rank computes at a time."""
    global_batch_size: int = setting(above=0)
    """Packs of one optimizer step, over all data-parallel ranks and accumulation steps."""
    num_workers: int = setting(2, low=0)
    """Reader processes per data-parallel rank; 0 reads in the training process."""
    packing_buffer_size: int = setting(100, above=0)
    """Samples from which packs are filled; more waste less of each pack."""
    shuffle_buffer_size: int = setting(1000, above=0)
    """Samples from which the next one is drawn at random."""
    text_dropout: float = setting(0.1, low=0, high=1)
    """Share of samples trained without their text, 0..1; classifier-free guidance needs some (arXiv 2207.12598)."""
    mixup: float = setting(0.0, low=0)
    """a of Beta(a, a), by which classifiers learn from two samples mixed (arXiv 1710.09412); 0 mixes none."""
    prior_weight: float = setting(1.0, low=0)
    """Weight of the loss of samples that `megadit prepare prior` made, relative to 1 for others: DreamBooth's prior
    preservation (arXiv 2208.12242, eq. 2)."""
    prior_text_dropout: float | None = setting(None, low=0, high=1)
    """Text dropout of these samples; None: `text_dropout`. Guidance leads every prompt away from what is trained
    without words: set `text_dropout=0` for a subject, and let the prior samples lose some texts."""
    conditioning: tuple[str, ...] = ()
    """Shares of samples trained with conditioning, by mode: `[first_frame:0.2, prefix:0.1]`; the others learn from text
    alone. Modes are first_frame, last_frame, keyframes, prefix, suffix, inpaint, edit (`packs/conditioning.py`)."""
    conditioning_dropout: tuple[float, float, float] = (0.05, 0.05, 0.05)
    """Shares of those samples that lose their conditioning, their text, or both: guidance by either needs some (arXiv
    2211.09800, section 3.2.1)."""
    mock_latent_shapes: tuple[tuple[int, int, int], ...] = ((1, 32, 32), (4, 32, 32))
    """(T, H, W) of mock samples, in latent frames and latent pixels, taken in turn."""
    use_train_split_for_val: bool = False
    """Validate on training samples, for datasets without a `val` split."""
    encode: Literal["precached", "on_the_fly"] = setting("precached")
    """Samples are latents, or pixels (`megadit prepare --store raw`) that the readers encode with the frozen encoders
    of the dataset."""
    max_frames: int | None = setting(None, above=0)
    """Latent frames of a sample; what lies beyond is cut off before its length is measured."""
    max_latent: float = setting(1000.0, above=0)
    """Samples whose latent has a larger absolute value are skipped."""
    min_aesthetic_score: float | None = None
    """Samples with a lower `aesthetic_score`, or none, are skipped."""
    keep: tuple[str, ...] = ()
    """Shares of samples read in each pass, to mix by ratio: `[image:0.25, 256x448:0.5]`; all that is not named, 1."""

    def __post_init__(self) -> None:
        check_settings(self, "data.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length, seed, folder and arithmetic of a run."""

    train_iters: int = setting(above=0)
    """Optimizer steps of the whole run, those before a resume included."""
    max_epochs: float | None = setting(None, above=0)
    """Passes over the training samples, in place of `train_iters`, which is then counted from them (`epochs.py`)."""
    seed: int = setting(1234, low=0)
    """Seed of the initial weights, and with a sample's id of its noise, sigma and text dropout."""
    output_dir: str | None = None
    """Folder for config.yaml, metrics.jsonl, checkpoints/, tensorboard/ and samples/; a run found there is resumed."""
    precision: Precision = setting("bf16")
    """Arithmetic of the network; master weights, sums of gradients, noise and loss are float32 in all. `fp16`, for GPUs
    without bf16, multiplies the loss so that small gradients are not lost (arXiv 1710.03740, section 3.2)."""
    loss_scale: float = setting(65536.0, low=1)
    """Initial loss scale of `fp16`; halved at every overflow, whose step is skipped."""
    loss_scale_window: int = setting(1000, above=0)
    """Steps without an overflow after which it is doubled."""
    matmul_precision: MatmulPrecision = setting("ieee")
    """Precision of float32 matrix products: `tf32` on a GPU, `bf16` on a CPU that has such instructions."""
    fp8: Fp8 = setting("none")
    """Eight bits in the products of the blocks' matrices while training: `e4m3`, or `hybrid` with e5m2 for gradients;
    embedders, modulation, attention, the last layer, validation and all that is kept stay bf16. By torch, or with
    `parallel.transformer_impl=transformer_engine` by that."""
    fp8_recipe: Fp8Recipe = setting("tensorwise")
    """Numbers that share a scale: a tensor's, or with TransformerEngine a block's of 128, or 32 in a row (`mxfp8`:
    Blackwell)."""
    log_interval: int = setting(10, above=0)
    """Steps between printed lines; metrics.jsonl has every step."""
    num_threads: int | None = setting(None, above=0)
    """CPU threads of one rank; None: OMP_NUM_THREADS, or the cores divided among the machine's ranks, or one where the
    third step was faster with one than the second with all."""
    adapter: AdapterConfig | None = None
    """Adapter to train in place of the network, whose weights stay those of `checkpoint.init_from` (or, without it, of
    a student's teacher); None trains the network."""
    base_precision: BasePrecision = setting("same")
    """Precision of the frozen weights beside an adapter: that of `precision`, or `int8`, one byte per weight of
    attention and MLP, converted for each product. The adapter then works on any copy of that base."""
    label_smoothing: float = setting(0.0, low=0, below=1)
    """Label smoothing of a classifier: the share of a sample's probability spread over all classes alike (arXiv
    1512.00567, section 7)."""
    contrast_rows: int | None = setting(None, above=0)
    """Number of a rank's samples whose scores with the texts and images of all ranks are in memory at once, recomputed
    in the backward (contrastive image-text training); None: all of them."""
    distill: DistillConfig | None = None
    """The teacher whose student the network is; None: it learns from the samples alone."""

    def __post_init__(self) -> None:
        check_settings(self, "train.")

    @property
    def is_half(self) -> bool:
        """Whether a number of the network takes two bytes."""
        return self.precision != "fp32"

    @property
    def base_is_int8(self) -> bool:
        """Whether frozen linears are held in eight bits."""
        return self.adapter is not None and self.base_precision == "int8"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig:
    """The distribution of noise levels in training and the weighting of their losses, of any `model.parameterization`.

    A flow model's t is sigma / (1 + sigma), and its shift multiplies sigma.
    """

    noise_levels: NoiseLevels = setting("log_normal")
    """Distribution of sigma: `log_normal`, which is a logit-normal t; `uniform`, or with a `mode` (arXiv 2403.03206,
    section 3.1), of t."""
    p_mean: float = 0.0
    """Mean of ln sigma; of `uniform` and `mode` the logarithm of the shift."""
    p_std: float = setting(1.0, above=0)
    """Standard deviation of ln sigma; of `mode` its scale s, at most 1.75; nothing to `uniform`."""
    shift_tokens: int | None = setting(None, above=0)
    """Noise levels are multiplied by sqrt(video tokens of a sample / these): more pixels or frames need more noise to
    hide as much (arXiv 2403.03206, eq. 23). None: the same for all sizes."""
    learned_uncertainty: bool = False
    """Divide each loss by a learned function of sigma, plus its logarithm (EDM2, arXiv 2312.02696, eq. 21)."""

    def __post_init__(self) -> None:
        check_settings(self, "diffusion.")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer, its learning-rate schedule and gradient clipping."""

    optimizer: OptimizerName = setting("adamw")
    """`muon` orthogonalises the updates of the block matrices; everything else takes AdamW in both cases."""
    lr: float = setting(above=0)
    """Highest learning rate, reached after the warm-up."""
    min_lr: float = setting(0.0, low=0)
    """Learning rate at the end of the decay."""
    weight_decay: float = setting(0.0, low=0)
    adam_beta1: float = setting(0.9, low=0, below=1)
    adam_beta2: float = setting(0.95, low=0, below=1)
    adam_eps: float = setting(1e-8, above=0)
    moments: Moments = setting("fp32")
    """Precision of AdamW's two moments; bf16 halves them, rounded at random so that small changes add up."""
    muon_momentum: float = setting(0.95, low=0, below=1)
    clip_grad: float = setting(1.0, low=0)
    """Largest norm of the gradient over all parameters; 0 does not clip."""
    lr_warmup_iters: int = setting(0, low=0)
    """Steps of linear increase from 0 to `lr`."""
    lr_decay_style: LRDecayStyle = setting("cosine")
    lr_decay_iters: int | None = setting(None, above=0)
    """Step at which `min_lr` is reached; None means `train.train_iters`."""

    def __post_init__(self) -> None:
        check_settings(self, "optimizer.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """EMA of the weights with several widths, kept side by side; which one to sample from is chosen afterwards."""

    sigma_rels: tuple[float, ...] = setting((0.05, 0.10), above=0, below=WIDEST_PROFILE)
    """Width of each power-function profile relative to the run so far (EDM2, arXiv 2312.02696, eq. 123)."""

    def __post_init__(self) -> None:
        check_settings(self, "ema.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Division of the work among ranks, in Megatron's terms. What remains of the world size is data parallel.

    Which layouts are legal: `models.megatron.parallel_sizes`; which to choose: LAYOUTS.md.
    """

    tensor_model_parallel_size: int = setting(1, above=0)
    pipeline_model_parallel_size: int = setting(1, above=0)
    virtual_pipeline_model_parallel_size: int = setting(1, above=0)
    """Parts of the network on each pipeline stage, taken in turn."""
    context_parallel_size: int = setting(1, above=0)
    context_parallel_comm: ContextComm = setting("ulysses")
    """Exchange of attention among context-parallel ranks: heads (`ulysses`), keys and values (`ring`), or `both`."""
    expert_model_parallel_size: int = setting(1, above=0)
    """Ranks that hold different experts; they hold different tokens too, of one sample or of several copies."""
    expert_tensor_parallel_size: int = setting(1, above=0)
    """Ranks that share the matrices of one expert; wide experts need it, never many small ones."""
    sequence_parallel: bool = False
    """Cut activations between the tensor-parallel regions along the sequence."""
    transformer_impl: TransformerImpl = setting("local")
    """Implementation of linears: Megatron's own, or TransformerEngine's (a GPU, and megadit[te])."""
    gradient_accumulation_fusion: bool = False
    """Add the gradient of a matrix to its sum over micro-batches in the product that makes it; needs a GPU, and
    TransformerEngine's linears or NVIDIA's apex (`fused_weight_gradient_mlp_cuda`)."""
    data_parallel: DataParallel = setting("ddp")
    """`distributed_optimizer` spreads AdamW's state and master weights over the data-parallel ranks (ZeRO-1), `fsdp`
    weights and gradients too (ZeRO-3). Muon divides whole matrices among them with the first two, and refuses fsdp."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward goes on; not with fsdp, which always does."""
    overlap_param_gather: bool = True
    """Gather updated weights while the forward begins; with `distributed_optimizer` alone."""
    recompute_granularity: Recompute = setting("none")
    """Compute again in the backward rather than keep: the attention (`selective`), or whole blocks (`full`); `auto`
    finds before the first step how many blocks the free memory demands (plan/recompute.py)."""
    recompute_num_layers: int | None = setting(None, above=0)
    """Blocks of each part of the network that `full` applies to; None means all."""
    cuda_graph_max_segments: int | None = setting(None, above=0)
    """Replay the blocks as CUDA graphs for packs of at most so many segments (samples, and one for the tail), where one
    GPU holds the network; None: never. It spares Python's time for each kernel, and keeps a gradient of all blocks."""

    def __post_init__(self) -> None:
        check_settings(self, "parallel.")

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
        check_config(self)

    @property
    def starting_weights(self) -> str | None:
        """Checkpoint or bundle whose tensors training starts from: `checkpoint.init_from`, or a student's teacher."""
        if self.checkpoint.init_from is None and self.train.distill is not None:
            return self.train.distill.teacher
        return self.checkpoint.init_from

    @property
    def has_one_base(self) -> bool:
        """Whether all adapters of the run, and a teacher, share the same base weights: those networks have one set."""
        distill = self.train.distill
        return self.train.adapter is not None and (distill is None or distill.is_at(self.checkpoint.init_from))

    @property
    def lr_decay_iters(self) -> int:
        """Step at which the decay of the learning rate ends: always after the warm-up, even in a run cut short."""
        return max(self.optimizer.lr_decay_iters or self.train.train_iters, self.optimizer.lr_warmup_iters + 1)
