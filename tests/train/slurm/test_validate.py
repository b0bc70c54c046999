"""`megadit slurm validate`: nodes that are not sound are named, and left out of the jobs that come after."""

import sys

import pytest

from megadit.models.shared.errors import UserError
from megadit.train.slurm.__main__ import main
from megadit.train.slurm.validate import faults_of

SOUND = "all 8 ranks compute and communicate alike"
NODES = [f"n{number}" for number in range(1, 5)]


@pytest.fixture
def results(tmp_path):
    """results(n2=(code, "what the doctor said"), ...): a folder in which all other nodes are sound."""

    def make(together: str = SOUND, dcgmi: dict[str, tuple[int, str]] | None = None, **doctors):
        folder = tmp_path / "results"
        folder.mkdir()
        (folder / "nodes").write_text("\n".join(NODES))
        for node in NODES:
            code, said = doctors.get(node, (0, SOUND))
            (folder / f"{node}.doctor").write_text(said + "\n")
            if code is not None:
                (folder / f"{node}.doctor.code").write_text(f"{code}\n")
        for node, (code, said) in (dcgmi or {}).items():
            (folder / f"{node}.dcgmi").write_text(said)
            (folder / f"{node}.dcgmi.code").write_text(f"{code}\n")
        (folder / "all.doctor").write_text(together + "\n")
        return folder

    return make


def test_sound_nodes_have_no_fault(results):
    assert faults_of(results(dcgmi={node: (0, "Pass") for node in NODES})) == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"n2": (None, "")}, "it did not answer"),
        (
            {"n2": (1, "broken: rank 3 on n2 (node 0, H100): computes a wrong product")},
            "broken: rank 3 on n2 (node 0, H100): computes a wrong product",
        ),
        ({"n2": (139, "Segmentation fault")}, "megadit doctor ended with 139; see n2.doctor"),
        ({"dcgmi": {"n2": (226, "| PCIe  | Pass |\n| Memory | Fail - GPU 3 |")}}, "dcgmi diag: Memory | Fail - GPU 3"),
        (
            {"together": "slow: node 1 (n2): 10% of the usual bandwidth with 3 of 3 partners"},
            "slow: node 1 (n2): 10% of the usual bandwidth with 3 of 3 partners",
        ),
        (
            {"together": "slow: rank 9 on n2.cluster.local (node 1, H100) computes at 30% of the usual rate"},
            "slow: rank 9 on n2.cluster.local (node 1, H100) computes at 30% of the usual rate",
        ),
    ],
)
def test_a_bad_node_is_named_and_no_other(results, found, said):
    if "cluster.local" in said:
        NODES[1] = "n2.cluster.local"
    try:
        (fault,) = faults_of(results(**found))
    finally:
        NODES[1] = "n2"
    assert fault.node.partition(".")[0] == "n2" and fault.said == said


def test_of_a_bad_link_neither_end_is_blamed(results):
    assert faults_of(results(together="slow: node 1 (n2) with node 3 (n4): 10% of the usual bandwidth")) == []


def test_a_folder_of_something_else_is_told(tmp_path):
    with pytest.raises(UserError, match="holds no results of nodes"):
        faults_of(tmp_path)


# --- the batch script, on a cluster of two nodes that are this machine ------------------------------------------------

TORCHRUN = r"""#!/usr/bin/env bash
echo "torchrun $*" >> "$FAKE_SLURM/torchrun.log"
if [ "$SLURM_PROCID" = "$FAKE_SICK" ] && [[ "$*" = *--standalone* ]]; then
  echo "broken: rank 0 on $(hostname) (node 0, CPU): computes a wrong product"
  exit 1
fi
echo "all ranks compute and communicate alike"
"""


@pytest.fixture
def nodes(slurm, monkeypatch):
    """Two nodes, a and b, each of which runs what srun gives it under its own name; dcgmi is on both."""
    programs = slurm.parent / "bin"
    (programs / "torchrun").write_text(TORCHRUN)
    (programs / "dcgmi").write_text('#!/usr/bin/env bash\necho "$*" >> "$FAKE_SLURM/dcgmi.log"\necho Pass\n')
    scontrol = (programs / "scontrol").read_text()
    (programs / "scontrol").write_text(scontrol.replace('"localhost", "localhost"', '"node-0", "node-1"'))
    srun = (programs / "srun").read_text()
    own = '"SLURM_PROCID": str(task), "SLURMD_NODENAME": f"node-{task}"'
    (programs / "srun").write_text(srun.replace('"SLURM_PROCID": str(task)', own))
    (programs / "python").write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setattr("megadit.train.slurm.scripts._preamble", lambda cluster: [])
    return slurm


@pytest.mark.parametrize("sick", ["1", "none"])
def test_a_bad_node_is_excluded_from_the_next_stage(nodes, tmp_path, monkeypatch, sick):
    monkeypatch.setenv("FAKE_SICK", sick)
    chain = [f"folder={tmp_path / 'chain'}", "cluster.gpus_per_node=0", "stages.a.command=ls"]
    trial = ["validate", "--nodes", "2", "--nodelist", "node-[0-1]", "--partition", "big", *chain]
    assert main(trial) == 0
    script = (tmp_path / "chain" / "validate.sh").read_text()
    assert "#SBATCH --nodelist=node-[0-1]\n#SBATCH --partition=big\n" in script and "#SBATCH --nodes=2\n" in script
    report = (tmp_path / "chain" / "validate" / "1001" / "report.txt").read_text()
    is_sick = sick == "1"
    assert report.startswith("1 of 2 nodes are sound\nnode-1: broken" if is_sick else "2 of 2 nodes are sound")
    assert (nodes / "dcgmi.log").read_text().splitlines() == ["diag -r 2"] * 2
    log = (nodes / "torchrun.log").read_text()
    assert log.count("--standalone") == 2 and log.count("--nnodes=2") == 2
    assert main(chain) == 0
    submitted = (nodes / "sbatch.log").read_text().splitlines()[1]
    assert ("--exclude=node-1" in submitted) == is_sick
    monkeypatch.setenv("FAKE_SICK", "none")  # mended, it is taken again
    assert main(trial) == 0 and main(chain) == 0
    assert "--exclude" not in (nodes / "sbatch.log").read_text().splitlines()[-1]


def test_a_trial_needs_a_number_of_nodes(tmp_path, capsys):
    assert main(["validate", f"folder={tmp_path}"]) == 2
    assert "--nodes N" in capsys.readouterr().err
