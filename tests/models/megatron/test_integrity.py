"""Whatever happens to the files of a checkpoint is noticed before anything in them is believed."""

import contextlib
import enum
import pickle
import random
import re
import shutil
import subprocess

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megadit.models.megatron import integrity
from megadit.models.megatron.checkpoint import CONFIG, STATE, TENSORS, check_checkpoint, checkpoint_name, read_network
from megadit.models.megatron.integrity import (
    SUMS,
    DamagedCheckpointError,
    SafeReader,
    checksums,
    file_names,
    read_description,
    write_sums,
)
from megadit.models.shared.files import write_json

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
NUM_CASES = 100


class Hostile:
    """Unpickled, it leaves a file."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return open, (str(self.place), "w")


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        path = root / checkpoint_name(step)
        path.mkdir()
        write_json(path / STATE, {"ema_sigma_rels": [], "run": {"iteration": step}})
        (path / CONFIG).write_text("recipe: digits\n")
        write_json(path / "loaders" / "00000.json", {"num_packs": step})
        tensors = {f"model.dit.{name}": torch.randn(9, 7) for name in "abc"}
        dcp.save(tensors, checkpoint_id=path / TENSORS, no_dist=True)
        sign(path)
    return root


def sign(path):
    write_sums(path, checksums(path, file_names(path)))


@pytest.fixture
def copies(two_checkpoints, tmp_path):
    shutil.copytree(two_checkpoints, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def truncate(path, files, draw, marker):
    file = draw.choice([file for file in files if file.stat().st_size])
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])
    return file.name


def flip(path, files, draw, marker):
    file = draw.choice([file for file in files if file.stat().st_size])
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return file.name


def delete(path, files, draw, marker):
    file = draw.choice(files)
    file.unlink()
    return file.name


def exchange(path, files, draw, marker):
    """Two files of one checkpoint, or one of it for that of another step."""
    first = draw.choice(files)
    others = [file for file in files if file.read_bytes() != first.read_bytes()]
    others += [path.parent / checkpoint_name(1) / first.relative_to(path)]
    second = draw.choice([other for other in others if other.read_bytes() != first.read_bytes()] or others[:1])
    if first.read_bytes() == second.read_bytes():
        return flip(path, files, draw, marker)
    first_bytes = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(first_bytes)
    return None


def poison(path, files, draw, marker):
    """By one who knows of the checksums."""
    content = pickle.dumps(Hostile(marker), protocol=draw.choice([0, 2, 4, 5]))
    target = path / TENSORS / ".metadata"
    if draw.random() < 0.5:  # a true description that hides something
        description = pickle.loads(target.read_bytes())
        description.planner_data = Hostile(marker)
        content = pickle.dumps(description)
    target.write_bytes(content)
    sign(path)
    return ".metadata"


def test_random_damage_is_named_and_nothing_is_run(two_checkpoints, tmp_path, request):
    marker, unnoticed = tmp_path / "code was run", []
    for case in range(request.config.getoption("--cases") or NUM_CASES):
        draw = random.Random(case)
        root = tmp_path / f"case{case}"
        shutil.copytree(two_checkpoints, root)
        path = root / checkpoint_name(2)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        damage = (truncate, flip, delete, exchange, poison)[case % 5]
        name = damage(path, files, draw, marker)
        try:
            read_network(path)
            unnoticed.append((case, damage.__name__))
        except DamagedCheckpointError as error:
            assert str(path) in str(error) and (name in (None, SUMS) or name in str(error)), error
        except ValueError as error:  # a part is missing altogether
            assert "not a complete checkpoint" in str(error)
        with pytest.raises(DamagedCheckpointError):
            check_checkpoint(path)
        shutil.rmtree(root)
    assert not unnoticed and not marker.exists()


def test_the_poison_would_work(copies, tmp_path):
    """The control: torch's own reader runs what the tests above hide in descriptions."""
    path = copies / checkpoint_name(2)
    poison(path, [], random.Random(0), tmp_path / "code was run")
    with contextlib.suppress(AttributeError):  # a file came of it, not a description
        dcp.FileSystemReader(path / TENSORS).read_metadata()
    assert (tmp_path / "code was run").exists()


def test_whole_checkpoints_pass(two_checkpoints):
    for path in two_checkpoints.iterdir():
        check_checkpoint(path)
        assert set(read_network(path)) == {"a", "b", "c"}
        command = subprocess.run(["sha256sum", "--quiet", "-c", SUMS], cwd=path, capture_output=True)
        assert command.returncode == 0, command.stderr


def test_tensors_that_are_pickles_are_not_run(copies, tmp_path):
    path = copies / checkpoint_name(2)
    file = next((path / TENSORS).glob("*.distcp"))
    file.write_bytes(pickle.dumps(Hostile(tmp_path / "code was run")).ljust(file.stat().st_size, b"."))
    sign(path)
    with pytest.raises(DamagedCheckpointError, match="damaged or hostile"):
        read_network(path)
    assert not (tmp_path / "code was run").exists()


def rewrite_description(path, change):
    file = path / TENSORS / ".metadata"
    description = pickle.loads(file.read_bytes())
    change(description)
    file.write_bytes(pickle.dumps(description))
    sign(path)


def test_bytes_that_torch_would_unpickle_are_refused(copies):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    path = copies / checkpoint_name(2)
    rewrite_description(path, lambda found: found.state_dict_metadata.update({"model.dit.a": BytesStorageMetadata()}))
    with pytest.raises(DamagedCheckpointError, match="is not a tensor"):
        check_checkpoint(path)


def test_a_description_is_read_once_for_all_tensors(copies, monkeypatch):
    """Of a large network it has many megabytes, each of which Python looks at."""
    found, read = [], integrity.read_description
    monkeypatch.setattr(integrity, "read_description", lambda directory: found.append(directory) or read(directory))
    reader = SafeReader(copies / checkpoint_name(2) / TENSORS)
    tensors = {name: torch.empty(9, 7) for name in reader.read_metadata().state_dict_metadata}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    assert len(found) == 1


def test_files_elsewhere_are_refused(copies):
    def change(description):
        next(iter(description.storage_data.values())).relative_path = "../../../secret"

    path = copies / checkpoint_name(2)
    rewrite_description(path, change)
    with pytest.raises(DamagedCheckpointError, match=r"it names the file '\.\./\.\./\.\./secret'"):
        read_description(path / TENSORS)


def test_a_checkpoint_under_the_name_of_another_step(copies):
    (copies / checkpoint_name(2)).rename(copies / checkpoint_name(3))
    with pytest.raises(DamagedCheckpointError, match="holds step 2, which its name contradicts"):
        check_checkpoint(copies / checkpoint_name(3))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "notes.txt").write_text("x"), f"notes.txt is not in {SUMS}"),
        (lambda path: (path / CONFIG).unlink(), f"{CONFIG} is missing"),
        (lambda path: (path / SUMS).unlink(), f"{SUMS} is missing"),
        (lambda path: (path / SUMS).write_text("x\n"), "is not a list of checksums"),
        (lambda path: (path / CONFIG).write_text("recipe: other\n"), f"{CONFIG} is not what was written"),
    ],
)
def test_what_is_wrong_is_said(copies, damage, message):
    path = copies / checkpoint_name(2)
    damage(path)
    with pytest.raises(DamagedCheckpointError, match=re.escape(message)):
        check_checkpoint(path)


@pytest.fixture
def members_by_getattr(monkeypatch):
    """Pickles members of enumerations as Python before 3.11.4 does."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self._name_)))


def test_descriptions_written_by_python_before_3_11_4_are_read(members_by_getattr, tmp_path):
    written = {"w": torch.arange(6.0)}
    dcp.save(written, checkpoint_id=tmp_path)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert list(read_description(tmp_path).state_dict_metadata) == ["w"]


class AnyAttribute:
    """Unpickled, it is a method of a class that descriptions name."""

    def __reduce__(self):
        return getattr, (torch.Size, "numel")


def test_other_attributes_are_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(AnyAttribute()))
    with pytest.raises(DamagedCheckpointError, match="names the attribute 'numel'"):
        read_description(tmp_path)
