"""A server on this machine that speaks as much of the Hugging Face Hub's protocol as `selfspec pull` needs."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """files: name -> content. gated: refuse who sends no token. cut_after: bytes of a weight file after which the
    connection is cut, once; with `stall`, only when `over` is set. requests: (method, path, Range header) of all."""

    def __init__(self, files, *, gated=False, cut_after=None, stall=False):
        self.files, self.gated, self.cut_after = files, gated, cut_after
        self.stalled, self.over = threading.Event(), threading.Event()
        if not stall:
            self.over.set()
        self.requests = []
        self.url = ""

    def handle(self, request, body):
        path = request.path.split("?")[0]
        self.requests.append((request.command, path, request.headers.get("Range")))
        repo, _, rest = path.lstrip("/").removeprefix("api/models/").partition("/revision/")
        if path.startswith("/api/models/"):
            if repo != "org/tiny":
                return answer(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if rest not in ("", "main", COMMIT):
                return answer(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if self.gated and not request.headers.get("Authorization"):
                return answer(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            return answer(request, 200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode(), {})
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if name not in self.files:
            return answer(request, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        self.deliver(request, name, body)

    def deliver(self, request, name, body):
        data = self.files[name]
        begin = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0] or 0)
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(data) - begin),
        }
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        request.send_response(206 if begin else 200)
        for key, value in headers.items():
            request.send_header(key, value)
        request.end_headers()
        if not body:
            return
        if self.cut_after and name.endswith(".safetensors") and len(data) > self.cut_after:
            cut, self.cut_after = self.cut_after, None
            request.wfile.write(data[begin : begin + cut])
            request.wfile.flush()
            self.stalled.set()
            self.over.wait(60)
            request.connection.close()
            return
        request.wfile.write(data[begin:])


def answer(request, status, body, headers):
    request.send_response(status)
    for key, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body)


@contextmanager
def served(hub):
    """The hub on a free port of this machine, at `hub.url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            hub.handle(self, True)

        def do_HEAD(self):
            hub.handle(self, False)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
