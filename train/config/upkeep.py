"""Configuration sections of a run around its steps: checkpoints, validation, health, loggers."""

from dataclasses import dataclass, field
from typing import Literal

from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.cli.setting import check_settings, setting, with_defaults

Remedy = Literal["stop", "skip", "rollback"]
SamplingConfig = with_defaults("SamplingConfig", SamplingSettings, module=__name__, num_steps=35, guidance=7.0)
"""Sampling settings; sizes and frame rate default to None, those of the longest training sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Schedule of checkpoints; resuming from the newest valid one is automatic."""

    save_interval: int = setting(1000, above=0)
    """Steps between checkpoints; one more is written at the end and at SIGTERM or SIGINT."""
    save_minutes: float = setting(30.0, low=0)
    """Maximum minutes between checkpoints, even before `save_interval` steps; 0: no such limit."""
    keep_last: int = setting(3, above=0)
    """Number of checkpoints kept; older ones are deleted."""
    copy_to: str | None = None
    """Second copy of the checkpoints: any fsspec URL (s3://bucket/run, a folder, ...). They are fetched from there if
    `train.output_dir` has none."""
    load: str | None = None
    """Folder of another run to continue here (step, optimizer, data position), as long as this run has no checkpoint
    of its own."""
    init_from: str | None = None
    """Bundle, checkpoint or folder of a run with the initial weights, for fine-tuning or the next resolution: training
    starts from step 0, as long as this run has no checkpoint of its own."""
    async_save: bool = True
    """Write checkpoint files in the background while training goes on."""

    def __post_init__(self) -> None:
        check_settings(self, "checkpoint.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """Validation: the loss at fixed noise levels on held-out samples, and videos sampled with the EMA weights."""

    interval: int = setting(1000, low=0)
    """Steps between validations; 0: no validation."""
    num_batches: int = setting(8, above=0)
    """Packs on which the loss is measured, each at every sigma."""
    patience: int | None = setting(None, above=0)
    """Early stopping: validations in a row without a lower mean loss after which the run ends; the checkpoint of the
    lowest loss is kept. None: train to the end."""
    sigmas: tuple[float, ...] = setting((0.1, 0.3, 1.0, 3.0, 10.0), above=0)
    """Noise levels of the measured losses."""
    prompts: tuple[str, ...] = ()
    """Prompts of the sampled videos; empty: the first captions of the validation split."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling settings of these videos, which become the defaults of bundles made from this run."""
    tokenizer_folder: str | None = None
    """Folder of the tokenizer that decodes these videos; None: the data set's copy. It must be the same tokenizer."""
    evaluate_interval: int = setting(0, low=0)
    """Steps between evaluations, which sample videos for captions of the validation split and compare them with its
    videos by the metrics of `megadit evaluate`; 0: no evaluation."""
    evaluate_count: int = setting(64, low=8)
    """Videos of one evaluation. With few, prefer `kid` and `kvd` to Fréchet distances, which are left out if there are
    too few videos for them."""
    extractors: tuple[str, ...] = ()
    """Feature extractors of an evaluation, as in `megadit evaluate --extractors`; the motion metrics need none."""

    def __post_init__(self) -> None:
        check_settings(self, "validation.")
        check_settings(self.sampling, "validation.sampling.")


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthConfig:
    """Reactions to failing steps, ranks and readers; events.jsonl records each with its samples."""

    on_not_finite: Remedy = setting("stop")
    """Reaction to a NaN or infinite loss or gradient: end the run (`stop`), skip the update (`skip`), or restore the
    last checkpoint and continue with the following data (`rollback`)."""
    on_spike: Remedy | None = setting(None)
    """Reaction to a loss spike; None: no check."""
    spike_factor: float = setting(3.0, above=0)
    """A loss above this multiple of the median of the last `spike_window` losses is a spike."""
    spike_window: int = setting(100, above=0)
    """Number of last steps whose losses give that median."""
    max_anomalies: int = setting(10, above=0)
    """Skipped or rolled back steps between two checkpoints after which the run ends."""
    watchdog_seconds: float = setting(1200.0, low=0)
    """Seconds without progress of a rank after which it is reported and the run ends; 0: wait forever."""
    starving_share: float = setting(0.5, above=0)
    """Fraction of the time spent waiting for data above which a warning is printed."""
    max_refused_share: float = setting(0.05, above=0, high=1)
    """Fraction of samples that may be unusable (damaged, too long, ...) before the run ends; 1: never ends it."""
    statistics_interval: int = setting(0, low=0)
    """Steps between statistics of all gradients and block outputs in metrics.jsonl; 0: none."""

    def __post_init__(self) -> None:
        check_settings(self, "health.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerConfig:
    """Trackers of metrics, in addition to metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Write scalars and validation videos to tensorboard/."""
    curves: bool = True
    """Keep curves.png, a plot of the metrics, up to date."""
    wandb_exp_name: str | None = None
    """Name of this run in Weights & Biases; None: not used. Needs megadit[wandb]. Without WANDB_API_KEY, files for
    `wandb sync` are written."""
    wandb_project: str = "megadit"
    wandb_entity: str | None = None
    """Team or user that owns the project; None: the account's default."""
    wandb_save_dir: str | None = None
    """Folder of Weights & Biases files; None: wandb/ in `train.output_dir`."""
