"""`megadit reward`: rounds that follow one another, bounds, and what goes on after an interruption."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.files import read_adapter, tensor_file
from megadit.models.shared.files import write_json
from megadit.models.storage.components import load_network
from megadit.train.config.load import resolve_config
from megadit.train.distill.check import Comparison
from megadit.train.reward import command as reward
from megadit.train.reward.command import main
from tests.ranks import TIMEOUT
from tests.train.conftest import FEW_STEPS
from tests.train.test_adapter_runs import write

FORKING = Path(__file__).parents[1] / "jobs" / "forking.py"
FAST = ("train.num_threads=1", "checkpoint.save_interval=1", "logger.tensorboard=false", *FEW_STEPS)
SCORER = "BETTER = {'bright': 'higher'}\ndef score(video, prompt):\n    return {'bright': float(video.mean())}\n"


@pytest.fixture(scope="module")
def base(run_ranks, tiny_arguments, tmp_path_factory):
    from megadit.train.checkpoints.to_bundle import main as to_bundle

    out = tmp_path_factory.mktemp("trained")
    run_ranks(1, *tiny_arguments, "validation.interval=0", f"train.output_dir={out}")
    assert to_bundle([str(out), str(out / "bundle")]) == 0
    return out / "bundle"


@pytest.fixture
def asked(tmp_path):
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer" / "scorer.py").write_text(SCORER)
    (tmp_path / "prompts.txt").write_text("sample number 1\nsample number 2\nsample number 3\n")
    more = ["--prompts", str(tmp_path / "prompts.txt"), "--scorer_dir", str(tmp_path / "scorer"), "--count", "8"]
    more += ["--rounds", "2", "--prompts_per_round", "2", "--group_size", "4", "--train_steps", "2", "--device", "cpu"]
    return [str(tmp_path / "out"), *more, "--spread", "0.01", "100", "--moved", "1e9", "--num_steps", "2", *FAST]


def weights(bundle):
    """As numbers, which are equal to the last bit or not."""
    network = load_network(bundle / Bundle.open(bundle).networks[0])
    return {name: tensor.tolist() for name, tensor in network.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("is_adapter", [False, True], ids=["whole", "adapter"])
def test_rounds_follow_one_another_and_go_on_where_they_were(
    base, asked, tmp_path, forked_modules, start_ranks, is_adapter, capfd
):
    """Whole networks by DiffusionNFT, also where the command is killed; adapters by Flow-GRPO."""
    steps = ["--objective", "flow_grpo", "--states", "1", "--sampler", "euler", "--eta", "1"]
    adapter = ["--adapter_rank", "2", "optimizer.lr=0.1", *steps]
    out, more = tmp_path / "out", adapter if is_adapter else ["--policy_decay", "0.25"]
    result = "adapter" if is_adapter else "bundle"
    assert main([str(base), *asked, *more]) == 0
    configs = [resolve_config(config_file=out / f"round_00{n}" / "config.yaml").train.distill for n in (1, 2)]
    first = out / "round_001" / result
    assert {each.objective for each in configs} == {"flow_grpo" if is_adapter else "diffusion_nft"}
    if is_adapter:
        assert [each.teacher for each in configs] == [str(base)] * 2
        assert [each.teacher_adapter for each in configs] == [None, str(first)]
        assert read_adapter(out / result).defaults["guidance"] == 1
        expected = tensor_file(out / result).read_bytes()
    else:
        assert [each.teacher for each in configs] == [str(base), str(out / "round_001" / "policy")]
        expected = weights(out / result)
        assert Bundle.open(out / result).defaults.guidance == 1
    lines = [json.loads(line) for line in (out / reward.ROUNDS_FILE).read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2] and lines[0]["comparison"] is None
    assert lines[1]["comparison"]["moved"] > 0 and lines[1]["videos"] == 8

    shutil.rmtree(out / result)
    shutil.rmtree(out / "round_002" / result)
    capfd.readouterr()
    assert main([str(base), *asked, *more]) == 0
    assert "all steps are done in" in capfd.readouterr().out, "nothing is trained again"
    again = out / result
    found = tensor_file(again).read_bytes() if is_adapter else weights(again)
    assert found == expected
    if is_adapter:
        return
    elsewhere = [str(base), str(tmp_path / "killed"), *asked[1:], *more]
    for files in ("round_001/rollouts/*", "round_001/checkpoints/iter_*", "round_002/prompts.jsonl"):
        (command,) = start_ranks(1, FORKING, "megadit.train.reward.command", *elsewhere)
        while not [*(tmp_path / "killed").glob(files)]:
            assert command.poll() is None, command.communicate()[0]
            time.sleep(0.01)
        command.kill()
        command.wait()
    for _ in range(60):  # what it started may still hold a folder, for as long as it takes to end
        (command,) = start_ranks(1, FORKING, "megadit.train.reward.command", *elsewhere)
        if command.wait(TIMEOUT) == 0:
            break
        assert "is in use" in command.communicate()[0]
        time.sleep(0.5)
    assert weights(tmp_path / "killed" / result) == expected


class Rounds:
    """Rounds in which nothing is made or trained."""

    def __init__(self, monkeypatch, bundle, comparisons):
        self.bundle, self.comparisons, self.launched, self.trained, self.compared = bundle, comparisons, [], [], []
        monkeypatch.setattr(reward, "launch", self.launch)
        monkeypatch.setattr(reward, "run_module", lambda module, *arguments: self.trained.append(arguments))
        monkeypatch.setattr("megadit.train.distill.runs.run_module", self.to_bundle)
        monkeypatch.setattr(reward, "compare", self.compare)
        monkeypatch.setattr(reward, "open_extractors", lambda path, device: [path])
        monkeypatch.setattr(reward, "open_videos", lambda path, count: path)
        monkeypatch.setattr("megadit.train.data.prepare.rewards.find_scorer", lambda folder: folder)

    def launch(self, module, arguments, num_processes):
        self.launched.append((arguments, num_processes))
        folder = arguments[2]
        Path(folder).mkdir(parents=True)
        write_json(Path(folder) / "scores.json", {"videos": 4, "rewarded": 4, "score": 0.5, "means": {"bright": 0.5}})

    def to_bundle(self, module, source, target):
        shutil.copytree(self.bundle, target, dirs_exist_ok=True)

    def compare(self, folder, base, policy, prompts, **more):
        self.compared.append((policy, prompts, more))
        return Comparison(seen_by="pixels", count=16, **self.comparisons[len(self.compared) - 1])


FINE = {"spread": 1.0, "distance": None, "moved": 0.2}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"spread": 0.1}, "its diversity is not within"),
        ({"moved": 3.0}, "further than 2 times"),
        ({"distance": 1.6}, "its distance from real videos"),
    ],
)
def test_a_reward_that_is_cheated_ends_the_run(tmp_path, monkeypatch, fault, said, capsys):
    bundle = write(tmp_path / "base", 0)
    (tmp_path / "prompts.txt").write_text("a cat\n")
    rounds = Rounds(monkeypatch, bundle, [FINE, FINE | fault])
    more = ["--prompts", str(tmp_path / "prompts.txt"), "--scorer_dir", "scorer", "--recipe", "digits"]
    out = tmp_path / "out"
    assert main([str(bundle), str(out), *more, "--rounds", "6", "--check_interval", "2", "--distance", "1.5"]) == 2
    found = capsys.readouterr().err
    assert said in found and f"{out / 'round_002' / 'bundle'} is kept" in found and "round 4:" in found
    assert Bundle.open(out / "bundle") and len(rounds.trained) == 4


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--scorer_dir", "nowhere"], "there is no scorer.py"),
        (["--extractors", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--real", "clips"], "--real needs --extractors"),
        (["--check_prompts", "nowhere.txt"], "nowhere.txt"),
        (["--device", "abacus"], "abacus"),
        (["--objective", "flow_grpo", "--eta", "0"], "states need --sampler euler --eta 1"),
        (["model.num_layers=3"], "leave out model.*"),
        (["--policy_decay", "0.5", "--adapter_rank", "2"], "leave out --adapter_rank"),
        (["--policy_decay", "1"], "--policy_decay"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(tmp_path, asked, more, said, capsys):
    bundle = write(tmp_path / "base", 0)
    assert main([str(bundle), *asked, "--recipe", "digits", *more]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out" / "round_001").exists()


def test_a_policy_is_an_average_and_training_goes_on_from_its_own_weights(tmp_path, monkeypatch):
    bundle, trained = write(tmp_path / "base", 0), write(tmp_path / "trained", 1)
    (tmp_path / "prompts.txt").write_text("a cat\n")
    rounds = Rounds(monkeypatch, trained, [FINE])
    more = ["--prompts", str(tmp_path / "prompts.txt"), "--scorer_dir", "scorer", "--recipe", "digits"]
    out = tmp_path / "out"
    assert main([str(bundle), str(out), *more, "--rounds", "3", "--policy_decay", "0.75"]) == 0
    policies = [bundle, *(out / f"round_00{n}" / "policy" for n in (1, 2, 3))]
    assert [arguments[1] for arguments, _ in rounds.launched] == [str(policy) for policy in policies[:3]]
    for number, arguments in enumerate(rounds.trained):
        starts = [word for word in arguments if word.startswith("checkpoint.init_from=")]
        assert f"train.distill.teacher={policies[number]}" in arguments
        assert starts == [f"checkpoint.init_from={out / f'round_00{number}' / 'bundle'}"][: number > 0]
    base, new, found = (
        load_network(path / Bundle.open(path).networks[0]).state_dict() for path in (bundle, trained, policies[2])
    )
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, 0.75**2 * base[name] + (1 - 0.75**2) * new[name], rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(base[name], new[name]) for name in found)
    assert Bundle.open(out / "bundle").manifest["fingerprints"] == Bundle.open(policies[3]).manifest["fingerprints"]


def test_every_option_reaches_its_part(tmp_path, monkeypatch, capsys):
    bundle = write(tmp_path / "base", 0)
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na bird\n")
    (tmp_path / "checked.txt").write_text("a fish\n")
    (tmp_path / "changes.yaml").write_text("data: {text_seq_length: 96}")
    rounds = Rounds(monkeypatch, bundle, [FINE, FINE])
    more = ["--prompts", str(tmp_path / "prompts.txt"), "--scorer_dir", "one", "two", "--watch_dir", "other"]
    more += ["--reward", "bright=1", "dark=-2", "--rounds", "2", "--prompts_per_round", "2", "--group_size", "3"]
    more += ["--train_steps", "5", "--beta", "0.5", "--seed", "9", "--scorer_seconds", "7", "--recipe", "digits"]
    more += ["--clip", "seer"]
    more += ["--config-file", str(tmp_path / "changes.yaml"), "--nproc", "2", "--check_interval", "1", "--count", "9"]
    more += ["--check_prompts", str(tmp_path / "checked.txt"), "--extractors", "seer", "--real", "clips"]
    more += ["--device", "cpu", "--even_if_too_large", "--sampler", "heun", "--num_steps", "3", "--guidance", "1.5"]
    assert main([str(bundle), str(tmp_path / "out"), *more, "optimizer.lr=9"]) == 0
    (first, ranks), (second, _) = rounds.launched
    pairs = {(first[n], first[n + 1]) for n in range(len(first) - 1)}
    assert ranks == 2 and first[1] == str(bundle) and second[1] == str(tmp_path / "out" / "round_001" / "bundle")
    assert {("--group_size", "3"), ("--seed", "9"), ("--scorer_seconds", "7"), ("--scorer_dir", "one")} <= pairs
    assert ("--clip", "seer") in pairs
    assert {("--watch_dir", "other"), ("--reward", "bright=1"), ("bright=1", "dark=-2"), ("one", "two")} <= pairs
    assert {"--sampler=heun", "--num_steps=3", "--guidance=1.5"} <= {*first}
    assert second[second.index("--seed") + 1] == "15", "no noise twice"
    drawn = [(tmp_path / "out" / f"round_00{n}" / "prompts.jsonl").read_text().splitlines() for n in (1, 2)]
    assert len({*drawn[0], *drawn[1][:1]}) == 3, "all prompts take turns"
    arguments = rounds.trained[0]
    assert arguments[:6] == ("--recipe", "digits", "--config-file", str(tmp_path / "changes.yaml"), "--nproc", "2")
    assert {"--even_if_too_large", "train.train_iters=5", "train.distill.nft_beta=0.5", "optimizer.lr=9"} <= {
        *arguments
    }
    _, prompts, given = rounds.compared[0]
    assert prompts == ["a fish"] * 9 and given["device"] == "cpu"
    assert [str(each) for each in given["extractors"]] == ["seer"] and str(given["real"]) == "clips"
    for missing in (["--prompts", more[1]], [*more[2:5], "--reward", "bright=1", "dark=-2"]):
        without = [word for word in more if word not in missing]
        assert main([str(bundle), str(tmp_path / "other"), *without]) == 2
        assert missing[0] in capsys.readouterr().err
