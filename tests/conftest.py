"""Tests whose hardware or library is missing are skipped, with the reason; what tests of several folders share."""

import importlib.util
import os
import random
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from megadit.models.shared.cli.command import ending_signals

from . import budget, exports, ranks, workers

_OF_USERS = (signal.SIGUSR1, signal.SIGUSR2)
workers.take_a_share_of_the_cores()  # conftest.py of folders import torch


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which all programs would inherit
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("MEGADIT_VARIANTS", "rule")  # bits that are compared do not depend on a measurement
    if not workers.asks_for_gpus(config.option.markexpr):  # bits, ranks and memory are those of CPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read where Triton is imported: its kernels run on CPUs
    plugins = [ranks, exports, budget.Meter(), workers.Bytecode()]
    plugins += [workers.Worker()] if hasattr(config, "workerinput") else [workers.Dealer(), budget.Table()]
    for plugin in plugins:
        config.pluginmanager.register(plugin)


with suppress(ImportError):
    import hypothesis

    # a busy machine makes no example wrong, and the examples are the same each time (new ones: `make fuzz`)
    hypothesis.settings.register_profile(
        "any machine", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="random cases of the tests that draw some (kills, damages, ...)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random numbers of a test do not depend on what its process ran before, which xdist decides."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Commands that run until a signal ends them leave their handlers, which a later test, or its fork, would meet."""
    before = {number: signal.getsignal(number) for number in (*ending_signals(), *_OF_USERS)}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, reason in _missing(item).items():
            item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))
        if sys.version_info >= (3, 13) and "tritonserver" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(3600))  # the first one compiles the numpy 1 of Triton's stub


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


# ------------------------------------------------- small published models, in the form in which the real ones come

WORDS = tuple("a red seven blue three moving left right on the beach robot waves digit".split())


def _write_t5(directory: Path, *, dim: int = 16, words: Sequence[str] = WORDS, kind: str = "T5") -> Path:
    """config.json, tokenizer.json, model.safetensors; `kind` is what the name of its class begins with."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -8.0), *((f"▁{word}", -2.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(tokens, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokens), d_model=dim, d_kv=4, d_ff=32, num_layers=2, num_heads=4
    )
    getattr(transformers, f"{kind}EncoderModel")(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def write_t5() -> Callable[..., Path]:
    """Writes a T5 with random weights into a directory."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    return _write_t5


def _write_clip(directory: Path, *, dim: int = 16, projection: int | None = None, pad: str = "<|endoftext|>") -> Path:
    """config.json, vocab.json and merges.txt, model.safetensors; with a `projection` of this width, the class that has
    one. Words are spelled, each letter a token."""
    import json
    import string

    import torch
    import transformers

    letters = string.ascii_lowercase + string.digits + "!,.-"
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    begin, end = len(tokens) - 2, len(tokens) - 1
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps({token: place for place, token in enumerate(tokens)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    about = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": pad}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    torch.manual_seed(dim)
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=dim,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=projection or 12,
        hidden_act="quick_gelu" if projection is None else "gelu",
        bos_token_id=begin,
        eos_token_id=end,
        pad_token_id=tokens.index(pad),
        initializer_factor=3.0,
    )
    name = "CLIPTextModel" if projection is None else "CLIPTextModelWithProjection"
    getattr(transformers, name)(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def write_clip() -> Callable[..., Path]:
    """Writes a CLIP of texts with random weights, and its words, into a directory."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    return _write_clip


def _randomised(network):
    """Every tensor random."""
    import torch

    for parameter in network.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
        else:
            torch.nn.init.kaiming_normal_(parameter)
    return network.eval()


@pytest.fixture(scope="session")
def randomise_autoencoder() -> Callable:
    return _randomised


def _cosmos_autoencoder(temporal: int = 4, *, statistics: bool = False):
    """A narrow `AutoencoderKLCosmos` with the levels of the released one."""
    import diffusers
    import torch

    torch.manual_seed(temporal)
    network = diffusers.AutoencoderKLCosmos(
        encoder_block_out_channels=(8, 8, 16, 16),
        decode_block_out_channels=(8, 16, 16) if temporal == 4 else (8, 16, 16, 16),
        latent_channels=4,
        num_layers=1,
        temporal_compression_ratio=temporal,
        latents_mean=torch.randn(4 * 3).tolist() if statistics else None,
        latents_std=(1 + torch.rand(4 * 3)).tolist() if statistics else None,
    )
    return _randomised(network)


@pytest.fixture(scope="session")
def make_cosmos_autoencoder() -> Callable:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    return _cosmos_autoencoder


@pytest.fixture(scope="session")
def exported_stable_diffusion(once, write_clip) -> Path:
    """A small XL with random weights as `megadit convert` and `megadit export` make it; it takes half a minute."""
    from megadit.export.build import ExportSettings, export_bundle
    from megadit.models.commands.convert import main

    from .stable_diffusion import SHALLOW, make_pipeline

    def write(folder: Path) -> None:
        make_pipeline(folder / "pipeline", "xl", write_clip, **SHALLOW)
        assert main([str(folder / "pipeline"), str(folder / "bundle")]) == 0
        export_bundle(folder / "bundle", folder / "exported", ExportSettings(profiles=("batch=1,1,2",), video_steps=3))

    return once("stable_diffusion", write) / "exported"


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory) -> Path:
    """A CLIP with random weights, as transformers saves it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("clip")
    words = ["<s>", "</s>", "<unk>", *"a red seven blue three moving left right".split()]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    shared = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(words), "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=shared | text | {"pad_token_id": 1},
        vision_config=shared | {"image_size": 32, "patch_size": 8},
        projection_dim=12,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    return folder
