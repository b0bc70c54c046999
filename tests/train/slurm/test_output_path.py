"""A chain in a folder whose path has a space: Slurm reads the path of the log as one word."""

import shlex

from megadit.train.slurm.config import ChainConfig, StageConfig
from megadit.train.slurm.scripts import scripts


def test_the_path_of_the_log_is_one_word(tmp_path):
    folder = tmp_path / "a chain's folder"
    chain = ChainConfig(name="x", folder=str(folder), stages={"a": StageConfig(command="true", time="1:00:00")})
    (line,) = [line for line in scripts(chain)["a.sh"].splitlines() if line.startswith("#SBATCH --output=")]
    assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--output={folder}/logs/%x-%j.log"]
