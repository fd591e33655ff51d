"""Tokens and keys of every look reach nothing that is written or printed; what only looks like one is kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from draftsmith.core.secrets import HIDDEN, redact, redact_argument, redact_tree
from draftsmith.core.tracking import Tracker, TrackingConfig
from draftsmith.recipes.cli import main
from draftsmith.recipes.provenance import versions

ROOT = Path(__file__).resolve().parents[2]
HEX, COMMIT = "0123456789abcdef0123456789abcdef01234567", "76543210fedcba9876543210fedcba9876543210"
# Made up for this test; none opens anything.
SHAPED = {
    "hugging face": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789",
    "wandb": HEX,
    "wandb, new": "wandb_v1_AbCdEfGhIjKlMnOpQrStUv_WxYz0123456789",
    "github": "ghp_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789",
    "openai": "sk-AbCdEfGhIjKlMnOpQrStUv-WxYz0123456789",
}
ADDRESSES = {
    "https://me:hunter2hunter2@host.org/x": "https://<hidden>@host.org/x",
    "https://me:hunter2@hunter2@host.org/x": "https://<hidden>@host.org/x",
    "http://:hunter2hunter2@proxy:8080": "http://<hidden>@proxy:8080",
    "https://hunter2hunter2@host.org": "https://<hidden>@host.org",
}
VARIABLES = {
    "WANDB_API_KEY": "env-wandb-0123",
    "HF_TOKEN": 'it\'s a "quoted" $token',
    "MY_SERVICE_PASSWORD": "env/pass+word=",
    "AWS_SECRET_ACCESS_KEY": "env-aws-secret",
}
PLAIN = "hunter2hunter2"  # looks like nothing: only its key's name gives it away


@pytest.fixture
def environment(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("secret", SHAPED.values(), ids=SHAPED.keys())
@pytest.mark.parametrize("around", ["{}", "a {} b", "path/run_{}_1.json", "x={}&y", "'{}'", "{}\n{}"])
def test_shapes_are_hidden_wherever_they_stand(secret, around):
    text = redact(around.replace("{}", secret))
    assert secret not in text
    assert HIDDEN in text


@pytest.mark.parametrize("address", ADDRESSES)
def test_users_and_passwords_of_addresses(address):
    assert redact(f"cannot reach {address}: timeout") == f"cannot reach {ADDRESSES[address]}: timeout"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GET https://h.org/x?token=hunter2hunter2&y=1 failed", "GET https://h.org/x?token=<hidden>&y=1 failed"),
        ("https://s3.org/f?X-Amz-Credential=AB%2F1&X-Amz-Signature=0a1b2c#z",
         "https://s3.org/f?X-Amz-Credential=<hidden>&X-Amz-Signature=<hidden>#z"),
        ("header b'Authorization: Bearer hunter2hunter2hunter2'", "header b'Authorization: Bearer <hidden>'"),
        ("a bearer of bad news", "a bearer of bad news"),
    ],
)  # fmt: skip
def test_what_addresses_and_headers_ask_with(text, expected):
    assert redact(text) == expected


def test_a_secret_that_begins_like_another(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "hunter2hunter2")
    monkeypatch.setenv("B_TOKEN", "hunter2hunter2-and-more")
    assert redact("hunter2hunter2-and-more") == HIDDEN


def test_a_recipe_that_cannot_be_read_shows_no_half_of_a_key(tmp_path, capfd):
    """YAML's own message cuts the line, and what is left of a key looks like none."""
    (tmp_path / "mine.yaml").write_text(f"stages: {SHAPED['hugging face']}: x")
    assert main([f"recipe={tmp_path / 'mine.yaml'}"]) == 2
    said = capfd.readouterr().err
    assert "line 1, column 48: mapping values are not allowed here" in said and "0123456789" not in said


@pytest.mark.parametrize("name", VARIABLES)
def test_values_of_secret_variables(environment, name):
    assert redact(f"<{VARIABLES[name]}>") == f"<{HIDDEN}>"
    assert redact_tree({"x": [VARIABLES[name]]}) == {"x": [HIDDEN]}


@pytest.mark.parametrize(
    "text",
    [
        "resuming from runs/x/step-00000004 (step 4)",
        "meta-llama/Llama-3 user@host.org, see https://host.org/a/b?c=d#e",
        "64 samples, 500 tokens, 100 supervised",
        "sha256 " + HEX + "0" * 24,
    ],
)
def test_other_text_is_left_alone(environment, text):
    assert redact(text) == text


def test_names_of_secrets_in_a_tree():
    names = ("token", "hf_token", "api_key", "apikey", "API_KEY", "password", "client_secret", "credentials", "tokens")
    for name in names:
        assert redact_tree({"a": [{name: PLAIN}]}) == {"a": [{name: HIDDEN}]}, name
        assert redact_tree({name: [PLAIN, {"value": PLAIN}]}) == {name: [HIDDEN, {"value": HIDDEN}]}, name
    assert redact_tree({"password": 12345678, "api_key": None}) == {"password": HIDDEN, "api_key": None}
    assert redact_tree({SHAPED["github"]: 1}) == {HIDDEN: 1}


def test_what_only_looks_like_a_secret_is_kept():
    tree = {
        "max_new_tokens": 40, "eos_token": "</s>", "target": {"revision": COMMIT}, "git": {"commit": COMMIT},
        "lr": 1e-3, "stages": ["a", "b"], "dry_run": True, "x": None, "keys": {1: "one"},
    }  # fmt: skip
    assert redact_tree(tree) == tree


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (f"a.api_key={PLAIN}", "a.api_key=<hidden>"),
        (f"a={{b: 1, auth_token: {PLAIN}}}", "a=<hidden>"),
        (f"a={{'password': '{PLAIN}'}}", "a=<hidden>"),
        ("a.password=12345678", "a.password=<hidden>"),
        (f"a=x{SHAPED['hugging face']}", "a=x" + SHAPED["hugging face"]),  # a word of its own only
        (f"a={SHAPED['hugging face']}", "a=<hidden>"),
        (SHAPED["hugging face"], "<hidden>"),
        ("stages.evaluate.max_new_tokens=12", "stages.evaluate.max_new_tokens=12"),
        ("a={text_tokens: 5, visual_tokens: 7}", "a={text_tokens: 5, visual_tokens: 7}"),
        (f"target.revision={COMMIT}", f"target.revision={COMMIT}"),
        ("recipe=demo/lvlm", "recipe=demo/lvlm"),
        ("fast", "fast"),
    ],
)
def test_command_line_arguments(argument, expected):
    assert redact_argument(argument) == expected


def test_the_tracker_writes_and_says_none(environment, tmp_path):
    """metrics.jsonl is a folder, so writing fails with a message that holds the path, and the path a token."""
    folder = tmp_path / SHAPED["hugging face"]
    (folder / "metrics.jsonl").mkdir(parents=True)
    said: list[str] = []
    tracker = Tracker(TrackingConfig(), folder, name="x", recipe={}, say=said.append)
    tracker.log({"loss": 1.0}, 1)
    assert len(said) == 1 and "tracking failed" in said[0] and HIDDEN in said[0]
    assert SHAPED["hugging face"] not in said[0]


def leaks(text: str | bytes) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    secrets = [*SHAPED.values(), *VARIABLES.values(), PLAIN]
    # As written by YAML, JSON and the shell as well.
    forms = {s: {s, json.dumps(s)[1:-1], s.replace("'", "''"), s.replace("'", "'\"'\"'")} for s in secrets}
    return [s for s in secrets if any(form.encode() in data for form in forms[s])]


SECRETIVE = [
    "tracking={wandb: {project: p, mode: offline}}",
    f"drafter.language_model.auth_token={PLAIN}",
    f"drafter.language_model.nested={{credentials: {{user: {PLAIN}}}}}",
    f"drafter.language_model.address=https://me:{PLAIN}@host.org/x",
    *(f"drafter.language_model.value_{number}={json.dumps(value)}" for number, value in enumerate(VARIABLES.values())),
    *(f"drafter.language_model.shaped_{number}={value}" for number, value in enumerate(SHAPED.values())),
]


def small_recipe(path: Path) -> Path:
    """The demo's first two stages, two steps long."""
    tree = yaml.safe_load((ROOT / "recipes" / "demo" / "lvlm.yaml").read_text())
    stages = tree["stages"]
    tree["stages"] = {
        "world": stages["world"] | {"splits": {"train": {"attribute": 8}}, "vocab_size": 400},
        "target": stages["target"] | {"steps": 2, "batch_size": 4, "log_every": 1, "checkpoints": {"every": 1}},
    }
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def test_a_whole_run_writes_and_prints_none(environment, tmp_path, capfd, monkeypatch):
    """Through the command line, with wandb offline: every file of the run is searched, wandb's own included."""
    output = tmp_path / "run"
    recipe = small_recipe(tmp_path / "recipe.yaml")
    arguments = [
        f"recipe={recipe}",
        f"output={output}",
        f"target.revision={COMMIT}",
        "stages.target.seed=3",
        *SECRETIVE,
    ]
    monkeypatch.setattr(sys, "argv", ["trains/train.py", *arguments])  # wandb reads it for itself
    assert main(arguments) == 0
    shown = capfd.readouterr()
    assert "stage target" in shown.out
    files = [path for path in output.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert {"recipe.yaml", "run.yaml", "metrics.jsonl", "manifest.json"} <= {path.name for path in files}
    for path in files:
        assert leaks(path.read_bytes()) == [], path
    assert leaks(shown.out) == leaks(shown.err) == []

    recipe = yaml.safe_load((output / "recipe.yaml").read_text())
    assert recipe["target"]["revision"] == COMMIT
    model = recipe["drafter"]["language_model"]
    assert (
        model["auth_token"] == model["nested"]["credentials"]["user"] == model["value_0"] == model["shaped_1"] == HIDDEN
    )
    about = yaml.safe_load((output / "run.yaml").read_text())
    assert about["git"]["commit"] == versions()["git"]["commit"]
    assert "stages.target.seed=3" in about["command"] and f"auth_token={HIDDEN}" in about["command"]


@pytest.mark.parametrize(
    "arguments",
    [
        [f"recipe={SHAPED['hugging face']}"],
        ["recipe=demo/lvlm", SHAPED["github"]],
        ["recipe=demo/lvlm", f"stages.new={{kind: {SHAPED['github']}}}"],
        ["recipe=demo/lvlm", f"drafter.password=[{PLAIN}"],
        ["recipe=demo/lvlm", f"seed=https://me:{PLAIN}@host.org"],
        ["recipe=demo/lvlm", f"seed={VARIABLES['WANDB_API_KEY']}"],
    ],
    ids=["recipe", "bare word", "section", "broken value", "address", "variable"],
)
def test_mistakes_are_told_without_them(environment, tmp_path, monkeypatch, capfd, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capfd.readouterr()
    assert HIDDEN in shown.err
    assert leaks(shown.out + shown.err) == []


def test_a_crash_is_told_without_them(tmp_path):
    """No mistake in the recipe, but an error of the operating system; through the real launcher, traceback and all."""
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / SHAPED["hugging face"]
    command = [sys.executable, "trains/train.py", "recipe=demo/lvlm", f"output={output}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "NotADirectoryError" in done.stderr and HIDDEN in done.stderr
    assert leaks(done.stdout + done.stderr) == []


def test_the_address_of_a_commit_is_kept_whole():
    """What publishing prints last is a link that works."""
    address = f"https://huggingface.co/me/draft/commit/{COMMIT}"
    assert redact(f"published: {address} (public)") == f"published: {address} (public)"
    assert HEX not in redact(f"key {HEX}")
