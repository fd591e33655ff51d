"""vLLM's server on this CPU: `target` of a folder, with the chat template beside it. Marks of tests in a real vLLM."""

import json
import os
import socket
import subprocess
import time
from urllib.request import urlopen

import pytest
from draftsmith.eval.engines.program import PYTHON, find_python

IN_VLLM = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON not in os.environ, reason="no vLLM: scripts/test_engines makes its environment"),
]
SERVER = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def start(folder, speculative):
    words = [str(folder / "target"), "--served-model-name", "tiny",
             "--chat-template", str(folder / "chat.jinja"), "--dtype", "float32", "--max-model-len", "480",
             "--enforce-eager", "--no-enable-prefix-caching"]  # fmt: skip
    return serve(folder, words + ([] if speculative is None else ["--speculative-config", json.dumps(speculative)]))


def serve(folder, words):
    """The server of `vllm serve WORDS`, and its address; its log lies in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs: that command looks for a package of vLLM's first name, and the CPU's has another.
    command = [find_python(), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
               "--model", *words]  # fmt: skip
    with (folder / f"{port}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | SERVER, cwd=folder)
    return process, f"http://127.0.0.1:{port}"


def wait(process, url):
    for _ in range(1200):
        assert process.poll() is None, "the server ended"
        try:
            with urlopen(f"{url}/health", timeout=5):
                return url
        except OSError:
            time.sleep(1)
    raise AssertionError("the server did not start")
