"""config.pbtxt of the service's Triton models, generated from the contract."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megadit.models.shared.cli.setting import check_settings, setting
from megadit.models.shared.errors import UserError
from megadit.serve.contract import INPUTS, Input
from megadit.serve.events import DATA, EVENT
from megadit.serve.service_info import ServiceInfo

PATHS = ("adapters", "guardrail_dir", "scorer_dir", "c2pa_certificate", "c2pa_key")
"""Parameters with paths outside of the repository, read at run time."""
NO_OTHERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling:
    """How Triton queues and batches requests."""

    device: str = setting("auto", "auto, cpu, or GPU numbers such as 0,1 (default: {default})", metavar="NAME")
    """auto: every GPU, or the CPU if there is none."""
    instances: int = setting(1, "pipelines on each device (default: {default})", above=0, metavar="N")
    ranks: int = setting(
        1,
        "processes, each on its own device, that generate a video together (default: {default})",
        above=0,
        metavar="N",
    )
    """GPU numbers are divided into groups of this size, one for each instance."""
    tp_size: int = setting(
        1, "ranks that share the network's matrices (tensor parallelism; default: {default})", above=0
    )
    cp_size: int = setting(
        1, "ranks that share the tokens of a video (context parallelism; default: {default})", above=0
    )
    """Additional ranks share the videos of a batch, and the conditional and unconditional pass."""
    max_batch_size: int = setting(8, "requests in one batch (default: {default})", above=0, metavar="N")
    """Requests of equal settings share a batch."""
    max_queue_size: int = setting(64, "requests that may wait (default: {default})", above=0, metavar="N")
    """The limit is per priority; further requests get UNAVAILABLE."""
    queue_seconds: float = setting(300.0, "seconds that a request may wait (default: 300)", above=0, metavar="S")
    """A request that waited longer gets UNAVAILABLE; requests may set a shorter time."""
    batching_seconds: float = setting(
        0.02, "seconds that a request waits for others to join its batch (default: {default})", low=0, metavar="S"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.device not in ("auto", "cpu") and not re.fullmatch(r"\d+(,\d+)*", self.device):
            raise UserError(f"device={self.device!r} must be auto, cpu, or GPU numbers such as 0,1")
        if self.ranks % (self.tp_size * self.cp_size):
            raise UserError(
                f"ranks={self.ranks} must be a multiple of tp_size x cp_size = {self.tp_size * self.cp_size}"
            )
        num_named = 0 if self.device == "auto" else len(self.gpus) or self.ranks
        if self.ranks > 1 and (not num_named or num_named % self.ranks):
            raise UserError(
                f"device={self.device!r} must name the GPUs of {self.ranks} ranks, as many for each instance: --device "
                f"{','.join(map(str, range(self.ranks)))}"
            )

    @property
    def gpus(self) -> list[str]:
        """Numbers of the named GPUs."""
        return self.device.split(",") if self.device not in ("auto", "cpu") else []

    def parameters(self) -> dict[str, str]:
        """Parameters of the backend for its ranks."""
        sizes = {name: getattr(self, name) for name in ("ranks", "tp_size", "cp_size")}
        return {"device": self.device, **{name: str(size) for name, size in sizes.items()}}


def service_config(
    name: str,
    info: ServiceInfo,
    scheduling: Scheduling,
    *,
    dtype: str,
    runtime: str = "torch",
    others: Mapping[str, str] = NO_OTHERS,
) -> str:
    """config.pbtxt of the model `name` with the service of `info`; `others` are parameters of the backend."""
    parameters = {"service": info.to_json(), "runtime": runtime, "dtype": dtype, **scheduling.parameters(), **others}
    return f"""\
# Written by `megadit serve build-repository`. Numbers may be edited; the server reads them when it loads
# the model.
name: "{name}"
backend: "python"
max_batch_size: {scheduling.max_batch_size}

# One request, a stream of responses: progress, then the videos.
model_transaction_policy {{ decoupled: true }}

{_list("input", map(_input, INPUTS))}

{_list("output", [_tensor(EVENT, "TYPE_STRING"), _tensor(DATA, "TYPE_UINT8", -1)])}

{_dynamic_batching(scheduling)}

{_instance_group(scheduling)}

{_WARMUP}

# Defaults, limits and other facts for clients.
{_parameters(parameters)}
"""


def features_config(
    name: str,
    scheduling: Scheduling,
    *,
    input: str,
    output: str,
    width: int,
    labels: str | None,
    parameters: Mapping[str, str],
) -> str:
    """config.pbtxt of the model `name`, which returns a row of `width` numbers for each `input`; the lines of the file
    `labels` name them."""
    named = f' label_filename: "{labels}"' if labels else ""
    return f"""\
# Written by `megadit serve build-repository`.
name: "{name}"
backend: "python"
max_batch_size: {scheduling.max_batch_size}
{_list("input", [_tensor(input, "TYPE_STRING")])}
{_list("output", [_tensor(output, "TYPE_FP32", width, named)])}
{_dynamic_batching(scheduling)}
{_instance_group(scheduling)}
{_parameters(parameters)}
"""


def _input(each: Input) -> str:
    ragged, optional = " allow_ragged_batch: true" * each.is_list, " optional: true" * (not each.is_required)
    return _tensor(each.name, each.data_type, -1 if each.is_list else 1, ragged + optional)


def _tensor(name: str, data_type: str, size: int = 1, more: str = "") -> str:
    return f'  {{ name: "{name}" data_type: {data_type} dims: [ {size} ]{more} }}'


def _dynamic_batching(scheduling: Scheduling) -> str:
    return f"""\
dynamic_batching {{
  max_queue_delay_microseconds: {round(scheduling.batching_seconds * 1e6)}
  # 1 is served first
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy {{
    timeout_action: REJECT
    default_timeout_microseconds: {round(scheduling.queue_seconds * 1e6)}
    allow_timeout_override: true
    max_queue_size: {scheduling.max_queue_size}
  }}
}}"""


def _instance_group(scheduling: Scheduling) -> str:
    kind = {"auto": "KIND_AUTO", "cpu": "KIND_CPU"}.get(scheduling.device)
    gpus = ",".join(scheduling.gpus[:: scheduling.ranks])
    where = f"kind: {kind}" if kind else f"kind: KIND_GPU gpus: [ {gpus} ]"
    return f"instance_group [ {{ count: {scheduling.instances} {where} }} ]"


_WARMUP = """\
model_warmup [
  {
    name: "default settings"
    batch_size: 1
    inputs { key: "prompt" value { data_type: TYPE_STRING dims: [ 1 ] zero_data: true } }
  }
]"""


def _parameters(values: Mapping[str, str]) -> str:
    # a JSON string is valid in the protobuf text format, since json escapes characters beyond ASCII
    shown = {key: json.dumps(value) for key, value in values.items()}
    return "\n".join(f'parameters {{ key: "{key}" value {{ string_value: {text} }} }}' for key, text in shown.items())


def parameter_in(config: str, key: str) -> str:
    """A parameter of a config.pbtxt that `service_config` wrote; "" if it has none."""
    found = re.search(rf'^parameters {{ key: "{key}" value {{ string_value: (".*") }} }}$', config, re.MULTILINE)
    return json.loads(found[1]) if found else ""


def _list(field: str, entries: Iterable[str]) -> str:
    return f"{field} [\n" + ",\n".join(entries) + "\n]"
