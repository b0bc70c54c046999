"""Builds the objects of a training run from its configuration."""

import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megadit.models.lora.adapters import draw_dropout
from megadit.models.machine import multiplies
from megadit.models.megatron import groups as process_groups
from megadit.models.megatron.groups import Groups
from megadit.models.ops.crossover import tune_for_cpu
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path
from megadit.models.shared.resources import check_memory_fits, threads_of_a_rank
from megadit.train.checkpoints.init_from import InitialWeights, initial_weights, read_teacher
from megadit.train.checkpoints.tensors import TrainedTensors
from megadit.train.config.load import to_yaml
from megadit.train.config.rules import check_layout
from megadit.train.config.schema import EmaConfig, MatmulPrecision, RunConfig
from megadit.train.engine.building import TRAINED, Form, build_chunks, least_free_memory, network_of, starting_values
from megadit.train.engine.device_update import DeviceUpdate, device_update
from megadit.train.objectives.adversary import critic_loss
from megadit.train.objectives.distillation import guided
from megadit.train.objectives.networks import Networks, TrainingModel, denoiser_of, discriminator_of
from megadit.train.optim.ema import EmaWeights
from megadit.train.optim.optimizer import build_optimizer, build_scheduler, loss_scaler
from megadit.train.optim.state import DataParallel, find_ownership, named_parameters
from megadit.train.plan.memory import SMALLER, needed_memory, with_recompute

CRITIC = "critic."
"""Prefix of the names of a critic's tensors in checkpoints."""
SECONDS_TO_APPEAR = 90.0
"""Time after which other nodes see a new file: NFS remembers for up to a minute that there was none."""


@dataclass(frozen=True, slots=True)
class Training:
    """Networks, optimizer, EMA weights and process groups of a run."""

    config: RunConfig
    groups: Groups
    parts: tuple[DataParallel, ...]
    """Model chunks of this rank in data-parallel wrappers; several on an interleaved stage."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    ema_weights: EmaWeights
    tensors: TrainedTensors
    base: str | None
    """`adapters.fingerprint` of an adapter's base weights."""
    device_update: DeviceUpdate | None
    """Optimizer step without host synchronization, in place of Megatron's."""
    trained_as: str | None = None
    """`model.parameterization` of the initial weights."""
    teacher: "Teacher | None" = None
    """A student's teacher."""
    critic: "Training | None" = None
    """Fake-score network, which learns the distribution of a student's videos."""

    @property
    def all_trained(self) -> "tuple[Training, ...]":
        """This network and its critic, if any."""
        return (self,) if self.critic is None else (self, self.critic)

    @property
    def network(self) -> TrainingModel:
        """The first model chunk on this rank, without its wrapper."""
        return self.parts[0].module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All trained parameters of this rank with their canonical names."""
        return named_parameters(self.parts)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def begin_step(self, step: int) -> None:
        """Tell the networks the step, and draw an adapter's dropout, which all samples of a step share."""
        for part in self.parts:
            part.module.networks.step = step
        adapter = self.config.train.adapter
        for part in self.parts if adapter is not None else ():
            draw_dropout(part.module.dit, adapter.dropout, seed=self.config.train.seed, step=step)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step on this rank."""
        return self.config.data.global_batch_size // (self.config.data.micro_batch_size * self.groups.readers.size())


@dataclass(frozen=True, slots=True)
class Teacher:
    """The frozen network of which a student learns."""

    network: nn.Module
    """Its weights on this rank."""
    fingerprint: str
    """`adapters.fingerprint` of them."""
    is_guided: bool
    """Whether guidance takes two forward passes."""


def start_processes(config: RunConfig) -> Groups:
    """Set threads, and create the process groups of a run."""
    _silence_megatron()
    check_layout(config, process_groups.world_size())
    torch.set_num_threads(config.train.num_threads or threads_of_a_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    _set_matmul_precision(config.train.matmul_precision)
    if not torch.cuda.is_available():
        tune_for_cpu()
    return process_groups.initialize(config.parallel.sizes, config.model)


def check_memory(config: RunConfig, groups: Groups) -> None:
    """Raises UserError on all ranks, which all call this, if the estimated memory is far beyond what one of them
    has."""
    free, ranks = least_free_memory(groups), groups.world_size
    check_memory_fits(
        needed_memory(with_recompute(config, ranks, free), ranks), free, f"a rank of {config.recipe}", SMALLER
    )


def begin_folder(config: RunConfig, groups: Groups) -> None:
    """Write the first files of a run's folder; called once all checks have passed."""
    if groups.is_first:
        folder = Path(config.train.output_dir)
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        if not (folder / "validation_generation").exists():  # name of this folder in NeMo and DFM
            (folder / "validation_generation").symlink_to("samples", target_is_directory=True)
        with atomic_path(folder / "config.yaml") as temporary:
            temporary.write_text(to_yaml(config), encoding="utf-8")
    dist.barrier()
    _check_shared(Path(config.train.output_dir) / "config.yaml")


def _check_shared(written: Path) -> None:
    """Raises UserError on all ranks if one of them does not see what the first has written: each writes its share of a
    checkpoint into the same folder."""
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not written.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, None if written.exists() else socket.gethostname())
    if blind := sorted(set(filter(None, hosts))):
        raise UserError(
            f"{', '.join(blind)} cannot see {written}, which the first rank has written: set train.output_dir to a "
            "folder that all nodes share"
        )


def _set_matmul_precision(precision: MatmulPrecision) -> None:
    if precision != "ieee":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    if precision == "tf32" or precision == "bf16" and multiplies(torch.bfloat16):
        torch.backends.mkldnn.matmul.fp32_precision = precision


def _silence_megatron() -> None:
    """Silence Megatron's log and its deprecation warnings about torch functions, which help no user."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)


def build_training(config: RunConfig, groups: Groups) -> Training:
    """Build the network with initial weights and data-parallel wrappers, optimizer and EMA weights; for distillation
    also teacher and critic."""
    training = _build_trained(config, groups, initial_weights(config))
    return training if config.train.distill is None else _with_teacher(training)


def _build_trained(
    config: RunConfig, groups: Groups, initial: InitialWeights | None, *, prefix: str = "", form: Form = TRAINED
) -> Training:
    """A trained network; `prefix` precedes the names of its tensors in checkpoints."""
    parts = build_chunks(config, groups, starting_values(config, initial), form)
    optimizer = build_optimizer(config, parts)
    update = device_update(optimizer, parts)
    if update is not None:
        parts[0].config.finalize_model_grads_func = update.finalize
    if loss_scaler(optimizer) is not None:
        parts[0].config.grad_scale_func = optimizer.scale_loss
    ownership = find_ownership(optimizer, named_parameters(parts), groups)
    ema_weights = EmaWeights(config.ema.sigma_rels, ownership)
    return Training(
        config=config,
        groups=groups,
        parts=parts,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        ema_weights=ema_weights,
        tensors=TrainedTensors(tuple(named_parameters(parts)), ownership, ema_weights, groups, prefix),
        base=None if config.train.adapter is None or initial is None else initial.fingerprint_of_base,
        device_update=update,
        trained_as=None if initial is None else initial.config.parameterization,
    )


def _with_teacher(training: Training) -> Training:
    """Add teacher and, if the objective needs one, a critic initialized as the teacher."""
    config, groups = training.config, training.groups
    asked, teacher = config.train.distill, read_teacher(config)
    frozen = _build_frozen(config, groups, teacher, base=training.network if config.has_one_base else None)
    has_guidance_embedding = teacher.config.guidance_embedding_range is not None
    student = training.network.networks
    student.teachers_chunk = network_of(frozen)
    student.teacher = denoiser_of(frozen) if has_guidance_embedding else guided(denoiser_of(frozen), asked.guidance)
    critic = _build_critic(config, groups, student, teacher, frozen) if asked.has_critic else None
    others = () if critic is None else ((critic.tensors, asked.critic_updates),)
    return replace(
        training,
        teacher=Teacher(frozen, teacher.fingerprint, asked.needs_two_passes(config.model, teacher.config)),
        critic=critic,
        tensors=replace(training.tensors, others=others),
    )


def _build_critic(
    config: RunConfig, groups: Groups, student: Networks, teacher: InitialWeights, frozen: nn.Module
) -> Training:
    """The critic of a student, initialized as its teacher; with a head if the student's loss is adversarial."""
    base = network_of(frozen) if config.train.adapter is not None else None
    form = Form(base=base, has_adversary=config.train.distill.has_adversary)
    critic = _build_trained(_fake_score_config(config), groups, teacher, prefix=CRITIC, form=form)
    student.critic = denoiser_of(critic.parts[0])
    if form.has_adversary:
        student.discriminator = discriminator_of(critic.parts[0])
        critic.network.networks.config = config
        critic.network.objective = critic_loss
    return critic


def _fake_score_config(config: RunConfig) -> RunConfig:
    """Configuration of a critic, trained as an ordinary network."""
    rate = config.train.distill.critic_lr or 2 * config.optimizer.lr
    return replace(
        config,
        train=replace(config.train, distill=None, objective=None),
        optimizer=replace(config.optimizer, lr=rate),
        ema=EmaConfig(sigma_rels=()),
    )


def _build_frozen(
    config: RunConfig, groups: Groups, initial: InitialWeights, *, base: TrainingModel | None
) -> nn.Module:
    """A frozen network in the parallel layout of the run; `base` as in `Form`."""
    config = replace(config, model=initial.config, train=replace(config.train, distill=None))
    form = Form(is_frozen=True, has_adapter=initial.adapter is not None, base=base)
    (part,) = build_chunks(config, groups, starting_values(config, initial), form)
    return part
