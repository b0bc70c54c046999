from importlib.util import find_spec

import numpy as np
import pytest
import torch


def to_tensor(image):
    """float32 [3, H, W], 0..1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def nearest_resize(mask, size, interpolation=None):
    return torch.nn.functional.interpolate(mask, size, mode="nearest")


@pytest.fixture
def without_torchvision(monkeypatch):
    """diffusers resizes the padding mask and reads an image with torchvision, which need not be installed."""
    from types import SimpleNamespace

    stand_in = SimpleNamespace(
        functional=SimpleNamespace(resize=nearest_resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    monkeypatch.setattr("diffusers.models.transformers.transformer_cosmos.transforms", stand_in, raising=False)
    reader = SimpleNamespace(transforms=SimpleNamespace(functional=SimpleNamespace(to_tensor=to_tensor)))
    if find_spec("diffusers.pipelines.cosmos.pipeline_cosmos2_5_predict"):  # from diffusers 0.37 on
        monkeypatch.setattr("diffusers.pipelines.cosmos.pipeline_cosmos2_5_predict.torchvision", reader, raising=False)
