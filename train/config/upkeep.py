"""The part of a run's configuration that surrounds its steps: checkpoints, validation, health, loggers."""

from dataclasses import dataclass, field
from typing import Literal

from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.cli.setting import check_settings, setting, with_defaults

Remedy = Literal["stop", "skip", "rollback"]
SamplingConfig = with_defaults("SamplingConfig", SamplingSettings, module=__name__, num_steps=35, guidance=7.0)
"""Every setting of sampling; sizes and frame rate are None, which means those of the longest training sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Schedule of checkpoints; resuming from the newest valid one is automatic."""

    save_interval: int = setting(1000, above=0)
    """Steps between checkpoints; one more is written at the end and at SIGTERM or SIGINT."""
    save_minutes: float = setting(30.0, low=0)
    """Minutes after the last checkpoint at which one is written even before `save_interval` steps; 0: never."""
    keep_last: int = setting(3, above=0)
    """Checkpoints kept; older ones are deleted."""
    copy_to: str | None = None
    """A second place for the same checkpoints, by any URL of fsspec (s3://bucket/run, a folder, ...); they are fetched
    from there where `train.output_dir` has none."""
    load: str | None = None
    """Folder of another run, continued here (step, optimizer, data and all) while this one has no checkpoint itself."""
    init_from: str | None = None
    """A bundle, checkpoint or folder of a run whose weights training starts from, at step 0, while there is no
    checkpoint of its own: fine-tuning, and the next stage of resolution."""
    async_save: bool = True
    """Write the files while training goes on; False waits for them."""

    def __post_init__(self) -> None:
        check_settings(self, "checkpoint.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """The loss at fixed noise levels on held-out samples, and videos sampled with the EMA of the weights."""

    interval: int = setting(1000, low=0)
    """Steps between validations; 0 never validates."""
    num_batches: int = setting(8, above=0)
    """Packs from which the loss is measured, each at every sigma."""
    patience: int | None = setting(None, above=0)
    """Validations in a row without a lower mean loss after which the run ends, keeping the checkpoint of the lowest:
    for few samples, which are soon overfitted. None trains to the end."""
    sigmas: tuple[float, ...] = setting((0.1, 0.3, 1.0, 3.0, 10.0), above=0)
    """Noise levels of the measured losses."""
    prompts: tuple[str, ...] = ()
    """Captions of the sampled videos; empty takes the first ones of the validation split."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling settings of these videos, which become the defaults of bundles made from this run."""
    tokenizer_folder: str | None = None
    """The tokenizer that decodes these videos, if not the data set's copy; it must be the same one."""
    evaluate_interval: int = setting(0, low=0)
    """Steps between evaluations: videos of captions of the validation split, measured against its videos as
    `megadit evaluate` does; 0 never evaluates."""
    evaluate_count: int = setting(64, low=8)
    """Videos of an evaluation. Of few, `kid` and `kvd` say more than Fréchet distances, which are left out where there
    are too few for them."""
    extractors: tuple[str, ...] = ()
    """Networks of `megadit evaluate --extractors` through which they are seen; motion takes none."""

    def __post_init__(self) -> None:
        check_settings(self, "validation.")
        check_settings(self.sampling, "validation.sampling.")


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthConfig:
    """Reactions to steps, ranks and readers that go wrong; events.jsonl records each with its samples."""

    on_not_finite: Remedy = setting("stop")
    """Reaction to a loss or gradient that is NaN or infinite: end the run, skip the update, or go back to the last
    checkpoint and continue with the data that follow."""
    on_spike: Remedy | None = setting(None)
    """Reaction to a loss far above the usual; None: no check."""
    spike_factor: float = setting(3.0, above=0)
    """Factor over the median of the last `spike_window` losses that counts as a spike."""
    spike_window: int = setting(100, above=0)
    max_anomalies: int = setting(10, above=0)
    """Steps left out or gone back over between two checkpoints, after which the run ends."""
    watchdog_seconds: float = setting(1200.0, low=0)
    """A rank that shows no progress for so long is named, and the run ends; 0 waits forever."""
    starving_share: float = setting(0.5, above=0)
    """Share of the time spent waiting for data above which a warning is printed."""
    max_refused_share: float = setting(0.05, above=0, high=1)
    """Share of the samples that may be unusable (damaged, too long, ...) before a run ends; 1 uses what is left."""
    statistics_interval: int = setting(0, low=0)
    """Steps between the sizes of all gradients and block outputs in metrics.jsonl; 0 never measures them."""

    def __post_init__(self) -> None:
        check_settings(self, "health.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerConfig:
    """Trackers that get the metrics besides metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Scalars and validation videos in tensorboard/."""
    curves: bool = True
    """curves.png, kept up to date."""
    wandb_exp_name: str | None = None
    """Name of this run in Weights & Biases, which it switches on (needs megadit[wandb]). Without WANDB_API_KEY it
    writes files for `wandb sync`."""
    wandb_project: str = "megadit"
    wandb_entity: str | None = None
    """The team or user the project belongs to; None is the account's default."""
    wandb_save_dir: str | None = None
    """Folder of its files; None is wandb/ in `train.output_dir`."""
