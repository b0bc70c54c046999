"""Finding and refusing checkpoints; what training writes is read in test_to_bundle and test_resume."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megadit.models.megatron.checkpoint import (
    CONFIG,
    STATE,
    TENSORS,
    check_checkpoint,
    checkpoint_name,
    ema_key,
    ema_profiles,
    find_checkpoints,
    model_key,
    read_network,
)
from megadit.models.megatron.integrity import checksums, file_names, write_sums
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def write_checkpoint(root, step):
    path = root / checkpoint_name(step)
    path.mkdir(parents=True)
    write_json(path / STATE, {"ema_sigma_rels": [0.1], "run": {"iteration": step}})
    (path / CONFIG).write_text("recipe: digits\n")
    tensors = {
        model_key("dit.a.weight"): torch.full((2, 3), float(step)),
        model_key("uncertainty.linear.weight"): torch.zeros(1),
        ema_key(0.1, "dit.a.weight"): torch.full((2, 3), step / 2),
    }
    dcp.save(tensors, checkpoint_id=path / TENSORS, no_dist=True)
    write_sums(path, checksums(path, file_names(path)))
    return path


def test_reading_the_weights_and_an_average(tmp_path):
    path = write_checkpoint(tmp_path, 4)
    assert ema_profiles(path) == (0.1,)
    weights, average = read_network(path), read_network(path, ema=0.1)
    assert list(weights) == list(average) == ["a.weight"]
    assert torch.equal(weights["a.weight"], torch.full((2, 3), 4.0))
    assert torch.equal(average["a.weight"], torch.full((2, 3), 2.0))


def test_only_complete_checkpoints_are_found_in_the_order_of_their_steps(tmp_path):
    for step in (12, 3, 10_000_000):
        write_checkpoint(tmp_path, step)
    write_checkpoint(tmp_path, 20).joinpath(STATE).write_text('{"cut off')
    write_checkpoint(tmp_path, 21).joinpath(TENSORS, ".metadata").unlink()
    write_checkpoint(tmp_path, 22).joinpath(CONFIG).unlink()
    write_checkpoint(tmp_path, 23).rename(tmp_path / "iter_0000023.unfinished")
    (tmp_path / "iter_notes").mkdir()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["iter_0000003", "iter_0000012", "iter_10000000"]
    assert find_checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * 100_000, "lists and objects within one another"),
        ("[]", "is not the state of a run"),
        ('{"run": {"iteration": "four"}, "ema_sigma_rels": []}', "is not the state of a run"),
        ('{"run": {"iteration": 4}, "ema_sigma_rels": 1}', "is not the state of a run"),
    ],
    ids=["deep", "no object", "no number", "no profiles"],
)
def test_a_hostile_state_is_a_damaged_checkpoint(tmp_path, text, complaint):
    path = write_checkpoint(tmp_path, 4)
    (path / STATE).write_text(text)
    write_sums(path, checksums(path, file_names(path)))
    with pytest.raises(UserError, match=complaint):
        check_checkpoint(path)
    assert find_checkpoints(tmp_path) == []


def test_a_loss_may_be_infinite(tmp_path):
    path = write_checkpoint(tmp_path, 4)
    write_json(path / STATE, {"ema_sigma_rels": [0.1], "run": {"iteration": 4, "recent_losses": [float("inf")]}})
    assert find_checkpoints(tmp_path) == [path]


def test_what_is_not_there(tmp_path):
    path = write_checkpoint(tmp_path, 4)
    with pytest.raises(UserError, match="no EMA weights with sigma_rel 0.2; it has 0.1"):
        read_network(path, ema=0.2)
    with pytest.raises(UserError, match="not a complete checkpoint"):
        read_network(tmp_path)
