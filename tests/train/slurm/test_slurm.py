"""The scripts of `megadit slurm`: what they ask of Slurm, and that they run."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import megadit.train.slurm
from megadit.models.shared.errors import UserError
from megadit.train.config.load import change
from megadit.train.slurm.__main__ import main
from megadit.train.slurm.config import ChainConfig
from megadit.train.slurm.scripts import scripts, validation_script

from ..conftest import FEW_STEPS

EXAMPLE = Path(megadit.train.slurm.__file__).parent / "chain.yaml"


def chain(*overrides, example=False) -> ChainConfig:
    made = change(ChainConfig(), config_file=EXAMPLE if example else None, overrides=list(overrides))
    made.check()
    return made


def test_example_is_a_chain_of_stages_that_bash_can_read(tmp_path):
    assert main(["--config-file", str(EXAMPLE), "--dry-run", f"folder={tmp_path}"]) == 0
    written = {path.name for path in tmp_path.glob("*.sh")}
    names = ("scan", "encode", "index", "train", "bundle", "export", "generate", "submit")
    assert written == {f"{name}.sh" for name in names}
    for path in tmp_path.glob("*.sh"):
        subprocess.run(["bash", "-n", path], check=True)
        assert path.stat().st_mode & 0o100
        assert "@@" not in path.read_text()


def test_dry_run_submits_nothing(slurm, tmp_path):
    assert main(["--config-file", str(EXAMPLE), "--dry-run", f"folder={tmp_path / 'out'}"]) == 0
    assert not (slurm / "sbatch.log").exists()


def test_written_configuration_writes_the_same_scripts(tmp_path):
    main(["--config-file", str(EXAMPLE), "--dry-run", f"folder={tmp_path}", "cluster.account=physics"])
    again = change(ChainConfig(), config_file=tmp_path / "chain.yaml")
    assert scripts(again)["train.sh"] == (tmp_path / "train.sh").read_text()


def test_the_resolved_configuration_is_shown_and_nothing_written(tmp_path, capsys):
    assert main(["--config-file", str(EXAMPLE), "--print-config", f"folder={tmp_path}", "cluster.account=physics"]) == 0
    assert "account: physics" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "setting", ["cluster.account", "cluster.partition", "folder", "cluster.sbatch_options", "stages.train.time"]
)
def test_no_setting_becomes_a_line_of_a_script(setting, tmp_path):
    value = "--x=a\ntouch trapped"
    override = f"{setting}={json.dumps([value] if setting.endswith('options') else value)}"
    with pytest.raises(UserError, match=r"touch trapped.*(more than one line of a script|write H:MM:SS)"):
        scripts(chain(override, example=True))


def test_nodes_meet_at_a_port_that_no_other_connection_takes():
    """Linux takes 32768 to 60999 for connections that ask for none."""
    checks = validation_script(chain(example=True), nodes=2, nodelist=None, partition=None)
    for text in (scripts(chain(example=True))["train.sh"], checks):
        port = re.search(r"\$\(\(.*SLURM_JOB_ID.*?\)\)", text)[0]
        for job in (1, 11_999, 12_000, 19_999, 4_123_456):
            found = subprocess.run(["bash", "-c", f"SLURM_JOB_ID={job}; echo {port}"], capture_output=True, check=True)
            assert 20_000 <= int(found.stdout) < 32_768


def test_sbatch_lines_come_before_the_first_command():
    text = scripts(chain(example=True))["train.sh"].splitlines()
    asked = [number for number, line in enumerate(text) if line.startswith("#SBATCH")]
    first = next(number for number, line in enumerate(text) if line and not line.startswith("#"))
    assert asked and max(asked) < first


@pytest.mark.parametrize(
    ("overrides", "script", "expected"),
    [
        (["stages.train.nodes=16"], "train.sh", "#SBATCH --nodes=16"),
        (["stages.train.time=1-12:00:00"], "train.sh", "#SBATCH --time=1-12:00:00"),
        (["stages.train.notice=120"], "train.sh", "#SBATCH --signal=B:USR1@120"),
        (["stages.train.notice=120"], "train.sh", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=60"),
        (["stages.train.max_restarts=7"], "train.sh", "--max-restarts=7"),
        (["stages.train.ranks_per_node=3"], "train.sh", "--nproc-per-node=3"),
        (["cluster.account=physics"], "bundle.sh", "#SBATCH --account=physics"),
        (["cluster.partition=big"], "scan.sh", "#SBATCH --partition=big"),
        (["cluster.sbatch_options=[--qos=high]"], "train.sh", "#SBATCH --qos=high"),
        (["cluster.gpus_per_node=4"], "train.sh", "#SBATCH --gpus-per-node=4"),
        (["cluster.numa_binding=socket"], "train.sh", "--numa-binding=socket"),
        (["cluster.environment=[WANDB_PROJECT=dit]"], "export.sh", "export WANDB_PROJECT=dit"),
        (["cluster.interconnect=efa"], "train.sh", "export FI_PROVIDER=efa"),
        (["cluster.setup=[module load cuda]"], "bundle.sh", "\nmodule load cuda\n"),
        (["cluster.container.image=lab/megadit:1"], "train.sh", "--container-image=lab/megadit:1"),
        (
            ["cluster.container.image=x", "cluster.container.mounts=[/data:/data:ro,/runs:/runs]"],
            "scan.sh",
            "--container-mounts=/data:/data:ro,/runs:/runs",
        ),
        (["cluster.container.image=x", "cluster.container.workdir=/runs"], "train.sh", "--container-workdir=/runs"),
        (["name=cosmos"], "train.sh", "#SBATCH --job-name=cosmos-train"),
    ],
)
def test_every_setting_reaches_its_script(overrides, script, expected):
    assert expected not in scripts(chain(example=True))[script]
    assert expected in scripts(chain(*overrides, example=True))[script]


@pytest.mark.parametrize("name", ["azure", "efa", "infiniband"])
def test_a_preset_says_what_each_variable_is_for_and_the_user_s_own_wins(name):
    lines = (EXAMPLE.parent / "interconnects" / f"{name}.yaml").read_text().splitlines()
    assert all(line.lstrip().startswith(("#", "- ", "environment:")) for line in lines)
    text = scripts(chain(f"cluster.interconnect={name}", "cluster.environment=[NCCL_SOCKET_IFNAME=eth9]", example=True))
    exports = [line for line in text["train.sh"].splitlines() if line.startswith("export NCCL_SOCKET_IFNAME=")]
    assert len(exports) == 2 and exports[-1].endswith("=eth9")
    subprocess.run(["bash", "-uec", "\n".join(exports)], check=True)


def test_no_gpus_asks_for_none_and_binds_nothing():
    text = scripts(chain("cluster.gpus_per_node=0", "stages.train.ranks_per_node=2", example=True))["train.sh"]
    assert "--gpus-per-node" not in text
    assert "--numa-binding" not in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "no stage has anything to run"),
        (["stages.train.command=a", "stages.train.torchrun=b"], "both set"),
        (["stages.prepare.command=megadit", "stages.prepare.nodes=2"], "runs on 1 node"),
        (["stages.train.torchrun=x", "stages.train.time=soon"], "stages.train.time='soon'"),
        (["stages.train.torchrun=x", "stages.train.nodes=0"], "stages.train.nodes=0"),
        (["stages.train.torchrun=x", "cluster.gpus_per_node=0"], "stages.train.ranks_per_node is not set"),
        (["stages.train.torchrun='-m x \"y'"], "is not shell"),
        (["stages.train.torchrun=x", "cluster.numa_binding=left"], "choose one of node"),
        (["stages.train.torchrun=x", "cluster.environment=[1]"], "str"),
        (["stages.train.torchrun=x", "cluster.environment=['two words']"], "write NAME=value"),
        (["stages.train.torchrun=x", "cluster.sbatch_options=[qos]"], "write an option of sbatch"),
        (["stages.train.torchrun=x", "cluster.container.mounts=[/a:/b]"], "need cluster.container.image"),
        (["stages.train.torchrun=x", "cluster.container.image=i", "cluster.container.mounts=[/a]"], "HOST:/CONTAINER"),
        (["stages.train.torchrun=x", "name=a b"], "name='a b'"),
        (["trian.torchrun=x"], "unknown key trian"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(overrides, message):
    with pytest.raises(UserError, match=message):
        chain(*overrides)


def test_without_sbatch_the_scripts_are_written_and_the_command_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["stages.train.torchrun=-m x", f"folder={tmp_path}"]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_a_stage_that_fails_keeps_the_next_from_starting(slurm, tmp_path):
    arguments = [
        "stages.prepare.command=touch $FAKE_SLURM/prepared; exit 3",
        "stages.bundle.command=touch $FAKE_SLURM/bundled",
    ]
    assert main([*arguments, f"folder={tmp_path / 'out'}", "cluster.gpus_per_node=0"]) == 0
    assert (slurm / "job1001.code").read_text() == "3"
    assert (slurm / "prepared").exists()
    assert not (slurm / "bundled").exists()


@pytest.mark.parametrize(
    ("tells", "is_requeued"),
    [
        pytest.param("script:USR1", True, id="near its limit"),
        pytest.param("ranks:TERM", True, id="preempted"),
        pytest.param("script:TERM", False, id="scancel"),
        pytest.param("script:INT", False, id="Ctrl-C in an allocation"),
    ],
)
def test_ranks_save_whoever_is_told_to_stop(ranks, tmp_path, monkeypatch, tells, is_requeued):
    """A signal to srun itself would kill them: it makes SIGKILL of SIGTERM."""
    monkeypatch.setenv("FAKE_SLURM_TELLS", tells)
    main(
        [
            "stages.train.torchrun=-m x",
            "stages.train.nodes=2",
            "stages.train.ranks_per_node=1",
            f"folder={tmp_path / 'out'}",
        ]
    )
    assert (ranks / "saved").read_text().count("\n") == 2
    assert len(list(ranks.glob("requeued1001.*"))) == is_requeued
    assert ((ranks / "job1001.code").read_text() == "0") == is_requeued


@pytest.mark.slow
def test_a_preempted_training_is_requeued_continues_and_is_bundled(
    slurm, tiny_dataset, tiny_arguments, tmp_path, monkeypatch
):
    """Four scripts as they are, on two nodes of one rank: data, training told to stop in the middle, bundle, a copy."""
    run = tmp_path / "train"
    monkeypatch.setenv("FAKE_SLURM_PREEMPT", f"{run / 'metrics.jsonl'}:8")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    dataset = f"{tmp_path}/dataset"
    train = " ".join((*tiny_arguments, *FEW_STEPS, "train.train_iters=30", "validation.interval=0"))
    code = main(
        [
            "cluster.gpus_per_node=0",
            f"folder={tmp_path / 'scripts'}",
            f"stages.prepare.command=cp -r {tiny_dataset} {dataset}",
            f"stages.train.torchrun={train} data.path={dataset} train.output_dir={run}",
            *("stages.train.nodes=2", "stages.train.ranks_per_node=1"),
            f"stages.bundle.command=megadit bundle {run} {tmp_path}/bundle --ema none",
            f"stages.export.command=cp -r {tmp_path}/bundle {tmp_path}/exported",
        ]
    )
    logs = "\n".join(path.read_text() for path in (tmp_path / "scripts" / "logs").iterdir())
    assert code == 0
    assert [(slurm / f"job{job}.code").read_text() for job in range(1001, 1005)] == ["0"] * 4, logs[-4000:]
    assert len(list(slurm.glob("requeued1002.*"))) == 1
    assert "stopped by a signal" in logs and "continuing from" in logs
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 31))
    assert (tmp_path / "exported" / "megadit.json").is_file()
    submitted = (slurm / "sbatch.log").read_text().splitlines()
    assert "--dependency=afterok:1002" in submitted[2]
    assert (slurm / "srun.log").read_text().count("--ntasks=2") == 2  # the training, and again after the requeue
