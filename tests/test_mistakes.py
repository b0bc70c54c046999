"""What people type wrongly, command by command: each mistake ends with exit code 2 and one line that names the thing
and says what to do, and leaves nothing behind."""

import shlex
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

from megadit.infer.media.video_io import write_video
from megadit.models.bundle_writer import write_bundle
from megadit.models.shared.cli import verbs
from megadit.models.text_encoders import HashedWordEncoder, load_text_encoder
from megadit.models.tokenizers import HaarTokenizer, load_tokenizer
from megadit.serve.repository.build import build_repository
from tests.bundles import CONFIG, DEFAULTS, random_dit
from tests.infer.conftest import make_adapter
from tests.train.conftest import write_noise_dataset

TRAIN = "train --recipe digits data.path=data train.output_dir=runs/mine"
MOCK = "train --recipe digits_tiny --mock train.output_dir=runs/mine"
GENERATE = "generate --checkpoint_path bundle --prompt hi"
EVALUATE = "evaluate bundle --out out"

MISTAKES = {
    # verbs
    "genrate --prompt hi": "unknown command 'genrate'; did you mean 'generate'?",
    "serve": "`megadit serve` is no command; choose one of build-repository, run",
    "benchmark trian": "did you mean 'train'?",
    # train
    "train": "no recipe; give --recipe NAME",
    "train --recipe digit": "unknown recipe 'digit'; did you mean 'digits'?",
    "train --recipe digits --nprocs 2": "unknown argument '--nprocs'; did you mean '--nproc'?",
    f"{TRAIN} train.train_iter=3": "unknown key train.train_iter; did you mean train.train_iters?",
    f"{TRAIN} train.train_iters=many": "train.train_iters='many' is str, expected int",
    f"{TRAIN} learning_rate": "cannot read 'learning_rate'; write section.key=value",
    f"{TRAIN} model=dit": "model holds several keys and cannot be set to 'dit'; set one of them",
    f"{TRAIN} train=dit": "train holds several keys and cannot be set to 'dit' beside train.output_dir; set one",
    f"{TRAIN} train.precision=fp8": "train.precision='fp8' is unknown; choose one of fp32, bf16, fp16",
    f"{TRAIN} optimizer.optimizer=adam": "did you mean 'adamw'?",
    f"{TRAIN} optimizer.lr=-1": "optimizer.lr=-1 must be greater than 0",
    f"{TRAIN} model.num_attention_heads=5": "does not divide model.hidden_size=96; use 4 heads",
    f"{TRAIN} data.seq_length=100000000000": "data.seq_length=100000000000 must be greater than 0 and at most 1e+07",
    f"{TRAIN} data.path=nowhere": "data.path=nowhere does not exist; write it with `megadit prepare`",
    f"{TRAIN} data.path=clips": "data.path=clips has no megadit.json; write it with `megadit prepare`",
    f"{TRAIN} train.output_dir=notes.txt": "train.output_dir=notes.txt cannot be a folder",
    f"{TRAIN} train.output_dir=notes.txt/run": "there is a file of that name; give another",
    f"{TRAIN} checkpoint.init_from=nowhere": "checkpoint.init_from=nowhere holds no weights; give a bundle",
    f"{TRAIN} checkpoint.init_from=clips": "checkpoint.init_from=clips holds no weights; give a bundle",
    f"{TRAIN} checkpoint.load=bundle": "a bundle has weights alone: checkpoint.init_from=bundle starts from them",
    f"{TRAIN} checkpoint.init_from=bundle train.adapter.rank=0": "train.adapter.rank=0 must be greater than 0",
    f"{TRAIN} train.adapter.rank=4": "give checkpoint.init_from=BUNDLE",
    f"{MOCK} data.seq_length=7": "48 tokens, more than data.seq_length=7; raise that",
    f"{MOCK} --nproc 3 parallel.tensor_model_parallel_size=2": "3 ranks cannot hold whole replicas",
    f"{MOCK} --gpu h200": "--gpu belong to --plan and --dry-run",
    f"{MOCK} --dry-run --gpu h2000": "--gpu h2000 is unknown; choose one of",
    "train --config-file mine.yml": "config file mine.yml does not exist; give the path of a YAML file",
    "train --config-file key.yaml": "unknown key train.train_iter; did you mean train.train_iters?",
    "train --config-file tab.yaml": "tab.yaml is not valid YAML: line 3: found character",
    "train --config-file clip.mp4": "clip.mp4 is not valid YAML",
    # prepare
    "prepare movies clips out": "unknown source 'movies'; did you mean 'videos'?",
    "prepare videos clips": "required: OUT; see `megadit prepare videos --help`",
    "prepare videos nowhere out": "nowhere does not exist; give a folder of videos",
    "prepare videos empty out": "empty holds no videos (.mp4",
    "prepare images clips out": "clips holds no images to use",
    "prepare videos clip.mp4 out": "clip.mp4 is not a folder; give a folder of videos",
    "prepare videos clips clips": "clips exists and is not a prepared data set; give another folder",
    "prepare videos clips out --sizes 64": "'64' is no size; write heights and widths such as 256x256",
    "prepare videos clips out --sizes 65x64": "height 65 cannot be encoded: take a multiple of 8, 64 or 72",
    "prepare videos clips out --num_frames 16": "16 frames cannot be encoded: take 1 + a multiple of 4, 13 or 17",
    "prepare videos clips out --val_share 2": "--val_share=2 must be at least 0 and below 1",
    "prepare videos table out": "no column of files; name it one of file_name",
    "prepare videos clips out --captions words.csv": "words.csv has no column of captions; name it one of caption",
    "prepare videos clips out --captions nowhere.csv": "nowhere.csv does not exist; give a table of files and",
    "prepare videos clips out --tokenizer clips": "give the folder of a tokenizer, or a bundle",
    "prepare videos clips out --text_encoder nowhere": "give the folder of a text encoder, or a bundle",
    "prepare videos clips out --background pinkish": "'pinkish' is no colour; white, black and #8040ff are",
    "prepare videos clips notes.txt/out": "notes.txt/out cannot be used: notes.txt is not a folder; give another path",
    "prepare prior bundle out": 'there is no prompt; give --prompt "a dog"',
    # new
    "new nowhere": "nowhere is not a folder, or does not exist; give one of videos or images",
    "new empty": "empty holds neither videos (",
    "new clips --go --gpu h200": "give one of them",
    "new clips --out notes.txt/run": "--out=notes.txt/run cannot be a folder: there is a file of that name",
    "demo --out notes.txt": "notes.txt cannot be used: File exists; give another path",
    # bundle, convert, export
    "bundle nowhere out": "nowhere does not exist; give the folder of a run",
    "bundle clips out": "clips holds no complete checkpoint; give the folder of a run",
    "bundle bundle out": "bundle is a bundle already; give a run",
    "bundle bundle out --merge nowhere": "the adapter nowhere does not exist; give PATH or PATH:SCALE",
    "bundle bundle out --merge zog:much": "the adapter zog:much does not exist; give PATH or PATH:SCALE",
    "bundle bundle out --merge bundle": "bundle holds no adapter: expected adapter_config.json",
    "convert nowhere out": "nowhere does not exist: expected a directory",
    "convert foo/bar out": "foo/bar is not on this machine: run `hf download foo/bar`",
    "convert clips out": "clips is no published checkpoint: expected a directory of diffusers",
    "convert clip.mp4 out": "clip.mp4 is no file of weights, of safetensors or torch.save",
    "convert bundle out --to comfy": "--to='comfy' is unknown; choose one of bundle",
    "export nowhere out": "nowhere does not exist: give a bundle",
    "export bundle out --format onxx": "did you mean 'onnx'?",
    "export bundle out --adapter_rank 0": "--adapter_rank=0 must be at least 1",
    "export bundle notes.txt": "notes.txt is a file; give the name of a directory",
    # generate
    "generate --prompt hi": "give --checkpoint_path: a bundle or a training directory",
    "generate --checkpoint_path bundle": "there is no prompt; give --prompt TEXT or --prompt_file FILE",
    "generate --checkpoint_path clips --prompt hi": "run: megadit bundle CHECKPOINT OUT",
    "generate --checkpoint_path data --prompt hi": "`megadit bundle CHECKPOINT OUT` makes one from a training",
    f"{GENERATE} --promt hi": "did you mean '--prompt'?",
    f"{GENERATE} --sampler eulr": "did you mean 'euler'?",
    f"{GENERATE} --num_steps 0": "--num_steps=0 must be greater than 0",
    f"{GENERATE} --video_save_path out.avi": "cannot write .avi; use .mp4",
    f"{GENERATE} --video_save_path out.png": "use .mp4 for 5 frames",
    f"{GENERATE} --height 16000 --width 16000": "more than the limit of 16,777,216; make it smaller",
    f"{GENERATE} --adapter nowhere": "the adapter nowhere does not exist; give PATH or PATH:SCALE",
    f"{GENERATE} --image nowhere.png": "cannot read nowhere.png: No such file or directory",
    f"{GENERATE} --mask first.png": "--mask=first.png needs --video",
    f"{GENERATE} --keyframe first.png": "must be the number of a frame and a file, such as 24:middle.png",
    f"{GENERATE} --seed 1 --seeds 2": "give --seed or --seeds, not both",
    f"{GENERATE} --runtime onnx": "make a bundle that has it with `megadit export bundle OUT --format onnx`",
    f"{GENERATE} --device gpu": "device 'gpu' cannot be used; choose auto, cpu, cuda or cuda:N",
    f"{GENERATE} --contact_sheet sheet": "--contact_sheet=sheet: use a name that ends in .mp4",
    f"{GENERATE} --contact_sheet notes.txt/a.png": "--contact_sheet=notes.txt/a.png: its folder is a file",
    "generate --checkpoint_path bundle --prompt_file prompts.jsonl": 'line 1 must be an object with a "prompt"',
    "generate --repeat clip.mp4": "of its settings: give a file that this command wrote",
    # evaluate, distill
    EVALUATE: "give --real (videos to compare with",
    f"{EVALUATE} --real nowhere": "nowhere is not a folder of videos, nor a data set",
    f"{EVALUATE} --real clips": "bundle makes 16x24, the real videos are 64x64: give --size 64 64",
    f"{EVALUATE} --real clips --metrics fdv": "--metrics fdv is unknown; did you mean 'fvd'?",
    "evaluate compare clips": "clips/report.json does not exist; give an OUT of `megadit evaluate BUNDLE",
    "distill bundle out --calls 0": "--calls=0 must lie between 1 and 64",
    "distill data out --data data": "data is not a bundle: expected a directory with megadit.json",
    # info, doctor
    "info nowhere": "nowhere does not exist; give a bundle, an adapter, a run, a checkpoint or a data set",
    "info notes.txt": "notes.txt is neither a bundle nor a dataset",
    "info key.yaml": "key.yaml is not a blend of data sets: `splits:`, each with a `path:`",
    "info bundle --html page.html": "training run or a dataset, and bundle is neither; leave it out",
    "doctor --nproc 2": "--nproc=2 needs --distributed",
    # serve
    "serve build-repository bundle clips": "clips holds no text_to_video but other files",
    "serve build-repository bundle models --default gudance=3": "did you mean 'guidance'?",
    "serve build-repository bundle models --adapters nowhere": "nowhere is not a folder; adapters are the folders",
    "serve run bundle": "is a bundle; make a model repository of it: `megadit serve build-repository",
    "serve run nowhere": "nowhere does not exist; `megadit serve build-repository` makes one",
    "serve run empty": "empty is not a model repository; `megadit serve build-repository` makes one",
    "serve run models --http_port {taken}": "{taken} (http) cannot be used: Address already in use; --http_port takes",
    "serve gateway --port {taken}": "127.0.0.1:{taken} cannot be used: Address already in use; --port takes",
    "serve demo --port {taken}": "127.0.0.1:{taken} cannot be used: Address already in use; --port takes",
    "serve ask": 'say what the video shows: megadit serve ask "a red seven"',
    "serve keys ad alice": "did you mean 'add'?",
}
"""A command -> words of the line that is its answer; `{taken}` is a port on which somebody listens."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A folder with one of everything that people have, and what they take for it."""
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_noise_dataset(folder / "data")
        write_bundle(
            "bundle",
            config=CONFIG,
            state_dict=random_dit(CONFIG).state_dict(),
            tokenizer=HaarTokenizer(temporal_compression=4, spatial_compression=2, sigma_data=CONFIG.sigma_data),
            text_encoder=HashedWordEncoder(dim=CONFIG.crossattn_emb_size),
            defaults=DEFAULTS,
        )
        make_adapter("zog", "bundle", 1)
        build_repository("bundle", "models")
        frames = np.random.default_rng(0).integers(0, 255, (9, 64, 64, 3), dtype=np.uint8)
        write_video("clip.mp4", frames, 8)
        write_video("first.png", frames[:1])
        for name in ("empty", "clips", "table"):
            Path(name).mkdir()
        shutil.copy("clip.mp4", "clips/0.mp4")
        Path("clips/0.txt").write_text("noise")
        Path("table/metadata.csv").write_text("name,words\n0.mp4,noise\n")
        Path("words.csv").write_text("file_name,words\n0.mp4,noise\n")
        Path("prompts.jsonl").write_text('{"promt": "a red seven"}\n')
        Path("notes.txt").write_text("call back\n")
        Path("key.yaml").write_text("recipe: digits\ntrain:\n  train_iter: 3\n")
        Path("tab.yaml").write_text("recipe: digits\ntrain:\n\ttrain_iters: 3\n")
    return folder


def on(desk: Path) -> dict[str, int]:
    """All that lies there, and when it was written."""
    return {str(path.relative_to(desk)): path.lstat().st_mtime_ns for path in desk.rglob("*")}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_told_in_one_line_and_leaves_nothing(command, desk, capfd, monkeypatch):
    monkeypatch.chdir(desk)
    before = on(desk)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = str(listening.getsockname()[1])
        code = verbs.main(shlex.split(command.replace("{taken}", taken)))
    told, complaint = capfd.readouterr()
    assert (code, told) == (2, "") and complaint.startswith("error: ") and complaint.count("\n") == 1, complaint
    assert MISTAKES[command].replace("{taken}", taken) in complaint
    assert on(desk) == before


def test_every_command_that_people_begin_with_has_a_mistake():
    begun = ("train", "prepare", "new", "generate", "bundle", "convert", "export", "serve", "evaluate", "info")
    told = {command.split()[0] for command in MISTAKES}
    assert len(MISTAKES) >= 60 and told.issuperset((*begun, "doctor", "distill"))


def test_a_bundle_is_understood_where_its_part_is_asked_for(desk):
    assert load_tokenizer(desk / "bundle").fingerprint() == load_tokenizer(desk / "bundle" / "tokenizer").fingerprint()
    assert load_text_encoder(desk / "bundle").dim == CONFIG.crossattn_emb_size
