"""A run, published: the folder and its card, what a fresh process makes of them, and what is refused."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import heads_run
import pytest
import torch
import visual_run
import yaml
from damage import DAMAGES, told
from draftsmith.core.errors import UserError
from draftsmith.core.results import SUMS, write_sums
from draftsmith.eval.published import assemble, open_published, read_published, reproduce
from draftsmith.eval.published_section import UserRequest
from draftsmith.models.drafters.lvlm import load_drafter
from draftsmith.recipes.commands.cli import main
from draftsmith.trainers.publish.folder import refuse_secrets
from fails import fails_with
from hub_server import TOKEN, HubServer
from notebooks import run_notebook
from safetensors.torch import load_file, save_file
from suite_run import loaded, run

DATA = "{from: world, path: train, aspect: square, max_length: 256, max_samples: 2}"
SETTINGS = [
    f"stages.evaluate.benchmarks=[{{name: seen, data: {DATA}}}]",
    "stages.evaluate.methods=null",
    "stages.evaluate.methods={MT*: {mode: MT*}, M: {}}",
    "stages.evaluate.max_new_tokens=12",
]
TRAINED = ("world", "target", "draft", "evaluate")
PUBLISH = "stages.publish={kind: publish, repo: me/tiny-draft, upload: false}"
COMMAND = [sys.executable, "-m", "draftsmith.recipes.commands.cli", "publish"]
SECRET = "hf_" + "S" * 34
PROJECT = "companyprojectname"
FROM_ENVIRONMENT = [
    "stages.draft.about=for ${oc.env:DRAFTSMITH_PROJECT}", "stages.draft.steps=${oc.env:DRAFTSMITH_STEPS}",
]  # fmt: skip


# What training, data and plots need: the packages are absent from the fresh process, as where nobody installed them.
# braceexpand comes with webdataset, pandas and pyarrow with datasets.
TRAINING_ONLY = ("wandb", "deepspeed", "peft", "webdataset", "datasets", "av", "matplotlib", "omegaconf", "accelerate",
                 "braceexpand", "pandas", "pyarrow", "rich")  # fmt: skip
ABSENT = f"""
import atexit, importlib.machinery, os, sys
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {TRAINING_ONLY} else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
@atexit.register
def say():
    with open(os.environ["DRAFTSMITH_TEST_SAID"], "w") as file:
        print(*sorted({{name.split(".")[0] for name in sys.modules}}), file=file)
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A run that ends with its folder, which a fresh process has tried: with a token in the environment, and without
    the packages that only training needs.
    """
    output, without = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("without")
    (without / "sitecustomize.py").write_text(ABSENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        patch.setenv("DRAFTSMITH_PROJECT", PROJECT)
        patch.setenv("DRAFTSMITH_STEPS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(without), os.environ.get("PYTHONPATH")])))
        patch.setenv("DRAFTSMITH_TEST_SAID", str(output / "imported.txt"))
        output.joinpath("run.yaml").write_text(
            f"command: trains/train.py recipe=/home/alice/mine.yaml output={output}\n"
            "recipe: mine.yaml\npackages: {torch: '2.13', transformers: '5.23'}\n"
        )
        said = run(output, *SETTINGS, *FROM_ENVIRONMENT, PUBLISH, stages=(*TRAINED, "publish"))
    assert any("not uploaded" in line for line in said)
    return output


@pytest.fixture
def folder(published, tmp_path):
    """A copy to break."""
    return Path(shutil.copytree(published / "publish" / "repository", tmp_path / "copy"))


def test_a_published_drafter_decodes_without_what_only_training_needs(published):
    """The fresh process opened the folder, ran the card's code and decoded (a fault there fails the fixture)."""
    imported = set((published / "imported.txt").read_text().split())
    assert {"draftsmith", "torch", "transformers"} <= imported and not imported & set(TRAINING_ONLY)


def test_the_notebook_shows_where_each_token_came_from(published, tmp_path, monkeypatch, capsys):
    """Its cells, in their order; what it says is what the folder was published with."""
    folder = published / "publish" / "repository"
    parts = f"target={published / 'target'} processor={published / 'world'}"
    names, shown = run_notebook(monkeypatch, "acceptance", tmp_path, folder=folder, target=parts)
    stored = json.loads((folder / "draftsmith.json").read_text())["published"]["expected"]
    assert names["tokens"] == stored["tokens"] and len(names["origins"]) == len(stored["tokens"])
    assert names["origins"].count("draft") == sum(stored["accepted"]) and names["origins"][0] == "prefill"
    assert "the same tokens: True" in capsys.readouterr().out
    tokens, bars = shown
    assert len(tokens.axes[0].texts) == len(stored["tokens"]) and tokens.axes[0].images, "over the picture"
    assert len(bars.axes[0].patches) == 2 * len(stored["accepted"])


def test_verify_says_what_is_as_it_was_published(published, folder, capsys):
    parts = ("--target", f"target={published / 'target'}", "--target", f"processor={published / 'world'}")
    assert main(["verify", str(folder), *parts]) == 0
    said = capsys.readouterr().out
    assert "as they were published" in said and "the same tokens and accepted drafts" in said and "method M" in said
    assert main(["verify", str(folder)]) == 2, "the run trained its target: nobody can fetch it"
    assert "--target FOLDER" in capsys.readouterr().err
    assert main(["verify", str(folder), "--files-only"]) == 0
    assert "stored prompt" not in capsys.readouterr().out


def test_verify_names_what_is_not_as_it_was_published(published, folder, capsys):
    state = load_file(folder / "model.safetensors")
    save_file({name: value.flip(0).contiguous() for name, value in state.items()}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    target = ("--target", str(published / "target"))
    assert main(["verify", str(folder), *target]) == 3
    said = capsys.readouterr().out
    assert f"({folder / 'model.safetensors'})" in said and "its checksum differs" in said
    assert "stored prompt" not in said, "nothing of it is loaded"
    write_sums(folder)
    assert main(["verify", str(folder), *target]) == 3
    assert "stored prompt has tau" in capsys.readouterr().out
    (folder / SUMS).unlink()
    (folder / "draftsmith.json").write_text("{}")
    assert main(["verify", str(folder), *target]) == 3
    said = capsys.readouterr().out
    assert f"{SUMS} is missing" in said and "does not say how this drafter was published" in said


def test_opened_again_it_does_what_it_did(published):
    folder, target = published / "publish" / "repository", {"target": published / "target"}
    stored = json.loads((folder / "draftsmith.json").read_text())["published"]["expected"]
    assert reproduce(folder, target=target).tau == stored["tau"]
    speculator = open_published(folder, target=published / "target")
    said = speculator("Describe the picture.", folder / "check" / "picture.png")
    assert said.generation.tokens == stored["tokens"] and said.tau == stored["tau"]
    plain = speculator("Describe the picture.", folder / "check" / "picture.png", plain=True)
    assert plain.output == said.output and plain.tau == 1.0
    outside = UserRequest(text="Describe the picture.", pictures=[str(folder / "check" / "picture.png")])
    with pytest.raises(UserError, match="is an absolute path"):  # of a stored prompt, whose writer may be a stranger
        speculator.say(outside, folder)
    # The drafter sees: without the picture it is asked something else.
    assert speculator("Describe the picture.").generation.tokens != stored["tokens"]


def test_answers_end_where_they_were_measured_to_end_and_of_an_older_folder_where_the_targets_do(published, tmp_path):
    folder = published / "publish" / "repository"
    section = read_published(folder)
    assert section.decoding.end_ids == [2]
    target = Path(shutil.copytree(published / "target", tmp_path / "target"))
    stored = section.expected.tokens
    inside = range(1, len(stored) - 1)
    end = next(stored[place] for place in inside if stored[place] not in stored[:place])
    path = target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [end, 2]}))

    def answered(section) -> list[int]:
        return assemble(folder, section, target).say(section.prompt, folder).generation.tokens

    assert answered(section) == stored
    decoding = section.decoding.model_dump(exclude={"end_ids"})
    older = type(section).model_validate(section.model_dump(mode="json", by_alias=True) | {"decoding": decoding})
    assert older.decoding.end_ids is None and answered(older) == stored[: stored.index(end) + 1]


def test_no_file_holds_the_token_what_variables_gave_or_where_it_was_made(published):
    """And what is published names no folder of this machine, nor whose it is."""
    folder = published / "publish" / "repository"
    for path in (path for path in published.rglob("*") if path.is_file()):
        held = path.read_bytes()
        assert SECRET.encode() not in held and PROJECT.encode() not in held, path
        places = (bytes(published), b"/home/", b"alice", bytes(Path.home()))
        assert not path.is_relative_to(folder) or not any(word in held for word in places), path
    command = yaml.safe_load((folder / "run.yaml").read_text())["command"]
    assert command.endswith(f"recipe=mine.yaml output={published.name}")
    draft = yaml.safe_load((folder / "recipe.yaml").read_text())["stages"]["draft"]
    assert draft["about"] == "for ${oc.env:DRAFTSMITH_PROJECT}" and draft["steps"] == "${oc.env:DRAFTSMITH_STEPS}"


def test_a_prompt_that_a_variable_gives_is_refused(published, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_PROJECT", PROJECT)
    with pytest.raises(UserError, match="word for word") as caught:
        run(published, *SETTINGS, PUBLISH.replace("publish=", "other="),
            "stages.other.prompt={text: '${oc.env:DRAFTSMITH_PROJECT}'}", stages=("other",))  # fmt: skip
    assert PROJECT not in str(caught.value) and "prompt.text=" in caught.value.hint


WRONG = {
    "no section": lambda manifest: manifest.pop("published"),
    "a section that is a list": lambda manifest: manifest.update(published=[1]),
    "a huge seed": lambda manifest: manifest["published"].update(seed=10**30),
    "a target of no kind": lambda manifest: manifest["published"]["target"].update(kind=["llava"]),
    "a target of another kind": lambda manifest: manifest["published"].update(target="llava"),
    "a drafter without kind": lambda manifest: manifest["published"]["drafter"].pop("kind"),
    "a drafter of wrong values": lambda manifest: manifest["published"]["drafter"].update(language_model=7),
    "decoding of wrong values": lambda manifest: manifest["published"]["decoding"].update(max_new_tokens="many"),
    "a prompt that is a number": lambda manifest: manifest["published"].update(prompt=3),
    "a tokenizer that is a list": lambda manifest: manifest.update(tokenizer_hash=[]),
    "a target that is a number": lambda manifest: manifest.update(target=3),
    "a share below nothing": lambda manifest: manifest["published"]["decoding"].update(top_p=-3),
    "a share of true": lambda manifest: manifest["published"]["decoding"].update(top_p=True),
    "a share above all": lambda manifest: manifest["published"]["decoding"].update(top_p=1.5),
    "fewer than no tokens kept": lambda manifest: manifest["published"]["decoding"].update(top_k=-1),
    "a temperature of 10**6": lambda manifest: manifest["published"]["decoding"].update(temperature=10**6),
    "10**12 tokens": lambda manifest: manifest["published"]["decoding"].update(max_new_tokens=10**12),
    "more tokens than positions": lambda manifest: manifest["published"]["decoding"].update(max_new_tokens=10**6),
    "a chain of 10**9": lambda manifest: tree(manifest, kind="chain", gamma=10**9),
    "a tree of 10**9 nodes": lambda manifest: tree(manifest, kind="dynamic", total=10**9),
    "a tree of 10**9 levels": lambda manifest: tree(manifest, kind="dynamic", depth=10**9),
    "a tree as wide": lambda manifest: tree(manifest, kind="dynamic", width=10**9),
    "a product of 10**9": lambda manifest: tree(manifest, kind="product", total=10**9),
    "SAGE's with 10**9 nodes": lambda manifest: tree(manifest, kind="sage", max_nodes=10**9),
    "a list of a rank of 10**9": lambda manifest: tree(manifest, kind="static", choices=[[10**9]]),
    "a list of 10**4 nodes": lambda manifest: tree(manifest, kind="static", choices=[[n] for n in range(10**4)]),
    "a named tree of 10**9": lambda manifest: manifest["published"]["decoding"].update(tree="1000000000-4-8"),
    "no pixels": lambda manifest: manifest["published"]["looking"].update(min_pixels=-1),
    "a negative class": lambda manifest: manifest["published"]["prompt"].update(label=-1),
    "negative tokens": lambda manifest: manifest["published"]["expected"].update(tokens=[-1]),
    "a setting that the drafter has not": lambda manifest: manifest["published"]["decoding"].update(reading={"x": 1}),
    "a mode that it has not": lambda manifest: manifest["published"]["decoding"].update(mode="Q"),
}


def tree(manifest, **values):
    manifest["published"]["decoding"].update(tree=values)


@pytest.mark.parametrize("change", WRONG)
def test_a_manifest_of_wrong_kinds_is_told_by_its_name(change, published, folder):
    manifest = json.loads((folder / "draftsmith.json").read_text())
    WRONG[change](manifest)
    (folder / "draftsmith.json").write_text(json.dumps(manifest))
    write_sums(folder)
    error = fails_with("", open_published, folder, target=published / "target")
    assert "draftsmith.json" in str(error) and error.hint


@pytest.mark.parametrize("size", [10**7, -1, 2.5e9])
@pytest.mark.parametrize("place", [("text_config", "num_hidden_layers"), ("vision_config", "hidden_size")])
def test_a_model_that_no_memory_holds_is_not_begun(published, folder, place, size):
    config = json.loads((folder / "config.json").read_text())
    config[place[0]][place[1]] = size
    (folder / "config.json").write_text(json.dumps(config))
    write_sums(folder)
    with pytest.raises(UserError, match=f"{place[0]}.{place[1]} is .*, and models have up to") as error:
        open_published(folder, target=published / "target")
    assert error.value.where == str(folder / "config.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "notes.txt", "report/x.pkl"])
def test_a_pickle_beside_the_weights_is_a_finding(published, folder, capsys, name):
    """Listed with a checksum, too: no reader of ours opens it, and others would."""
    if name == "notes.txt":
        (folder / name).write_bytes(pickle.dumps([1]))
    else:
        torch.save({}, folder / name)
    write_sums(folder)
    assert main(["verify", str(folder), "--target", str(published / "target")]) == 3
    said = capsys.readouterr().out
    assert f"{folder / name} is a pickle" in said and "stored prompt" not in said, "nothing of it is loaded"


@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_another_type_of_the_weights_is_said(published, folder, capfd, kind):
    state = load_file(folder / "model.safetensors")
    state = {name: value.to(getattr(torch, kind)) for name, value in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    write_sums(folder)
    open_published(folder, target=published / "target")
    said = f"{folder}: {len(state)} tensors are stored as {kind} and read as float32"
    assert said in capfd.readouterr().err


def test_damaged_files_of_a_publication_are_told(published, folder):
    """The list of checksums itself, and with a list that agrees each file that is opened by its name."""

    def load():
        return open_published(folder, target=published / "target")

    assert set(DAMAGES) - told(folder / SUMS, load) <= {"missing"}  # as somebody's own folder has none

    def load_listed():
        write_sums(folder)
        return load()

    for name in ("draftsmith.json", "config.json", "model.safetensors"):
        assert set(DAMAGES) - told(folder / name, load_listed) <= {"one flipped bit"}, name


def test_a_damaged_index_of_several_files_is_told(published, tmp_path):
    """Of a draft whose weights were split: cut and edited, and one that names what is not there or not its own."""
    draft = Path(shutil.copytree(published / "draft", tmp_path / "draft", ignore=lambda *_: {"steps", "cache"}))
    model = load_drafter(draft, tokenizer_hash=None, dtype=torch.float32)
    (draft / "model.safetensors").unlink()
    model.save_pretrained(draft, max_shard_size="40KB")
    index = draft / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    files = sorted(set(whole["weight_map"].values()))
    assert len(files) > 2

    def load():
        return load_drafter(draft, tokenizer_hash=None, dtype=torch.float32)

    assert set(DAMAGES) - told(index, load) <= {"one flipped bit"}
    for name in files[1:2]:
        assert set(DAMAGES) - told(draft / name, load) <= {"one flipped bit"}
    shutil.copy(draft / files[0], tmp_path / files[0])
    tensor = next(iter(whole["weight_map"]))
    named = {
        "model-00099-of-00099.safetensors": "model-00099-of-00099.safetensors",
        f"../{files[0]}": f"names a file outside its folder: ../{files[0]}",
        str(tmp_path / files[0]): "names a file outside its folder",
    }
    for name, problem in named.items():
        index.write_text(json.dumps(whole | {"weight_map": whole["weight_map"] | {tensor: name}}))
        error = fails_with(re.escape(problem), load)
        assert str(draft) in str(error) and error.hint


@pytest.mark.parametrize(("change", "says"), [("cut", "is [4, 32], expected [32, 32]"), ("take", "is missing")])
def test_weights_of_another_shape_are_named_even_with_a_list_that_agrees(change, says, published, folder):
    """transformers draws a missing tensor at random and says so in a log alone."""
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if "q_proj" in name and "language_model" in name)
    state[name] = state[name][:4].clone()
    if change == "take":
        del state[name]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    write_sums(folder)
    caught = fails_with("", open_published, folder, target=published / "target")
    assert "the weights do not fit config.json" in caught.problem and says in caught.problem


def test_a_login_that_is_missing_is_told_before_anything_is_built(published, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="not logged in"):
        run(published, *SETTINGS, "stages.early={kind: publish, repo: me/tiny-draft}", stages=("early",))
    assert not (published / "early" / "repository").exists()


def test_a_secret_in_a_setting_is_refused_by_the_files_name(published, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "an-old-password")
    asked = "stages.publish.prompt={text: say an-old-password please}"
    with pytest.raises(UserError, match="holds a secret") as caught:
        run(published, *SETTINGS, PUBLISH.replace("publish=", "again="), asked.replace("publish", "again"),
            stages=("again",))  # fmt: skip
    assert "an-old-password" not in str(caught.value)
    left = [path for path in (published / "again").rglob("*") if path.is_file()]
    assert not (published / "again" / "repository").exists()
    assert not any(b"an-old-password" in path.read_bytes() for path in left), left


KEY = "gl" + "pat-" + "AbCd_EfGh-IjKl012345"  # made up, and put together here


@pytest.mark.parametrize(("name", "text"), [
    ("recipe.yaml", f"stages:\n  a: {{note: {KEY}}}\n"), ("README.md", f"run with `{KEY}`\n"),
    ("page.html", f'<img src="data:image/png;base64,AbC0+/="><td>{KEY}</td>'), ("tokenizer.model", f"\0\1{KEY}\0"),
    (f"{KEY}.txt", ""), ("a.txt", "x https://me:hunter2hunter2@host.org"), ("b.txt", "private_key: hunter2"),
    ("c.txt", "x from-the-environment"), ("d.txt", "x of-the-hub"),
])  # fmt: skip
def test_a_text_with_a_secret_is_refused_by_its_files_name(name, text, tmp_path, monkeypatch):
    monkeypatch.setenv("DATABASE_PASS", "from-the-environment")
    words = {"eos_token": "<|im_end|>", "vocab": {"password": 1, "secret": 2, "sk-": 3}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "SHA256SUMS").write_text(f"{'0123456789abcdef' * 4}  model.safetensors\n")
    refuse_secrets(tmp_path, "of-the-hub")
    (tmp_path / name).write_text(text)
    caught = fails_with(r"holds a secret \(rule: ", refuse_secrets, tmp_path, "of-the-hub")
    assert KEY not in str(caught) and "change the secret" in str(caught)


@pytest.mark.slow
def test_a_finished_run_goes_to_the_hub_and_comes_back(tmp_path, capfd):
    """`draftsmith publish RUN` of a recipe without a stage for it, and a stranger's process with the Hub's name."""
    run(tmp_path, *SETTINGS, stages=TRAINED)
    (tmp_path / "suite-test.yaml").rename(tmp_path / "recipe.yaml")
    tree = loaded(tmp_path / "again", *SETTINGS).tree
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree | {"output": str(tmp_path)}, sort_keys=False))
    assert main(["publish", str(tmp_path), "repo=me/eagle-draft"]) == 2
    assert "EAGLE" in capfd.readouterr().err and not (tmp_path / "publish").exists()
    with HubServer() as server:
        environment = os.environ | {"HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        asked = [*COMMAND, str(tmp_path), "repo=me/tiny-draft", "visibility=public"]
        own = environment | {"HF_TOKEN": TOKEN}
        done = subprocess.run(asked, env=own, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr and "(public)" in done.stdout
        repository = server.repositories["me/tiny-draft"]
        assert not repository.private and [what for what, _ in repository.history].count("commit") == 1
        told = json.loads((tmp_path / "publish" / "published.json").read_text())
        assert told["uploaded"] and told["commit"] == repository.refs["main"]
        # The card's own three lines, word for word but for the reader's target and picture.
        code = repository.commits[told["commit"]]["README.md"].decode().split("```python\n")[1].split("```")[0]
        code = code.replace('"path/to/the/target"', json.dumps(str(tmp_path / "target")))
        picture = tmp_path / "publish" / "repository" / "check" / "picture.png"
        code = code.replace('"picture.png"', json.dumps(str(picture))) + "\nprint(speculator.decoding.max_new_tokens)"
        stranger = environment | {"HF_HOME": str(tmp_path / "home")}
        done = subprocess.run([sys.executable, "-c", code], env=stranger, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith("12")
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.slow
@pytest.mark.parametrize("track", ["visual", "language"])
def test_heads_of_both_kinds_are_published(track, tmp_path, monkeypatch):
    if track == "visual":
        publish = "{kind: publish, repo: me/EAGLE-tiny, upload: false, from: head, prompt: {text: a red circle}}"
        visual_run.run(tmp_path, f"stages.publish={publish}")
    else:
        publish = "{kind: publish, repo: me/tiny-sparrow, upload: false, from: head, method: Sparrow without VATA}"
        heads_run.run(tmp_path, f"stages.publish={publish}")
    folder = tmp_path / "publish" / "repository"
    assert {"model.safetensors", "config.json", "draftsmith.json", "recipe.yaml"} <= {p.name for p in folder.iterdir()}
    assert not (folder / "tokenizer.json").exists()
    stored = json.loads((folder / "draftsmith.json").read_text())["published"]
    made = {thing: tmp_path / name for thing, name in (("target", "target"), ("vq", "vq"), ("text", "target"))}
    made |= {"processor": tmp_path / "world"} if track == "language" else {}
    assert reproduce(folder, target=made).tokens == stored["expected"]["tokens"]
    if track == "visual":
        parts = " ".join(f"{part}={place}" for part, place in made.items())
        names, (squares, _) = run_notebook(
            monkeypatch, "acceptance", tmp_path, folder=folder, target=parts, picture="", prompt="a red circle"
        )
        assert len(squares.axes[0].patches) == len(names["tokens"]), "a square for each token"
    matter = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert matter["library_name"] == "draftsmith" and "pipeline_tag" not in matter
    assert ("text-to-image" if track == "visual" else "image-text-to-text") in matter["tags"]
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=r"model\.safetensors is not as it was published"):
        open_published(folder, target=made)
