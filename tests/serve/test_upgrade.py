"""What an earlier release wrote is served by this one (its job store: gateway/test_store.py)."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.serve.repository.build import build_repository

MEANS = np.array(
    [
        [131.546875, 126.765625, 131.03125],
        [132.328125, 122.203125, 125.453125],
        [128.59375, 133.734375, 131.765625],
        [128.453125, 126.3125, 129.015625],
        [130.625, 132.4375, 130.0625],
    ]
)
"""Of red, green and blue in each frame of the video that 0.1.0 made."""


@pytest.fixture
def old_bundle(tmp_path):
    zipfile.ZipFile(Path(__file__).parent / "bundle_of_format_1.zip").extractall(tmp_path)
    return tmp_path / "bundle"


def test_a_bundle_of_0_1_0_makes_its_video_and_becomes_a_repository(old_bundle, tmp_path):
    pipeline = TextToVideo.from_pretrained(old_bundle, device="cpu")
    (made,) = pipeline(["a red seven"], seeds=3)
    means = made.video.astype(float).mean(axis=(1, 2))
    assert np.abs(means - MEANS).max() < 1, "rounding moves a few pixels by a level"
    (other,) = pipeline(["a red seven"], seeds=4)
    assert np.abs(other.video.astype(float).mean(axis=(1, 2)) - MEANS).max() > 1, "the control: another seed"
    repository = build_repository(old_bundle, tmp_path / "models")
    assert Bundle.open(repository / "text_to_video" / "1" / "bundle", verify=True)
