"""From a checkpoint that two tensor-parallel ranks wrote to a bundle that generates, in one process."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle, open_bundle
from megadit.models.convert.adapters.files import read_adapter_of
from megadit.models.megatron.checkpoint import read_adapter as read_trained
from megadit.models.megatron.checkpoint import read_network
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_manifest
from megadit.models.shared.words import read_words, write_words
from megadit.models.text_encoders import load_text_encoder
from megadit.train.checkpoints.to_bundle import choose_average, find_checkpoint, main, prompts_of, training_words
from megadit.train.config.load import load_config
from megadit.train.dataset.dataset_info import DatasetInfo

pytestmark = pytest.mark.slow
BLEND = """
__module__: megatron.energon
__class__: MetadatasetV2
splits: {{train: {{path: {first}, split_part: val}}}}
"""


@pytest.fixture(scope="module")
def trained(run_ranks, tiny_arguments, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    layout = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
    run_ranks(2, *tiny_arguments, *layout, "validation.interval=4", f"train.output_dir={out}")
    return out


def weights_of(bundle):
    return Bundle.open(bundle).load_dit().state_dict()


def test_the_newest_checkpoint_and_its_best_average(trained, tmp_path, capsys):
    assert main([str(trained), str(tmp_path / "bundle")]) == 0
    newest = trained / "checkpoints" / "iter_0000004"
    best = json.loads((newest / "state.json").read_text())["run"]["validation"]["best"]
    expected = read_network(newest, ema=None if best == "none" else float(best))
    assert all(torch.equal(expected[name], tensor) for name, tensor in weights_of(tmp_path / "bundle").items())
    training = Bundle.open(tmp_path / "bundle").manifest["training"]
    assert training["step"] == 4 and training["recipe"] == "digits_tiny" and training["consumed_samples"] > 0
    assert str(newest) in capsys.readouterr().out


def test_the_bundle_samples_what_was_trained_on(trained, tmp_path):
    main([str(trained), str(tmp_path / "bundle")])
    defaults = Bundle.open(tmp_path / "bundle").defaults
    assert (defaults.num_frames, defaults.height, defaults.width, defaults.fps) == (3, 8, 8, 8)
    assert (defaults.num_steps, defaults.guidance) == (2, 3.0)


def test_the_bundle_knows_its_training_words_and_those_before(trained, tiny_dataset, tmp_path):
    main([str(trained), str(tmp_path / "bundle")])
    held_out, told = {str(number) for number in range(8)}, {str(number) for number in range(8, 40)}
    assert read_words(tmp_path / "bundle") == {"sample", "number", *told}
    assert Bundle.open(tmp_path / "bundle").prompts == tuple(f"sample number {number}" for number in range(6))
    config, info = load_config(trained / "checkpoints" / "iter_0000004" / "config.yaml"), DatasetInfo.read(tiny_dataset)
    blend = tmp_path / "blend.yaml"
    blend.write_text(BLEND.format(first=tiny_dataset))
    encoder = load_text_encoder(info.text_encoder_folder)
    assert training_words(config, str(blend), info, encoder) == ({"sample", "number", *held_out}, 3)
    assert Bundle.open(tmp_path / "bundle").longest_caption == 3
    (first, *_) = prompts_of(config, blend, DatasetInfo.read(blend))
    assert first == "sample number 0", "what the blend takes, not what its first data set has beside"
    write_words(tmp_path / "bundle", ["before"])
    manifest = read_json(tmp_path / "bundle" / "megadit.json")
    write_manifest(tmp_path / "bundle", manifest | {"training": {"longest_caption": 9}})
    for begun, expected in (
        (tmp_path / "bundle", ({"before", "sample", "number", *held_out}, 9)),
        (trained, (None, None)),
    ):
        after = replace(config, checkpoint=replace(config.checkpoint, init_from=str(begun)))
        assert training_words(after, str(blend), info, encoder) == expected
    model, data = (
        replace(config.model, conditioning_sigma=0.02),
        replace(config.data, conditioning=("first_frame:0.3",)),
    )
    given = replace(config, model=model, data=data)
    assert training_words(given, str(blend), info, encoder) == (None, None)
    assert training_words(config, str(blend), info, object()) == (None, None)  # one with words of its own


def test_averages_and_steps_are_chosen(trained, tmp_path):
    found = {}
    for name, more in {"none": ["--step", "2"], "0.05": ["--step", "2"], "0.15": []}.items():
        assert main([str(trained), str(tmp_path / name), "--ema", name, *more]) == 0
        found[name] = weights_of(tmp_path / name)
        assert Bundle.open(tmp_path / name).manifest["training"]["step"] == (2 if more else 4)
    key = "final_layer.linear.weight"  # blocks are the identity at the start and have hardly moved
    assert not torch.equal(found["none"][key], found["0.05"][key])
    assert not torch.equal(found["0.05"][key], found["0.15"][key])


@pytest.mark.parametrize("choice", [["--ema", "0.3"], ["--step", "3"], ["--ema", "bset"]])
def test_mistakes_are_one_line(trained, tmp_path, capsys, choice):
    assert main([str(trained), str(tmp_path / "bundle"), *choice]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {choice[0]} {choice[1]}") and error.count("\n") == 1
    assert not (tmp_path / "bundle").exists()


def test_a_pattern_of_steps_gives_a_bundle_of_each(trained, tmp_path, capsys):
    assert main([str(trained), str(tmp_path / "all"), "--step", "[24]"]) == 0
    steps = {path.name: Bundle.open(path).manifest["training"]["step"] for path in (tmp_path / "all").iterdir()}
    assert steps == {"2": 2, "4": 4}
    assert main([str(trained), str(tmp_path / "none"), "--step", "*000"]) == 2
    assert "--step *000" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_best_without_a_validation_is_the_narrowest_average(trained, tmp_path):
    checkpoint = tmp_path / "iter_0000002"
    shutil.copytree(trained / "checkpoints" / "iter_0000002", checkpoint)
    assert choose_average(checkpoint, "best") == 0.05


def test_a_folder_without_checkpoints(tmp_path):
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_checkpoint(tmp_path)


def test_the_data_set_may_lie_elsewhere(trained, tiny_dataset, tmp_path, capsys):
    assert main([str(trained), str(tmp_path / "bundle"), "--dataset", "/nowhere"]) == 2
    assert "/nowhere does not exist" in capsys.readouterr().err and not (tmp_path / "bundle").exists()
    shutil.copytree(tiny_dataset, tmp_path / "moved")
    assert main([str(trained), str(tmp_path / "bundle"), "--dataset", str(tmp_path / "moved")]) == 0


def test_defaults_are_chosen(trained, tmp_path, capsys):
    assert main([str(trained), str(tmp_path / "plain")]) == 0
    assert main([str(trained), str(tmp_path / "bundle"), "--default", "num_steps=3", "--default", "guidance=5"]) == 0
    plain, chosen = (Bundle.open(tmp_path / name, verify=True).defaults for name in ("plain", "bundle"))
    assert chosen == replace(plain, num_steps=3, guidance=5.0) != plain
    assert main([str(trained), str(tmp_path / "other"), "--default", "height=1"]) == 2
    assert "height=1 is not a multiple" in capsys.readouterr().err and not (tmp_path / "other").exists()


# --------------------------------------------------------------------------------------------- of a run with an adapter


@pytest.fixture(scope="module")
def adapted(trained, run_ranks, tiny_arguments, tmp_path_factory):
    """(the bundle that an adapter began with, the folder of its run)."""
    folder = tmp_path_factory.mktemp("adapted")
    assert main([str(trained), str(folder / "base")]) == 0
    adapter = ("train.adapter.rank=2", "train.adapter.alpha=6", f"checkpoint.init_from={folder / 'base'}")
    run_ranks(2, *tiny_arguments, *adapter, "parallel.tensor_model_parallel_size=2", f"train.output_dir={folder}/run")
    return folder / "base", folder / "run"


def test_the_adapter_of_a_run(adapted, tmp_path):
    base, run = adapted
    assert main([str(run), str(tmp_path / "adapter"), "--ema", "none"]) == 0
    adapter = read_adapter_of(tmp_path / "adapter", Bundle.open(base))
    state, settings = adapter.to_state()
    expected = read_trained(run / "checkpoints" / "iter_0000004")
    assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)
    assert settings.scaling == 3 and adapter.training["step"] == 4
    assert any(tensor.any() for key, tensor in state.items() if key.endswith(".up")), "it has learnt something"
    assert sum(file.stat().st_size for file in (tmp_path / "adapter").iterdir()) < 100_000


def test_an_adapter_needs_its_base(adapted, tmp_path):
    base, run = adapted
    with pytest.raises(UserError, match="has trained an adapter, .* give the bundle that it was trained on"):
        open_bundle(run)
    pipeline = TextToVideo.from_pretrained(base, device="cpu")
    plain, changed = (pipeline(["a"], adapters=kind)[0] for kind in ({}, {str(run / "bundle"): 1.0}))
    assert not torch.equal(plain.latents_CTHW, changed.latents_CTHW)
    assert main([str(base), str(tmp_path / "merged"), "--merge", str(run / "bundle")]) == 0
    merged = TextToVideo.from_pretrained(tmp_path / "merged", device="cpu")(["a"])[0]
    torch.testing.assert_close(merged.latents_CTHW, changed.latents_CTHW)
    assert main([str(run), str(tmp_path / "other"), "--merge", str(run / "bundle")]) == 2


def test_weights_that_were_trained_on_are_another_base(trained, adapted, tmp_path):
    _, run = adapted
    assert main([str(run), str(tmp_path / "adapter")]) == 0
    assert main([str(trained), str(tmp_path / "earlier"), "--step", "2", "--ema", "none"]) == 0
    with pytest.raises(UserError, match="was trained with other weights"):
        read_adapter_of(tmp_path / "adapter", Bundle.open(tmp_path / "earlier"))
