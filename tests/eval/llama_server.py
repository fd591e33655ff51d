"""llama-server by xllamacpp, told by the flags of its command line: `python llama_server.py --model FILE ...`.

Flags are those that `draftsmith export` prints, and those of the other server and of a test. One that is not here, or
that llama.cpp does not have, is an error. Prints its address, and runs until it is ended.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
from draftsmith.eval.engines.llama_program import TRIED

_FOUND = importlib.util.find_spec("xllamacpp") and importlib.metadata.version("xllamacpp") == TRIED
IN_LLAMA = pytest.mark.skipif(not _FOUND, reason=f"no llama.cpp: pip install xllamacpp=={TRIED}")


def params(words):
    """CommonParams of a command line."""
    import xllamacpp as x

    known = Path(x.__file__).with_name("xllamacpp.abi3.so").read_bytes()
    made, rest = x.CommonParams(), list(words)
    draft = made.speculative.draft
    made.port, made.cache_ram_mib, made.warmup, made.fit_params = 0, 0, False, False
    made.n_parallel, made.kv_unified = 4, True  # llama-server's own
    for threads in (made.cpuparams, made.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        threads.n_threads = 1
    while rest:
        flag = rest.pop(0)
        assert flag.encode() + b"\0" in known, f"llama.cpp has no {flag}"
        if flag == "--model":
            made.model.path = rest.pop(0)
        elif flag == "--spec-draft-model":
            draft.mparams.path = rest.pop(0)
        elif flag == "--spec-type":
            name = rest.pop(0).replace("-", "_").upper()
            made.speculative.types = [getattr(x.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{name}")]
        elif flag == "--spec-draft-n-max":
            draft.n_max = int(rest.pop(0))
        elif flag == "--no-spec-draft-backend-sampling":
            draft.backend_sampling = False
        elif flag == "--flash-attn":
            kind = {"off": "DISABLED", "on": "ENABLED", "auto": "AUTO"}[rest.pop(0)]
            made.flash_attn_type = getattr(x.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{kind}")
        elif flag in ("--cache-type-k", "--cache-type-v"):
            setattr(made, flag[2:].replace("-", "_"), getattr(x.ggml_type, f"GGML_TYPE_{rest.pop(0).upper()}"))
        elif flag == "--chat-template-file":
            made.chat_template = Path(rest.pop(0)).read_text()
        elif flag == "--jinja":
            made.use_jinja = True
        elif flag == "--metrics":
            made.endpoint_metrics = True
        elif flag in ("--parallel", "--ctx-size", "--port"):
            setattr(made, {"--parallel": "n_parallel", "--ctx-size": "n_ctx"}.get(flag, "port"), int(rest.pop(0)))
        else:
            raise AssertionError(f"{flag} is not known here")
    return made


def start(words, log):
    """A process of the server, and its address."""
    with log.open("w") as errors:
        process = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, stderr=errors, text=True)
    for line in process.stdout:
        if line.startswith("http"):
            return process, line.strip()
    raise AssertionError(f"the server ended:\n{log.read_text()[-3000:]}")


if __name__ == "__main__":
    import xllamacpp

    server = xllamacpp.Server(params(sys.argv[1:]))
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)
