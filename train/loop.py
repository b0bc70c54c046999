"""The training loop: `train(config)` runs a configuration to its end, from wherever it stands."""

import signal
import time
from contextlib import ExitStack
from typing import Any

from megadit.models.megatron import groups as process_groups
from megadit.models.support import UserError
from megadit.train.batches import TrainBatches, validation_batches
from megadit.train.checkpoint import CheckpointStore, RunState
from megadit.train.config import RunConfig
from megadit.train.flops import peak_flops
from megadit.train.metrics import Metrics
from megadit.train.setup import Training, build_training, precision, start_processes
from megadit.train.step import StepResult, train_step
from megadit.train.validation import validate


def train(config: RunConfig) -> None:
    """Trains until `train.train_iters` steps are done, continuing the run found in `train.output_dir`.

    Every rank calls this. A SIGTERM or SIGINT ends the run after the current step, with a checkpoint.

    Raises:
        UserError: for a configuration that cannot run here, or a loss that is not a number.
    """
    with StopRequest() as stop:
        groups = start_processes(config)
        try:
            _Run(build_training(config, groups)).to_the_end(stop)
        except UserError:
            if process_groups.is_first_to_tell("error"):
                raise
            raise SystemExit(2) from None
        finally:
            process_groups.destroy()


class StopRequest:
    """Whether SIGTERM or SIGINT came while the block was active; a second SIGINT after a second interrupts at once."""

    def __init__(self) -> None:
        self.has_come = False
        self._time = 0.0

    def __enter__(self) -> "StopRequest":
        # reader processes inherit these handlers: a SIGINT to the whole process group must not end them
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        # torchrun repeats a SIGINT that the terminal has sent already
        if number == signal.SIGINT and self.has_come and time.monotonic() - self._time > 1:
            raise KeyboardInterrupt
        if not self.has_come:
            self.has_come, self._time = True, time.monotonic()


class _Run:
    """A run in progress."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.config = training.config
        self.store = CheckpointStore(training.config, training.groups)
        self.batches = TrainBatches(training.config, training.groups)
        self.state = RunState()
        if self.config.validation.interval:
            validation_batches(training.config, training.groups)  # what is missing is missed now, not hours later
        self.peak = peak_flops(training.groups.device, precision(training.config)) * training.groups.world_size
        self.saved_iteration: int | None = None

    def to_the_end(self, stop: StopRequest) -> None:
        self._resume()
        is_first = self.training.groups.is_first
        with ExitStack() as stack:
            start, length = self.state.iteration, self.state.metrics_bytes
            metrics = stack.enter_context(Metrics(self.config, start=start, length=length, enabled=is_first))
            while self.state.iteration < self.config.train.train_iters:
                result = self._step(stop, metrics)
                if result.must_stop:
                    break
            self._save(metrics)
            self.store.close()
        if self.state.iteration < self.config.train.train_iters:
            self._say(f"told to stop: saved after step {self.state.iteration}; run the same command to continue")

    def _resume(self) -> None:
        path = self.store.latest()
        if path is None:
            return
        self.state, readers = self.store.load(path, self.training.tensors)
        if path.parent != self.store.root:
            self.state.metrics_bytes = 0  # the other run's file stays where it is
        self.training.scheduler.step(self.state.iteration)
        if (said := self.batches.restore_state(readers)) is not None:
            self._say(f"the data readers go on with {said}")
        self.saved_iteration = self.state.iteration if path.parent == self.store.root else None
        is_done = self.state.iteration >= self.config.train.train_iters
        self._say(f"{'all steps are done in' if is_done else 'continuing from'} {path}")

    def _step(self, stop: StopRequest, metrics: Metrics) -> StepResult:
        step = self.state.iteration + 1
        result = train_step(self.training, self.batches, step, must_stop=stop.has_come)
        self.state.iteration = step
        self.state.consumed_samples += result.samples
        self.state.consumed_tokens += result.tokens
        values = self._values(result)
        if self._is_due(self.config.validation.interval) and not result.must_stop:
            self.state.validation, videos = validate(self.training, step)
            values["validation"] = self.state.validation["losses"]
            metrics.show(step, videos)
        metrics.log(values)
        self.store.poll()
        if self._is_due(self.config.checkpoint.save_interval):
            self._save(metrics)
        return result

    def _is_due(self, interval: int) -> bool:
        """Every `interval` steps and at the end; never for 0."""
        step = self.state.iteration
        return interval > 0 and (step % interval == 0 or step == self.config.train.train_iters)

    def _values(self, result: StepResult) -> dict[str, Any]:
        """What metrics.jsonl says of a step."""
        return {
            "step": self.state.iteration,
            "loss": result.loss,
            "squared_error": result.squared_error,
            "objective": result.objective,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "samples": result.samples,
            "consumed_samples": self.state.consumed_samples,
            "consumed_tokens": self.state.consumed_tokens,
            "seconds": result.seconds,
            "samples_per_s": result.samples / result.seconds,
            "tokens_per_s": result.tokens / result.seconds,
            "tflops": result.flops / result.seconds / 1e12,
            "mfu": result.flops / result.seconds / self.peak,
        }

    def _save(self, metrics: Metrics) -> None:
        if self.saved_iteration == self.state.iteration:
            return
        self.state.metrics_bytes = metrics.num_bytes
        self.store.save(self.state, self.training.tensors, self.batches.save_state())
        self.saved_iteration = self.state.iteration

    def _say(self, message: str) -> None:
        if self.training.groups.is_first:
            print(message, flush=True)
