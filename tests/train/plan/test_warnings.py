"""What is allowed and doubtful is said: before a run, and by a dry run, which opens the data set."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.dit import DiT
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.__main__ import main
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.plan.hardware import find_gpu
from megadit.train.plan.warnings import reconstruction_psnr, warnings_of
from megadit.train.recipes import load_recipe

GIB = 2**30


def write_random_bundle(path, *, guidance):
    network = DiTConfig(num_layers=1, hidden_size=24, num_attention_heads=2, in_channels=24, crossattn_emb_size=16)
    write_bundle(
        path,
        config=network,
        state_dict=DiT(network).state_dict(),
        tokenizer=HaarTokenizer(temporal_compression=2, spatial_compression=2),
        text_encoder=HashedWordEncoder(dim=16),
        defaults=SamplingSettings(num_steps=4, guidance=guidance, num_frames=3, height=8, width=8, fps=8.0),
    )
    return path


@pytest.fixture
def blurred(tiny_dataset, tmp_path):
    """The data set, whose tokenizer says that it loses much."""
    root = shutil.copytree(tiny_dataset, tmp_path / "blurred")
    path = root / "tokenizer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"reconstruction_psnr": 21.0}))
    return root


def test_nothing_is_doubtful_about_the_demo():
    assert warnings_of(load_recipe("digits"), None, needed=GIB, free=2 * GIB) == []


def test_tokens_that_hold_more_than_half_the_width():
    run = load_recipe("digits")
    (said, _) = warnings_of(replace(run, model=replace(run.model, in_channels=64)), None)
    assert "a token holds 64 numbers (64 channels x 1 x 1 x 1), more than half of model.hidden_size=96" in said


def test_ranks_and_stages_that_would_wait_for_the_heaviest_pack():
    """Of a data set with clips of 64 to 4,096 tokens."""
    run = load_recipe("digits")
    lengths = tuple((2**n, 8, 8) for n in range(7))
    sizes = {"seq_length": 4096, "text_seq_length": 4096, "global_batch_size": 16}
    usual = replace(run.data, path="clips", mock_latent_shapes=lengths, packing_buffer_size=1000, **sizes)

    def said(parallel=run.parallel, **data):
        return warnings_of(replace(run, parallel=parallel, data=replace(usual, **data)), None, readers=8)

    assert said() == []
    assert "data.balance=work helps" in said(balance="tokens")[0]
    assert "more than data.packing_buffer_size=20 helps" in said(packing_buffer_size=20)[0]
    stages = replace(run.parallel, pipeline_model_parallel_size=2)
    assert "data.balance=step makes them equal" in said(stages)[0] and said(stages, balance="step") == []


def test_guidance_that_another_network_had(tmp_path):
    run = load_recipe("digits")
    other = replace(run, model=replace(run.model, num_layers=6, hidden_size=192))
    (said,) = warnings_of(other, None)
    steps = run.validation.sampling.num_steps
    assert f"guidance=3 and {steps} steps, which recipe digits has for a network of another size" in said
    bundle = write_random_bundle(tmp_path / "bundle", guidance=2.5)
    tuned = replace(other, checkpoint=replace(run.checkpoint, init_from=str(bundle)))
    assert f"guidance=3 (that of {bundle}: 2.5)" in warnings_of(tuned, None)[0]
    chosen = replace(run.validation, sampling=replace(run.validation.sampling, guidance=3.5))
    assert warnings_of(replace(other, validation=chosen), None) == []
    assert warnings_of(replace(run, checkpoint=tuned.checkpoint), None) == []  # a network that the recipe is for


def test_memory_that_this_machine_has_not():
    (said,) = warnings_of(load_recipe("digits"), None, needed=3 * GIB, free=2 * GIB)
    assert "needs about 3 GiB, and this machine has 2 GiB for it" in said


def test_a_tokenizer_that_loses_much(tiny_dataset, blurred):
    infos = [DatasetInfo.read(root) for root in (tiny_dataset, blurred)]
    assert [reconstruction_psnr(info) for info in infos] == [None, 21.0]
    assert warnings_of(load_recipe("digits"), infos[0]) == []
    (said,) = warnings_of(load_recipe("digits"), infos[1])
    assert "reconstructs videos at 21.0 dB only (24 channels)" in said


def test_what_more_channels_would_give(blurred):
    noted = blurred / "prepare" / "channels.json"
    noted.parent.mkdir()
    noted.write_text('{"16": 19.04, "32": 25.06, "48": 27.3, "x": 1, "64": "many"}')
    (said,) = warnings_of(load_recipe("digits"), DatasetInfo.read(blurred))
    assert said.endswith("for sharper ones; --channels 32, 48 would give 25.1, 27.3 dB")
    for broken in ("[", "[1]", '{"16": 19.0}'):
        noted.write_text(broken)
        (said,) = warnings_of(load_recipe("digits"), DatasetInfo.read(blurred))
        assert said.endswith("for sharper ones"), broken


def test_a_dry_run_opens_the_data_set(blurred, tmp_path, capsys):
    command = ["--recipe", "digits_tiny", "--dry-run"]
    assert main([*command, f"data.path={blurred}"]) == 0
    assert "note: the tokenizer of" in capsys.readouterr().out
    assert main([*command, f"data.path={tmp_path / 'nowhere'}"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert main([*command, f"data.path={blurred}", "model.in_channels=16"]) == 2
    assert "model.in_channels=16 does not fit" in capsys.readouterr().err


def test_a_dry_run_compares_with_this_machine(capsys):
    assert main(["--recipe", "pretrain_7b", "--dry-run", "data.micro_batch_size=1", "data.global_batch_size=1"]) == 0
    shown = capsys.readouterr().out
    assert "note: a rank needs about" in shown and "estimated on this machine" not in shown, "it cannot run here"
    assert main(["--recipe", "digits", "--dry-run"]) == 0
    assert re.search(r"estimated on this machine: about .* for 960 steps of \S+ s\n", capsys.readouterr().out)


def test_a_gpu_by_the_beginning_of_its_name(capsys):
    assert find_gpu("h200") is find_gpu("h200-141gb")
    assert main(["--recipe", "digits", "--dry-run", "--gpu", "a100"]) == 2
    assert "--gpu a100 is unknown; did you mean 'a100-" in capsys.readouterr().err
