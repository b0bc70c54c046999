"""`megadit prepare prior`: a model's own samples as a data set, and what their loss counts."""

import json
import re
import shutil
import tarfile
from dataclasses import asdict, replace

import pytest
import safetensors.torch
import torch

from megadit.infer.commands.tune_sampler import write_defaults
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.diffusion.noise import latent_noise, seed_key
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.dit import DiT
from megadit.models.networks.embeddings import patchify
from megadit.models.networks.initialize import initialize_
from megadit.models.packing.segments import TokenMesh
from megadit.train.data.ingest.workers import Workers
from megadit.train.data.packs.packed_batch import PackFormat
from megadit.train.data.packs.rules import Rules
from megadit.train.data.packs.samples import UnreadableSampleError, decode
from megadit.train.data.packs.training_sample import TrainingSample
from megadit.train.data.prepare import command as prepare
from megadit.train.data.prepare import prior
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.dataset.description import read_description
from megadit.train.distill import pairs
from megadit.train.objectives.denoise import sampling_noise, token_noise
from megadit.train.objectives.losses import edm_loss

from .conftest import MODEL

PROMPTS = ("a dog", "a small dog", "")


@pytest.fixture
def make(bundle, tmp_path, monkeypatch):
    """Runs the command; shards of four samples."""
    monkeypatch.setattr(prior, "SHARD_SIZE", 4)

    def run(*more, out="out", count=10):
        argv = ["prior", str(bundle), str(tmp_path / out), "--prompt", *PROMPTS, "--count", str(count), *more]
        assert prepare.main(argv) == 0
        return tmp_path / out

    return run


def shards(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}


def members(folder):
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}
    return found


def test_samples_are_what_the_model_makes(make, bundle):
    folder = make("--seed", "5", "--guidance", "1")
    assert DatasetInfo.read(folder).num_samples == {"train": 10, "val": 0}
    found = members(folder)
    video = TextToVideo.from_pretrained(bundle)([PROMPTS[1]], seeds=[9], guidance=1.0)[0]
    crude = {name: found[f"prior-00000009.{name}"] for name in ("json", "safetensors")}
    sample = decode(crude | {"__key__": "prior-00000009", "__occurrence__": 0})
    torch.testing.assert_close(sample.latent_CTHW, video.latents_CTHW.half())
    assert sample.is_prior and sample.fps == 8 and json.loads(crude["json"])["caption"] == PROMPTS[1]
    assert "text" not in safetensors.torch.load(found["prior-00000007.safetensors"]), "an empty caption has no text"


def test_a_killed_run_goes_on(make, bundle, monkeypatch, tmp_path):
    whole = shards(make())
    assert len(whole) == 3
    argv = ["prior", str(bundle), str(tmp_path / "killed"), "--prompt", *PROMPTS, "--count", "10"]

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(prior, "describe_dataset", stop)
        assert prepare.main(argv) == 130
    first, second, _ = sorted((tmp_path / "killed").glob("*.tar"))
    second.unlink()
    kept = first.stat().st_mtime_ns
    assert prepare.main(argv) == 0
    assert shards(tmp_path / "killed") == whole and first.stat().st_mtime_ns == kept


def test_each_rank_writes_its_share(bundle, make, tmp_path):
    whole = make()
    options = json.loads((whole / prior.PRIOR.request_file).read_text())
    settings = SamplingSettings.from_dict(options["settings"])
    wanted = prior.Prior(purpose=prior.PRIOR, prompts=PROMPTS, settings=settings, count=10, seed=0)
    pipeline, shared = TextToVideo.from_pretrained(bundle), tmp_path / "halves"
    shared.mkdir()
    for rank in (1, 0):
        prior.write_shards(shared, pipeline, wanted, Workers(rank=rank, size=2))
    assert shards(shared) == shards(whole)


def test_the_noise_of_a_seed_is_what_a_student_begins_with(bundle, tmp_path):
    """In a pack, of whichever shape its neighbours are, and on each of the ranks that share it."""
    argv = ["trajectories", str(bundle), str(tmp_path / "pairs"), "--prompt", *PROMPTS, "--count", "3", "--seed", "7"]
    assert prepare.main(argv) == 0
    found, samples = members(tmp_path / "pairs"), []
    for seed in (7, 8, 9):
        name = f"trajectories-{seed:08d}"
        crude = {suffix: found[f"{name}.{suffix}"] for suffix in ("json", "safetensors")}
        samples.append(decode(crude | {"__key__": name, "__occurrence__": 0}))
    assert [each.seed for each in samples] == [7, 8, 9] and not any(each.is_prior for each in samples)
    samples.insert(1, replace(samples[0], latent_CTHW=samples[0].latent_CTHW[:, :1, :4], seed=11))
    format = PackFormat(model=MODEL, seq_length=112, text_seq_length=40, seed=1, text_dropout=0.0, extras=("seed_key",))
    pack, start = format.pack(samples), 0
    noise_S1P = sampling_noise(pack, MODEL)
    for each in samples:
        expected = patchify(latent_noise(torch.tensor([seed_key(each.seed)]), tuple(each.latent_CTHW.shape)), MODEL)
        assert torch.equal(noise_S1P[start : start + len(expected)], expected)
        start += len(expected)
    for rank in range(2):
        mine = pack.shard(TokenMesh(context=2, rank=rank))
        assert torch.equal(sampling_noise(mine, MODEL), noise_S1P[mine.layout.on("cpu").index_S])
    rules = Rules(format=format, max_frames=1)
    assert rules.reason_against(samples[0]) is None
    assert rules.reason_against(rules.crop(samples[0]))[0] == "no_seed", "half a video is not what noise became"


@pytest.mark.parametrize("more", [["--sampler", "euler", "--eta", "1"], ["--sampler", "consistency"]])
def test_a_trajectory_is_that_of_an_ode(bundle, tmp_path, more, capsys):
    argv = ["trajectories", str(bundle), str(tmp_path / "pairs"), "--prompt", "a dog", *more]
    assert prepare.main(argv) == 2 and not (tmp_path / "pairs").exists()
    assert "adds noise while sampling" in capsys.readouterr().err


@pytest.fixture
def churning(bundle, tmp_path):
    """A model whose videos are made with noise that is added before and after steps, and with half of it at first."""
    shutil.copytree(bundle, tmp_path / "churning")
    found = Bundle.open(tmp_path / "churning")
    write_defaults(found, replace(found.defaults, sampler="heun", churn=4.0, eta=0.5, noise_scale=0.5))
    return tmp_path / "churning"


def test_what_the_refusal_names_makes_trajectories(churning, tmp_path, capsys):
    argv = ["trajectories", str(churning), str(tmp_path / "pairs"), "--prompt", "a dog", "--count", "2"]
    assert prepare.main(argv) == 2
    remedy = re.search(r"give ((--\w+ \w+ ?)+), or dpmpp_2m", capsys.readouterr().err)[1].split()
    assert prepare.main([*argv, *remedy]) == 0
    asked = json.loads((tmp_path / "pairs" / "trajectories.json").read_text())["settings"]
    assert (asked["sampler"], asked["churn"], asked["eta"], asked["noise_scale"]) == ("euler", 0, 0, 1)


def test_pairs_of_such_a_model_are_an_odes(churning, tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "launch", lambda module, argv, **_: prepare.main(argv))
    pairs.make_trajectories(
        tmp_path / "pairs", Bundle.open(churning), PROMPTS, count=2, num_steps=2, guidance=1.0, num_processes=1
    )
    assert DatasetInfo.read(tmp_path / "pairs" / pairs.DATASET).num_samples["train"] == 2


@pytest.mark.parametrize("seed", ["7", True, -1, 1 << 63, 0.5])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(UnreadableSampleError, match="seed"):
        read_description(json.dumps({"fps": 0, "seed": seed}).encode())


def test_what_is_refused(make, capsys):
    folder = make()
    before = shards(folder)
    for more, message in (
        (["--count", "11"], "samples of another request"),
        (["--guidance", "3"], "samples of another request"),
        (["--height", "17"], "height=17"),
        (["--count", "0"], "must be"),
    ):
        with pytest.raises(AssertionError):
            make(*more)
        assert message in capsys.readouterr().err and shards(folder) == before, more


def test_no_prompt_and_foreign_folders_are_refused(bundle, tmp_path, capsys):
    assert prepare.main(["prior", str(bundle), str(tmp_path / "out")]) == 2
    assert "--prompt" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    assert prepare.main(["prior", str(bundle), str(tmp_path / "mine"), "--prompt", "a dog"]) == 2
    assert "was not begun by this command" in capsys.readouterr().err


@pytest.mark.parametrize("purpose", ["prior", "trajectories"])
def test_every_option_reaches_the_samples(bundle, tmp_path, monkeypatch, purpose):
    asked = []
    monkeypatch.setattr(prior, "write_shards", lambda out, pipeline, wanted, workers: asked.append((pipeline, wanted)))
    monkeypatch.setattr(prior, "describe_dataset", lambda *_: None)
    (tmp_path / "prompts.txt").write_text("a small dog")
    out = [purpose, str(bundle), str(tmp_path / "out")]

    def wanted(*more):
        assert prepare.main([*out, *more, "--overwrite"]) == 0
        return asked[-1]

    pipeline, plain = wanted("--prompt", "a dog")
    assert (plain.prompts, plain.count, plain.seed, plain.batch_size) == (["a dog"], 200, 0, None)
    assert pipeline.device.type == "cpu" and pipeline.denoiser.dtype == torch.float32
    file = ["--prompt_file", str(tmp_path / "prompts.txt")]
    pipeline, other = wanted(*file, "--count", "3", "--seed", "4", "--batch_size", "2", "--dtype", "bfloat16")
    assert (other.prompts, other.count, other.seed, other.batch_size) == (["a small dog"], 3, 4, 2)
    assert pipeline.denoiser.dtype == torch.bfloat16
    assert prepare.main([*out, *file, "--overwrite", "--device", "nothing"]) == 2
    settings = {
        **{"--sampler": "heun", "--num_steps": "5", "--guidance": "3", "--num_video_frames": "9", "--height": "24"},
        **{"--width": "32", "--fps": "4", "--negative_prompt": "a cat", "--eta": "0", "--churn": "2"},
    }
    if purpose == "trajectories":
        settings["--churn"] = "0"
    _, other = wanted(*file, *(word for pair in settings.items() for word in pair))
    assert asdict(other.settings) == asdict(plain.settings) | {
        **{"sampler": "heun", "num_steps": 5, "guidance": 3, "num_frames": 9, "height": 24},
        **{"width": 32, "fps": 4, "negative_prompt": "a cat", "eta": 0, "churn": float(settings["--churn"])},
    }


# --- what they count ----------------------------------------------------------------------------------------------


def sample(name, *, is_prior=False):
    generator = torch.Generator().manual_seed(len(name))
    return TrainingSample(
        sample_id=name,
        occurrence=0,
        latent_CTHW=torch.randn(48, 1, 4, 4, generator=generator),
        text_LE=torch.randn(2, 16, generator=generator),
        fps=8.0,
        is_prior=is_prior,
    )


def objective(samples, prior_weight):
    pack = PackFormat(
        model=MODEL, seq_length=12, text_seq_length=8, seed=3, text_dropout=0.0, prior_weight=prior_weight
    ).pack(samples)
    dit = initialize_(DiT(MODEL), seed=0)
    with torch.no_grad():
        sums = edm_loss(dit, pack, torch.full((len(pack.fps_G),), 0.7), token_noise(pack))
    return sums


def test_a_prior_sample_counts_by_its_weight():
    subject, other = sample("a"), sample("bb", is_prior=True)
    alone, of_prior = objective([subject], 0.25), objective([other], 1.0)
    both = objective([subject, other], 0.25)
    torch.testing.assert_close(both.objective, alone.objective + 0.25 * of_prior.objective)
    torch.testing.assert_close(both.weighted, alone.weighted + of_prior.weighted)  # what is reported is unweighted
    ordinary = objective([subject, replace(other, is_prior=False)], 0.25)
    torch.testing.assert_close(ordinary.objective, alone.objective + of_prior.objective)


def test_a_prior_loses_its_text_by_its_own_share():
    samples = [sample(str(number), is_prior=number % 2 == 0) for number in range(4)]

    def kept(**shares):
        pack = PackFormat(model=MODEL, seq_length=16, text_seq_length=8, seed=3, **shares).pack(samples)
        return [segment.text_length > 0 for segment in pack.layout.segments if not segment.is_padding]

    assert kept(text_dropout=0.0, prior_text_dropout=1.0) == [False, True] * 2
    assert kept(text_dropout=1.0) == [False] * 4 and kept(text_dropout=1.0, prior_text_dropout=0.0) == [True, False] * 2


def test_prior_is_true_or_false():
    tensors = safetensors.torch.save({"latent": torch.zeros(1, 1, 1, 1)})
    crude = {"json": b'{"fps": 8, "prior": "yes"}', "safetensors": tensors, "__key__": "a", "__occurrence__": 0}
    with pytest.raises(UnreadableSampleError, match="prior is 'yes'"):
        decode(crude)
