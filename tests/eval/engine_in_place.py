"""A toy model (toy_servers.py) behind HTTP, with the fields of vLLM, llama-server or SGLang. It can be told to fail.

Its words are `t5` for token 5; of any other word the token is a hash.
"""

import json
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from draftsmith.eval.engines.audit import END
from draftsmith.eval.engines.exact_law import Sampling
from toy_servers import VOCABULARY, Toy


class EngineInPlace(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, fault="plain", engine="vllm", noise=0.0, **settings):
        super().__init__(("127.0.0.1", 0), Handler)
        self.toy, self.engine, self.settings = Toy(fault, 0, noise), engine, settings
        self.asked, self.heard, self.lock, self.drafts = [], [], threading.Lock(), 0
        self.running = self.most_running = 0
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

    def handle_error(self, *_):
        """A connection that the client cuts."""


def ids(text):
    return [int(w[1:]) if w[0] == "t" and w[1:].isdecimal() else zlib.crc32(w.encode()) % VOCABULARY
            for w in text.split()]  # fmt: skip


def ids_of_messages(messages):
    parts = [message["content"] for message in messages]
    return ids(" ".join(part if isinstance(part, str) else json.dumps(part) for part in parts))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._answered(None)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, asked))
            self.server.running += 1
            self.server.most_running = max(self.server.running, self.server.most_running)
        try:
            self._answered(asked)
        finally:
            with self.server.lock:
                self.server.running -= 1

    def _answered(self, asked):
        server, settings = self.server, self.server.settings
        server.heard.append((self.path, self.headers["Authorization"]))
        path, address = settings.get("redirects", ("", ""))
        if self.path == path:
            self.send_response(302)
            self.send_header("Location", address)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif asked is not None and "fails" in settings:
            message = {"message": 'the "prompt" is too long', "code": settings["fails"]}
            self._send(json.dumps({"error": message}), settings["fails"])
        elif self.path in settings.get("pages", {}):
            self._send(settings["pages"][self.path])
        elif self.path in ("/v1/models", "/moved"):
            owner = server.engine
            self._send(json.dumps({"data": [{"id": n, "owned_by": owner} for n in settings.get("models", ["tiny"])]}))
        elif self.path == "/metrics" and "counters" in settings:
            self._send(self._metrics(settings["counters"]))
        elif asked is not None and (
            of := getattr(self, "_" + self.path.strip("/").replace("/", "_").replace("-", "_"))
        ):
            self._send(json.dumps(of(asked)))
        else:
            self._send(json.dumps({"error": {"message": "Not Found"}}), 404)

    def _metrics(self, prefix):
        names = {"num_drafts_total{}": 2, "num_accepted_tokens_per_pos_total{position=\"0\"}": 1, "other": 9,
                 "num_accepted_tokens_per_pos_total{position=\"1\"}": 0.5}  # fmt: skip
        return "# HELP x\n" + "".join(f"{prefix}:spec_decode_{n} {v * self.server.drafts}\n" for n, v in names.items())

    def _tokenize(self, asked):
        if "messages" in asked:
            return {"tokens": ids_of_messages(asked["messages"])}
        return {"tokens": ids(asked["content"] if self.server.engine == "llamacpp" else asked["prompt"])}

    def _detokenize(self, asked):
        words = [f"t{token}" for token in asked["tokens"]]
        return {"prompt": " ".join(word if word != self.server.settings.get("misread") else "t1" for word in words)}

    def _apply_template(self, asked):
        return {"prompt": " ".join(message["content"] for message in asked["messages"])}

    def _said(self, prompt, count, asked, seed, shown):
        sampling = Sampling(asked["temperature"], max(0, asked["top_k"]) if asked["temperature"] else 0, asked["top_p"])
        answer = self.server.toy.answer(prompt, (), count, sampling, seed=seed, shown=shown)
        with self.server.lock:
            self.server.drafts += self.server.toy.fault != "plain"
        ended = answer.tokens[-1] == END
        return list(answer.tokens[: len(answer.tokens) - ended]), answer.laws, ended

    def _v1_completions(self, asked, prompt=None, shown=None):
        prompt = asked["prompt"] if prompt is None else prompt
        shown = asked.get("logprobs", 0) if shown is None else shown
        tokens, laws, ended = self._said(prompt, asked["max_tokens"], asked, asked["seed"], shown)
        named = [{f"token_id:{token}": value for token, value in law.items()} for law in laws]
        return {"choices": [{"token_ids": tokens, "finish_reason": "stop" if ended else "length",
                             "logprobs": {"top_logprobs": named} if shown else None}]}  # fmt: skip

    def _v1_chat_completions(self, asked):
        prompt = ids_of_messages(asked["messages"])
        answer = self._v1_completions(asked, prompt, asked.get("top_logprobs", 0))
        answer["prompt_token_ids"] = prompt
        choice = answer["choices"][0]
        if choice["logprobs"]:
            places = choice["logprobs"]["top_logprobs"]
            choice["logprobs"] = {"content": [
                {"top_logprobs": [{"token": t, "logprob": v} for t, v in place.items()]} for place in places
            ]}  # fmt: skip
        return answer

    def _completion(self, asked):
        tokens, laws, ended = self._said(asked["prompt"], asked["n_predict"], asked, asked["seed"], asked["n_probs"])
        scored = [{"id": 0, "top_logprobs": [{"id": t, "logprob": v} for t, v in law.items()]} for law in laws]
        return {"tokens": tokens, "stop_type": "eos" if ended else "limit"} | (
            {"completion_probabilities": scored} if asked["n_probs"] else {})  # fmt: skip

    def _generate(self, asked):
        settings, shown = asked["sampling_params"], asked.get("top_logprobs_num", 0)
        seed, count = settings["sampling_seed"], settings["max_new_tokens"]
        tokens, laws, ended = self._said(asked["input_ids"], count, settings, seed, shown)
        scored = [[[value, token, None] for token, value in law.items()] for law in laws]
        about = {"finish_reason": {"type": "stop" if ended else "length"}}
        return {"output_ids": tokens, "meta_info": about | ({"output_top_logprobs": scored} if shown else {})}

    def _send(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode("utf-8", "surrogatepass"))))
        self.end_headers()
        self.wfile.write(text.encode("utf-8", "surrogatepass"))
