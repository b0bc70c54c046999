"""A data set runs no code and reads no file but its own, whichever of Energon's files asks for it."""

import contextlib
import io
import json
import os
import random
import shutil
from collections import Counter

import pytest
import yaml
from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.metadataset import load_dataset

from megadit.models.shared.errors import UserError
from megadit.train.data.loader import build_train_loader
from megadit.train.data.packs.task_encoder import LatentTaskEncoder
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.dataset.energon_files import _FILES, MOST_SHARDS, check_blend, check_data_set
from tests.memory import within_memory
from tests.mutations import mutated

CRUDE = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}


def blend_of(path, **more) -> dict:
    splits = {"train": {"blend": [{"path": str(path), "weight": 1, **more}]}, "val": {"path": str(path)}}
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}


def command(marker) -> dict:
    return {"__module__": "subprocess", "__function__": "getoutput", "cmd": f"touch {marker}"}


def program(root, marker) -> None:
    """A file of the data set's own that leaves a mark as soon as it is read."""
    (root / ".nv-meta" / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nkeep = decode = lambda *_: True\n")


@pytest.fixture
def copy(dataset, tmp_path):
    """The small data set, to be changed."""
    return shutil.copytree(dataset, tmp_path / "copy")


def crude(root, marker, **more):
    program(root, marker)
    (root / ".nv-meta" / "crude.yaml").write_text(yaml.safe_dump({**CRUDE, **more}))
    return root


def blend(root, marker, content):
    path = root.parent / "blend.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def nested(root, marker, content):
    (root.parent / "inner.yaml").write_text(yaml.safe_dump(content))
    return blend(root, marker, blend_of("inner.yaml"))


TRAPS = {
    "a filter of parts": lambda root, marker: crude(root, marker, part_filter="evil.py:keep"),
    "a decoder": lambda root, marker: crude(root, marker, decoder=command(marker)),
    "subflavors": lambda root, marker: crude(root, marker, subflavors={"a": command(marker)}),
    "a blend": lambda root, marker: blend(root, marker, blend_of(root, subflavors={"a": command(marker)})),
    "a nested blend": lambda root, marker: nested(root, marker, blend_of(root, subflavors={"a": command(marker)})),
    "another configuration": lambda root, marker: blend(
        crude(root, marker, part_filter="evil.py:keep"), marker, blend_of(root)
    ),
}
"""Each gives a `data.path` that runs code where it is read as it is."""


def read(config) -> None:
    next(iter(build_train_loader(config, rank=0, world_size=1)))


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS)
def test_no_file_of_a_data_set_runs_code(trap, copy, make_config, tmp_path):
    path = trap(copy, tmp_path / "marker")
    with pytest.raises(UserError, match="which no data set needs; do not trust its source") as told:
        read(make_config(path=str(path)))
    assert "\n" not in str(told.value) and not (tmp_path / "marker").exists()


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS)
def test_the_traps_would_work(trap, copy, tmp_path):
    """The control: Energon by itself runs what the test above hides in its files."""
    path, settings = (
        trap(copy, tmp_path / "marker"),
        {"worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0)},
    )
    with contextlib.suppress(Exception):  # what comes back is not what Energon expects
        load_dataset(EPath(path)).get_datasets(
            dataset_config="crude.yaml",
            training=True,
            split_part="train",
            decoder=LatentTaskEncoder.decoder,
            **settings,
        )
    assert (tmp_path / "marker").exists()


def changed(name, **changes):
    """Writes values into a file of .nv-meta."""

    def change(root):
        file = root / ".nv-meta" / name
        values = yaml.safe_load(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**values, **changes}))
        return root

    return change


def as_text(name, text):
    def change(root):
        (root / ".nv-meta" / name).write_text(text)
        return root

    return change


def as_blend(content):
    return lambda root: blend(root, None, content(root) if callable(content) else content)


HOSTILE = {
    "a command": (as_blend(command("nothing")), "'__function__'"),
    "a nested command": (lambda root: nested(root, None, command("nothing")), "'__function__'"),
    "a filter by name": (changed("crude.yaml", part_filter=command("nothing")), "'part_filter'"),
    "flavours that are called": (changed("crude.yaml", subflavors=command("nothing")), "subflavors"),
    "a shard elsewhere": (changed("split.yaml", split_parts={"train": ["../other/train-000000.tar"]}), "split_parts"),
    "an absolute shard": (changed("split.yaml", split_parts={"train": ["/tmp/train-000000.tar"]}), "split_parts"),
    "a shard in a store": (
        changed("split.yaml", split_parts={"train": ["msc://x/a.tar"]}),
        "cannot be read by Energon",
    ),
    "a shard counted elsewhere": (changed(".info.json", shard_counts={"../a.tar": 3}), "no shard of this folder"),
    "endless names": (changed("split.yaml", split_parts={"train": ["a-{0..999999999}.tar"]}), "split_parts"),
    "names by names": (changed("split.yaml", exclude=["{0..9999}{0..9999}"]), "exclude"),
    "names within names": (changed("split.yaml", exclude=["{{a,b},{c,d}}"]), "exclude"),
    "endless samples": (changed(".info.json", shard_counts={"train-000000.tar": 10**12}), "at most 1,000,000,000"),
    "negative samples": (changed(".info.json", shard_counts={"train-000000.tar": -5}), "which no data set needs"),
    "half a sample": (changed(".info.json", shard_counts={"train-000000.tar": 0.5}), "no shard of this folder"),
    "no shards": (changed(".info.json", shard_counts={}), "cannot be read by Energon"),
    "no split": (changed("split.yaml", split_parts={"other": []}), "cannot be read by Energon"),
    "a program of samples": (changed("dataset.yaml", sample_loader="evil.py:load"), "'sample_loader'"),
    "a foreign sample type": (changed("dataset.yaml", sample_type={"__module__": "os", "__class__": "x"}), "'os'"),
    "deep": (as_text("crude.yaml", "[" * 5000), "lists and objects within one another"),
    "deep JSON": (as_text(".info.json", '{"shard_counts":' * 5000), "lists and objects within one another"),
    "aliases": (as_text("split.yaml", "a: &a [1]\nb: *a\n"), "aliases"),
    "tags": (as_text("split.yaml", "!!python/object/apply:os.getcwd []\n"), "not valid YAML"),
    "no YAML": (as_text("split.yaml", "a: [1, 2\n"), "not valid YAML"),
    "another's YAML": (as_text("split.yaml", '? "a\\\n  b"\n: 1\n'), "split.yaml"),
    "text": (as_text("crude.yaml", "CrudeWebdataset"), "not names and values"),
    "a list of splits": (as_blend({"splits": []}), "not names and values"),
    "a blend of itself": (as_blend(blend_of("blend.yaml")), "in a cycle"),
    "a join": (as_blend(lambda root: blend_of(root) | {"joiner": "x"}), "'joiner'"),
    "files beside": (as_blend(lambda root: blend_of(root, aux={"a": "filesystem:///etc"})), "'aux'"),
    "another configuration": (as_blend(lambda root: blend_of(root, dataset_config="../x.yaml")), "'dataset_config'"),
    "another split": (as_blend(lambda root: blend_of(root, split_config="../x.yaml")), "'split_config'"),
    "a kind of place": (as_blend(blend_of("file:///etc")), "give a folder, or msc://PROFILE/PATH"),
    "a weight": (as_blend(lambda root: blend_of(root, weight=float("inf"))), "which no data set needs"),
}


@pytest.mark.parametrize(("change", "complaint"), HOSTILE.values(), ids=HOSTILE)
def test_whatever_is_not_listed_is_refused(change, complaint, copy, make_config):
    path = change(copy)
    with pytest.raises(UserError, match=complaint) as told:
        read(make_config(path=str(path)))
    assert "\n" not in str(told.value) and len(str(told.value)) < 500


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_fingerprint", "../../../elsewhere"),
        ("text_encoder_fingerprint", "a/b"),
        ("sigma_data", "1"),
        ("sigma_data", -1),
        ("latent_channels", True),
        ("text_width", -5),
        ("num_samples", {"train": 1.5}),
        ("num_samples", []),
        ("tokenizer_fingerprint", None),
    ],
)
def test_the_description_of_a_data_set_holds_what_it_can(copy, name, value):
    values = json.loads((copy / "megadit.json").read_text())
    (copy / "megadit.json").write_text(json.dumps({**values, name: value}))
    with pytest.raises(UserError, match=f"is not the description of a data set .its {name}."):
        DatasetInfo.read(copy)


def test_what_energon_prepares_passes(copy, tmp_path):
    """Ranges of shards, exclusions, weights, subsets and flavours are what its own tools write and its guide shows."""
    split = {"split_parts": {"train": ["train-{000000..000004}.tar"], "val": []}, "exclude": ["train-000001.tar/a"]}
    (copy / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump(split))
    check_data_set(copy)
    more = {"subset": {"range": ["0%", "50%"]}, "subflavors": {"a": [1, {"b": None}]}, "split_part": "train",
            "subflavor": "a", "split_config": "split.yaml", "dataset_config": "crude.yaml"}  # fmt: skip
    (tmp_path / "inner.yaml").write_text(yaml.safe_dump(blend_of("copy", **more)))
    old = {
        "datasets": [{"path": "inner.yaml", "weight": 0.5}, {"path": str(copy), "shuffle_over_epochs_multiplier": 2}]
    }
    path = tmp_path / "outer.yaml"
    path.write_text(yaml.safe_dump({**CRUDE, "__class__": "Metadataset", "splits": {"train": old}}))
    check_blend(path)


def test_most_shards_may_stand_in_one_pattern(copy):
    for last, is_allowed in ((MOST_SHARDS - 1, True), (MOST_SHARDS, False)):
        changed("split.yaml", split_parts={"train": [f"a-{{0..{last}}}.tar"]})(copy)
        with contextlib.nullcontext() if is_allowed else pytest.raises(UserError, match="split_parts"):
            check_data_set(copy)


@within_memory()
def test_mutated_files_run_nothing_and_end_in_one_line(new_writer, toy, make_config, tmp_path, request):
    """`--cases N` files of Energon's, each changed by chance, are read as a data set, or refused as one."""
    with new_writer() as writer:
        for index in range(8):
            toy.add_sample(writer, "train", index)
    root, found, marker = writer.root, Counter(), tmp_path / "marker"
    program(root, marker)
    (tmp_path / "inner.yaml").write_text(yaml.safe_dump(blend_of(root, subflavors={"a": "b"})))
    outer = tmp_path / "outer.yaml"
    outer.write_text(yaml.safe_dump(blend_of("inner.yaml")))
    names = (*_FILES, "../megadit.json", "../../inner.yaml", "../../outer.yaml")
    files = [path for name in names if (path := root / ".nv-meta" / name).is_file()]
    for case in range(request.config.getoption("--cases") or 60):
        draw = random.Random(case)
        file, path = draw.choice(files), draw.choice([root, outer])
        whole = file.read_bytes()
        file.write_bytes(mutated(whole, draw))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                read(make_config(path=str(path)))
            found["read"] += 1
        except UserError as error:
            assert "\n" not in str(error), (case, file)
            found[file.name] += 1
        finally:
            file.write_bytes(whole)
    print(dict(found))
    assert found["read"] and found.total() > found["read"] and not marker.exists()


def test_a_blend_in_a_store_names_nothing_on_this_machine(s3, dataset):
    import fsspec

    url = f"{s3()}/sets/blend.yaml"
    with fsspec.open(url, "w") as file:
        yaml.safe_dump(blend_of(dataset), file)
    assert os.path.isabs(dataset)
    with pytest.raises(UserError, match="lies in a store and names .* on this machine"):
        DatasetInfo.read(url)
