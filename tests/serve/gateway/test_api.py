"""The HTTP side in this process, on a real store, with no server behind it: jobs stay in the queue."""

import base64
import hmac
import json
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from sqlalchemy.exc import OperationalError

VIDEO = {"prompt": "a red seven moving left"}


def test_a_video_is_taken_with_everything_that_decides_it(visit):
    answer = visit().post("/v1/videos", json=VIDEO | {"size": "32x16", "seconds": "1", "seed": 7, "guidance": 1.5})
    assert answer.status_code == 200
    video = answer.json()
    assert (video["status"], video["progress"], video["object"]) == ("queued", 0, "video")
    assert (video["size"], video["seconds"]) == ("32x16", "1")
    settings = video["settings"]
    assert (settings["seed"], settings["guidance"], settings["num_frames"], settings["sampler"]) == (7, 1.5, 8, "euler")


def test_a_prompt_that_is_far_too_long_is_taken_with_a_warning(visit, gateway):
    infos, client = gateway.servers.all[0].infos, visit()
    infos["text_to_video"] = replace(infos["text_to_video"], longest_caption=6)
    long, short = (client.post("/v1/videos", json={"prompt": prompt}).json() for prompt in ("a " * 13, "a " * 12))
    assert long["status"] == "queued" and "a prompt has 13 words" in long["warning"] and short["warning"] is None


def test_health_that_is_well_leaves_no_line_in_the_log(visit, caplog):
    """It is asked for every few seconds; what is not well is told."""
    caplog.set_level("INFO", logger="megadit.gateway")
    client = visit()
    statuses = {path: client.get(path).status_code for path in ("/health/live", "/health/ready", "/v1/models")}
    assert statuses == {"/health/live": 200, "/health/ready": 503, "/v1/models": 200}
    told = [record.fields["route"] for record in caplog.records if record.getMessage() == "request"]
    assert told == ["/health/ready", "/v1/models"]


def test_the_interface_is_described_as_it_is(visit):
    described = visit().get("/openapi.json").json()
    assert "GET /v1/models" in described["info"]["description"] and "OpenAI" not in described["info"]["description"]
    assert "/v1/videos/{video_id}/content" in described["paths"]


def test_forms_say_the_same_as_json(visit):
    client = visit()
    body = VIDEO | {"size": "32x16", "seconds": "1", "seed": "7"}
    videos = [
        client.post("/v1/videos", json=body).json(),
        client.post("/v1/videos", data=body).json(),
        client.post("/v1/videos", files={name: (None, value) for name, value in body.items()}).json(),
    ]
    assert all(video["settings"] == videos[0]["settings"] for video in videos)


def test_settings_have_the_names_of_other_programs(visit):
    client = visit()
    for names in (
        ("guidance_scale", "image_guidance_scale", "num_inference_steps"),
        ("text_cfg_scale", "image_cfg_scale", "steps"),
    ):
        body = VIDEO | dict(zip(names, (7.5, 1.2, 3), strict=True))
        for how in ({"json": body}, {"data": body}):
            settings = client.post("/v1/videos", **how).json()["settings"]
            assert [settings[name] for name in ("guidance", "image_guidance", "num_steps")] == [7.5, 1.2, 3], names
        answer = client.post("/v1/videos", json=body | {"guidance": 2.0})
        assert answer.status_code == 400 and f"{names[0]} and guidance are names" in answer.json()["error"]["message"]


def test_get_list_and_delete(visit):
    client = visit()
    ids = [client.post("/v1/videos", json=VIDEO | {"seed": seed}).json()["id"] for seed in range(5)]
    assert client.get(f"/v1/videos/{ids[0]}").json()["id"] == ids[0]
    page = client.get("/v1/videos", params={"limit": 2}).json()
    assert [video["id"] for video in page["data"]] == [ids[4], ids[3]] and page["has_more"]
    rest = client.get("/v1/videos", params={"after": page["last_id"]}).json()
    assert [video["id"] for video in rest["data"]] == [ids[2], ids[1], ids[0]] and not rest["has_more"]
    assert client.get("/v1/videos", params={"order": "asc"}).json()["first_id"] == ids[0]
    assert client.delete(f"/v1/videos/{ids[0]}").json() == {"id": ids[0], "object": "video.deleted", "deleted": True}
    assert client.get(f"/v1/videos/{ids[0]}").status_code == 404
    assert client.delete(f"/v1/videos/{ids[0]}").status_code == 404


def test_a_key_sees_only_its_own(visit):
    mine, theirs = visit(), visit()
    video_id = mine.post("/v1/videos", json=VIDEO).json()["id"]
    for path in (video_id, f"{video_id}/content", f"{video_id}/events"):
        answer = theirs.get(f"/v1/videos/{path}")
        assert answer.status_code == 404 and "there is no video" in answer.json()["error"]["message"]
    assert theirs.delete(f"/v1/videos/{video_id}").status_code == 404
    assert theirs.get("/v1/videos").json()["data"] == []
    assert theirs.get("/v1/videos", params={"after": video_id}).status_code == 404
    assert mine.get(f"/v1/videos/{video_id}").status_code == 200


def test_without_a_key_nothing_but_health_answers(visit, gateway, new_key):
    client, text = visit(anonymous=True), new_key()[0]
    revoked, key = new_key()
    gateway.keys.revoke(key.id)
    wrong = [
        "",
        "Bearer",
        "Bearer x",
        f"Bearer {text}x",
        f"Basic {text}",
        f"Bearer {revoked}",
        f"Bearer {text[:-1]}{'A' if text[-1] != 'A' else 'B'}",
    ]
    described = client.app.openapi()["paths"]
    paths = {path: {method.upper() for method in methods} for path, methods in described.items()}
    assert len(paths) >= 8
    for path, methods in (paths | {"/docs": {"GET"}, "/openapi.json": {"GET"}}).items():
        for method in methods:
            for header in wrong:
                answer = client.request(method, path.replace("{video_id}", "x"), headers={"authorization": header})
                assert (answer.status_code in (200, 503)) if path.startswith("/health") else answer.status_code == 401
    assert client.get("/v1/videos", headers={"authorization": f"Bearer {text}"}).status_code == 200


def test_the_documentation_opens_in_a_browser_with_the_key_as_password(visit, new_key):
    client = visit(anonymous=True)
    login = base64.b64encode(f"anybody:{new_key()[0]}".encode()).decode()
    assert client.get("/docs").headers["www-authenticate"].startswith("Basic")
    for path in ("/docs", "/openapi.json"):
        assert client.get(path, headers={"authorization": f"Basic {login}"}).status_code == 200
    poor = base64.b64encode(f"anybody:{new_key(requests_per_minute=1)[0]}".encode()).decode()
    asked = [client.get("/docs", headers={"authorization": f"Basic {poor}"}).status_code for _ in range(3)]
    assert asked[0] == 200 and asked[-1] == 429, "it counts as every request does"
    refused = client.get("/v1/videos", headers={"authorization": f"Basic {login}"})
    assert refused.status_code == 401, "a browser that kept the password makes no videos for other pages"


def test_every_key_check_does_the_same_work(gateway, new_key, monkeypatch):
    """One hash and one comparison of hashes, however wrong the key is: its time tells nothing."""
    text, key = new_key()
    revoked, other = new_key()
    gateway.keys.revoke(other.id)
    compared = []

    def compare(left, right):
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    wrong = ["", "x", "mdk_", text[:-1] + "\0", f"mdk_{'0' * 12}_{text[-43:]}", f"{text[:17]}{'A' * 43}", revoked]
    assert [gateway.keys.check(each) for each in wrong] == [None] * len(wrong)
    assert gateway.keys.check(text) == key
    assert compared == [(64, 64)] * (len(wrong) + 1)


def test_keys_are_kept_as_hashes(gateway, new_key, tmp_path):
    text, key = new_key()
    secret = text.removeprefix(f"mdk_{key.id}_").encode()
    assert len(secret) == 43
    with gateway.database.writing() as connection:
        connection.exec_driver_sql("SELECT 1")
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and secret in file.read_bytes()]


BAD = [
    ({}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "say what the video shows"),
    ({"prompt": "  "}, "say what the video shows"),
    ({"promt": "a red seven"}, "there is no such field; did you mean 'prompt'?"),
    (VIDEO | {"num_step": 3}, "did you mean 'num_steps'?"),
    (VIDEO | {"zzz": 3}, "there is no such field"),
    (VIDEO | {"size": "32"}, "WIDTHxHEIGHT"),
    (VIDEO | {"size": "17x16"}, "width=17 is not a multiple of 4"),
    (VIDEO | {"size": "0x16"}, "size"),
    (VIDEO | {"size": "99999x16"}, "width=99999"),
    (VIDEO | {"seconds": 1, "num_frames": 3}, "give one of them"),
    (VIDEO | {"num_frames": 21}, "up to 20 frames"),
    (VIDEO | {"num_steps": 2**31 - 1}, "pixel steps"),
    (VIDEO | {"sampler": "x"}, "choose one of euler, heun"),
    (VIDEO | {"seed": 2**64}, "seed"),
    (VIDEO | {"priority": 4}, "priority"),
    (VIDEO | {"preview_every": -1}, "preview_every"),
    (VIDEO | {"input_reference": "x"}, "input_reference"),
    (VIDEO | {"prompt": "bell\x07"}, "control character"),
    (VIDEO | {"prompt": "x" * 3000}, "3,000 characters"),
    ([], "the body"),
]
"""What is sent, and what of it is named."""


def test_bad_requests_are_told_at_the_door(visit):
    client, params = visit(), []
    for body, told in BAD:
        answer = client.post("/v1/videos", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and told in error["message"] and "pattern" not in error["message"], body
        params.append(error["param"])
    assert {"promt", "num_step", "zzz"} < set(params), "a program reads which field it is"


def test_a_scale_that_the_network_is_not_told_is_refused_at_the_door(visit, gateway):
    infos = gateway.servers.all[0].infos
    infos["text_to_video"] = replace(infos["text_to_video"], guidance_embedding_range=(1.0, 6.0))
    client = visit()
    assert client.post("/v1/videos", json=VIDEO | {"guidance": 6.0}).status_code == 200
    answer = client.post("/v1/videos", json=VIDEO | {"guidance": 7.0})
    assert answer.status_code == 400 and "1 to 6" in answer.json()["error"]["message"]


def test_bodies_that_are_no_request(visit, new_key):
    client = visit()
    kinds = {"application/json": b'{"prompt": "\\ud800"}', "text/plain": b"a", "multipart/form-data": b"--x"}
    codes = [
        client.post("/v1/videos", content=body, headers={"content-type": kind}).status_code
        for kind, body in kinds.items()
    ]
    assert codes == [400, 415, 400]
    assert client.post("/v1/videos", json={"prompt": "x" * (1 << 20)}).status_code == 400
    many = client.post("/v1/videos", json={"prompt": ["" for _ in range(1 << 20)]})
    assert many.status_code == 400 and "too many values" in many.text
    small = visit(new_key(max_upload_bytes=1 << 20)[0])
    assert small.post("/v1/videos", json={"prompt": "x" * (1 << 20)}).status_code == 413
    assert client.get("/v1/videos").status_code == 200


def test_unknown_models_are_told(visit):
    client = visit()
    assert client.post("/v1/videos", json=VIDEO | {"model": "sora-2"}).json()["error"]["code"] == "model_not_found"
    models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["text_to_video"]
    assert client.get("/v1/models/text_to_video").json() == models[0]
    assert models[0]["service"]["defaults"]["num_frames"] == 5


def test_an_idempotency_key_makes_one_video(visit):
    client, header = visit(), {"idempotency-key": "order-17"}
    first = client.post("/v1/videos", json=VIDEO, headers=header).json()
    assert client.post("/v1/videos", json=VIDEO, headers=header).json() == first
    assert len(client.get("/v1/videos").json()["data"]) == 1
    assert client.post("/v1/videos", json=VIDEO | {"preview_every": 5}, headers=header).json() == first
    other = client.post("/v1/videos", json=VIDEO | {"seed": 5}, headers=header)
    assert other.status_code == 422 and other.json()["error"]["code"] == "idempotency_mismatch"
    assert visit().post("/v1/videos", json=VIDEO, headers=header).json()["id"] != first["id"], "keys do not share them"
    client.delete(f"/v1/videos/{first['id']}")
    assert client.post("/v1/videos", json=VIDEO, headers=header).status_code == 422
    assert client.post("/v1/videos", json=VIDEO, headers={"idempotency-key": "a b"}).status_code == 400


def test_limits_of_a_key(visit, new_key):
    client = visit(new_key(max_active=2, videos_per_day=4)[0])
    ids = [client.post("/v1/videos", json=VIDEO).json()["id"] for _ in range(2)]
    full = client.post("/v1/videos", json=VIDEO)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_active")
    assert int(full.headers["retry-after"]) >= 1
    for _ in range(2):
        client.delete(f"/v1/videos/{ids.pop()}")
        ids.append(client.post("/v1/videos", json=VIDEO).json()["id"])
    client.delete(f"/v1/videos/{ids.pop()}")
    assert client.post("/v1/videos", json=VIDEO).json()["error"]["code"] == "insufficient_quota"
    slow = visit(new_key(requests_per_minute=3)[0])
    codes = [slow.get("/v1/videos").status_code for _ in range(5)]
    assert codes[:3] == [200, 200, 200] and codes[4] == 429
    assert visit().get("/v1/videos").status_code == 200, "another key is not slowed down"


def test_request_ids_are_repeated_only_where_they_are_plain(visit):
    client = visit()
    assert client.get("/v1/videos", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for evil in ("a\tb", "x" * 65, 'a"b', "ä".encode()):
        told = client.get("/v1/videos", headers={"x-request-id": evil}).headers["x-request-id"]
        assert told.startswith("req_")


def test_a_full_disk_takes_no_more_jobs(visit, gateway, monkeypatch):
    client = visit()
    monkeypatch.setattr(gateway.results, "free_bytes", lambda: -1)
    answer = client.post("/v1/videos", json=VIDEO)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_full")
    assert client.get("/v1/videos").json()["data"] == []


def test_a_gateway_that_drains_takes_no_more_jobs_and_still_answers_for_those_it_has(visit, gateway):
    client = visit()
    video_id = client.post("/v1/videos", json=VIDEO).json()["id"]
    gateway.servers.all[0].silent_since, gateway.servers.all[0].is_proven = None, True
    assert client.get("/health/ready").status_code == 200
    gateway.runner._draining.set()
    refused = client.post("/v1/videos", json=VIDEO)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining") and refused.headers[
        "retry-after"
    ]
    assert client.get("/health/ready").status_code == 503 and client.get("/health/live").status_code == 200
    assert client.get(f"/v1/videos/{video_id}").json()["status"] == "queued"
    assert client.get(f"/v1/videos/{video_id}/events").text == "", (
        "who follows it is sent to the next life of the gateway"
    )


def test_a_fault_of_ours_is_a_500_that_tells_nothing(visit, gateway, monkeypatch):
    client = visit()

    def broken(*_, **__):
        raise RuntimeError("secret internals")

    monkeypatch.setattr(gateway.store, "page", broken)
    answer = client.get("/v1/videos")
    assert answer.status_code == 500 and "secret" not in answer.text and answer.headers["x-request-id"]


def test_methods_that_somebody_made_up_are_counted_together(visit, gateway):
    client = visit()
    for index in range(3):
        assert client.request(f"BREW{index}", "/v1/videos").status_code == 405
    told = generate_latest(gateway.metrics.registry).decode()
    assert 'method="other"' in told and "BREW" not in told


def test_every_cancel_and_failure_is_counted_by_key(visit, gateway, new_key):
    text, key = new_key()
    client = visit(text)
    ids = [client.post("/v1/videos", json=VIDEO).json()["id"] for _ in range(2)]
    told = generate_latest(gateway.metrics.registry).decode()
    assert f'megadit_jobs{{key="{key.id}",status="queued"}} 2.0' in told
    for video_id in ids:
        client.delete(f"/v1/videos/{video_id}")
    gateway.metrics.errors.labels(key.id, "timed_out").inc()
    told = generate_latest(gateway.metrics.registry).decode()
    assert f'megadit_videos_total{{key="{key.id}",model="text_to_video",outcome="cancelled"}} 2.0' in told
    assert f'megadit_video_errors_total{{code="timed_out",key="{key.id}"}} 1.0' in told


def test_an_empty_queue_is_told_as_zero_and_a_broken_store_does_not_hide_the_rest(gateway, monkeypatch):
    """Autoscaling takes a metric that is not there for a fault, and would never go back to few servers."""
    empty = 'megadit_jobs{key="",status="queued"} 0.0'
    assert empty in generate_latest(gateway.metrics.registry).decode()

    def broken():
        raise OperationalError("SELECT", {}, Exception("disk I/O error"))

    collector = next(each for each in gateway.metrics.registry._collector_to_names if hasattr(each, "_counts"))
    monkeypatch.setattr(collector, "_counts", broken)
    told = generate_latest(gateway.metrics.registry).decode()
    assert empty not in told and "megadit_server_up" in told


def test_nobody_is_sent_elsewhere(visit):
    answer = visit().get("/v1/videos/", headers={"host": "evil.example"}, follow_redirects=False)
    assert answer.status_code == 404 and "location" not in answer.headers


def test_the_front_says_where_to_go_without_a_key(visit):
    answer = visit(anonymous=True).get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert all(place in answer.text for place in ("/docs", "/v1/videos", "/health/ready", "megadit serve demo --url"))


def in_parts(*parts: tuple[str, bytes], is_whole: bool = True) -> dict:
    """A multipart form as it is sent: (headers after the name, content) of each part."""
    texts = [
        b"--x\r\nContent-Disposition: form-data; name=%b\r\n\r\n%b\r\n" % (head.encode(), content)
        for head, content in parts
    ]
    content = b"".join(texts) + b"--x--\r\n" * is_whole
    return {"content": content, "headers": {"content-type": "multipart/form-data; boundary=x"}}


@pytest.mark.parametrize("coding", ["latin-1", "cp1252", "cp932", "gb18030", "utf-8"])
def test_a_form_is_read_in_utf8_or_told(visit, coding):
    """Starlette would read any other bytes as Latin-1, and make the video of something else."""
    client = visit()
    for text in ("café", "größer", "a 日本の猫", "a – b"):
        for field in ("prompt", "negative_prompt"):
            content = text.encode(coding, errors="ignore")
            answer = client.post("/v1/videos", **in_parts(*({"prompt": b"a"} | {field: content}).items()))
            if content.decode(errors="ignore").encode() == content:
                assert answer.status_code == 200, answer.text
            else:
                assert answer.status_code == 400
                assert f"'{field}' is not UTF-8; send a text in UTF-8" in answer.json()["error"]["message"]


@pytest.mark.parametrize("keep", range(1, 6))
def test_a_form_that_was_cut_off_is_not_half_a_request(visit, keep):
    """Nor is any beginning of one: the last field would be missing."""
    form = in_parts(("prompt", b"a"), ("num_steps", b"3"))
    form["content"] = form["content"][: -2 * keep - 4]
    answer = visit().post("/v1/videos", **form)
    assert answer.status_code == 400 and "the form was cut off" in answer.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["base64", "Quoted-Printable", "x-zip"])
def test_a_part_in_a_transfer_encoding_is_told(visit, coding):
    head = "prompt\r\nContent-Transfer-Encoding: "
    answer = visit().post("/v1/videos", **in_parts((f"{head}{coding}", b"YSByZWQgc2V2ZW4=")))
    assert answer.status_code == 400 and "'prompt' has a Content-Transfer-Encoding" in answer.json()["error"]["message"]
    assert visit().post("/v1/videos", **in_parts((f"{head}8bit", b"a"))).json()["prompt"] == "a"


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync", "/v1/adapters", "/v1/videos/video_1/remix"])
def test_a_compressed_body_is_told(visit, path, kind):
    answer = visit().post(path, content=b"\x1f\x8b", headers={"content-type": kind, "content-encoding": "gzip"})
    assert answer.status_code == 415 and "without Content-Encoding: gzip" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "seed": 1, "seed": 2}', "has a name twice"),
        ('{"prompt": "a:b", "adapters": [{"name": "a", "name": "b"}]}', "has a name twice"),
        (r'{"prompt": "a", "\u0070rompt": "b"}', "has a name twice"),
        ('{"prompt": "a", "seed": true}', "seed must not be true"),
        ('{"prompt": "a", "steps": true}', "num_steps must not be true"),
        ('{"prompt": "a", "guidance": false}', "guidance must not be false"),
    ],
)
def test_json_that_others_read_otherwise_is_told(visit, text, message):
    answer = visit().post("/v1/videos", content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_json_may_have_a_mark_and_colons(visit):
    text = json.dumps({"prompt": r'a: "b\\": c', "negative_prompt": "::"}, ensure_ascii=False)
    for mark in (b"", b"\xef\xbb\xbf"):
        answer = visit().post("/v1/videos", content=mark + text.encode(), headers={"content-type": "application/json"})
        assert answer.json()["prompt"] == json.loads(text)["prompt"]
