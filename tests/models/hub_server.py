"""A model hub of this machine: the part of Hugging Face's API that huggingface_hub uses, with
faults."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns a folder's files, as a repository has them."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def commit_of(files: Files) -> str:
    return sha1(repr(sorted((n, etag(b)) for n, b in files.items())).encode()).hexdigest()


class Hub:
    """Repositories by name and revision, faults, and a log of requests.

    `gated` needs a token of `tokens`, and `private` does not exist without one. `cuts` closes the
    connection after so many bytes of a file, once for each number. `statuses` answers requests
    whose path has this part. `size_shown` replaces the sizes in listings.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Files]] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.tokens: set[str] = set()
        self.cuts: dict[str, list[int]] = {}
        self.statuses: dict[str, int] = {}
        self.size_shown: int | None = None
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.sent_bytes: Counter[str] = Counter()
        self.stalled, self.resumed = threading.Event(), threading.Event()
        self.stall_at: tuple[str, int] = ("", 0)
        self.url = ""

    def add(self, repo: str, files: Files, revision: str = "main") -> str:
        """Sets the files of a revision. Returns its commit."""
        self.repos.setdefault(repo, {})[revision] = files
        return commit_of(files)

    def find(self, repo: str, revision: str) -> Files | None:
        known = self.repos[repo]
        by_commit = {commit_of(files): files for files in known.values()}
        return known.get(revision) or by_commit.get(revision)

    def listed(self, files: Files) -> list[tuple[str, int, str]]:
        return [
            (name, len(body) if self.size_shown is None else self.size_shown, etag(body))
            for name, body in files.items()
        ]


def etag(body: bytes) -> str:
    return sha1(body).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves the hub at `hub.url` for the block."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.resumed.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        for part, status in self.hub.statuses.items():
            if part in path:
                return self.refuse(status)
        api, file = _API.fullmatch(path), _FILE.fullmatch(path)
        if api is not None:
            return self.describe(api[1], api[2] or "", unquote(api[3] or "main"))
        if file is not None:
            return self.send_file(file[1], unquote(file[2]), file[3])
        return self.refuse(404)

    def describe(self, repo: str, what: str, revision: str) -> None:
        files = self.checked(repo, revision, whole=False)
        if files is None:
            return
        listed = self.hub.listed(files)
        info: Any = {
            "id": repo,
            "sha": commit_of(files),
            "siblings": [{"rfilename": n, "size": s, "blobId": e} for n, s, e in listed],
        }
        if what == "tree":
            info = [{"type": "file", "path": n, "size": s, "oid": e} for n, s, e in listed]
        self.answer(json.dumps(info).encode(), {"Content-Type": "application/json"})

    def send_file(self, repo: str, revision: str, name: str) -> None:
        files = self.checked(repo, revision, whole=True)
        if files is None:
            return
        if name not in files:
            return self.refuse(404, "EntryNotFound")
        body, first = files[name], 0
        asked = self.headers.get("Range")
        headers = {"ETag": f'"{etag(body)}"', "X-Repo-Commit": commit_of(files)}
        if asked is not None:
            self.hub.ranges.append(f"{name} {asked}")
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
        self.answer(body[first:], headers, name, first)

    def checked(self, repo: str, revision: str, *, whole: bool) -> Files | None:
        """Returns the files, or sends a refusal as the hub does. Descriptions of gated models are
        public."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            return self.refuse(401, message="Invalid credentials in Authorization header")
        if repo not in self.hub.repos or (repo in self.hub.private and not token):
            return self.refuse(404 if token else 401, "RepoNotFound")
        if whole and repo in self.hub.gated and not token:
            return self.refuse(401, "GatedRepo")
        files = self.hub.find(repo, revision)
        return self.refuse(404, "RevisionNotFound") if files is None else files

    def refuse(self, status: int, code: str = "", message: str = "no") -> None:
        body = json.dumps({"error": message}).encode()
        more = {"X-Error-Code": code} if code else {}
        self.answer(body, {"X-Error-Message": message, **more}, status=status)

    def answer(
        self,
        body: bytes,
        headers: Mapping[str, str],
        name: str = "",
        first: int = 0,
        status: int = 200,
    ) -> None:
        self.send_response(206 if "Content-Range" in headers else status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cuts.get(name)
        end = max(0, cuts.pop(0) - first) if cuts else len(body)
        stalled_name, stalled_at = self.hub.stall_at
        if name and name == stalled_name:
            self.send(name, body[:stalled_at])
            self.hub.stalled.set()
            self.hub.resumed.wait(60)
            body, end = body[stalled_at:], end - stalled_at
        self.send(name, body[:end])
        if end < len(body):
            self.close_connection = True

    def send(self, name: str, body: bytes) -> None:
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True
        if name:
            self.hub.sent_bytes[name] += len(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""
