"""`--min_clip_score BUNDLE:SCORE`: what its caption does not fit is left out, and counted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from megadit.infer.evaluate.videos import Clip
from megadit.infer.matching import Matcher
from megadit.models.bundle import Bundle
from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.registry import build_network
from megadit.models.shared.files import read_json
from megadit.models.text_encoders.token_ids import learned_words
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.data.prepare import command as prepare
from megadit.train.dataset.dataset_info import DatasetInfo

TEXTS = ["a red seven", "a green three", "the number nine", "a blue one", "two"]


@pytest.fixture
def bundle(tmp_path):
    model = build_network(replace(NAMED_CONFIGS["clip_digits"], num_layers=1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    write_bundle(
        tmp_path / "bundle",
        config=model.config,
        state_dict=model.state_dict(),
        tokenizer=HaarTokenizer(temporal_compression=1, spatial_compression=1),
        text_encoder=learned_words(TEXTS, num_words=300),
        defaults=SamplingSettings(num_steps=1, guidance=1.0, num_frames=1, height=32, width=32, fps=0.0),
    )
    return tmp_path / "bundle"


def test_pictures_whose_caption_fits_less_are_left_out(bundle, tmp_path, capsys):
    generator, source = np.random.default_rng(0), tmp_path / "pictures"
    source.mkdir()
    pictures = generator.integers(0, 256, (len(TEXTS) + 1, 32, 32, 3), dtype=np.uint8)
    for index, pixels in enumerate(pictures):
        Image.fromarray(pixels).save(source / f"{index}.png")
        if index < len(TEXTS):
            (source / f"{index}.txt").write_text(TEXTS[index])
    matcher = Matcher(Bundle.open(bundle))
    seen = matcher.pictures([Clip(pixels[None], 0.0, "a picture") for pixels in pictures[:-1]])
    scores = (seen * matcher.texts(TEXTS)).sum(1)
    least = scores.sort().values[1:3].mean().item()  # two fit less
    arguments = ["images", str(source), str(tmp_path / "out"), "--sizes", "32x32", "--tokenizer", "pixels"]
    arguments += ["--num_workers", "0", "--val_share", "0", "--max_duplicate_bits", "-1"]
    assert prepare.main([*arguments, "--min_clip_score", f"{bundle}:{least}"]) == 0
    assert DatasetInfo.read(tmp_path / "out").num_samples["train"] == 3
    assert "left out: 3 x low CLIP score" in capsys.readouterr().out
    assert read_json(tmp_path / "out" / "report.json")["skips"] == {"low CLIP score": 3}
    skipped = (tmp_path / "out" / "prepare" / "skips.jsonl").read_text()
    assert skipped.count("no caption") == 1 and f"{scores.min().item():.3f}" in skipped


@pytest.mark.parametrize("least", ["0.2", "BUNDLE:high", "BUNDLE:1.5", "nowhere:0.2"])
def test_what_is_no_score_is_refused_before_anything_is_read(bundle, tmp_path, least, capsys):
    source, out = tmp_path / "pictures", tmp_path / "out"
    source.mkdir()
    arguments = ["images", str(source), str(out), "--min_clip_score", least.replace("BUNDLE", str(bundle))]
    assert prepare.main(arguments) == 2
    error = capsys.readouterr().err
    assert ("write BUNDLE:SCORE" in error or "nowhere" in error) and error.count("\n") == 1 and not out.exists()
