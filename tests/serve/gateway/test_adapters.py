"""Adapters over HTTP: brought, listed, deleted, found by their names, and nobody else's."""

import io
import json
import os
import pickle
import shutil
import stat
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from anyio import from_thread, to_thread

from megadit.infer.commands.check_adapter import problem_of
from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.files import read_adapter, write_adapter
from megadit.models.shared.errors import UserError
from megadit.serve.gateway import adapters
from megadit.serve.gateway.adapters import Adapters, StoredAdapter
from megadit.serve.gateway.jobs.runner import Runner
from megadit.serve.repository.build import build_repository, service_info
from megadit.serve.repository.model_config import Scheduling
from tests.infer.conftest import make_adapter

from ..test_triton import frames_of
from .conftest import INFO

MODELS = frozenset({"text_to_video"})
VIDEO = {"prompt": "a red seven"}


@pytest.fixture(scope="module")
def files(bundle_dir, tmp_path_factory):
    """Bytes of two adapters of the bundle, and of one of other weights."""
    folder = tmp_path_factory.mktemp("files")
    made = [Path(make_adapter(folder / f"{seed}.safetensors", bundle_dir, seed)).read_bytes() for seed in (1, 2)]
    head, tail = made[0].split(b'\\"fingerprint\\": \\"', 1)
    return *made, head + b'\\"fingerprint\\": \\"' + b"0" * 16 + tail[16:]


@pytest.fixture
def folder(bundle_dir, tmp_path):
    folder = tmp_path / "adapters"
    folder.mkdir()
    make_adapter(folder / "house", bundle_dir, 9)
    return folder


@pytest.fixture
def keep_checked(gateway, folder, bundle_dir):
    """The gateway keeps adapters in the folder."""
    bundle = Bundle.open(bundle_dir)
    info = replace(INFO, adapters=service_info(bundle, bundle.defaults, None, adapters=folder).adapters)
    gateway.servers.all[0].infos["text_to_video"] = info
    gateway.adapters = Adapters(str(folder))


@pytest.fixture
def look_here(monkeypatch):
    """look_here(): from now on uploads are looked at in this process, which imports nothing anew."""

    def look(command, *, input, **_):
        return SimpleNamespace(stdout=json.dumps({"error": problem_of(Path(command[-1]), **json.loads(input))}))

    here = SimpleNamespace(run=look, TimeoutExpired=subprocess.TimeoutExpired)
    return lambda: monkeypatch.setattr(adapters, "subprocess", here)


@pytest.fixture
def keep(keep_checked, look_here):
    """The gateway keeps adapters in the folder, and looks at them in this process."""
    look_here()


def put(client, name: str, data: bytes):
    return client.post("/v1/adapters", data={"name": name}, files={"file": ("a.safetensors", data)})


def code(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def names(client) -> list[tuple[str, str]]:
    return [(each["id"], each["owned_by"]) for each in client.get("/v1/adapters").json()["data"]]


def test_a_key_brings_lists_uses_and_deletes_its_own(keep, gateway, visit, folder, files):
    mine, other = visit(), visit()
    assert names(mine) == [("house", "service")]
    made = put(mine, "zog", files[0])
    assert made.status_code == 200 and made.json()["bytes"] == len(files[0])
    assert code(put(mine, "zog", files[1])) == (409, "adapter_exists")
    assert put(other, "zog", files[1]).status_code == 200, "another key's name is another name"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("zog.*")} == {0o600}
    assert names(mine) == [("house", "service"), ("zog", "key")]
    stored = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(stored) == 2 and {(folder / name).read_bytes() for name in stored} == set(files[:2])

    uses = [{"name": "zog", "scale": 0.5}, {"name": "house"}]
    video = mine.post("/v1/videos", json=VIDEO | {"adapters": uses}).json()
    assert video["settings"]["adapters"] == [{"name": "zog", "scale": 0.5}, {"name": "house", "scale": 1.0}]
    form = mine.post("/v1/videos", data=VIDEO | {"adapters": '[{"name": "zog"}]'}, files={})
    assert form.json()["settings"]["adapters"] == [{"name": "zog", "scale": 1.0}], form.text
    request = Runner._request(gateway.runner, gateway.store.claim(MODELS))
    own, house = request.adapter_scales()
    assert house == "house" and (folder / f"{own}.safetensors").read_bytes() == files[0]
    assert hash(request) and request.adapter_scales()[own] == 0.5
    plain = mine.post("/v1/videos", json=VIDEO).json()
    assert "adapters" not in plain["settings"]

    stranger = next(name.removesuffix(".safetensors") for name in stored if not name.startswith(own))
    for name in ("nowhere", stranger, own, "../zog", "/etc/passwd", ".lock"):
        answer = mine.post("/v1/videos", json=VIDEO | {"adapters": [{"name": name}]})
        assert answer.status_code == 400 and len(answer.text) < 400, name
    assert code(mine.post("/v1/videos", json=VIDEO | {"adapters": [{"name": "nowhere"}]})) == (400, "adapter_not_found")
    for bad in (
        [{"name": "zog", "scale": "NaN"}],
        [{"name": "zog"}] * 2,
        "zog",
        [{"name": "zog", "more": 1}],
        "[",
        [{}],
    ):
        assert mine.post("/v1/videos", json=VIDEO | {"adapters": bad}).status_code == 400, bad

    assert code(mine.delete("/v1/adapters/house")) == (404, "not_found"), "the service's own stays"
    assert code(mine.delete(f"/v1/adapters/{stranger}")) == (404, "not_found")
    assert mine.delete("/v1/adapters/zog").json() == {"id": "zog", "object": "adapter.deleted", "deleted": True}
    assert names(mine) == [("house", "service")] and names(other) == [("house", "service"), ("zog", "key")]


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_keys_own_is_for_one_of_two_networks(keep, gateway, visit, files, folder):
    """Where it says of which weights it is, it may be of either's."""
    known = gateway.servers.all[0].infos
    about = known["text_to_video"].adapters
    known["text_to_video"] = replace(known["text_to_video"], adapters=replace(about, base=f"{'0' * 16} {about.base}"))
    client = visit()
    assert put(client, "zog", files[2]).status_code == 200
    uses = [{"name": "low=zog", "scale": 0.5}, {"name": "high=house"}]
    video = client.post("/v1/videos", json=VIDEO | {"adapters": uses}).json()
    assert [kind["name"] for kind in video["settings"]["adapters"]] == ["low=zog", "high=house"]
    low, high = Runner._request(gateway.runner, gateway.store.claim(MODELS)).adapter_scales()
    assert high == "high=house" and (folder / f"{low.removeprefix('low=')}.safetensors").read_bytes() == files[2]


def test_a_keys_own_adapter_is_not_called_as_a_student_of_its_name(keep, gateway, visit, files):
    known = gateway.servers.all[0].infos
    info = known["text_to_video"]
    few = {"num_steps": 2, "guidance": 1.0, "sigmas": [20.0, 2.0]}
    known["text_to_video"] = replace(info, adapters=replace(info.adapters, defaults={"house": few}))
    mine, other = visit(), visit()
    assert put(mine, "house", files[0]).status_code == 200
    steps = {}
    for client in (mine, other):
        made = client.post("/v1/videos", json=VIDEO | {"adapters": [{"name": "house"}]})
        assert made.status_code == 200, made.text
        steps[client] = made.json()["settings"]["num_steps"]
    assert (steps[mine], steps[other]) == (INFO.defaults["num_steps"], 2)


def test_what_is_no_adapter_is_refused_and_leaves_nothing(
    keep_checked, look_here, visit, folder, files, monkeypatch, tmp_path
):
    """The first in a process of its own, as all are."""
    monkeypatch.chdir(tmp_path)
    client, before = visit(), sorted(folder.iterdir())
    large = int.to_bytes(1 << 40, 8, "little") + b"{}"
    hostile = {"pickle": pickle.dumps(Evil()), "length": large, "cut": files[0][:-9]}
    for name, data in hostile.items():
        answer = put(client, name, data)
        look_here()
        assert code(answer) == (400, "invalid_adapter"), (name, answer.text)
        message = answer.json()["error"]["message"]
        assert "\n" not in message and str(folder) not in message and len(message) <= 500
    other = put(client, "other", files[2])
    assert other.json()["error"]["message"].startswith("the adapter was trained with other weights (0000000000000000)")
    for name in ("../zog", "a/b", "", ".zog", "x" * 101, "zog.0123456789ab.0123456789abcdef", "é"):
        assert code(put(client, name, files[0])) == (400, "invalid_request"), name
    assert client.post("/v1/adapters", json={"name": "zog"}).status_code == 415
    assert client.post("/v1/adapters", data={"name": "zog"}, files={"other": b"a"}).status_code == 400
    assert visit(anonymous=True).get("/v1/adapters").status_code == 401
    assert put(visit(anonymous=True), "zog", files[0]).status_code == 401
    left = [path for path in folder.iterdir() if path.name != ".lock"]
    assert sorted(left) == before and not (tmp_path / "ran").exists()


def test_an_adapter_that_asks_for_what_it_may_not_is_refused_at_its_upload(bundle_dir, folder, files, tmp_path):
    """One of megadit's own form, whose header would have the service open a path, or work without end."""
    bundle, path = Bundle.open(bundle_dir), tmp_path / "a.safetensors"
    info = service_info(bundle, bundle.defaults, None, adapters=folder).adapters
    path.write_bytes(files[0])
    adapter = read_adapter(path)
    assert problem_of(path, info.network, info.base) is None
    for asked in (
        *({"autoguidance": "/etc/shadow"}, {"negative_prompt": "grey"}, {"noise_scale": 1e38}, {"shift": 1e308}),
        *({"sigmas": [1.0] * 7000}, {"sigmas": [1.0, 2.0]}, {"num_frames": 10**6}, {"cache_budget": 0.5}, {"zog": 1}),
    ):
        write_adapter(path, replace(adapter, defaults=asked))
        problem, (name,) = problem_of(path, info.network, info.base), asked
        assert name in problem and len(problem) < 1000 and "\n" not in problem


def test_who_waits_for_an_adapter_to_be_looked_at_holds_no_thread_of_others(keep, gateway, visit, monkeypatch):
    held = []

    def note(key, name, file, info):
        held.append(from_thread.run_sync(lambda: to_thread.current_default_thread_limiter().borrowed_tokens))
        return StoredAdapter(name=name, stored=name, key_id=key.id, num_bytes=1, created_at=0)

    monkeypatch.setattr(gateway.adapters, "put", note)
    assert put(visit(), "zog", b"a").status_code == 200 and held == [0]


def test_a_key_keeps_so_many_and_so_much(keep, gateway, visit, new_key, files):
    few, small = visit(new_key(max_adapters=1)[0]), visit(new_key(max_adapter_bytes=len(files[0]))[0])
    assert put(few, "a", files[0]).status_code == 200 and code(put(few, "b", files[1])) == (429, "insufficient_quota")
    assert put(small, "a", files[0]).status_code == 200
    small.delete("/v1/adapters/a")
    assert code(put(small, "b", files[0] + b"x")) == (429, "insufficient_quota"), "before it is looked at"
    large = io.BytesIO(bytes(2 << 20))
    answer = visit(new_key(max_upload_bytes=1 << 20)[0]).post(
        "/v1/adapters", data={"name": "zog"}, files={"file": ("a", large)}
    )
    assert answer.status_code == 413


def test_what_nobody_may_use_is_swept_away(keep, gateway, visit, new_key, folder, files):
    text, key = new_key()
    assert put(visit(text), "zog", files[0]).status_code == 200
    half = folder / ".upload.zog.safetensors"
    half.write_bytes(b"half")
    gateway.adapters.sweep(gateway._is_revoked)
    assert len(list(folder.glob("zog.*"))) == 1 and half.exists(), "it may be on its way"
    gateway.keys.revoke(key.id)
    os.utime(half, (time.time() - 3600,) * 2)
    gateway.adapters.sweep(gateway._is_revoked)
    assert not list(folder.glob("zog.*")) and not half.exists() and (folder / "house").is_dir()


def test_a_gateway_without_a_folder_passes_names_on(gateway, visit, files, folder, bundle_dir, tmp_path):
    client = visit()
    answer = client.post("/v1/videos", json=VIDEO | {"adapters": [{"name": "house"}]})
    assert code(answer) == (400, "adapter_not_found") and names(client) == []
    assert code(put(client, "zog", files[0])) == (400, "unsupported")
    bundle = Bundle.open(bundle_dir)
    (folder / "zog.0123456789ab.0123456789abcdef.safetensors").write_bytes(files[0])
    info = service_info(bundle, bundle.defaults, None, adapters=folder)
    assert info.adapters.names == ("house",), "what a key brought is not told to others"
    gateway.servers.all[0].infos["text_to_video"] = replace(INFO, adapters=info.adapters)
    assert client.post("/v1/videos", json=VIDEO | {"adapters": [{"name": "house"}]}).status_code == 200
    with pytest.raises(UserError, match="is not a folder"):
        Adapters(str(tmp_path / "nowhere"))


# ------------------------------------------------------------------------------------------------ a real tritonserver


@pytest.mark.slow
def test_videos_with_adapters_of_keys(
    tritonserver, bundle_dir, folder, files, tmp_path, start_gateway, eventually, kept_running
):
    """Through the gateway and Triton: loaded, used, deleted under a waiting job, 16 clients at once."""
    from concurrent.futures import ThreadPoolExecutor

    from megadit.serve.launch.local_server import LocalServer

    repository = build_repository(
        bundle_dir,
        tmp_path / "models",
        scheduling=Scheduling(device="cpu"),
        adapters=folder,
        limits={"max_work": 16 * 24 * 5 * 5000},
    )
    with kept_running(LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3, hang_seconds=1e6)) as triton:
        gateway = start_gateway(f"grpc://{triton.grpc_url}", arguments=(f"--adapters={folder}", "--slots=4"))
        client = gateway.client()

        def make(name: str | None, seed: int = 5, client=client, **more) -> dict:
            uses = {"adapters": [{"name": name, "scale": 0.8}]} if name else {}
            answer = client.post("/v1/videos", json=VIDEO | {"seed": seed} | uses | more)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def ended(video: dict) -> dict:
            states = ("completed", "failed")
            eventually(lambda: client.get(f"/v1/videos/{video['id']}").json()["status"] in states)
            return client.get(f"/v1/videos/{video['id']}").json()

        def content(video: dict) -> bytes:
            assert ended(video)["status"] == "completed", ended(video)
            return client.get(f"/v1/videos/{video['id']}/content").content

        base = content(make(None))
        for name, data in zip(("one", "two"), files, strict=False):
            assert put(client, name, data).status_code == 200
        one, two, again, after = (content(make(name)) for name in ("one", "two", "one", None))
        assert one == again and len({base, one, two}) == 3 and after == base
        with ThreadPoolExecutor(16) as threads:
            wanted = [("one", None, "two", "house")[number % 4] for number in range(24)]
            made = list(threads.map(lambda name: ended(make(name)), wanted))
        assert [video["status"] for video in made] == ["completed"] * 24, "none is lost"

        busy = [make(None, num_steps=2000) for _ in range(4)]
        waiting, control = make("one"), make("two")
        client.delete("/v1/adapters/one")
        for video in busy:
            client.delete(f"/v1/videos/{video['id']}")
        failed = ended(waiting)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "adapter_not_found"), failed
        assert ended(control)["status"] == "completed", "and fails alone"
        assert put(client, "one", files[1]).status_code == 200
        again, other = (frames_of(content(make(name))) for name in ("one", "two"))
        assert np.array_equal(again, other), "a new file of the same name is a new adapter"
    shutil.rmtree(folder)
