import json

import pytest
from safetensors.torch import save_file

from megadit.infer.sampling.samplers import SAMPLERS
from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.dit import DiT
from megadit.models.networks.initialize import initialize_
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.demos.digits import sampling
from megadit.train.demos.digits.classifier import DigitReader


@pytest.fixture
def demo(tmp_path):
    """What `make demo` leaves, with weights that never saw a digit."""
    config = DiTConfig(
        num_layers=1, hidden_size=24, num_attention_heads=2, in_channels=192, patch_spatial=1, crossattn_emb_size=8
    )
    write_bundle(
        tmp_path / "demo/bundle",
        config=config,
        state_dict=initialize_(DiT(config), 0).state_dict(),
        tokenizer=HaarTokenizer(temporal_compression=4, spatial_compression=4, sigma_data=config.sigma_data),
        text_encoder=HashedWordEncoder(dim=8),
        defaults=SamplingSettings(num_steps=2, guidance=2.0, num_frames=9, height=32, width=32, fps=8),
    )
    save_file(DigitReader().state_dict(), tmp_path / "demo/classifier.safetensors")
    return tmp_path / "demo"


def test_measures_and_draws_everything(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "CALLS", (3, 4))
    monkeypatch.setattr(sampling, "SCALES", (2.0,))
    out = tmp_path / "out"
    assert sampling.main([str(demo), str(out), "--clips", "2", "--weaker", str(demo / "bundle")]) == 0
    result = json.loads((out / "sampling.json").read_text())
    negative = result["negative_prompt"]
    assert [row["scale"] for row in negative["red_as_negative"]] == list(sampling.NEGATIVE_SCALES)
    assert all(0 <= row["red"] <= row["coloured"] <= 1 for row in [negative["plain"], *negative["red_as_negative"]])
    assert result["solvers"].keys() == sampling.SOLVERS.keys() > SAMPLERS.keys()
    assert [point["calls"] for point in result["solvers"]["heun"]] == [3, 3]
    assert [point["calls"] for point in result["solvers"]["euler"]] == [3, 4]
    costs = {row["guidance"]: row["function_evaluations"] for row in result["guidance"]}
    assert costs["plain"] == costs["rescale 0.7"] == costs["autoguidance"] == 20
    assert abs(costs["interval 0.3 to 10"] - 20) <= 1  # equal cost is what the comparison claims
    assert (out / "score_against_calls.png").stat().st_size > 10_000


def test_what_is_no_demo_is_told(tmp_path, capsys):
    assert sampling.main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "classifier.safetensors does not exist" in capsys.readouterr().err
