"""The training loop: `train(config)` runs a configuration to its end, resuming from its newest checkpoint."""

import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn

import torch.distributed as dist

from megadit.models.machine import is_out_of_memory, memory_message, peak_flops
from megadit.models.megatron import groups as process_groups
from megadit.models.megatron.groups import Groups
from megadit.models.shared.cli.command import StopRequest
from megadit.models.shared.errors import StoppedError, UserError
from megadit.models.shared.folder_lock import FolderLock
from megadit.train.checkpoints.checkpoint import CheckpointStore, Fence, RunState
from megadit.train.config.schema import RunConfig
from megadit.train.data.distribute import TrainBatches, validation_batches
from megadit.train.engine.balance import largest_load, restore_counts
from megadit.train.engine.setup import Training, begin_folder, build_training, check_memory, start_processes
from megadit.train.engine.step import Mark, StepResult, train_step
from megadit.train.engine.threads import Threads
from megadit.train.engine.validation import RAW, evaluate_videos, lowest_so_far, validate
from megadit.train.monitoring.anomalies import Anomaly, AnomalyDetector, ReadingTime, Refusals, worst_shards
from megadit.train.monitoring.console import beginning, ending, evaluated, expected_seconds, validated
from megadit.train.monitoring.metrics import Metrics
from megadit.train.monitoring.statistics import Statistics
from megadit.train.monitoring.watchdog import EXIT_CODE, Watchdog
from megadit.train.optim.optimizer import precision, restore_scaler, scaler_state


def train(config: RunConfig, *, even_if_too_large: bool = False) -> None:
    """Trains until `train.train_iters` steps are done, continuing the run found in `train.output_dir`.

    Every rank calls this. A run whose estimated memory is far more than a rank has is refused before anything is
    allocated, unless `even_if_too_large`. SIGTERM, SIGINT or SIGHUP ends the run after the current step, with a
    checkpoint.

    Raises:
        UserError: for a configuration that cannot run here, a loss that is not finite, or a folder in use.
        StoppedError: if a signal ended the run before its end.
    """
    with StopRequest() as stop:
        groups = start_processes(config)
        with (
            _sole_writer(config, groups) as fence,
            _watchdog(config) as watchdog,
            process_groups.destroyed_at_end(),
        ):
            try:
                if not even_if_too_large:
                    check_memory(config, groups)
                expected = expected_seconds(config, groups.world_size) if groups.is_first else 0.0
                if groups.is_first:
                    print(*beginning(config, groups.world_size, groups.device, expected), sep="\n", flush=True)
                with _ending_with_readers():
                    _Run(build_training(config, groups), watchdog.mark, fence, expected).to_the_end(stop)
            except UserError:
                if process_groups.claims_report("error"):
                    raise
                raise SystemExit(2) from None
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    _end_for_memory(config, error)
                # a collective fails like this if its peer is gone
                if (lost := watchdog.lost_rank()) is None:
                    raise
                _end(f"{lost}; run the same command to continue", EXIT_CODE)


@contextmanager
def _sole_writer(config: RunConfig, groups: Groups) -> Iterator[Fence]:
    """Within the block the first rank holds the lock of the run's folder; yields the fence that ends a rank without it.
    Raises UserError if the folder is in use."""
    lock, problem, is_first = FolderLock(config.train.output_dir, "trains"), [None], groups.is_first
    with ExitStack() as held:
        if is_first:
            try:
                held.enter_context(lock)
            except UserError as error:
                problem = [str(error)]
        dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            process_groups.destroy()
            if is_first:
                raise UserError(problem[0])
            raise SystemExit(2)
        yield lock.check if is_first else lambda: None


def _end(error: str, code: int) -> NoReturn:
    """End this rank at once: its process groups cannot be destroyed without the others, whose watchdogs report it."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(code)


def _end_for_memory(config: RunConfig, error: Exception) -> NoReturn:
    data, said = config.data, memory_message(error)
    _end(
        f"no memory for packs of data.seq_length={data.seq_length:,} tokens, data.micro_batch_size="
        f"{data.micro_batch_size} at a time ({said}); lower these, or recompute (parallel.recompute_granularity=auto); "
        "`--dry-run` estimates what a run takes",
        2,
    )


@contextmanager
def _ending_with_readers() -> Iterator[None]:
    """Within the block, a reader that was killed, as by the kernel when memory runs out, ends this rank with a line."""
    try:
        yield
    except (RuntimeError, EOFError, ConnectionResetError) as error:
        if not _is_of_lost_reader(error):
            raise
        with suppress(RuntimeError):  # of torch's handler, if what it told came first as a broken pipe
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _end(
            f"a process that reads data has ended ({str(error).strip() or type(error).__name__}), perhaps for lack of "
            "memory; run the same command to continue, if need be with fewer data.num_workers",
            EXIT_CODE,
        )


def _is_of_lost_reader(error: Exception) -> bool:
    if isinstance(error, RuntimeError):
        return "DataLoader worker (pid" in str(error) and "Bus error" not in str(error)
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals["__name__"] == "multiprocessing.connection"


def _watchdog(config: RunConfig) -> Watchdog:
    return Watchdog(
        Path(config.train.output_dir) / "watchdog",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        limit=config.health.watchdog_seconds,
    )


class _Run:
    """A run in progress."""

    def __init__(self, training: Training, mark: Mark, fence: Fence, expected: float) -> None:
        """`expected`: expected seconds of a step, on the first rank."""
        self.training = training
        self.expected = expected
        self.mark = mark
        self.fence = fence
        self.config = training.config
        teacher = None if training.teacher is None else training.teacher.fingerprint
        self.store = CheckpointStore(
            *(training.config, training.groups, training.base, teacher, fence),
            lambda: mark(self.state.iteration, "finding, fetching or copying checkpoints"),
        )
        self.batches = TrainBatches(training.config, training.groups)
        self.state = RunState()
        if self.config.validation.interval:
            validation_batches(training.config, training.groups)  # missing data is reported now, not hours later
        self.peak = peak_flops(training.groups.device, precision(training.config)) * training.groups.world_size
        self.saved_iteration: int | None = None
        self.saved_at = time.monotonic()
        self.num_anomalies = 0  # since the last checkpoint
        self.threads = Threads(training.config, training.groups.device)
        self.reading = ReadingTime(training.config.health)
        readers = training.groups.readers.size() * max(1, training.config.data.num_workers)
        ahead = 2 * readers * training.config.data.packing_buffer_size
        self.unreadable_shards = Counter[str]()
        self.refusals = Refusals(training.config.health, read_ahead=ahead)
        self.caption: str | None = None
        """Caption of the last video of validation."""

    def to_the_end(self, stop: StopRequest) -> None:
        self._resume()
        begin_folder(self.config, self.training.groups)
        is_first, begin = self.training.groups.is_first, time.monotonic()
        with ExitStack() as stack:
            start, length = self.state.iteration, self.state.metrics_bytes
            metrics = stack.enter_context(
                Metrics(self.config, start=start, length=length, expected=self.expected, enabled=is_first)
            )
            self._report_deferred(metrics)
            while not self._is_over():
                result = self._step(stop, metrics)
                if result.must_stop:
                    break
            self._save(metrics)
            self.store.close()
        if not self._is_over():
            self._say(f"stopped by a signal: saved after step {self.state.iteration}; run the same command to continue")
            dist.barrier()  # a launcher ends all ranks when the first one fails, and that may still copy
            raise StoppedError(stop.signal or signal.SIGTERM)
        else:
            steps, seconds = self.state.iteration - start, time.monotonic() - begin
            self._say(*ending(self.config, self.state, steps=steps, seconds=seconds, caption=self.caption))

    def _is_over(self) -> bool:
        """Whether all steps are done, or `validation.patience` has run out."""
        patience, since = self.config.validation.patience, self.state.lowest.get("since", 0)
        return self.state.iteration >= self.config.train.train_iters or (patience is not None and since >= patience)

    def _resume(self) -> None:
        path = self.store.latest()
        if path is None:
            return
        self.state, readers = self.store.load(path, self.training.tensors)
        if path.parent != self.store.root:
            self.state.metrics_bytes = 0  # the other run's file stays where it is
        self._restore_what_is_no_tensor()
        self.threads.go_on(self.state.iteration, self.state.num_threads)
        if (said := self.batches.restore_state(readers)) is not None:
            self._say(f"the data readers continue with {said}")
        self.saved_iteration = self.state.iteration if path.parent == self.store.root else None
        self._say(f"{'all steps are done in' if self._is_over() else 'continuing from'} {path}")

    def _step(self, stop: StopRequest, metrics: Metrics) -> StepResult:
        step = self.state.iteration + 1
        detector = AnomalyDetector(self.config.health, self.state.recent_losses)
        self.threads.begin(step)
        with Statistics(self.training, is_due=self._is_due(self.config.health.statistics_interval, step)) as sizes:
            asked = {"must_stop": stop.has_come, "must_save": self._is_time_to_save()}
            result = train_step(self.training, self.batches, step, **asked, detector=detector, mark=self.mark)
        self.fence()
        self.state.iteration = step
        chosen = self.threads.end(step, result.seconds - result.reading_seconds)
        self.state.num_threads = chosen or self.state.num_threads
        self.state.expert_counts = result.expert_counts
        self.state.loss_scaler = scaler_state(self.training.optimizer)
        self.state.consumed_samples += result.samples
        self.state.consumed_tokens += result.tokens
        for reason, count in result.refused.items():
            self.state.refused_samples[reason] = self.state.refused_samples.get(reason, 0) + count
        self.unreadable_shards.update(result.unreadable_shards)
        if (complaint := self.refusals.complaint(used=result.samples, refused=result.refused)) is not None:
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, self.unreadable_shards)
            shards = worst_shards(sum(everyones, Counter[str]()))
            self._fail(
                f"{complaint}{shards}. `megadit info {self.config.data.path} --verify` compares all shards with what "
                "was written; `skipped sample` lines above name samples"
            )
        if result.anomaly is not None and not self._get_over(result.anomaly, metrics):
            return result
        if step == 1 and self.training.trained_as not in (None, self.config.model.parameterization):
            self._say(
                f"the weights of {self.config.checkpoint.init_from} were trained with model.parameterization="
                f"{self.training.trained_as} and go on with {self.config.model.parameterization}: "
                f"the first loss is {result.loss:.4g}"
            )
        if (warning := self.reading.warning(reading=result.reading_seconds, whole=result.seconds)) is not None:
            self._say(f"{warning}; raise data.num_workers (now {self.config.data.num_workers}), or look at the storage")
        values = self._values(result) | ({"statistics": sizes.found} if sizes.found else {})
        self._report(values, metrics, may_validate=not result.must_stop)
        self.store.poll()
        is_lowest = self.state.lowest.get("step") == self.state.iteration
        if result.must_save or is_lowest or self._is_due(self.config.checkpoint.save_interval):
            self._save(metrics)
        return result

    def _is_time_to_save(self) -> bool:
        seconds = 60 * self.config.checkpoint.save_minutes
        return 0 < seconds < time.monotonic() - self.saved_at

    def _report(self, values: dict[str, Any], metrics: Metrics, *, may_validate: bool) -> None:
        """Report the last step, with validation and evaluation if due; a run that stops does these when continued."""
        step, asked = self.state.iteration, self.config.validation
        self.state.untold = None
        if not may_validate and (self._is_due(asked.interval) or self._is_due(asked.evaluate_interval)):
            self.state.untold = values
            return
        if self._is_due(asked.interval):
            self.mark(step, "validating")
            self.state.validation, videos = validate(self.training, step)
            values["validation"] = self.state.validation["losses"]
            if asked.patience is not None:
                self.state.lowest = lowest_so_far(self.state.lowest, self.state.validation)
            self._say(validated(step, self.state.validation, videos))
            self.caption = videos[-1].caption if videos else self.caption
            metrics.show(step, videos)
        if self._is_due(asked.evaluate_interval):
            self.mark(step, "evaluating")
            values["evaluation"] = evaluate_videos(self.training, self.state.validation.get("best", RAW))
            self._say(evaluated(step, values["evaluation"]))
        metrics.log(values)

    def _report_deferred(self, metrics: Metrics) -> None:
        """Report the step of a checkpoint that was written at a request to stop, before its validation."""
        if self.state.untold is not None:
            self._report(self.state.untold, metrics, may_validate=True)

    def _get_over(self, anomaly: Anomaly, metrics: Metrics) -> bool:
        """React to an anomaly as `health.*` says; return whether the step counts, without its update. Raises UserError
        if the reaction is to stop, or there have been too many anomalies."""
        self.num_anomalies += not anomaly.is_usual
        metrics.event(anomaly.record(self.state.iteration))
        if anomaly.remedy == "stop" or self.num_anomalies > self.config.health.max_anomalies:
            too_many = f"no. {self.num_anomalies} since the last checkpoint: " if anomaly.remedy != "stop" else ""
            self._fail(
                f"{too_many}{anomaly.describe()}; the last good checkpoint in {self.config.train.output_dir} is kept: "
                "try a lower optimizer.lr, or inspect these samples"
            )
        self._say(f"{anomaly.describe()}: {'update skipped' if anomaly.remedy == 'skip' else 'rolling back'}")
        if anomaly.remedy == "rollback":
            self._go_back(anomaly, metrics)
            return False
        self.state.skipped_steps += 1
        return True

    def _go_back(self, anomaly: Anomaly, metrics: Metrics) -> None:
        """Restore tensors and step of the last checkpoint, and continue with the following data."""
        self.store.finish()
        path = self.store.latest()
        if path is None:
            self._fail(f"{anomaly.describe()}; there is no checkpoint to roll back to")
        seen = self.state.consumed_samples, self.state.consumed_tokens, self.state.refused_samples
        self.state, _ = self.store.load(path, self.training.tensors)
        self.state.consumed_samples, self.state.consumed_tokens, self.state.refused_samples = seen
        self.saved_iteration = self.state.iteration if path.parent == self.store.root else None
        self._restore_what_is_no_tensor()
        metrics.rewind(self.state.iteration, self.state.metrics_bytes if path.parent == self.store.root else 0)
        self._report_deferred(metrics)
        self._say(f"rolled back to {path}; the samples since then are not repeated")

    def _fail(self, message: str) -> NoReturn:
        """End all ranks, which all call this; the first one prints why, once the last checkpoint is complete."""
        self.store.finish()
        if self.training.groups.is_first:
            raise UserError(message)
        raise SystemExit(2)

    def _restore_what_is_no_tensor(self) -> None:
        restore_counts(self.training, self.state.expert_counts)
        restore_scaler(self.training.optimizer, self.state.loss_scaler)
        for trained in self.training.all_trained:
            trained.scheduler.num_steps = 0
            trained.scheduler.step(self.state.iteration)

    def _is_due(self, interval: int, step: int | None = None) -> bool:
        """Whether a step, or else the current one, is due: every `interval` steps and at the end; never for 0."""
        step = self.state.iteration if step is None else step
        return interval > 0 and (step % interval == 0 or step == self.config.train.train_iters)

    def _values(self, result: StepResult) -> dict[str, Any]:
        """Values of a step for metrics.jsonl."""
        return {
            "step": self.state.iteration,
            "loss": _number(result.loss),
            "squared_error" if self.config.model.denoises else "wrong": result.error,
            "objective": result.objective,
            "grad_norm": _number(result.grad_norm),
            "lr": result.lr,
            "tokens": result.tokens,
            "samples": result.samples,
            "sample_checksum": result.sample_checksum,
            **({"imbalance": result.imbalance} if self.training.groups.readers.size() > 1 else {}),
            "fill": result.tokens / (self.config.data.global_batch_size * self.config.data.seq_length),
            "consumed_samples": self.state.consumed_samples,
            "consumed_tokens": self.state.consumed_tokens,
            **({"refused": dict(self.state.refused_samples)} if self.state.refused_samples else {}),
            "seconds": result.seconds,
            "reading_seconds": result.reading_seconds,
            "samples_per_s": result.samples / result.seconds,
            "tokens_per_s": result.tokens / result.seconds,
            "tflops": result.flops / result.seconds / 1e12,
            "mfu": result.flops / result.seconds / self.peak,
            **({} if result.critic_loss is None else {"critic_loss": _number(result.critic_loss)}),
            **({} if self.state.loss_scaler is None else {"loss_scale": self.state.loss_scaler["scale"]}),
            **({"expert_load": largest_load(result.expert_counts)} if result.expert_counts else {}),
        }

    def _save(self, metrics: Metrics) -> None:
        if self.saved_iteration == self.state.iteration:
            return
        self.fence()
        self.mark(self.state.iteration, "saving")
        self.num_anomalies = 0
        self.state.metrics_bytes = metrics.num_bytes
        self.store.save(self.state, self.training.tensors, self.batches.save_state())
        self.saved_iteration, self.saved_at = self.state.iteration, time.monotonic()

    def _say(self, *lines: str) -> None:
        if self.training.groups.is_first:
            print(*lines, sep="\n", flush=True)


def _number(value: float) -> float | None:
    """The number, or None if it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None
