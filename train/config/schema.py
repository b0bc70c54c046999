"""Configuration of a training run: one frozen dataclass per topic, collected in `RunConfig`.

The dotted path of a field (`optimizer.lr`) is its name in YAML files and in `a.b=c` overrides. A field declares the
bounds of its value; rules across several fields are in `rules.py`. Both raise `UserError` with the offending value and
a remedy.
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
Balance = Literal["work", "step", "tokens"]
OptimizerName = Literal["adamw", "muon"]
LRDecayStyle = Literal["cosine", "linear", "constant"]
DataParallel = Literal["ddp", "distributed_optimizer", "fsdp"]
Recompute = Literal["none", "selective", "full", "auto"]
TransformerImpl = Literal["local", "transformer_engine"]
WIDEST_PROFILE = 1 / 12**0.5
"""Largest sigma_rel, reached as gamma -> 0: a plain mean over the whole run."""
MOST_TOKENS = 10_000_000
"""Maximum capacity of a pack in tokens: far beyond any training, yet small enough to allocate its indices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Source of the samples, and how they are packed into rows of fixed size."""

    path: str | None = None
    """Folder written by `megadit prepare` (WebDataset shards with Energon's metadata and a megadit.json), or an Energon
    YAML file that blends several of them."""
    mock: bool = False
    """Use endless random samples in place of `path`."""
    seq_length: int = setting(above=0, high=MOST_TOKENS)
    """Video tokens of one pack; unused places at its end are padding, which is masked."""
    text_seq_length: int = setting(above=0, high=MOST_TOKENS)
    """Text tokens of one pack, at least one per sample (a sample without text has one null token)."""
    micro_batch_size: int = setting(1, above=0)
    """Packs in one forward and backward pass of a data-parallel rank."""
    global_batch_size: int = setting(above=0)
    """Packs of one optimizer step, summed over data-parallel ranks and accumulation steps."""
    num_workers: int = setting(2, low=0)
    """Reader processes per data-parallel rank; 0 reads in the training process."""
    packing_buffer_size: int = setting(100, above=0)
    """Samples buffered for packing; more of them leave less padding in each pack."""
    balance: Balance = setting("work")
    """Order of packs: `work`, those of equal floating-point operations at the same time on all ranks, so that none
    waits for one with longer clips; `step`, also in all micro-batches of a step, for pipelines, whose stages wait for
    the heaviest; `tokens`, random: packs are equal in tokens alone. A `packing_buffer_size` of some hundred packs makes
    them more equal."""
    shuffle_buffer_size: int = setting(1000, above=0)
    """Samples buffered for shuffling, from which the next one is drawn at random."""
    text_dropout: float = setting(0.1, low=0, high=1)
    """Fraction of samples trained without their text, 0 to 1; classifier-free guidance needs some (arXiv
    2207.12598)."""
    mixup: float = setting(0.0, low=0)
    """Parameter a of the Beta(a, a) from which classifiers draw the mixing weight of two samples (mixup, arXiv
    1710.09412); 0: no mixup."""
    prior_weight: float = setting(1.0, low=0)
    """Weight of the loss of samples that `megadit prepare prior` made, relative to 1 for others: DreamBooth's prior
    preservation (arXiv 2208.12242, eq. 2)."""
    prior_text_dropout: float | None = setting(None, low=0, high=1)
    """Text dropout of the prior samples; None: `text_dropout`. Guidance moves samples away from what is trained without
    text: to learn a subject, set `text_dropout=0` and drop only texts of prior samples."""
    conditioning: tuple[str, ...] = ()
    """Fractions of samples trained with conditioning, by mode: `[first_frame:0.2, prefix:0.1]`; the others have text
    alone. Modes: first_frame, last_frame, keyframes, prefix, suffix, inpaint, edit."""
    conditioning_dropout: tuple[float, float, float] = (0.05, 0.05, 0.05)
    """Fractions of the samples with conditioning that lose their conditioning, their text, or both. Guidance on either
    needs some (arXiv 2211.09800, section 3.2.1)."""
    mock_latent_shapes: tuple[tuple[int, int, int], ...] = ((1, 32, 32), (4, 32, 32))
    """(T, H, W) of mock samples in latent frames and latent pixels, used in turn."""
    use_train_split_for_val: bool = False
    """Validate on training samples, for data sets without a `val` split."""
    encode: Literal["precached", "on_the_fly"] = setting("precached")
    """`precached`: samples are latents. `on_the_fly`: samples are pixels (`megadit prepare --store raw`), which the
    readers encode with the frozen encoders of the data set."""
    max_frames: int | None = setting(None, above=0)
    """Maximum latent frames of a sample; longer ones are cut before packing."""
    max_latent: float = setting(1000.0, above=0)
    """Samples whose latent has a larger absolute value are skipped."""
    min_aesthetic_score: float | None = None
    """Samples with a lower `aesthetic_score`, or without one, are skipped."""
    keep: tuple[str, ...] = ()
    """Fractions of samples read in each epoch, by kind or size: `[image:0.25, 256x448:0.5]`; 1 for all others."""

    def __post_init__(self) -> None:
        check_settings(self, "data.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length, seed, folder and precision of a run."""

    train_iters: int = setting(above=0)
    """Optimizer steps of the whole run, including those before a resume."""
    max_epochs: float | None = setting(None, above=0)
    """Epochs over the training samples, in place of `train_iters`, which is then computed from them
    (`train/__main__.py`)."""
    seed: int = setting(1234, low=0)
    """Seed of the initial weights and, together with a sample's id, of its noise, sigma and text dropout."""
    output_dir: str | None = None
    """Folder of config.yaml, metrics.jsonl, checkpoints/, tensorboard/ and samples/; a run found there is resumed."""
    precision: Precision = setting("bf16")
    """Precision of the network; master weights, gradient sums, noise and loss are always float32. `fp16`, for GPUs
    without bf16, uses loss scaling (arXiv 1710.03740, section 3.2)."""
    loss_scale: float = setting(65536.0, low=1)
    """Initial loss scale of `fp16`. An overflow halves it and skips the step."""
    loss_scale_window: int = setting(1000, above=0)
    """Steps without an overflow after which the loss scale is doubled."""
    matmul_precision: MatmulPrecision = setting("ieee")
    """Precision of float32 matrix products: `tf32` needs a GPU, `bf16` a CPU with bf16 instructions."""
    fp8: Fp8 = setting("none")
    """FP8 matrix products in the blocks while training: `e4m3`, or `hybrid` with e5m2 for gradients. Embedders,
    modulation, attention, the last layer, validation and everything saved stay bf16. Computed by torch, or by
    TransformerEngine with `parallel.transformer_impl=transformer_engine`."""
    fp8_recipe: Fp8Recipe = setting("tensorwise")
    """Granularity of FP8 scales: one per tensor (`tensorwise`); with TransformerEngine also one per block of 128
    (`blockwise`) or per 32 numbers of a row (`mxfp8`, Blackwell)."""
    fp8_weight_cache: bool = False
    """Cast each weight to FP8 once a step instead of twice a micro-batch, for 2 bytes of memory per weight. Useful with
    several micro-batches, where the memory is not needed otherwise; the results are the same."""
    log_interval: int = setting(10, above=0)
    """Steps between printed lines; metrics.jsonl has every step."""
    num_threads: int | None = setting(None, above=0)
    """CPU threads of one rank. None: OMP_NUM_THREADS, or else the faster of two choices: all cores of the machine
    divided among its ranks (measured in step 2), or one thread (step 3)."""
    adapter: AdapterConfig | None = None
    """Adapter (LoRA) to train while the network stays frozen at the weights of `checkpoint.init_from`, or of a
    student's teacher; None trains the network."""
    base_precision: BasePrecision = setting("same")
    """Precision of the frozen base of an adapter: that of `precision`, or `int8`, one byte per weight of attention and
    MLP, dequantized for each product. The trained adapter also fits the unquantized base."""
    objective: str | None = None
    """Name of the loss, one of `train/objectives/registry.py`; None: that of the network's task, or of `distill`."""
    label_smoothing: float = setting(0.0, low=0, below=1)
    """Label smoothing of a classifier: the probability of a sample that is spread evenly over all classes (arXiv
    1512.00567, section 7)."""
    contrast_rows: int | None = setting(None, above=0)
    """Rows of the similarity matrix of contrastive training (samples of a rank against those of all ranks) computed at
    once and recomputed in the backward, which bounds memory; None: all rows."""
    distill: DistillConfig | None = None
    """Distillation from a teacher; None: train on the samples."""

    def __post_init__(self) -> None:
        check_settings(self, "train.")

    @property
    def is_half(self) -> bool:
        """Whether the network computes in two bytes per number."""
        return self.precision != "fp32"

    @property
    def base_is_int8(self) -> bool:
        """Whether frozen linears are held in int8."""
        return self.adapter is not None and self.base_precision == "int8"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig:
    """Distribution of noise levels in training and weighting of their losses, for any `model.parameterization`.

    A flow model's t is sigma / (1 + sigma), and its shift multiplies sigma.
    """

    noise_levels: NoiseLevels = setting("log_normal")
    """Distribution of sigma: `log_normal` (a logit-normal t), or of t: `uniform`, or `mode` (arXiv 2403.03206, section
    3.1)."""
    p_mean: float = 0.0
    """Mean of ln sigma (`log_normal`); logarithm of the shift (`uniform`, `mode`)."""
    p_std: float = setting(1.0, above=0)
    """Standard deviation of ln sigma (`log_normal`); scale s, at most 1.75 (`mode`); unused by `uniform`."""
    shift_tokens: int | None = setting(None, above=0)
    """Multiply noise levels by sqrt(video tokens of a sample / `shift_tokens`), because larger samples need more noise
    to be hidden equally (arXiv 2403.03206, eq. 23). None: the same levels for all sizes."""
    learned_uncertainty: bool = False
    """Divide each loss by a learned function of sigma, plus its logarithm (EDM2, arXiv 2312.02696, eq. 21)."""

    def __post_init__(self) -> None:
        check_settings(self, "diffusion.")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer, its learning-rate schedule and gradient clipping."""

    optimizer: OptimizerName = setting("adamw")
    """`adamw` for all parameters, or `muon` (orthogonalised updates) for the matrices of the blocks and AdamW for the
    rest."""
    lr: float = setting(above=0)
    """Maximum learning rate, reached after the warm-up."""
    min_lr: float = setting(0.0, low=0)
    """Learning rate at the end of the decay."""
    weight_decay: float = setting(0.0, low=0)
    adam_beta1: float = setting(0.9, low=0, below=1)
    adam_beta2: float = setting(0.95, low=0, below=1)
    adam_eps: float = setting(1e-8, above=0)
    moments: Moments = setting("fp32")
    """Precision of AdamW's two moments; bf16 halves their memory and uses stochastic rounding."""
    muon_momentum: float = setting(0.95, low=0, below=1)
    clip_grad: float = setting(1.0, low=0)
    """Maximum gradient norm over all parameters; 0: no clipping."""
    lr_warmup_iters: int = setting(0, low=0)
    """Steps of linear increase from 0 to `lr`."""
    lr_decay_style: LRDecayStyle = setting("cosine")
    lr_decay_iters: int | None = setting(None, above=0)
    """Step at which `min_lr` is reached; None: `train.train_iters`."""

    def __post_init__(self) -> None:
        check_settings(self, "optimizer.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """EMA weights of several widths, all kept; which one to sample from is chosen afterwards."""

    sigma_rels: tuple[float, ...] = setting((0.05, 0.10), above=0, below=WIDEST_PROFILE)
    """Width of each power-function EMA profile relative to the run so far (EDM2, arXiv 2312.02696, eq. 123)."""

    def __post_init__(self) -> None:
        check_settings(self, "ema.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallelism in Megatron's terms. The data-parallel size is the world size divided by the model-parallel sizes.

    Rules of legal layouts: `models.megatron.parallel_sizes`. Advice on choosing one: LAYOUTS.md.
    """

    tensor_model_parallel_size: int = setting(1, above=0)
    """Ranks that share the matrices of each layer."""
    pipeline_model_parallel_size: int = setting(1, above=0)
    """Pipeline stages, each with a share of the layers."""
    virtual_pipeline_model_parallel_size: int = setting(1, above=0)
    """Model chunks on each pipeline stage (interleaved schedule)."""
    context_parallel_size: int = setting(1, above=0)
    """Ranks that share the tokens of each sample."""
    context_parallel_comm: ContextComm = setting("ulysses")
    """Data that context-parallel ranks exchange in attention: heads (`ulysses`), keys and values (`ring`), or `both`.
    """
    expert_model_parallel_size: int = setting(1, above=0)
    """Ranks among which experts are divided; these ranks also hold different tokens, by context or data parallelism.
    """
    expert_tensor_parallel_size: int = setting(1, above=0)
    """Ranks among which the matrices of one expert are divided; useful for wide experts, not for many small ones."""
    sequence_parallel: bool = False
    """Divide activations between the tensor-parallel regions along the sequence."""
    transformer_impl: TransformerImpl = setting("local")
    """Implementation of linears: Megatron's own, or TransformerEngine's (needs a GPU and megadit[te])."""
    gradient_accumulation_fusion: bool = False
    """Accumulate weight gradients inside the matrix product that computes them; needs a GPU, and torch 2.8,
    TransformerEngine's linears or NVIDIA's apex (`fused_weight_gradient_mlp_cuda`)."""
    data_parallel: DataParallel = setting("ddp")
    """`ddp`; `distributed_optimizer` shards AdamW's state and master weights over the data-parallel ranks (ZeRO-1);
    `fsdp` shards weights and gradients too (ZeRO-3). Muon divides whole matrices among the ranks with `ddp` and
    `distributed_optimizer`, and does not support `fsdp`."""
    overlap_grad_reduce: bool = True
    """Reduce gradients during the backward; fsdp always does."""
    overlap_param_gather: bool = True
    """Gather updated weights during the next forward; only with `distributed_optimizer`."""
    recompute_granularity: Recompute = setting("none")
    """Activation recomputation in the backward: of attention (`selective`) or of whole blocks (`full`). `auto` finds
    before the first step how many blocks must be recomputed to fit the free memory (`train/plan/memory.py`)."""
    recompute_num_layers: int | None = setting(None, above=0)
    """Blocks of each model chunk that `full` applies to; None: all."""
    cpu_offloading_num_layers: int = setting(0, low=0)
    """Blocks of each model chunk, the first that are not recomputed, whose activations are in host memory between their
    forward and backward. Of use on GPUs alone, where a block computes longer than its activations travel."""
    cuda_graph_max_segments: int | None = setting(None, above=0)
    """Maximum segments (samples, plus one for padding) of packs for which the blocks are replayed as CUDA graphs; None:
    no graphs. Needs a network on one GPU. Saves kernel launch time, and takes memory for a gradient of all blocks."""

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
    """Complete configuration of a training run, saved as config.yaml in the run's folder and with every checkpoint."""

    recipe: str
    """Name of the recipe that the configuration started from."""
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
        """Checkpoint or bundle with the initial weights: `checkpoint.init_from`, or a student's teacher."""
        if self.checkpoint.init_from is None and self.train.distill is not None:
            return self.train.distill.teacher
        return self.checkpoint.init_from

    @property
    def has_one_base(self) -> bool:
        """Whether all networks of the run (also a teacher's) are adapters on the same base weights, held once."""
        distill = self.train.distill
        return self.train.adapter is not None and (distill is None or distill.is_at(self.checkpoint.init_from))

    @property
    def lr_decay_iters(self) -> int:
        """Step at which the learning-rate decay ends: always after the warm-up, even in a shortened run."""
        return max(self.optimizer.lr_decay_iters or self.train.train_iters, self.optimizer.lr_warmup_iters + 1)
