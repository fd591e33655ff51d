"""Data of somebody else, in a folder that this process cannot write: it is read, and nothing is left beside it."""

import os
import shutil
from pathlib import Path

from ranks_run import run_ranks
from suite_run import run

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
# The command on a file that may not be read, in a folder that may not be entered, and on one that may be read.
# Root passes over permissions, unless it gives its capabilities 1 to 3 up.
COMMAND = """
import ctypes, os, sys
from pathlib import Path
from draftsmith.recipes.commands.cli import main

if os.geteuid() == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    for place in range(3):
        data[place] &= ~0b1110
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())
sealed, whole, *arguments = sys.argv[1:]
try:
    (Path(sealed).parent / "mine").touch()
    sys.exit("the folder can be written: this test says nothing")
except PermissionError:
    pass
data = "stages.target.data={from: null, path: %s, aspect: square, max_length: 256}"
assert main([*arguments, data % sealed]) == 2
assert main([*arguments, data % (Path(sealed).parent / "closed" / "train.json")]) == 2
print("refused", flush=True)
sys.exit(main([*arguments, data % whole]))
"""


def test_a_data_folder_that_cannot_be_written_is_read_and_left_as_it_is(tmp_path):
    output, data = tmp_path / "run", tmp_path / "data"
    run(output, stages=["world"])
    shutil.copytree(output / "world" / "world", data, ignore=lambda *_: {"suite", "manifest.json"})
    sealed = Path(shutil.copy(data / "train.json", data / "sealed.json"))
    (data / "closed").mkdir()
    before = sorted(str(path) for path in data.rglob("*"))
    for path in (data, *data.rglob("*")):
        path.chmod(0o000 if path in (sealed, data / "closed") else 0o555 if path.is_dir() else 0o444)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
    try:
        arguments = [f"recipe={output / 'suite-test.yaml'}", "stages=[target]"]
        ((code, text),) = run_ranks(1, COMMAND, str(sealed), str(data / "train.json"), *arguments, cwd=ROOT)
    finally:
        for path in (data, *data.rglob("*")):
            path.chmod(0o755)
    assert code == 0, text[-3000:]
    refusal = text.partition("refused")[0]
    assert "Permission denied" in refusal and str(sealed) in refusal and "hint:" in refusal, refusal
    assert f"permission denied\n  where: {data / 'closed' / 'train.json'}" in refusal, refusal
    assert "Traceback" not in text and (output / "target" / "model.safetensors").is_file()
    assert sorted(str(path) for path in data.rglob("*")) == before
