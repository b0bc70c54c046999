import pytest
import torch


def nearest_resize(mask, size, interpolation=None):
    return torch.nn.functional.interpolate(mask, size, mode="nearest")


@pytest.fixture
def without_torchvision(monkeypatch):
    """diffusers resizes the padding mask with torchvision, which need not be installed."""
    from types import SimpleNamespace

    stand_in = SimpleNamespace(
        functional=SimpleNamespace(resize=nearest_resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    monkeypatch.setattr("diffusers.models.transformers.transformer_cosmos.transforms", stand_in, raising=False)
