"""Classes are named by text or number."""

import pytest
import torch

from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import ClassLabels, load_text_encoder

LABELS = ClassLabels(names=("tench, Tinca tinca", "goldfish", *(f"class {i}" for i in range(2, 600))))


def test_names_synonyms_and_numbers():
    features = LABELS.encode(["Goldfish", "tinca tinca", "", "515", "class 599"])
    assert features.length_B.tolist() == [1, 1, 0, 1, 1]
    digits = features.features_BLE[:, 0].bfloat16().float()
    assert (256 * digits[:, 0] + digits[:, 1])[features.length_B > 0].tolist() == [1, 0, 515, 599]


def test_unknown_classes_name_the_nearest():
    with pytest.raises(UserError, match="did you mean 'goldfish'"):
        LABELS.encode(["goldfisch"])
    with pytest.raises(UserError, match="class 600 does not exist: there are 0 to 599"):
        LABELS.encode(["600"])


def test_saving_and_loading(tmp_path):
    LABELS.save(tmp_path)
    loaded = load_text_encoder(tmp_path)
    assert loaded == LABELS and loaded.fingerprint() == LABELS.fingerprint()
    assert torch.equal(loaded.encode(["goldfish"]).features_BLE, LABELS.encode(["1"]).features_BLE)
