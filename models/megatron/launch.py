"""Starts several ranks on this machine with torchrun's launcher, without its failure report."""

import logging
import os
import uuid
from collections.abc import Sequence

from megadit.models.shared.cli.command import ending_signals, python_module
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import rank_environment


def rank_arguments(argv: Sequence[str], *, debug: bool) -> list[str]:
    """The command line of each rank: this process's, without --nproc, and with --debug where it was given.

    Raises:
        UserError: if this process is a rank itself.
    """
    if "RANK" in os.environ:
        raise UserError("--nproc starts ranks itself; leave it out under torchrun")
    kept, skip = [], False
    for argument in argv:
        if not skip and argument != "--nproc" and not argument.startswith("--nproc="):
            kept.append(argument)
        skip = argument == "--nproc"
    return [*kept, "--debug"] if debug else kept


def launch(module: str, argv: list[str], *, num_processes: int) -> int:
    """Runs `python -m module argv` on `num_processes` ranks; the exit code is that of the first rank to fail, or 0.

    Ranks print to the shared terminal; torchrun would add its own traceback below their errors. SIGTERM, SIGINT and
    SIGHUP are passed on to every rank; they have 30 seconds to write a checkpoint. They also get a SIGTERM if this
    process is killed. Each rank uses an equal number of cores as threads, unless OMP_NUM_THREADS is set: more threads
    than cores would wait for each other.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launcher = logging.getLogger("torch.distributed.elastic")  # loggers below it have levels of their own
    launcher.propagate, launcher.handlers = False, [logging.NullHandler()]
    for library in ("GLOO", "NCCL"):  # ranks of one machine need no network
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    threads = rank_environment(num_processes)
    before = {name: os.environ.get(name) for name in threads}
    os.environ.update(threads)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # otherwise each launch leaves a folder in TMPDIR
    )
    # without an ignored SIGHUP; torch 2.9 reads the variable, later versions get it from the configuration
    config.signals_to_handle = ",".join(number.name for number in ending_signals())
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    try:
        command, *rest = python_module(module, *argv)
        elastic_launch(config, command)(*rest)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval.value
    finally:
        for name, value in before.items():  # this process may later start fewer ranks
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return 0
