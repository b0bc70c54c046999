"""Files over HTTP: as a form and as JSON, checked at the door, kept with their job and gone with it."""

import base64
import io
import json
from dataclasses import replace

import pytest

from megadit.serve.contract import VideoRequest
from megadit.serve.gateway.client import _in_json
from megadit.serve.gateway.jobs.runner import Runner
from megadit.serve.gateway.media import pack, unpack

from ..media import GIF, HOSTILE, MASK, MP4, OTHER_PNG, PNG
from .conftest import INFO

MODELS = frozenset({"text_to_video"})
VIDEO = {"prompt": "a red seven"}
ABLE = replace(INFO, conditionings=("first_frame", "last_frame", "keyframes", "edit", "inpaint"))


@pytest.fixture
def client(gateway, visit):
    gateway.servers.all[0].infos["text_to_video"] = ABLE
    yield visit()
    for reader in gateway._readers.values():
        reader.close()


@pytest.fixture
def given_of(gateway):
    """What the runner hands to Triton of the next job."""

    def given_of() -> dict:
        job = gateway.store.claim(MODELS)
        given = Runner._request(gateway.runner, job).sent()
        return {name: value for name, value in given.items() if value is not None}

    return given_of


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_form_and_json_bring_the_same_files(client, given_of):
    files = {"image": ("a.png", PNG, "image/png"), "keyframe[2]": ("b", OTHER_PNG), "keyframe[3]": ("c", PNG)}
    assert client.post("/v1/videos", data=VIDEO, files=files).status_code == 200
    body = VIDEO | {"image": f"data:image/png;base64,{text(PNG)}"}
    body["keyframe"] = [f"2:{text(OTHER_PNG)}", f"3:data:;base64,{text(PNG)}"]
    assert client.post("/v1/videos", json=body).status_code == 200
    expected = {"image": PNG, "keyframe": (b"2:" + OTHER_PNG, b"3:" + PNG)}
    assert given_of() == expected and given_of() == expected
    assert unpack(pack(expected)) == expected
    asked = VideoRequest(prompt="a", **expected).sent()
    assert [_in_json(name, asked[name]) for name in ("image", "keyframe")] == [
        text(PNG), [f"2:{text(OTHER_PNG)}", f"3:{text(PNG)}"]
    ]  # fmt: skip


def test_a_reference_is_what_the_other_fields_say(client, given_of):
    for reference, fields, name in (
        (PNG, VIDEO, "image"),
        (MP4, VIDEO, "video"),
        (MP4, VIDEO | {"keep_frames": 2}, "continue_video"),
        (MP4, VIDEO | {"strength": 0.5}, "input_video"),
        (MP4, {"instruction": "make it red"}, "video"),
    ):
        answer = client.post("/v1/videos", json=fields | {"input_reference": text(reference)})
        assert answer.status_code == 200 and given_of()[name] == reference, answer.text
    answer = client.post("/v1/videos", json=VIDEO | {"mask": text(MASK), "input_reference": text(GIF)})
    assert answer.status_code == 400 and "mask needs video" in answer.text, "a mask is of a video"


def test_files_are_kept_with_their_job_and_gone_with_its_end(client, gateway, tmp_path):
    def kept() -> list[str]:
        return sorted(path.suffix for path in (tmp_path / "videos").glob("video_*"))

    header = {"idempotency-key": "one"}
    body = VIDEO | {"image": text(PNG)}
    first = client.post("/v1/videos", json=body, headers=header).json()
    assert client.post("/v1/videos", json=body, headers=header).json()["id"] == first["id"] and kept() == [".given"]
    other = client.post("/v1/videos", json=VIDEO | {"image": text(OTHER_PNG)}, headers=header)
    assert other.status_code == 422 and kept() == [".given"], "another file is another request"
    assert gateway.results.sweep(gateway.store.has_result) == 0 and kept() == [".given"]
    second = client.post("/v1/videos", json=body).json()["id"]
    assert "PNG" not in json.dumps(client.get(f"/v1/videos/{second}").json()) and kept() == [".given"] * 2
    client.delete(f"/v1/videos/{second}")
    job = gateway.store.claim(MODELS)
    gateway.store.interrupt(job)
    gateway.clean_up()
    assert kept() == [".given"], "a job that is made again finds them"
    job = gateway.store.claim(MODELS)
    assert Runner._request(gateway.runner, job).image == PNG
    gateway.store.complete(job, gateway.results.put(job.id, b"made", "video/mp4"), seconds_to_live=1000)
    gateway.clean_up()
    assert kept() == [".mp4"] and gateway.store.ended_with_conditioning() == []


def test_a_job_whose_files_are_gone_fails(client, gateway):
    video_id = client.post("/v1/videos", json=VIDEO | {"image": text(PNG)}).json()["id"]
    job = gateway.store.claim(MODELS)
    gateway.results.remove(job.conditioning_name)
    assert Runner._request(gateway.runner, job) is None
    video = client.get(f"/v1/videos/{video_id}").json()
    assert (video["status"], video["error"]["code"]) == ("failed", "storage_failed")


def test_a_file_that_is_just_written_is_not_swept_away(gateway, monkeypatch):
    """Another gateway may be about to write its job down."""
    result = gateway.results.put_conditioning("video_" + "0" * 32, b"x")
    assert gateway.results.sweep(gateway.store.has_result) == 0
    monkeypatch.setattr("megadit.serve.gateway.store.results._SECONDS_OF_YOUTH", 0.0)
    assert gateway.results.sweep(gateway.store.has_result) == 1 and result.num_bytes == 1


def test_hostile_files_are_refused_at_the_door(client, gateway):
    for name, data in HOSTILE.items():
        for answer in (
            client.post("/v1/videos", data=VIDEO, files={"image": ("a.png", data)}),
            client.post("/v1/videos", json=VIDEO | {"input_reference": text(data)}),
        ):
            assert answer.status_code == 400, name
            assert "\n" not in answer.json()["error"]["message"] and not gateway.store.has_queued()
    refused = [{"image": "not base64!"}, {"image": "http://127.0.0.1/a.png"}, {"image": "data:image/png,abc"}]
    refused += [{"image": 5}, {"keyframe": [text(PNG)]}, {"keyframe": [f"5:{text(PNG)}"] * 17}, {"image": "é"}]
    refused += [{"image": text(PNG), "input_reference": text(PNG)}, {"mask": text(MASK)}, {"instruction": "redder"}]
    for fields in refused:
        answer = client.post("/v1/videos", json=VIDEO | fields)
        assert answer.status_code == 400 and len(answer.text) < 1000, fields
    assert client.post("/v1/videos", data=VIDEO, files={"prompt": ("a.txt", b"a")}).status_code == 400
    assert client.post("/v1/videos", json=VIDEO | {"image": text(PNG)}).status_code == 200, "the control"


def test_what_the_model_does_not_take_is_told(client, gateway):
    gateway.servers.all[0].infos["text_to_video"] = INFO
    answer = client.post("/v1/videos", json=VIDEO | {"last_image": text(PNG)})
    assert answer.status_code == 400 and "was not trained for last_frame (supported: none)" in answer.text


def test_uploads_have_limits_before_they_are_read(visit, new_key, gateway, client, monkeypatch):
    big = {"image": ("a.png", PNG + bytes(2 << 20))}

    assert client.post("/v1/videos", data=VIDEO, files=big).status_code == 200, "more than other bodies may have"
    small = visit(new_key(max_upload_bytes=1 << 20)[0])
    assert small.post("/v1/videos", data=VIDEO, files=big).status_code == 413
    full = visit(new_key(max_stored_bytes=1 << 20)[0])
    answer = full.post("/v1/videos", data=VIDEO, files=big)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
    assert full.post("/v1/videos", json=VIDEO | {"image": text(PNG)}).status_code == 200
    assert visit(anonymous=True).post("/v1/videos", data=VIDEO, files=big).status_code == 401
    assert client.get("/v1/videos", params={"limit": 1}).status_code == 200
    stranger = io.BytesIO(bytes(2 << 20))
    answer = client.post("/v1/videos", content=iter(stranger), headers={"content-type": "application/json"})
    assert answer.status_code in (400, 413), "who does not say how much it is sends no more than usual"
    monkeypatch.setattr(gateway.uploads, "_most_at_once", 0)
    assert client.post("/v1/videos", data=VIDEO, files=big).json()["error"]["code"] == "too_many_uploads"


def test_a_remix_changes_a_finished_video(client, gateway, visit, given_of):
    made = client.post("/v1/videos", json=VIDEO | {"seed": 9, "num_frames": 9, "image": text(PNG)}).json()["id"]
    body = {"prompt": "make it red"}
    assert client.post(f"/v1/videos/{made}/remix", json=body).status_code == 404, "it is not there yet"
    job = gateway.store.claim(MODELS)
    gateway.store.complete(job, gateway.results.put(job.id, MP4, "video/mp4"), seconds_to_live=1000)
    assert visit().post(f"/v1/videos/{made}/remix", json=body).status_code == 404, "somebody else's"
    remix = client.post(f"/v1/videos/{made}/remix", json=body).json()
    assert (remix["remixed_from_video_id"], remix["prompt"]) == (made, "make it red")
    assert (remix["settings"]["seed"], remix["settings"]["num_frames"]) == (9, 9)
    assert given_of() == {"video": MP4, "instruction": "make it red"}
    assert client.post(f"/v1/videos/{made}/remix", json={}).status_code == 400
    gateway.servers.all[0].infos["text_to_video"] = INFO
    refused = client.post(f"/v1/videos/{made}/remix", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "unsupported"


def test_the_description_shows_files(client):
    schemas = client.app.openapi()["components"]["schemas"]
    form, body = (schemas[name]["properties"] for name in ("CreateVideoForm", "CreateVideo"))
    assert form["image"]["format"] == "binary" and form["input_reference"]["format"] == "binary"
    assert "contentEncoding" in json.dumps(body["image"]) and "strength" in form
