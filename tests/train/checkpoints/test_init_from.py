"""Training starts from the weights of another run's checkpoint, whichever way it is named."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.megatron.checkpoint import CONFIG, STATE, TENSORS, checkpoint_name, model_key
from megadit.models.megatron.integrity import DamagedCheckpointError, checksums, file_names, write_sums
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.models.storage.components import network_shapes
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.checkpoints.init_from import initial_weights, read_teacher
from megadit.train.config.distill import DistillConfig
from megadit.train.config.load import to_yaml
from megadit.train.recipes import load_recipe
from tests.bundles import write_tiny_bundle

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    """(folder of a run, its weights)."""
    root, config = tmp_path_factory.mktemp("other"), load_recipe("digits_tiny")
    path = root / "checkpoints" / checkpoint_name(7)
    path.mkdir(parents=True)
    weights = {name: torch.randn(tensor.shape) for name, tensor in DiT(config.model).state_dict().items()}
    write_json(path / STATE, {"ema_sigma_rels": [], "run": {"iteration": 7}})
    (path / CONFIG).write_text(to_yaml(config))
    tensors = {model_key(f"dit.{name}"): weight for name, weight in weights.items()}
    dcp.save(tensors, checkpoint_id=path / TENSORS, no_dist=True)
    write_sums(path, checksums(path, file_names(path)))
    return root, weights


def run_from(source, **model):
    run = load_recipe("digits_tiny")
    return replace(run, checkpoint=replace(run.checkpoint, init_from=str(source)), model=replace(run.model, **model))


@pytest.mark.parametrize("name", [".", "checkpoints/iter_0000007"])
def test_a_run_or_one_of_its_checkpoints(other_run, name):
    root, weights = other_run
    read = initial_weights(run_from(root / name)).read
    assert all(torch.equal(read(key), weight) for key, weight in weights.items())


def test_another_network_is_refused_with_both_values(other_run):
    with pytest.raises(UserError, match=r"has model\.num_layers=2 \(not 3\)"):
        initial_weights(run_from(other_run[0], num_layers=3))


def test_another_objective_is_the_same_network(other_run):
    assert initial_weights(run_from(other_run[0], parameterization="flow")).config.parameterization == "edm"


def test_a_network_goes_on_with_positions_for_another_size_and_an_adapter_does_not(other_run):
    """The adapter would be used beside its base, whose positions are those of before."""
    dense = run_from(other_run[0], rope_interpolation=(1.0, 2.0, 2.0), rope_scale=(1.0, 2.0, 2.0))
    assert initial_weights(dense).config.rope_interpolation == (1.0, 1.0, 1.0)
    adapted = replace(
        dense,
        train=replace(dense.train, adapter=AdapterConfig(rank=2)),
        optimizer=replace(dense.optimizer, optimizer="adamw"),
        diffusion=replace(dense.diffusion, learned_uncertainty=False),
    )
    with pytest.raises(
        UserError, match=r"has model\.rope_scale=\(1\.0, 1\.0, 1\.0\) \(not \(1\.0, 2\.0, 2\.0\)\), model\.rope_i"
    ):
        initial_weights(adapted)


def test_what_is_neither(tmp_path):
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        initial_weights(run_from(tmp_path))


def test_a_damaged_checkpoint_is_refused(other_run, tmp_path):
    shutil.copytree(other_run[0], tmp_path / "copy")
    file = next((tmp_path / "copy").rglob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DamagedCheckpointError, match="is not what was written"):
        initial_weights(run_from(tmp_path / "copy"))


def test_a_teacher_that_was_given_nothing_is_no_teacher_of_what_is_given(other_run):
    """Its network has no noise level for that: its answers would be no numbers."""
    run = run_from(None, conditioning_sigma=0.02)
    distill = DistillConfig(teacher=str(other_run[0]), objective="guidance")
    student = replace(
        run,
        train=replace(run.train, distill=distill),
        checkpoint=replace(run.checkpoint, init_from=None),
        diffusion=replace(run.diffusion, learned_uncertainty=False),
    )
    assert read_teacher(student).config.conditioning_sigma is None
    with pytest.raises(UserError, match="was not trained with conditioning: leave out data.conditioning"):
        read_teacher(replace(student, data=replace(student.data, conditioning=("first_frame:0.5",))))


def told(source, *scales, adapter=None, **model):
    """A run whose network is told these scales, and starts from `source`, which is its teacher too."""
    run = run_from(source, guidance_embedding_range=scales or None, **model)
    distill = DistillConfig(teacher=str(source), objective="guidance")
    return replace(
        run,
        train=replace(run.train, distill=distill, adapter=adapter),
        optimizer=replace(run.optimizer, optimizer="adamw"),
        diffusion=replace(run.diffusion, learned_uncertainty=False),
    )


def test_a_network_goes_on_to_be_told_guidance_and_never_back(other_run, tmp_path):
    plain, run = other_run[0], told(other_run[0], 1.0, 6.0)
    given = initial_weights(run)
    shapes = network_shapes(run.model)
    state = {name: given.read(name) for name in shapes}
    of_guidance = {name for name in shapes if name.startswith("guidance_embedder.")}
    assert len(of_guidance) == 4 and not state["guidance_embedder.linear_2.weight"].any()
    assert state["guidance_embedder.linear_1.weight"].std() > 0.01
    assert read_teacher(run).config.guidance_embedding_range is None
    with pytest.raises(UserError, match=r"has model\.guidance_embedding_range=None \(not \(1\.0, 6\.0\)\)"):
        initial_weights(told(plain, 1.0, 6.0, adapter=AdapterConfig(rank=2)))

    channels, model = {"in_channels": 12}, replace(run.model, in_channels=12)
    tokenizer = HaarTokenizer(temporal_compression=1, spatial_compression=2, sigma_data=model.sigma_data)
    path = write_tiny_bundle(tmp_path / "told", model, tokenizer).path
    assert initial_weights(told(path, 1.0, 4.0, **channels)).config.guidance_embedding_range == (1.0, 6.0)
    assert read_teacher(told(path, 2.0, 6.0, **channels)).config.guidance_embedding_range == (1.0, 6.0)
    with pytest.raises(UserError, match=r"model\.guidance_embedding_range=\[1,8\] exceeds 1 to 6, .* teacher "):
        read_teacher(told(path, 1.0, 8.0, **channels))
    with pytest.raises(UserError, match=r"has model\.guidance_embedding_range=\(1\.0, 6\.0\) \(not None\)"):
        initial_weights(told(path, **channels))


def test_a_teacher_of_other_positions_is_none(other_run):
    """It would judge sizes beyond those that it was trained at."""
    run = run_from(None, rope_interpolation=(1.0, 2.0, 2.0))
    student = replace(
        run,
        train=replace(run.train, distill=DistillConfig(teacher=str(other_run[0]), objective="guidance")),
        checkpoint=replace(run.checkpoint, init_from=None),
        diffusion=replace(run.diffusion, learned_uncertainty=False),
    )
    with pytest.raises(UserError, match=r"has model\.rope_interpolation=\(1\.0, 1\.0, 1\.0\) \(not"):
        read_teacher(student)
