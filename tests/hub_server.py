"""A Hugging Face Hub on loopback: the few calls that `huggingface_hub` makes, over files in memory."""

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Repositories by name; each commit's files, and the commit of each branch."""

    url: str = ""
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    is_down: bool = False
    fetched: list[str] = field(default_factory=list)
    """Files that were handed out as a whole."""

    def push(self, name, folder, branch="main"):
        """Make a folder's files the newest commit of a branch; its hash."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        content = repr([(file, hashlib.sha256(data).hexdigest()) for file, data in files.items()])
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits.setdefault(name, {})[commit] = files
        self.branches[name, branch] = commit
        return commit

    def commit(self, name, revision):
        found = self.branches.get((name, revision), revision)
        return found if found in self.commits.get(name, {}) else None

    def entry(self, name, data):
        """A file in a listing."""
        found = {"rfilename": name, "path": name, "type": "file", "size": len(data)}
        found["blobId"] = found["oid"] = hashlib.sha1(data).hexdigest()
        if name.endswith(".safetensors"):  # kept as a repository keeps large files: with their SHA-256 on record
            sha256 = hashlib.sha256(data).hexdigest()
            found["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(data), "pointerSize": 130}
        return found


class Handler(BaseHTTPRequestHandler):
    """Answers of a `Hub`."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def log_message(self, *arguments):
        pass

    def answer(self):
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if self.hub.is_down:
            self.send(503, b"{}")
        elif parts[:2] == ["api", "models"]:
            self.tell("/".join(parts[2:4]), parts[4:])
        elif len(parts) == 5:
            self.hand_out("/".join(parts[:2]), parts[3], parts[4])
        else:
            self.send(404, b"{}")

    def tell(self, name, rest):
        """What a repository holds: `[revision, R]`, `[tree, R]` or nothing."""
        if name not in self.hub.commits:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        commit = self.hub.commit(name, rest[1] if rest else "main")
        if commit is None:
            self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files = [self.hub.entry(file, data) for file, data in self.hub.commits[name][commit].items()]
        about = files if rest[:1] == ["tree"] else {"id": name, "sha": commit, "siblings": files}
        self.send(200, json.dumps(about).encode())

    def hand_out(self, name, revision, file):
        """A file."""
        commit = self.hub.commit(name, revision)
        data = None if commit is None else self.hub.commits[name][commit].get(file)
        if commit is None or data is None:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        known = self.hub.entry(file, data)
        etag = known["lfs"]["sha256"] if "lfs" in known else known["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "X-Linked-Size": str(len(data))}
        if self.command == "GET":
            self.hub.fetched.append(file)
        self.send(200, data, headers)

    def send(self, code, body, headers=None):
        self.send_response(code)
        for name, value in (
            {"Content-Length": str(len(body)), "Content-Type": "application/json"} | (headers or {})
        ).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving():
    """A Hub that listens on loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
