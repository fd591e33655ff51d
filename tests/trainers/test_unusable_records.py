"""Records that teach nothing, of five kinds among many: they leave the order, a batch of nothing else is passed over,
and every way of training says how many and why.
"""

import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import prints
from draftsmith.models.drafters.lvlm import LvlmConfig
from fails import fails_with
from PIL import Image
from ranks_run import run_ranks
from safetensors.torch import load_file
from small_records import talk
from states_run import OPTIM, WORDS, cached, context, losses, parsed, stage, synthetic

KINDS = ["more than max_length 256", "empty answer", "missing image", "roles .* do not alternate", "is truncated"]
TEXT = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
DRAFT = LvlmConfig(kind="lvlm", language_model=TEXT, vision_tower="target")
COUNT = 95  # and five that cannot be used


STORE = {"shard_bytes": 20_000, "measured_samples": 2}
SOURCES = {"online": {"kind": "online"}, "cached": {"kind": "cached"},
           "first": {"kind": "cached_on_first_epoch", "states": STORE}}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Conversations of which five of a hundred teach nothing, each for another reason."""
    made = synthetic(tmp_path_factory.mktemp("world"))
    records = json.loads((made.folder / "data.json").read_text())
    few = itertools.islice(itertools.cycle(records), COUNT)
    records = [record | {"id": str(number)} for number, record in enumerate(few)]
    broken = made.folder / "images" / "broken.png"
    Image.effect_noise((30, 20), 90).convert("RGB").save(broken)
    broken.write_bytes(broken.read_bytes()[:-900])  # its size can be read, and its pixels cannot
    picture = talk("<image>\nWhich?", "one two")
    tools = [*talk("Which?"), {"from": "tool", "value": "{}"}, {"from": "gpt", "value": "one"}]
    bad = [
        {"id": "long", "conversations": talk("Which?", " ".join(WORDS * 20))},
        {"id": "empty", "conversations": talk("Which?", "")},
        {"id": "gone", "image": "images/gone.png", "conversations": picture},
        {"id": "tools", "conversations": tools},
        {"id": "broken", "image": "images/broken.png", "conversations": picture},
    ]
    for number, record in enumerate(bad):
        records.insert(20 * number, record)
    (made.folder / "data.json").write_text(json.dumps(records))
    made.data |= {"max_length": 256, "on_error": "skip"}
    return made


def open_stage(made, source: str, **settings):
    """A draft LVLM's stage, or a head's with its source of states; one record in each batch."""
    settings = {"batch_size": 1, "micro_batch_size": 1, "epochs": 1} | settings
    if source != "records":
        return stage(made, source=SOURCES[source], held_out=0, **settings)
    draft = {"kind": "train", "data": made.data, "trainable": ["language_model"], "log_every": 1, "optim": OPTIM}
    return parsed(context(made, made.folder / "parse").target, DRAFT, draft | settings)


def train(made, folder: Path, source: str, **settings) -> list[str]:
    """What the training said; of cached states the cache stage before it, too."""
    before = cached(made, folder.parent / f"{folder.name}-cache") if source == "cached" else None
    asked = context(made, folder, DRAFT if source == "records" else None, before and {"states": before.folder})
    open_stage(made, source, **settings).run(asked)
    return [*(before.say.lines if before else []), *asked.say.lines]


@pytest.mark.parametrize("source", ["records", *SOURCES])
def test_a_run_with_five_kinds_of_unusable_records_trains_to_its_end_and_says_so(made, source, tmp_path):
    """A picture that breaks inside is found when it is decoded: before the training where states are made before."""
    told = train(made, tmp_path / "train", source)
    steps = COUNT + (source != "cached")
    found, silent = losses(tmp_path / "train"), [line for line in told if "had no supervised token" in line]
    assert len(found) == COUNT and max(found) == steps
    if source == "cached":
        (line,) = [line for line in told if "cached record(s) supervise nothing" in line]
        assert not silent and line.startswith("3 cached record(s) supervise nothing; 5 record(s) were left out (")
        assert all(re.search(kind, line) for kind in KINDS)
        assert line.endswith(str(tmp_path / "train-cache" / "skipped.jsonl"))
        return
    assert silent == [f"1 of {steps} steps had no supervised token, and changed nothing"]
    *first, last = [line for line in told if "left out (" in line]
    if source == "records":  # some samples are read whole before the first step, this one among them
        assert not first
    else:
        assert first[0].startswith("4 record(s)") and last.startswith("5 record(s)")
        assert [kind for kind in KINDS if not re.search(kind, first[0])] == [KINDS[-1]]
    assert all(re.search(kind, last) for kind in KINDS) and last.endswith(str(tmp_path / "train" / "skipped.jsonl"))


@pytest.mark.parametrize("source", ["records", "first"])
def test_a_run_that_was_stopped_behind_a_silent_step_ends_as_if_it_was_not(made, source, tmp_path, monkeypatch):
    settings = {"checkpoints": {"every": 1, "keep": 200}, "epochs": 2}
    train(made, tmp_path / "whole", source, **settings)
    expected = losses(tmp_path / "whole")
    silent = min(set(range(1, 2 * COUNT + 3)) - expected.keys())
    assert len(expected) == 2 * COUNT
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for path in (tmp_path / "again" / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > silent:
            shutil.rmtree(path)
    assert any("resuming from" in line for line in train(made, tmp_path / "again", source, **settings))
    assert losses(tmp_path / "again") == expected
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert all(torch.equal(two[name], value) for name, value in one.items())


RANKS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from draftsmith.core import ranks
from test_unusable_records import train
folder, source = Path(sys.argv[1]), sys.argv[2]
made = SimpleNamespace(folder=folder, data={"path": str(folder / "data.json"), "max_length": 256, "on_error": "skip"})
told = train(made, Path(sys.argv[3]), source, batch_size=2)
if ranks.is_main():
    print("\\n".join(told))
"""


@pytest.mark.parametrize("source", ["records", "online"])
def test_two_ranks_pass_the_same_steps_over(source, made, tmp_path):
    """One of them reads the broken picture, and neither waits for the other; alone, a pair of ranks has a step."""
    for code, text in run_ranks(2, RANKS, str(made.folder), source, str(tmp_path / "run"), cwd=tmp_path):
        assert code == 0, text[-3000:]
    assert len(losses(tmp_path / "run")) == (COUNT + 2) // 2


@pytest.mark.parametrize("source", ["records", "online"])
def test_where_nothing_is_usable_the_kinds_stand_in_the_error(made, source, tmp_path):
    records = [record for record in json.loads((made.folder / "data.json").read_text()) if record["id"] == "long"]
    (tmp_path / "long.json").write_text(json.dumps(records))
    nothing = SimpleNamespace(folder=made.folder, data=made.data | {"path": str(tmp_path / "long.json")})
    fails_with(r"no sample to train on(.|\n)*1 times \d+ ids, more than max_length 256", train, nothing,
               tmp_path / "train", source)  # fmt: skip


def test_a_dry_run_counts_the_usable_samples(made, capsys):
    settings = ["path=" + made.data["path"], "on_error=skip", "max_length=256"]
    shown = prints(capsys, ["recipe=eagle-llava15-7b", "dry_run=true", "stages=[text]",
                            "stages.text.format={template: v1}", f"target.path={made.folder / 'target'}",
                            *(f"stages.text.data.{one}" for one in settings)])  # fmt: skip
    # Those that their index refuses are none of its samples before.
    assert f"samples {COUNT + 1} (measured, 2.0% of the records are left out)" in shown
