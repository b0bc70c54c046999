"""A chain in a folder of any name: Slurm reads the path of the log as one word, and no shell runs what is in it."""

import os
import shlex
import subprocess

import pytest

from megadit.models.shared.errors import UserError
from megadit.train.slurm.config import ChainConfig, ClusterConfig, ContainerConfig, StageConfig
from megadit.train.slurm.scripts import local_script, scripts, validation_script


def test_the_path_of_the_log_is_one_word(tmp_path):
    folder = tmp_path / "a chain's folder"
    chain = ChainConfig(name="x", folder=str(folder), stages={"a": StageConfig(command="true", time="1:00:00")})
    (line,) = [line for line in scripts(chain)["a.sh"].splitlines() if line.startswith("#SBATCH --output=")]
    assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--output={folder}/logs/%x-%j.log"]


NASTY = """a'b"c$(touch pwned)`touch pwned`;touch pwned&&touch pwned|touch pwned>pwned #\\@@{state}$HOME %%x"""


def test_names_of_folders_and_images_run_nothing(tmp_path):
    """In what is submitted, in what runs on a node, and in the trial of nodes: each name is one word, as it is."""
    folder, bin = tmp_path / NASTY.replace("/", ""), tmp_path / "bin"
    bin.mkdir()
    for name, text in {
        "srun": 'printf "%s\\n" "$@" >>"$SEEN"',
        "sbatch": "echo 7",
        "scontrol": "echo node",
        "squeue": "true",
        "python": 'printf "%s\\n" "$@" >>"$SEEN"',
    }.items():
        (bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin / name).chmod(0o755)
    container = ContainerConfig(image=NASTY, mounts=(f"{NASTY}:/b",), workdir=NASTY)
    stages = {"one": StageConfig(command="true"), "two": StageConfig(torchrun="-m x", nodes=2)}
    chain = ChainConfig(folder=str(folder), cluster=ClusterConfig(container=container), stages=stages)
    texts = {**scripts(chain), "validate.sh": validation_script(chain, nodes=2, nodelist=None, partition=None)}
    folder.mkdir()
    environment = {"PATH": f"{bin}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen"), "SLURM_JOB_ID": "1"}
    environment |= {"SLURM_JOB_NODELIST": "node", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "node"}
    for name, text in texts.items():
        (folder / name).write_text(text)
        run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(["bash", str(folder / name)], **run)
        assert done.returncode == 0, (name, done.stderr)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen.count(f"--container-image={NASTY}") == seen.count(f"--container-workdir={NASTY}") == 3
    assert f"{folder}/validate/1" in seen and f"{folder}/exclude" in seen
    assert (folder / "state").is_dir() and (folder / "jobs").read_text().startswith("one 7")
    subprocess.run(["bash", "-c", local_script(chain, "one")], **run, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "bin", "seen"}, "nothing was touched"


@pytest.mark.parametrize(
    "name", ["a'b", 'a"b', "a b", "a\nb", "$(touch x)", "`x`", "a;b", "a/b", "../a", "-a", "", "a\0"]
)
def test_names_of_chains_and_stages_are_words(name):
    stage = StageConfig(command="true")
    for chain in (ChainConfig(name=name, stages={"one": stage}), ChainConfig(stages={name: stage})):
        with pytest.raises(UserError, match="use letters, digits"):
            chain.check()
