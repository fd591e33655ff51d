"""A small Hub on a port of this machine: the endpoints that huggingface_hub's own code uses, over real HTTP.

Repositories with branches and pull requests, commits of NDJSON with regular and LFS files, uploads in one piece or in
parts, redirected downloads, visibility, and a token without which nothing private is seen. `server.fail` makes the
next request that fits answer with a status.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "localTestToken" * 3
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # sha -> files
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    history: list[tuple[str, bool]] = field(default_factory=list)  # (what happened, private at that time)

    def commit(self, ref: str, files: dict[str, bytes], message: str) -> str:
        parent = self.refs.get(ref, "")
        digest = hashlib.sha1(f"{parent}{sorted(files)}{len(self.commits)}".encode()).hexdigest()
        self.commits[digest], self.refs[ref] = files, digest
        self.messages.append(message)
        return digest

    def resolve(self, revision: str) -> str | None:
        revision = unquote(revision)
        return self.refs.get(revision) or (revision if revision in self.commits else None)


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".png"))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait for the client's word of its headers, 40 ms a request
    server: "HubServer"

    def log_message(self, *_):
        pass

    def do_GET(self):
        method = self.command
        length = int(self.headers.get("Content-Length") or 0)
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        self.body = self._chunks() if chunked else self.rfile.read(length)
        split = urlsplit(self.path)
        self.query, path = parse_qs(split.query), split.path
        self.authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        for verb, pattern, action in self.server.actions:
            if verb == method and re.search(pattern, path):
                action()
        with self.server.lock:
            self.server.requests.append((method, path))
            self.server.told_storage |= "localhost" in self.headers["Host"] and "Authorization" in self.headers
            for rule in self.server.failures:
                if rule.times > 0 and rule.method == method and re.search(rule.path, path):
                    rule.times -= 1
                    return self._json({"error": rule.message}, rule.status)
            return self._route(method, path)

    do_HEAD = do_POST = do_PUT = do_GET

    def _chunks(self):
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _route(self, method, path):
        for verb, pattern, action in ROUTES:
            match = re.fullmatch(pattern, path)
            if verb == method and match:
                named = match.groupdict()
                if "repo" in named:
                    repository = self.server.repositories.get(named["repo"])
                    if repository is None or (repository.private and not self.authorized):
                        return self._missing()
                    named["repo"] = repository
                return action(self, **named)
        return self._json({"error": f"no route {method} {path}"}, 404)

    def _missing(self):
        self._send(b'{"error": "Repository not found"}', 401 if not self.authorized else 404,
                   {"X-Error-Code": "RepoNotFound"})  # fmt: skip

    def _json(self, value, status=200):
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def _send(self, content, status=200, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def create(self):
        asked = json.loads(self.body)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if not self.authorized or not name.startswith("me/"):
            return self._json({"error": "no right to write to this namespace"}, 403)
        if name in self.server.repositories:
            return self._json({"error": "You already created this model repo", "url": f"/{name}"}, 409)
        private = asked.get("visibility") == "private" and not self.server.always_public
        made = self.server.repositories[name] = Repository(private=private)
        made.commit("main", {".gitattributes": b"*.safetensors filter=lfs"}, "initial commit")
        return self._json({"url": f"{self.server.address}/{name}"})

    def info(self, repo, revision="main"):
        sha = repo.resolve(revision)
        if sha is None:
            return self._send(b'{"error": "Revision not found"}', 404, {"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": name} for name in repo.commits[sha]]
        return self._json({"id": "me/x", "modelId": "me/x", "sha": sha, "private": repo.private, "siblings": siblings,
                           "tags": [], "downloads": 0, "likes": 0})  # fmt: skip

    def tree(self, repo, revision):
        files = repo.commits[repo.resolve(revision)]
        result = []
        for name, content in files.items():
            entry = {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
            if is_lfs(name):
                sha = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 134}
            result.append(entry)
        return self._json(result)

    def validate(self):
        return self._json({"errors": [], "warnings": []})

    def branch(self, repo, branch):
        if unquote(branch) in repo.refs:
            return self._json({"error": "Reference already exists"}, 409)
        repo.refs[unquote(branch)] = repo.refs["main"]
        return self._json({})

    def preupload(self, repo, revision):
        files, asked = repo.commits[repo.resolve(revision)], json.loads(self.body)["files"]
        told = []
        for file in asked:
            mode, there = "lfs" if is_lfs(file["path"]) else "regular", files.get(file["path"])
            oid = None if there is None else hashlib.sha256(there).hexdigest() if mode == "lfs" else git_oid(there)
            told.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return self._json({"files": told})

    def batch(self, repo):
        told = []
        for asked in json.loads(self.body)["objects"]:
            oid, size, answer = asked["oid"], asked["size"], {}
            if oid not in self.server.blobs:
                place = f"{self.server.storage}/storage/{oid}"
                upload = {"href": place}
                verify = {"href": f"{self.server.address}/storage/{oid}/verify"}
                answer = {"actions": {"upload": upload, "verify": verify}}
            told.append({"oid": oid, "size": size, **answer})
        return self._json({"transfer": "basic", "objects": told})

    def store(self, oid):
        self.server.blobs[oid] = self.body
        self._send(b"", 200)

    def verify(self, oid):
        right = hashlib.sha256(self.server.blobs.get(oid, b"")).hexdigest() == oid
        self._json({}, 200 if right else 422)

    def commit(self, repo, revision):
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        head = repo.resolve(revision)
        if header.get("parentCommit") not in (None, head):
            return self._json({"error": "the branch has moved on"}, 412)
        files = dict(repo.commits[head])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        ref, answer = unquote(revision), {}
        if self.query.get("create_pr"):
            number = 1 + sum(name.startswith("refs/pr/") for name in repo.refs)
            ref = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.server.address}/me/x/discussions/{number}"
        repo.history.append(("commit", repo.private))
        sha = repo.commit(ref, files, header["summary"])
        self._json(
            {"success": True, "commitOid": sha, "commitUrl": f"{self.server.address}/me/x/commit/{sha}", **answer}
        )

    def download(self, repo, revision, path):
        sha = repo.resolve(revision)
        content = repo.commits.get(sha or "", {}).get(unquote(path))
        if content is None:
            return self._send(b'{"error": "Entry not found"}', 404, {"X-Error-Code": "EntryNotFound"})
        repo.history.append(("download", repo.private))
        content = self.server.damage.get(unquote(path), content)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{git_oid(content)}"', "Accept-Ranges": "bytes"}
        if is_lfs(path):
            oid = hashlib.sha256(content).hexdigest()
            self.server.blobs[oid] = content
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content)),
                        "Location": f"{self.server.storage}/storage/{oid}"}  # fmt: skip
            return self._send(b"", 302, headers)
        return self._send(content, 200, headers)

    def fetch(self, oid):
        content = self.server.blobs[oid]
        self._send(content, 200, {"ETag": f'"{oid}"'})

    def settings(self, repo):
        repo.private = json.loads(self.body)["visibility"] == "private"
        repo.history.append(("settings", repo.private))
        self._json({"private": repo.private})


ROUTES = (
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("GET", f"/api/models/{REPO}", Handler.info),
    ("GET", f"/api/models/{REPO}/revision/(?P<revision>[^/]+)", Handler.info),
    ("GET", f"/api/models/{REPO}/tree/(?P<revision>[^/]+)", Handler.tree),
    ("POST", f"/api/models/{REPO}/branch/(?P<branch>[^/]+)", Handler.branch),
    ("POST", f"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    ("POST", f"/api/models/{REPO}/commit/(?P<revision>[^/]+)", Handler.commit),
    ("PUT", f"/api/models/{REPO}/settings", Handler.settings),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/storage/(?P<oid>[0-9a-f]{64})", Handler.store),
    ("POST", "/storage/(?P<oid>[0-9a-f]{64})/verify", Handler.verify),
    ("GET", "/storage/(?P<oid>[0-9a-f]{64})", Handler.fetch),
    ("HEAD", "/storage/(?P<oid>[0-9a-f]{64})", Handler.fetch),
    ("GET", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.download),
    ("HEAD", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.download),
)


@dataclass
class Failure:
    method: str
    path: str
    status: int
    times: int
    message: str


class HubServer(http.server.ThreadingHTTPServer):
    """`with HubServer() as server:`; `server.address` is what HF_ENDPOINT would be."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.storage = f"http://localhost:{self.server_address[1]}"  # another host, as the Hub's storage is
        self.lock = threading.RLock()
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.damage: dict[str, bytes] = {}  # path -> what a download of it gives in its place
        self.requests: list[tuple[str, str]] = []
        self.always_public = False  # whatever is asked for
        self.told_storage = False  # whether the storage's host was ever sent the token
        self.failures: list[Failure] = []
        self.actions: list[tuple[str, str, Callable[[], object]]] = []

    def fail(self, method: str, path: str, status: int, *, times: int = 1, message: str = "busy") -> None:
        self.failures.append(Failure(method, path, status, times, message))

    def on(self, method: str, path: str, action: Callable[[], object]) -> None:
        """Call `action` before each such request is answered."""
        self.actions.append((method, path, action))

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
