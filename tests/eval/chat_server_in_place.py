"""A small server with OpenAI's API that streams and counts as vLLM does: what `draftsmith bench` is tested against.

Its model answers with the numbers of a hash of what it was asked, one word a token; with `drafts` it writes several a
pass, as many as its drafter has right. It can be told to fail.
"""

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PASS_S = 0.004


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, drafts=0, **settings):
        super().__init__(("127.0.0.1", 0), Handler)
        self.drafts, self.settings = drafts, settings
        names = ("generation_tokens_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count")
        self.asked, self.counts, self.lock = [], {f"vllm:{name}{{}}": 0 for name in names}, threading.Lock()
        self.running = self.most_running = 0
        self.heard = []
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name, number):
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + number

    def handle_error(self, *_):
        """A connection that the test has the server cut."""


def words(messages, count):
    """What the model answers: of the same messages always the same."""
    text = json.dumps(messages, sort_keys=True)
    return [hashlib.sha256(f"{text}/{n}".encode()).hexdigest()[:3] for n in range(count)]


def passes(messages, count, drafts):
    """(accepted, emitted) of each pass after the first token: 0, 1, ... drafted tokens are right, again and again."""
    made, left = [], count - 1
    while left:
        accepted = len(made) % (drafts + 1)
        emitted = min(accepted + 1, left)
        made.append((accepted, emitted))
        left -= emitted
    return made


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, labels = self.server, '{engine="0",model_name="tiny"}'
        if self._sends_on():
            return
        if "page" in server.settings:
            self._send(server.settings["page"])
        elif self.path in ("/v1/models", "/moved"):
            names = server.settings.get("models", ["tiny"])
            self._send(json.dumps({"data": [{"id": name} for name in names]}))
        elif self.path == "/version" and "version" in server.settings:
            self._send(json.dumps({"version": server.settings["version"]}))
        elif self.path == "/metrics" and server.settings.get("metrics", True):
            known = ["# HELP vllm:generation_tokens_total Number of generation tokens processed."]
            known += [name.replace("{}", labels) + f" {float(value)}" for name, value in server.counts.items()]
            self._send("\n".join(known) + "\n")
        else:
            self._send(json.dumps({"error": {"message": "Not Found"}}), 404)

    def _sends_on(self):
        """To another address, where the test has it so; says what was asked at all."""
        self.server.heard.append(self.path)
        path, address = self.server.settings.get("redirects", ("", ""))
        if self.path == path:
            self.send_response(302)
            self.send_header("Location", address)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return self.path == path

    def do_POST(self):
        server = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._sends_on():
            return
        with server.lock:
            server.asked.append(asked)
            server.running += 1
            server.most_running = max(server.running, server.most_running)
        self.runs = True
        try:
            self._answer(asked)
        finally:
            self._ends()

    def _ends(self):
        """Before the last bytes: whoever has them may ask again before this thread goes on."""
        with self.server.lock:
            self.server.running -= self.runs
            self.runs = False

    def _answer(self, asked):
        server, fails = self.server, self.server.settings.get("fails")
        if isinstance(fails, int):
            self._send(json.dumps({"error": {"message": 'the "prompt" is too long', "code": fails}}), fails)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        said, told = words(asked["messages"], asked["max_tokens"]), 0
        self._event(asked, "", 0, role=True)
        while "event" in server.settings:
            self._data(server.settings["event"])
            if not server.settings.get("endless"):
                break
        time.sleep(server.settings.get("prefill_s", PASS_S))
        for number, (accepted, emitted) in enumerate([(0, 1), *passes(asked, len(said), server.drafts)]):
            if number:
                self._count(accepted)
                time.sleep(PASS_S)
            else:
                server.add("vllm:time_to_first_token_seconds_count{}", 1)
            self._event(asked, " ".join(said[told : told + emitted]) + " ", told + emitted)
            told += emitted
            if fails == "cut" and told > 3:
                self.close_connection = True
                self.connection.close()
                return
            if fails == "error" and told > 3:
                self._data({"error": {"message": "EngineCore encountered an issue.", "code": 500}})
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")
                return
        self._event(asked, None, told)  # the count comes after the tokens, as vLLM's does
        threading.Timer(
            0.1, server.add, ("vllm:generation_tokens_total{}", told + server.settings.get("others", 0))
        ).start()
        self._ends()
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _count(self, accepted):
        server = self.server
        server.add("vllm:inter_token_latency_seconds_count{}", 1)
        if server.drafts:
            server.add("vllm:spec_decode_num_drafts_total{}", 1)
            server.add("vllm:spec_decode_num_draft_tokens_total{}", server.drafts)
            for place in range(server.drafts):
                name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                labels = f'{{engine="0",model_name="tiny",position="{place}"}}'
                server.add(name + labels, place < accepted)

    def _event(self, asked, text, count, role=False):
        """text None: the last one, which has the usage alone."""
        delta = {"content": text} | ({"role": "assistant"} if role else {})
        event = {"model": "tiny", "choices": [] if text is None else [{"index": 0, "delta": delta}]}
        if self.server.settings.get("counts", True):
            event["usage"] = {"completion_tokens": count}
        self._data(event)

    def _data(self, event):
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
