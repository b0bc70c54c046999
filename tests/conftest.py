"""Tests whose hardware or library is missing are skipped, with the reason."""

import importlib.util

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="random cases of the tests that draw some (kills, damages, ...)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, reason in _missing(item).items():
            item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def _missing(item: pytest.Item) -> dict[str, str]:
    """Marker -> why its tests cannot run here, for the markers of this test; torch is imported only where asked for."""
    missing = {}
    if item.get_closest_marker("gpu") and _num_gpus() < 1:
        missing["gpu"] = "no CUDA device"
    if item.get_closest_marker("multi_gpu") and _num_gpus() < 2:
        missing["multi_gpu"] = "fewer than two CUDA devices"
    if item.get_closest_marker("trt") and importlib.util.find_spec("tensorrt") is None:
        missing["trt"] = "TensorRT is not installed"
    return missing


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
