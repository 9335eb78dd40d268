"""A Hub on loopback, realistic enough for the real huggingface_hub to work with it.

Large files (by suffix) are LFS: `resolve` answers with a redirect to another path, as the Hub does
with its content network, and X-Linked-Size and X-Linked-Etag. No answer has X-Xet headers, so
downloads are plain HTTP. Uploads: this client uses Xet without asking, wherever hf_xet is installed
and HF_HUB_DISABLE_XET is not set; that there is no xet-write-token here is for the caller to see.

It can fail as the real one does: `cut` ends an answer after some bytes, `corrupt` flips a byte,
`fail` answers with a status, `no_ranges` gives whole files only, `portal` answers in HTML.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS = (".safetensors", ".bin", ".pth", ".parquet", ".arrow", ".model", ".h5")
TOKEN = "hf_a-token-for-tests-alone"
PAGE = 3  # entries per page of a tree


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        words = repr((len(self.commits), sorted(files))).encode()
        oid = hashlib.sha1(words).hexdigest()
        self.commits[oid] = dict(files)
        self.refs[branch] = oid
        return oid

    def find(self, revision: str) -> str | None:
        found = self.refs.get(revision, revision)
        return found if found in self.commits else None


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]


class Hub:
    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.stored: dict[str, bytes] = {}  # LFS objects by sha256
        self.requests: list[Request] = []
        self.cut: dict[str, list[int]] = {}  # file -> bytes after which an answer ends, in turn
        self.corrupt: dict[str, int] = {}  # file -> how many more answers have a wrong byte
        self.fail: dict[str, list[int]] = {}  # file -> statuses, in turn
        self.hold: dict[str, int] = {}  # file -> bytes after which an answer waits for `release`
        self.release = threading.Event()
        self.claims: dict[str, dict[str, Any]] = {}  # file -> what the tree says instead
        self.endless: set[str] = set()  # files whose answers go on until the client hangs up
        self.gitignored: set[str] = set()
        self.no_ranges = self.portal = False
        self.answers: dict[str, Any] = {}  # end of a path -> what is answered instead
        self.list_goes_on: Callable[[int], str] | None = None  # where, by the number of requests
        self.server = Server(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def content_url(self) -> str:
        """Another host, as the Hub's content network is: a token must not travel there."""
        return self.url.replace("127.0.0.1", "localhost")

    def add(self, name: str, files: dict[str, bytes], kind: str = "model", **facts: bool) -> Repo:
        repo = self.repos[kind, name] = Repo(**facts)
        repo.commit(files)
        return repo

    def gets(self, file: str) -> list[Request]:
        """Requests for a file's bytes, in order."""
        return [
            one
            for one in self.requests
            if one.method == "GET" and (one.path.endswith(f"/{file}") or f"file={file}" in one.path)
        ]

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        return Handler


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may hang up, and a server says nothing on the client's own stderr."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Answer(Exception):
    """Raised, so that any depth can end a request."""

    def __init__(self, status: int, body: Any = None, **headers: str) -> None:
        self.status, self.body = status, body
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_one("GET")

    def do_HEAD(self) -> None:
        self.handle_one("HEAD")

    def do_POST(self) -> None:
        self.handle_one("POST")

    def do_PUT(self) -> None:
        self.handle_one("PUT")

    def handle_one(self, method: str) -> None:
        self.hub.requests.append(Request(method, self.path, dict(self.headers)))
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            self.body = b""
            while size := int(self.rfile.readline().strip(), 16):
                self.body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            self.route(method)
            raise Answer(404, {"error": f"no {method} {self.path}"})
        except Answer as answer:
            if answer.body is not None or answer.status != 0:
                self.send(method, answer)

    def send(self, method: str, answer: Answer) -> None:
        is_bytes = isinstance(answer.body, bytes)
        body = answer.body if is_bytes else json.dumps(answer.body or {}).encode()
        self.send_response(answer.status)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(body)))
        self.send_header(
            "Content-Type", "application/octet-stream" if is_bytes else "application/json"
        )
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if method != "HEAD":
            self.wfile.write(body)

    def route(self, method: str) -> None:
        if self.hub.portal:
            raise Answer(200, b"<html>log in first</html>", Connection="close")
        path = unquote(urlsplit(self.path).path)
        for end, body in self.hub.answers.items():
            if path.endswith(end):
                raise Answer(200, body)
        routes: list[tuple[str, str, Callable[..., None]]] = [
            ("POST", r"/api/repos/create", self.create),
            ("POST", r"/api/validate-yaml", self.fine),
            ("GET", r"/api/(model|dataset)s/(.+)/revision/(.+)", self.info),
            ("GET", r"/api/(model|dataset)s/(.+)/tree/([^/]+)", self.tree),
            ("GET", r"/api/(model|dataset)s/(.+)/refs", self.refs),
            ("POST", r"/api/(model|dataset)s/(.+)/branch/(.+)", self.branch),
            ("POST", r"/api/(model|dataset)s/(.+)/preupload/(.+)", self.preupload),
            ("POST", r"/api/(model|dataset)s/(.+)/commit/(.+)", self.commit),
            ("GET", r"/api/(model|dataset)s/([^/]+/[^/]+|[^/]+)", self.info),
            ("POST", r"/(?:(dataset)s/)?(.+)\.git/info/lfs/objects/batch", self.batch),
            ("PUT", r"/lfs/(\w+)", self.store),
            ("GET", r"/cdn/(\w+)", self.content),
            ("HEAD", r"/(?:(dataset)s/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
            ("GET", r"/(?:(dataset)s/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
        ]
        for wanted, pattern, act in routes:
            match = re.fullmatch(pattern, path)
            if match and wanted == method:
                act(*match.groups())

    # who may

    @property
    def is_known(self) -> bool:
        header = self.headers.get("Authorization")
        if header not in (None, f"Bearer {TOKEN}"):
            raise Answer(401, X_Error_Message="Invalid credentials in Authorization header")
        return header is not None

    def repo(self, kind: str | None, name: str) -> Repo:
        repo, is_known = self.hub.repos.get((kind or "model", name)), self.is_known
        if repo is None or (repo.private and not is_known):
            # As the Hub does, which does not tell strangers what there is.
            raise Answer(404 if is_known else 401, X_Error_Code="RepoNotFound")
        return repo

    def found(self, repo: Repo, revision: str) -> str:
        oid = repo.find(revision)
        if oid is None:
            raise Answer(404, X_Error_Code="RevisionNotFound")
        return oid

    # reading

    def info(self, kind: str, name: str, revision: str = "main") -> None:
        repo = self.repo(kind, name)
        sha = self.found(repo, revision)
        raise Answer(200, {"id": name, "sha": sha, "private": repo.private, "gated": repo.gated})

    def refs(self, kind: str, name: str) -> None:
        repo = self.repo(kind, name)
        branches = [
            {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": oid}
            for ref, oid in repo.refs.items()
        ]
        raise Answer(200, {"branches": branches, "tags": [], "converts": []})

    def tree(self, kind: str, name: str, revision: str) -> None:
        repo = self.repo(kind, name)
        files = repo.commits[self.found(repo, revision)]
        folders = {file.rpartition("/")[0] for file in files} - {""}
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": folder, "oid": git_id(folder.encode()), "size": 0}
            for folder in sorted(folders)
        ]
        for path, data in sorted(files.items()):
            entry = {"type": "file", "path": path, "size": len(data), "oid": git_id(data)}
            if path.endswith(LFS):
                entry["oid"] = git_id(b"pointer to " + data)
                entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
            entries.append(entry | self.hub.claims.get(path, {}))
        start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        more = {}
        if start + PAGE < len(entries):
            here = self.hub.url + urlsplit(self.path).path
            more["Link"] = f'<{here}?recursive=True&cursor={start + PAGE}>; rel="next"'
        if self.hub.list_goes_on is not None:
            more["Link"] = f'<{self.hub.list_goes_on(len(self.hub.requests))}>; rel="next"'
        raise Answer(200, entries[start : start + PAGE], **more)

    def resolve(self, kind: str | None, name: str, revision: str, file: str) -> None:
        repo = self.repo(kind, name)
        if repo.gated and not self.is_known:
            raise Answer(401, X_Error_Code="GatedRepo")
        if repo.gated:
            raise Answer(403, X_Error_Code="GatedRepo")
        oid = self.found(repo, revision)
        data = repo.commits[oid].get(file)
        if data is None:
            raise Answer(404, X_Error_Code="EntryNotFound")
        if self.hub.fail.get(file):
            raise Answer(self.hub.fail[file].pop(0))
        if not file.endswith(LFS):
            self.give(file, data, git_id(data), {"X-Repo-Commit": oid})
        self.hub.stored[sha256(data)] = data
        headers = {
            "Location": f"{self.hub.content_url}/cdn/{sha256(data)}?file={file}",
            "X-Repo-Commit": oid,
            "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{sha256(data)}"',
        }
        raise Answer(302, b"", **headers)

    def content(self, oid: str) -> None:
        if self.headers.get("Authorization"):  # signed addresses of other hosts get no token
            raise Answer(400, {"error": "a token was sent to the content network"})
        file = parse_qs(urlsplit(self.path).query)["file"][0]
        self.give(file, self.hub.stored[oid], oid, {})

    def give(self, file: str, data: bytes, etag: str, headers: dict[str, str]) -> None:
        if self.hub.corrupt.get(file, 0) > 0 and self.command == "GET":
            self.hub.corrupt[file] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        headers |= {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        body, status = data, 200
        if asked and not self.hub.no_ranges:
            first, last = int(asked[1]), int(asked[2] or len(data) - 1)
            body, status = data[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        if self.command == "GET" and (self.hub.cut.get(file) or file in self.hub.hold):
            self.give_part(status, body, headers, file)
        if self.command == "GET" and file in self.hub.endless:
            self.give_endlessly(status, body, headers)
        raise Answer(status, body, **headers)

    def give_endlessly(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """At most 64 MiB, so that a client that would take it all fails its test and no disk."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)
            for _ in range(64):
                self.wfile.write(b"x" * 2**20)
        raise Answer(0)

    def give_part(self, status: int, body: bytes, headers: dict[str, str], file: str) -> None:
        """Promises all, and hangs up or waits in the middle."""
        hold = self.hub.hold.pop(file, None)
        size = hold if hold is not None else self.hub.cut[file].pop(0)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:size])
        self.wfile.flush()
        if hold is not None:
            self.hub.release.wait(60)
        self.close_connection = True
        raise Answer(0)

    # writing

    def fine(self) -> None:
        raise Answer(200, {"errors": [], "warnings": []})

    def create(self) -> None:
        if not self.is_known:
            raise Answer(401, {"error": "who are you?"})
        wanted = json.loads(self.body)
        name = f"{wanted['organization']}/{wanted['name']}"
        kind = wanted.get("type") or "model"
        if (kind, name) in self.hub.repos:
            raise Answer(409, {"error": "You already created this repo", "url": f"/{name}"})
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.add(name, {".gitattributes": b"*.bin lfs\n"}, kind, private=private)
        raise Answer(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def branch(self, kind: str, name: str, branch: str) -> None:
        repo = self.repo(kind, name)
        if branch in repo.refs:
            raise Answer(409, {"error": "Reference already exists"})
        repo.refs[branch] = repo.refs["main"]
        raise Answer(200, {})

    def preupload(self, kind: str, name: str, revision: str) -> None:
        repo = self.repo(kind, name)
        there = repo.commits[self.found(repo, revision)]
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular",
                "shouldIgnore": file["path"] in self.hub.gitignored,
                "oid": git_id(there[file["path"]]) if file["path"] in there else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        raise Answer(200, {"files": files})

    def batch(self, kind: str | None, name: str) -> None:
        self.repo(kind, name)
        objects = []
        for one in json.loads(self.body)["objects"]:
            known = one["oid"] in self.hub.stored
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}", "header": {}}}
            objects.append({**one, **({} if known else {"actions": upload})})
        raise Answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        data = self.body
        if self.hub.corrupt.get("upload", 0) > 0:
            self.hub.corrupt["upload"] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.hub.stored[oid] = data
        raise Answer(200)

    def commit(self, kind: str, name: str, revision: str) -> None:
        repo = self.repo(kind, name)
        if not self.is_known:
            raise Answer(403, {"error": "read only"})
        files = dict(repo.commits[self.found(repo, revision)])
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        oid = repo.commit(files, revision)
        raise Answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})
