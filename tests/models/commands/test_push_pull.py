"""Bundles come back from a store as they were sent, or not at all."""

import json

import fsspec
import pytest
import torch

from megadit.models.bundle import Bundle, update_manifest
from megadit.models.bundle_writer import write_bundle
from megadit.models.commands.push_pull import pull, pull_bundle, push, push_bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer

from ..storage.hub_server import TOKEN, serve_hub

CONFIG = DiTConfig(num_layers=1, hidden_size=24, num_attention_heads=2, in_channels=24, crossattn_emb_size=16)


@pytest.fixture
def bundle(tmp_path):
    write_bundle(
        tmp_path / "bundle",
        config=CONFIG,
        state_dict=DiT(CONFIG).state_dict(),
        tokenizer=HaarTokenizer(temporal_compression=2, spatial_compression=2),
        text_encoder=HashedWordEncoder(dim=16),
        defaults=SamplingSettings(num_steps=4, guidance=3.0, num_frames=3, height=8, width=8, fps=8.0),
    )
    return tmp_path / "bundle"


@pytest.fixture
def url(request):
    name = f"memory://{request.node.name}/models/tiny"
    yield name
    store, root = fsspec.core.url_to_fs(name)
    if store.exists(root):
        store.rm(root, recursive=True)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub that `hf://` leads to."""
    library = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    constants = pytest.importorskip("huggingface_hub.constants")
    with serve_hub() as (hub, address):
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": address,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,  # large files by git's own protocol
            "HF_HUB_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        library.close_session()
        yield hub
        library.close_session()


def contents(directory):
    return {file.relative_to(directory): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_there_and_back(bundle, url, tmp_path, capsys):
    assert push([str(bundle), url]) == 0
    assert pull([url, str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.splitlines() == [url, str(tmp_path / "again")]
    before, after = Bundle.open(bundle), Bundle.open(tmp_path / "again", verify=True)
    assert before.manifest == after.manifest
    tensors = after.load_dit().state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.load_dit().state_dict().items())


def test_files_have_a_url_too(bundle, tmp_path):
    push_bundle(bundle, f"file://{tmp_path}/store/tiny")
    pull_bundle(f"file://{tmp_path}/store/tiny", tmp_path / "again")
    assert Bundle.open(tmp_path / "again", verify=True).config == CONFIG


def test_objects_of_s3_too(bundle, s3, tmp_path):
    url = s3()
    push_bundle(bundle, f"{url}/models/tiny")
    pull_bundle(f"{url}/models/tiny", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(bundle)


def test_a_hub_gives_back_what_it_was_sent(bundle, hub, tmp_path, capsys):
    assert push([str(bundle), "hf://somebody/tiny"]) == 0
    assert pull(["hf://somebody/tiny", str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.splitlines() == ["hf://somebody/tiny", str(tmp_path / "again")]
    assert contents(tmp_path / "again") == contents(bundle), "and nothing beside it"
    assert len(hub.commits["somebody/tiny"]) == 2, "an empty model, then all of the bundle at once"
    assert list(hub.large.values()) == [(bundle / "transformer/model.safetensors").read_bytes()]

    update_manifest(bundle, training={"step": 7})
    push_bundle(bundle, "hf://somebody/tiny")
    pull_bundle("hf://somebody/tiny", tmp_path / "again")
    assert Bundle.open(tmp_path / "again").manifest["training"] == {"step": 7}


def test_a_hub_that_refuses_has_no_half_bundle(bundle, hub, tmp_path, monkeypatch):
    hub.is_full = True
    with pytest.raises(UserError, match="^hf://somebody/tiny cannot be written to: .*model.safetensors"):
        push_bundle(bundle, "hf://somebody/tiny")
    with pytest.raises(UserError, match="^hf://somebody/tiny is neither a bundle nor an adapter: it has no "):
        pull_bundle("hf://somebody/tiny", tmp_path / "again")
    with pytest.raises(UserError, match="^hf://somebody/other cannot be read: .*Repository Not Found"):
        pull_bundle("hf://somebody/other", tmp_path / "again")
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(UserError, match="^hf://somebody/tiny cannot be written to: .*401"):
        push_bundle(bundle, "hf://somebody/tiny")
    assert not (tmp_path / "again").exists()


def test_a_copy_that_was_cut_short_is_no_bundle(bundle, url, tmp_path, monkeypatch):
    store, root = fsspec.core.url_to_fs(url)
    put = type(store).put_file
    sent = []

    def fail_late(self, source, target, **options):
        sent.append(target)
        if len(sent) > 2:
            raise OSError("no space left")
        return put(self, source, target, **options)

    monkeypatch.setattr(type(store), "put_file", fail_late)
    with pytest.raises(UserError, match=r"cannot be written to: no space left"):
        push_bundle(bundle, url)
    assert len(sent) == 3 and not any(name.endswith("megadit.json") for name in sent), "the manifest goes last"
    with pytest.raises(UserError, match=r"is neither a bundle nor an adapter: it has no megadit.json"):
        pull_bundle(url, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_damage_on_the_way_is_noticed(bundle, url, tmp_path):
    push_bundle(bundle, url)
    store, root = fsspec.core.url_to_fs(url)
    data = bytearray(store.cat_file(f"{root}/transformer/model.safetensors"))
    data[-1] ^= 1
    store.pipe_file(f"{root}/transformer/model.safetensors", bytes(data))
    with pytest.raises(UserError, match="differs from its checksum"):
        pull_bundle(url, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["../../trap", "/tmp/trap", "a/../../trap"])
def test_a_manifest_writes_nowhere_else(bundle, url, tmp_path, name):
    push_bundle(bundle, url)
    store, root = fsspec.core.url_to_fs(url)
    manifest = json.loads(store.cat_file(f"{root}/megadit.json"))
    manifest["files"][name] = {"bytes": 1, "sha256": "0"}
    store.pipe_file(f"{root}/megadit.json", json.dumps(manifest).encode())
    with pytest.raises(UserError, match=f"'{name}' is not the name of a file in .*: it leads elsewhere"):
        pull_bundle(url, tmp_path / "a/b/pulled")
    assert not list(tmp_path.rglob("trap")) and not (tmp_path / "a/b/pulled").exists()


def test_what_the_manifest_does_not_list_is_not_taken_along(bundle, url, tmp_path):
    push_bundle(bundle, url)
    store, root = fsspec.core.url_to_fs(url)
    store.pipe_file(f"{root}/text_encoder/tokenizer.py", b"import os")
    pull_bundle(url, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(bundle)


def test_a_hub_too_gives_only_what_the_manifest_lists(bundle, hub, tmp_path):
    (bundle / "notes.txt").write_text("A card.")
    push_bundle(bundle, "hf://somebody/tiny")
    pull_bundle("hf://somebody/tiny", tmp_path / "again")
    (bundle / "notes.txt").unlink()
    assert contents(tmp_path / "again") == contents(bundle)


def test_mistakes_are_told_in_one_line(bundle, tmp_path):
    with pytest.raises(UserError, match="'somewhere' is no URL"):
        push_bundle(bundle, "somewhere")
    with pytest.raises(UserError, match="nowhere://x cannot be reached"):
        push_bundle(bundle, "nowhere://x")
    with pytest.raises(UserError, match="is not a bundle"):
        push_bundle(tmp_path, "memory://x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("do not lose")
    with pytest.raises(UserError, match="would be replaced"):
        pull_bundle("memory://x", tmp_path / "mine")
    with pytest.raises(UserError, match="hf://nobody/nothing cannot be read"):
        pull_bundle("hf://nobody/nothing", tmp_path / "out")
