"""C2PA signatures: C2PA's own reader finds them valid, and no more once a byte was changed."""

import base64
import random

import numpy as np
import pytest

from megadit.infer.commands.calibrate_cache import open_trial
from megadit.infer.generate.command import main
from megadit.infer.media.signing import Marker, SigningOptions, load_marker
from megadit.infer.media.video_io import read_comment, read_video, write_video
from megadit.models.shared.errors import UserError
from tests.signing import manifest_of, state_of, write_chain

FRAMES = np.random.default_rng(0).integers(0, 255, (5, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return write_chain(tmp_path_factory.mktemp("chain"))


@pytest.mark.parametrize("suffix", [".mp4", ".png", ".webp", ".gif", ".jpg"])
def test_a_signed_file_is_valid_and_a_changed_one_is_not(chain, tmp_path, suffix):
    frames = FRAMES if suffix in (".mp4", ".webp", ".gif") else FRAMES[:1]
    comment = {"comment": '{"a": 1}'}
    write_video(tmp_path / f"plain{suffix}", frames, 8, metadata=comment)
    write_video(tmp_path / f"signed{suffix}", frames, 8, metadata=comment, mark=Marker(*chain))
    plain, signed = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("plain", "signed"))
    assert state_of(plain, suffix) == "none" and state_of(signed, suffix) == "Valid"
    told = manifest_of(signed, suffix)
    (actions,) = [each["data"]["actions"] for each in told["assertions"] if each["label"].startswith("c2pa.actions")]
    assert actions[0]["digitalSourceType"].endswith("/trainedAlgorithmicMedia")
    assert told["claim_generator_info"][0]["name"] == "megadit"
    assert read_comment(tmp_path / f"signed{suffix}") == '{"a": 1}', "which --repeat reads"
    frames_of = [read_video(tmp_path / f"{name}{suffix}")[0] for name in ("plain", "signed")]
    assert np.array_equal(*frames_of)
    pictures = max(signed.find(plain[start : start + 64]) for start in range(len(plain) // 2, len(plain) - 64))
    assert pictures > 0, "where the file has the bytes of its pictures"
    for place in random.Random(0).sample(range(pictures, pictures + 64), 8):
        changed = bytearray(signed)
        changed[place] ^= 1
        assert state_of(bytes(changed), suffix) == "Invalid", place


@pytest.mark.parametrize("kind", ["p384", "ed25519", "rsa"])
def test_other_kinds_of_keys_sign(tmp_path, kind):
    marker = Marker(*write_chain(tmp_path, kind))
    write_video(tmp_path / "a.png", FRAMES[:1], mark=marker)
    assert state_of((tmp_path / "a.png").read_bytes(), ".png") == "Valid"


def test_what_cannot_sign_is_told_before_anything_is_made(chain, tmp_path, monkeypatch):
    certificate, key = chain
    other = write_chain(tmp_path)[1]
    (tmp_path / "noise").write_text("noise")
    for pair, told in (
        ((certificate, other), "cannot sign"),
        ((tmp_path / "noise", key), "cannot sign"),
        ((certificate, tmp_path / "noise"), "cannot sign"),
        ((certificate, tmp_path / "nowhere"), "cannot be read"),
    ):
        with pytest.raises(UserError, match=told) as error:
            Marker(*pair)
        assert "\n" not in str(error.value) and "PRIVATE" not in str(error.value)
    with pytest.raises(UserError, match="go together"):
        SigningOptions(c2pa_key=str(key)).found()
    assert load_marker(SigningOptions()) is None, "off without a key"
    monkeypatch.setenv("MEGADIT_C2PA_KEY", str(key))
    with pytest.raises(UserError, match="go together"):
        load_marker(SigningOptions())
    monkeypatch.setenv("MEGADIT_C2PA_CERTIFICATE", str(certificate))
    assert load_marker(SigningOptions()) is not None


@pytest.mark.parametrize("suffix", [".png", ".mp4"])
def test_a_key_beside_its_certificate_stays_where_it_is(chain, tmp_path, suffix, capsys):
    """In one file, as many programs take both: what is signed holds the chain as it is handed over."""
    both = tmp_path / "both.pem"
    for first, last in (chain, chain[::-1]):
        both.write_bytes(first.read_bytes() + last.read_bytes())
        write_video(tmp_path / f"a{suffix}", FRAMES[:1], 8, mark=Marker(both, both))
        assert state_of(signed := (tmp_path / f"a{suffix}").read_bytes(), suffix) == "Valid"
        lines = chain[1].read_bytes().splitlines()[1:-1]
        assert not any(line in signed for line in lines) and base64.b64decode(b"".join(lines))[36:68] not in signed
    assert f"may read {both}: chmod 600" in capsys.readouterr().err
    both.chmod(0o600)
    Marker(both, both)
    assert not capsys.readouterr().err


def test_generated_files_are_signed_and_repeated(bundle_dir, chain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sign = ["--c2pa_certificate", str(chain[0]), "--c2pa_key", str(chain[1])]
    make = ["--checkpoint_path", str(bundle_dir), "--device", "cpu", "--prompt", "a red seven", "--seed", "3"]

    def generate(path: str, *more: str) -> bytes:
        assert main([*more, "--video_save_path", path]) == 0, capsys.readouterr().err
        return (tmp_path / path).read_bytes() if (tmp_path / path).is_file() else b""

    plain = generate("plain.mp4", *make)
    signed = generate("signed.mp4", *make, *sign, "--contact_sheet", "sheet.png")
    assert (state_of(plain, ".mp4"), state_of(signed, ".mp4")) == ("none", "Valid")
    assert state_of((tmp_path / "sheet.png").read_bytes(), ".png") == "Valid"
    again = generate("again.mp4", "--repeat", "signed.mp4", "--recorded_files", "--device", "cpu")
    assert again == plain, "made again from what a signed file says; not signed unless asked"
    assert state_of(generate("long.mp4", *make, *sign, "--total_frames", "9"), ".mp4") == "Valid"
    generate("frames", *make, *sign, "--format", "png")
    assert {state_of(path.read_bytes(), ".png") for path in (tmp_path / "frames").glob("**/*.png")} == {"Valid"}
    assert not list(tmp_path.glob("**/*.signed"))
    assert main([*make, *sign[:2], "--video_save_path", "other.mp4"]) == 2 and not (tmp_path / "other.mp4").exists()


def test_what_writes_nothing_signs_nothing(bundle_dir):
    make = ["--checkpoint_path", str(bundle_dir), "--prompt", "a", "--cache_budget", "0.1"]
    for verb in ("calibrate-cache", "check-cache"):
        with pytest.raises(UserError, match="leave it out"):
            open_trial([*make, "--c2pa_certificate", "a", "--c2pa_key", "b"], verb)
