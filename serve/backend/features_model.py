"""Embedding and classification models of Triton's Python backend; a repository's model.py imports `TritonPythonModel`
from here. The models are in `features.py`."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # exists only inside Triton

from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError
from megadit.serve.backend.features import Features
from megadit.serve.backend.triton_instance import Instance
from megadit.serve.service_info import Limits


class TritonPythonModel:
    """One instance: one network on one device."""

    def initialize(self, args: dict[str, str]) -> None:
        instance = Instance.of(args)
        self._features = Features(
            args["model_name"],
            Bundle.open(instance.bundle),
            runtime=instance.parameters["runtime"],
            device=instance.device,
            limits=Limits(**json.loads(instance.parameters["limits"])),
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response to each request."""
        name = self._features.model.input
        values = [pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1) for request in requests]
        return [self._response(answer) for answer in self._features.answer(values)]

    def finalize(self) -> None:
        self._features.close()

    def _response(self, answer: np.ndarray | Exception) -> Any:
        if isinstance(answer, np.ndarray):
            tensor = pb_utils.Tensor(self._features.model.output, answer)
            return pb_utils.InferenceResponse(output_tensors=[tensor])
        code = pb_utils.TritonError.INVALID_ARG if isinstance(answer, UserError) else pb_utils.TritonError.UNAVAILABLE
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(answer), code))
