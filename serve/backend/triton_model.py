"""The service as a model of Triton's Python backend; a repository's model.py imports `TritonPythonModel` from here.

Triton passes the requests that its dynamic batcher collected; each gets a stream of events (`events.py`) through its
own response sender.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # exists only inside Triton

from megadit.infer.hooks.scorer import Scorer
from megadit.infer.media.reader import MediaReader
from megadit.infer.media.signing import SigningOptions, load_marker
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.distributed import DevicePlacement
from megadit.infer.runtimes.load import most_videos_at_once
from megadit.infer.runtimes.options import print_dtype
from megadit.infer.runtimes.torch import use_device
from megadit.models.bundle import Bundle
from megadit.models.shared.cli.setting import settings_of
from megadit.models.shared.errors import UserError
from megadit.serve.backend.engine import Engine, OpenRequest
from megadit.serve.backend.triton_instance import Instance
from megadit.serve.contract import INPUTS, VideoRequest
from megadit.serve.events import (
    DATA,
    EVENT,
    CancelledError,
    DeadlineExceededError,
    Event,
    InvalidRequestError,
    ServiceError,
    error_to_wire,
    event_to_wire,
)
from megadit.serve.service_info import ServiceInfo
from megadit.serve.tracing import NOTHING, TRACEPARENT, Span, Tracing


class TritonPythonModel:
    """One instance: one pipeline on one device, or on a group of ranks that it starts."""

    def initialize(self, args: dict[str, str]) -> None:
        instance = Instance.of(args)
        self._tracing, self._name = Tracing.of_environment("megadit-triton"), args["model_name"]
        parameters, device, bundle = instance.parameters, instance.device, Bundle.open(instance.bundle)
        runtime = parameters["runtime"]
        use_device(device)
        pipeline = TextToVideo.from_pretrained(
            bundle,
            device=device,
            ranks=_device_placement(parameters, device),
            dtype=print_dtype(parameters["dtype"], bundle, device, runtime),
            runtime=runtime,
            adapter_bytes=int(parameters["adapter_bytes"]),
            guardrail_dir=parameters["guardrail_dir"],
            opens_paths=False,
        )
        guardrail, pipeline.guardrail = pipeline.guardrail, None  # the engine calls it for each request separately
        pipeline.preview(torch.zeros(1, pipeline.tokenizer.latent_channels, 1, 1, 1))  # fitted at the first call
        info = ServiceInfo.from_json(parameters["service"])
        self._media = MediaReader(info.limits)
        self._engine = Engine(
            pipeline,
            info,
            batch_size=most_videos_at_once(bundle, runtime),
            decode=self._media.read,
            adapters=Path(parameters["adapters"]) if info.adapters else None,
            guardrail=guardrail,
            scorer=Scorer.load(parameters["scorer_dir"]) if info.has_scorer else None,
            mark=load_marker(SigningOptions(**{name: parameters[name] for name in settings_of(SigningOptions)})),
        )

    def execute(self, requests: Sequence[Any]) -> None:
        """Serves all of them; a decoupled model returns nothing."""
        open_requests = []
        for request in requests:
            span = self._tracing.begin(self._name, _traceparent(request), kind="server")
            open_request = _Answer(request.get_response_sender(), span).open(request)
            if open_request is not None:
                open_requests.append(open_request)
        self._engine.run(open_requests)

    def finalize(self) -> None:
        self._media.close()
        self._tracing.close()


def _device_placement(parameters: dict[str, str], device: str) -> DevicePlacement | None:
    """Placement of the instance's ranks, the first of which is on `device`; None without ranks."""
    num_ranks = int(parameters["ranks"])
    if num_ranks == 1:
        return None
    devices = [device if device == "cpu" else f"cuda:{gpu}" for gpu in parameters["device"].split(",")]
    devices = devices * num_ranks if device == "cpu" else devices[devices.index(device) :][:num_ranks]
    sizes = {"tensor": int(parameters["tp_size"]), "context": int(parameters["cp_size"])}
    return DevicePlacement(devices=tuple(devices), **sizes)


class _Answer:
    """The stream of responses to one request."""

    def __init__(self, sender: Any, span: Span = NOTHING) -> None:
        self._sender, self._span = sender, span

    def open(self, request: Any) -> OpenRequest | None:
        """Return the engine's request, or None for invalid inputs, after sending the error."""
        try:
            video_request = VideoRequest.from_inputs(_read_inputs(request))
        except UserError as error:
            self.end(InvalidRequestError(str(error)))
            return None
        return OpenRequest(
            request=video_request,
            send=self.send,
            end=self.end,
            is_cancelled=self._sender.is_cancelled,
            seconds=request.timeout() / 1e6 or None,
            span=self._span,
        )

    def send(self, event: Event) -> None:
        text, data = event_to_wire(event)
        tensors = [
            pb_utils.Tensor(EVENT, np.array([[text.encode()]], dtype=np.object_)),
            pb_utils.Tensor(DATA, np.frombuffer(data, dtype=np.uint8)[None]),
        ]
        self._sender.send(pb_utils.InferenceResponse(output_tensors=tensors))

    def end(self, error: ServiceError | None) -> None:
        """Closes the stream, also after a cancelled request."""
        self._span.end(None if error is None else type(error).__name__)
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if error is None:
            self._sender.send(flags=final)
            return
        code = pb_utils.TritonError.INTERNAL
        if isinstance(error, InvalidRequestError):
            code = pb_utils.TritonError.INVALID_ARG
        elif isinstance(error, (CancelledError, DeadlineExceededError)):
            code = pb_utils.TritonError.CANCELLED
        self._sender.send(
            pb_utils.InferenceResponse(error=pb_utils.TritonError(error_to_wire(error), code)), flags=final
        )


def _traceparent(request: Any) -> str | None:
    """Trace context of the caller, if the request has one."""
    value = json.loads(request.parameters() or "{}").get(TRACEPARENT)
    return value if isinstance(value, str) else None


def _read_inputs(request: Any) -> dict[str, Any]:
    """Python values of the inputs in the request."""
    values = {}
    for each in INPUTS:
        tensor = pb_utils.get_input_tensor_by_name(request, each.name)
        if tensor is None:
            continue
        array = tensor.as_numpy()
        is_text = each.data_type == "TYPE_STRING" and not each.is_media
        if each.is_list:
            items = array.reshape(-1).tolist()
            values[each.name] = tuple(_text(each.name, item) if is_text else item for item in items)
            continue
        if array.size != 1:
            raise UserError(f"the input {each.name!r} holds {array.size} values; send one request for each video")
        values[each.name] = _text(each.name, array.item()) if is_text else array.item()
    return values


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"the input {name!r} is not UTF-8: {error.reason} at byte {error.start}") from None
