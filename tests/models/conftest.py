"""Small published models, made by the tests in the form in which the real ones come."""

from pathlib import Path

import pytest
import torch

WORDS = "a red seven blue three moving left right on the beach robot waves digit".split()


def _write_t5(directory: Path, *, dim: int = 16, words=WORDS) -> Path:
    """config.json, tokenizer.json, model.safetensors."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -8.0), *((f"▁{word}", -2.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(pieces), d_model=dim, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    T5EncoderModel(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def write_t5():
    """Writes a T5 with random weights into a directory."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    return _write_t5


def cosmos_autoencoder(temporal: int = 4, *, statistics: bool = False):
    """A narrow `AutoencoderKLCosmos` with the levels of the released one, every tensor random."""
    import diffusers

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
    for parameter in network.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
        else:
            torch.nn.init.kaiming_normal_(parameter)
    return network.eval()


@pytest.fixture(scope="session")
def make_cosmos_autoencoder():
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    return cosmos_autoencoder
