"""Tests whose hardware or library is missing are skipped, with the reason."""

import importlib.util
import uuid
from collections.abc import Callable, Iterator

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


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a server that speaks S3."""
    pytest.importorskip("s3fs", reason="s3fs is not installed (megadit[s3])")
    pytest.importorskip("boto3", reason="boto3 is not installed (megadit[s3])")
    server = pytest.importorskip("moto.server", reason="moto is not installed (megadit[dev])")
    server = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """s3() makes an empty bucket and gives its URL; whoever asks for S3 in this test is sent to the server."""
    import boto3
    import s3fs

    settings = {"AWS_ENDPOINT_URL": s3_server, "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    s3fs.S3FileSystem.clear_instance_cache()

    def new_bucket() -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        boto3.client("s3").create_bucket(Bucket=name)
        return f"s3://{name}"

    return new_bucket
