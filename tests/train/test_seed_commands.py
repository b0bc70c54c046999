"""Commands that users of NeMo and DFM know do their work here, with only the program's name changed.

`seed_commands.txt` holds the commands of those documents, as they stand there. Each ends up in one row of a table that
the tests print: read and resolved at its full size (--dry-run), run for real at a small one, refused by name, or none
of ours.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megadit.infer.media.video_io import read_video
from megadit.models.megatron.checkpoint import find_checkpoints
from megadit.train import pretrain_dit_model
from megadit.train.__main__ import main as train
from megadit.train.data.prepare.command import main as prepare

CONF = Path(pretrain_dit_model.__file__).parent / "conf"
PROGRAMS = {
    "train.py": train,
    "train.sh": train,
    "pretrain_dit_model.py": pretrain_dit_model.main,
    "prepare_energon_dataset_butterfly.py": lambda argv: prepare(["butterfly", *argv]),
    "prepare_energon_dataset.py": lambda argv: prepare(["dummy_images", *argv, "--num_images", "8", "--size", "32"]),
}
"""Their program -> ours; of fewer and smaller pictures."""
NOT_OURS = {
    "docker": "starts a container",
    "salloc": "asks the cluster for nodes",
    "energon": "Energon's own; `megadit prepare` writes what it asks for",
}
REFUSED = {
    "--t5_cache_dir": "$t5_cache_dir/config.json does not exist",
    "prepare_energon_dataset_butterfly.py": "the data set huggan/smithsonian_butterflies_subset cannot be downloaded",
}
"""A word of the command -> how the refusal begins: what is not here yet, files to have, a network to reach."""


def seed_commands() -> list[list[str]]:
    """The commands as words, without the variables set before them."""
    text = (Path(__file__).parent / "seed_commands.txt").read_text()
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if line.strip()]
    return [[word for word in words if not re.match(r"[A-Z]+=", word)] for words in commands]


def split_command(words: list[str]) -> tuple[list[str], str, list[str]]:
    """(launcher and its options, program, arguments)."""
    for position, word in enumerate(words):
        if word.endswith((".py", ".sh")):
            return words[:position], Path(word).name, words[position + 1 :]
    return [], words[0], words[1:]


COMMANDS = seed_commands()


@pytest.fixture(scope="module")
def table(request):
    """Rows (command, how, result), printed when the module is done."""
    rows: list[tuple[str, str, str]] = []
    yield rows
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print()
        for command, how, result in rows:
            print(f"{how:8} | {command[:100]:100} | {result[:110]}")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the files that the documents tell one to have."""
    conf = tmp_path / "examples/megatron/recipes/dit/conf"
    conf.mkdir(parents=True)
    template = (CONF / "dit_pretrain.yaml").read_text()
    (conf / "dit_pretrain.yaml").write_text(template.replace("path: /path/to/dataset", "path: null"))  # one's own
    shutil.copy(conf / "dit_pretrain.yaml", conf / "my_config.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: split_command(words)[1])
def test_seed_command(words, place, monkeypatch, capsys, table):
    launcher, program, arguments = split_command(words)
    shown = " ".join([program, *arguments])
    if program in NOT_OURS:
        table.append((shown, "not ours", NOT_OURS[program]))
        return
    if program == "cp":
        subprocess.run(words, check=True)
        table.append((shown, "real", "the file is there"))
        return
    if program == "prepare_energon_dataset.py":
        assert PROGRAMS[program](arguments) == 0
        table.append((shown, "real", capsys.readouterr().out.strip()))
        return
    if program == "inference_dit_model.py":
        pytest.skip("run for real below")
    if ranks := re.search(r"--nproc-per-node[= ](\d+)", " ".join(launcher)):
        monkeypatch.setenv("WORLD_SIZE", ranks[1])
    refusal = next((REFUSED[word] for word in (*arguments, program) if word in REFUSED), None)
    code = PROGRAMS[program]([*arguments, "--dry-run"] if refusal is None else arguments)
    output = capsys.readouterr()
    if refusal is not None:
        assert code == 2 and output.err.startswith(f"error: {refusal}") and output.err.count("\n") == 1
        table.append((shown, "refused", output.err.strip()))
        return
    assert code == 0, output.err
    parameters = re.search(r"parameters: [\d,]+", output.out)
    assert parameters
    table.append((shown, "dry run", f"resolved; {parameters[0]}"))


def test_overrides_of_the_documents_reach_the_run(place, capsys):
    argv = ["--config-file", str(CONF / "dit_pretrain.yaml"), "train.train_iters=20000", "model.num_layers=32"]
    assert pretrain_dit_model.main([*argv, "dataset.use_train_split_for_val=true", "--mock", "--print-config"]) == 0
    shown = capsys.readouterr().out
    for line in ("train_iters: 20000", "num_layers: 32", "use_train_split_for_val: true", "mock: true"):
        assert line in shown


# --------------------------------------------------------------------------------- for real, at a small size


@pytest.fixture(scope="module")
def cosmos_sized_dataset(tmp_path_factory):
    """A few captioned clips in the latents of a tokenizer that compresses like Cosmos' CV4x8x8."""
    import torch

    from megadit.models.text_encoders.hashed_words import HashedWordEncoder
    from megadit.models.tokenizers.haar import HaarTokenizer
    from megadit.train.data.writer import DatasetWriter

    root = tmp_path_factory.mktemp("data") / "clips"
    generator = torch.Generator().manual_seed(0)
    clips = torch.rand(12, 3, 5, 32, 32, generator=generator) * 2 - 1
    tokenizer = HaarTokenizer.fit([clips], channels=16)
    text_encoder = HashedWordEncoder(dim=16)
    with DatasetWriter(root, tokenizer=tokenizer, text_encoder=text_encoder) as writer:
        for number, (clip, latent) in enumerate(zip(clips, tokenizer.encode(clips), strict=True)):
            features = text_encoder.encode([f"clip {number}"])
            writer.add(
                "train", f"clip-{number}", latent_CTHW=latent, text_LE=features.features_BLE[0],
                caption=f"clip {number}", num_frames=clip.shape[1], height=32, width=32, fps=24,
            )  # fmt: skip
    return root


SMALL = (
    *("model.num_layers=1", "model.hidden_size=48", "model.num_attention_heads=2", "train.train_iters=2"),
    *("dataset.task_encoder_seq_length=64", "data.text_seq_length=64", "dataset.packing_buffer_size=4"),
    *("dataset.num_workers=0", "data.shuffle_buffer_size=4", "train.global_batch_size=2", "train.eval_iters=1"),
    *("model.val_generation_num_steps=2", "train.precision=fp32"),
)
"""What makes a run of the documents small enough for a test; nothing that they set."""


@pytest.fixture(scope="module")
def pretrained(cosmos_sized_dataset, tmp_path_factory):
    """(run folder, output) of the documents' pretraining, every value that they tell one to edit edited."""
    from megadit.train.dataset.dataset_info import DatasetInfo

    folder = tmp_path_factory.mktemp("pretrain")
    info = DatasetInfo.read(cosmos_sized_dataset)
    edits = (
        f"model.vae_cache_folder={info.tokenizer_folder}",
        f"dataset.path={cosmos_sized_dataset}",
        f"checkpoint.save={folder / 'run'}",
        f"checkpoint.load={folder / 'run'}",
        "logger.wandb_exp_name=my_experiment",
        f"model.sigma_data={info.sigma_data}",
        f"model.crossattn_emb_size={info.text_width}",
    )
    command = next(words for words in COMMANDS if "dataset.use_train_split_for_val=true" in words)
    _, program, arguments = split_command(command)
    example = "examples/megatron/recipes/dit/conf/my_config.yaml"
    real = [word.replace(example, str(CONF / "dit_pretrain.yaml")) for word in arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "megadit.train.pretrain_dit_model", *real, *edits, *SMALL],
        env={**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / "run", done.stdout, " ".join([program, *arguments])


@pytest.mark.slow
def test_pretraining_of_the_documents_for_real(pretrained, table):
    run, output, command = pretrained
    assert [path.name for path in find_checkpoints(run / "checkpoints")] == ["iter_0000002"]
    line = r"iteration 2/2 \| lr: \S+ \| global_batch_size: 2 \| global_step: 2 \| reduced_train_loss: \S+ \| "
    assert re.search(line + r"train_step_timing in s: \S+ \| consumed_samples: \d+", output)
    assert len(list((run / "validation_generation").rglob("*.mp4"))) == 4
    if importlib.util.find_spec("wandb"):
        assert list((run / "wandb").glob("offline-run-*/run-*.wandb"))
    table.append((command, "real", "2 ranks, small network: trained, validated, saved"))


@pytest.mark.slow
def test_inference_of_the_documents_for_real(pretrained, cosmos_sized_dataset, tmp_path, monkeypatch, table):
    words = next(words for words in COMMANDS if split_command(words)[1] == "inference_dit_model.py")
    _, program, arguments = split_command(words)
    shutil.copytree(cosmos_sized_dataset / "tokenizer", tmp_path / "cache" / "Cosmos-0.1-Tokenizer-CV4x8x8")
    variables = {
        "$artifact_dir": str(cosmos_sized_dataset / "text_encoder"),
        "$tokenizer_cache_dir": str(tmp_path / "cache"),
        "$checkpoint_dir": str(pretrained[0]),
        "$save_path": str(tmp_path / "video.mp4"),
        "$prompt": "clip 3",
    }
    real = [variables.get(word, word) for word in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "megadit.infer.inference_dit_model", *real], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    frames, _ = read_video(tmp_path / "video.mp4")
    assert frames.shape == (10, 240, 416, 3)
    table.append((" ".join([program, *arguments]), "real", "a video of 10 frames of 240 x 416"))


def test_every_command_of_the_documents_is_here():
    assert len(COMMANDS) == 17 and {split_command(words)[1] for words in COMMANDS} == {
        *PROGRAMS, *NOT_OURS, "cp", "inference_dit_model.py"
    }  # fmt: skip
