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
    """Repositories by name: each commit's files, and the newest commit, which is that of `main`."""

    url: str = ""
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    newest: dict[str, str] = field(default_factory=dict)
    is_down: bool = False
    fetched: list[str] = field(default_factory=list)
    """Files that were handed out as a whole."""

    def push(self, name, folder):
        """Make a folder's files the newest commit; its hash."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        content = repr([(file, hashlib.sha256(data).hexdigest()) for file, data in files.items()])
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits.setdefault(name, {})[commit] = files
        self.newest[name] = commit
        return commit

    def commit(self, name, revision):
        """The files of a revision and its hash; nothing and None if there is no such."""
        found = self.newest.get(name) if revision == "main" else revision
        files = self.commits.get(name, {}).get(found)
        return ({}, None) if files is None else (files, found)

    def entry(self, name, data):
        """A file in a listing."""
        sha1 = hashlib.sha1(data).hexdigest()
        found = {"rfilename": name, "path": name, "type": "file", "size": len(data), "blobId": sha1, "oid": sha1}
        if name.endswith(".safetensors"):  # kept as a repository keeps large files: with their SHA-256 on record
            sha256 = hashlib.sha256(data).hexdigest()
            found["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(data), "pointerSize": 130}
        return found


class Handler(BaseHTTPRequestHandler):
    """Answers of a `Hub`."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if self.hub.is_down:
            self.send(503, b"{}")
        elif parts[:2] == ["api", "models"]:
            self.tell("/".join(parts[2:4]), parts[4:])
        elif len(parts) == 5:
            self.hand_out("/".join(parts[:2]), parts[3], parts[4])
        else:
            self.send(404, b"{}")

    def do_HEAD(self):
        self.do_GET()

    def tell(self, name, rest):
        """What a repository holds: `[revision, R]`, `[tree, R]` or nothing."""
        if name not in self.hub.commits:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        files, commit = self.hub.commit(name, rest[1] if rest else "main")
        if commit is None:
            self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        entries = [self.hub.entry(file, data) for file, data in files.items()]
        about = entries if rest[:1] == ["tree"] else {"id": name, "sha": commit, "siblings": entries}
        self.send(200, json.dumps(about).encode())

    def hand_out(self, name, revision, file):
        """A file."""
        files, commit = self.hub.commit(name, revision)
        if file not in files:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = files[file]
        known = self.hub.entry(file, data)
        etag = known.get("lfs", known)["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "X-Linked-Size": len(data)}
        if self.command == "GET":
            self.hub.fetched.append(file)
        self.send(200, data, headers)

    def send(self, code, body, headers=()):
        self.send_response(code)
        sent = {"Content-Length": len(body), "Content-Type": "application/json", **dict(headers)}
        for name, value in sent.items():
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
