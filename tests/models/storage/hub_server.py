"""The part of the hub's protocol that pushing and pulling a model takes, on this machine."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


class Hub:
    """Models as lists of commits, and the large files that commits point to."""

    def __init__(self) -> None:
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.large: dict[str, bytes] = {}
        self.is_full = False
        """Large files are refused."""

    def sha(self, name: str) -> str:
        return hashlib.sha1(f"{name} {len(self.commits[name])}".encode()).hexdigest()

    def commit(self, name: str, lines: list[dict]) -> None:
        files = dict(self.commits[name][-1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
        self.commits[name].append(files)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args) -> None:
        pass

    def do_POST(self) -> None:
        body, path = self._body(), urlsplit(self.path).path
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            is_new = name not in self.hub.commits
            self.hub.commits.setdefault(name, [{".gitattributes": b"*.safetensors filter=lfs"}])
            return self._json({"url": f"{self._address}/{name}"}, 200 if is_new else 409)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._json({"transfer": "basic", "objects": [self._slot(o) for o in json.loads(body)["objects"]]})
        name, verb = "/".join(path.split("/")[3:5]), path.split("/")[5]
        if verb == "preupload":
            modes = [{"path": file["path"], "shouldIgnore": False, **_mode(file)} for file in json.loads(body)["files"]]
            return self._json({"files": modes})
        assert verb == "commit", path
        self.hub.commit(name, [json.loads(line) for line in body.splitlines()])
        self._json(
            {"commitUrl": f"{self._address}/{name}/commit/{self.hub.sha(name)}", "commitOid": self.hub.sha(name)}
        )

    def do_PUT(self) -> None:
        """A large file, where a slot said; as in the store behind a hub, without the token."""
        oid, content = self.path.rpartition("/")[2], self._body()
        if self.hub.is_full:
            return self._json({"error": "no space left"}, 403)
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.large[oid] = content
        self._json({})

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name not in self.hub.commits:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        files, sha = self.hub.commits[name][-1], self.hub.sha(name)
        if parts[0] != "api":
            return self._send(files["/".join(parts[4:])], {"X-Repo-Commit": sha})
        if parts[4:5] == ["tree"]:
            return self._json([_entry(path, content) for path, content in files.items()])
        self._json({"id": name, "sha": sha, "siblings": [{"rfilename": path} for path in files]})

    do_HEAD = do_GET

    @property
    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _slot(self, asked: dict) -> dict:
        return {**asked, "actions": {"upload": {"href": f"{self._address}/large/{asked['oid']}"}}}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _json(self, value, status: int = 200, headers=None) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})}, status)

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        for name, value in {"ETag": etag, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _mode(file: dict) -> dict[str, str]:
    return {"uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}


def _entry(path: str, content: bytes) -> dict:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def serve_hub() -> Iterator[tuple[Hub, str]]:
    """(the hub, its address), for as long as the context lasts."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
