"""Tokens and keys of every look reach nothing that is written or printed; what only looks like one is kept."""

import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml
from command_line import prints
from draftsmith.core.errors import UserError, first_line
from draftsmith.core.results import read_sums
from draftsmith.core.secrets import HIDDEN, redact, redact_argument, redact_output, redact_tree, secret_in, shortened
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.alike import versions
from draftsmith.trainers.run.matching import _shown
from fails import fails_with

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "76543210fedcba9876543210fedcba9876543210"
MIXED = "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
# Made up for this test; none opens anything. Put together here, so that scanners of repositories pass over this file.
SHAPED = {
    "hugging face": "hf" + "_" + MIXED,
    "wandb": "wandb" + "_v1_" + "AbCdEfGhIjKlMnOpQrStUv_WxYz0123456789",
    "github": "gh" + "p_" + MIXED,
    "github, fine-grained": "github" + "_pat_" + MIXED[:22] + "_" + (MIXED * 2)[:59],
    "openai": "sk" + "-AbCdEfGhIjKlMnOpQrStUv-WxYz0123456789",
    "aws": "AK" + "IA" + "QZ2X3C4V5B6N7M2K",
    "gitlab": "gl" + "pat-" + "AbCd_EfGh-IjKl012345",
    "google": "AI" + "za" + MIXED[:30] + "-_123",
    "slack": "xo" + "xb-123456789012-123456789012-" + MIXED[:24],
    "slack's webhook": "https://hooks.slack.com/" + "services/T01234567/B01234567/AbCdEfGhIjKlMnOpQrStUvWx",
    "nvidia": "nv" + "api-" + MIXED + "-" + MIXED[:20],
    "json web token": "ey" + "JhbGciOiJIUzI1NiJ9." + "ey" + "JzdWIiOiIxMjM0NSJ9." + "dBjftJeZ4CVP-mB92K27uhbUJU1p",
}
ADDRESSES = {
    "https://me:hunter2hunter2@host.org/x": "https://<hidden>@host.org/x",
    "https://me:hunter2@hunter2@host.org/x": "https://<hidden>@host.org/x",
    "https://hunter2hunter2@host.org": "https://<hidden>@host.org",
}
VARIABLES = {"WANDB_API_KEY": "env-wandb-0123", "HF_TOKEN": 'it\'s a "quoted" $token',
             "MY_SERVICE_PASSWORD": "env/pass+word=", "AWS_SECRET_ACCESS_KEY": "env-aws-secret",
             "AWS_ACCESS_KEY_ID": "env-aws-identity", "DATABASE_PASS": "env-database-pass",
             "SLACK_WEBHOOK_URL": "env-webhook", "MY_BEARER": "env-bearer"}  # fmt: skip
PLAIN = "hunter2hunter2"  # looks like nothing: only its key's name gives it away


@pytest.fixture
def environment(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("secret", SHAPED.values(), ids=SHAPED.keys())
@pytest.mark.parametrize("around", ["{}", "a {} b", "path/run_{}_1.json", "x={}&y", "'{}'", "{}\n{}"])
def test_shapes_are_hidden_wherever_they_stand(secret, around):
    text = redact(around.replace("{}", secret))
    assert secret not in text and HIDDEN in text


@pytest.mark.parametrize("name", SHAPED)
def test_a_key_is_hidden_to_its_end(name):
    assert redact(f"a {SHAPED[name]}-Z9_x, b") == f"a {HIDDEN}, b"


@pytest.mark.parametrize(("address", "hidden"), ADDRESSES.items())
def test_users_and_passwords_of_addresses(address, hidden):
    assert redact(f"cannot reach {address}: timeout") == f"cannot reach {hidden}: timeout"


@pytest.mark.parametrize(("text", "expected"), [
    ("GET https://h.org/x?token=hunter2hunter2&y=1 failed", "GET https://h.org/x?token=<hidden>&y=1 failed"),
    ("https://s3.org/f?X-Amz-Credential=AB%2F1&X-Amz-Signature=0a1b2c3d4e5f6071#z",
     "https://s3.org/f?X-Amz-Credential=<hidden>&X-Amz-Signature=<hidden>"),
    ("AccountName=me;AccountKey=AbC/d01+234==;Suffix=x", "AccountName=me;AccountKey=<hidden>;Suffix=x"),
    ("export AWS_SECRET_ACCESS_KEY=hunter2/hunter2 DB_PASS=hunter2",
     "export AWS_SECRET_ACCESS_KEY=<hidden> DB_PASS=<hidden>"),
    ("{'secret_access_key': 'hunter2', \"private_key\": \"hunter2\"}",
     "{'secret_access_key': '<hidden>', \"private_key\": \"<hidden>\"}"),
    ("private_key: hunter2", "private_key: <hidden>"),
    ("header b'Authorization: Bearer hunter2hunter2hunter2'", "header b'Authorization: Bearer <hidden>'"),
    *((f"{name}: hunter2hunter2", f"{name}: <hidden>") for name in ("bearer", "Bearer", "BEARER", "api_bearer")),
    ("--bearer-key hunter2hunter2", "--bearer-key <hidden>"),
    ("see https://discord.com/api/webhooks/12/hunter2.", "see <hidden>."),
    ("Authorization: token hunter2", "Authorization: token <hidden>"),
    ("sent bearer hunter2hunter2hunter2", "sent bearer <hidden>"),
    ("x-api-key: hunter2, X-Auth-Token: 'hunter2'", "x-api-key: <hidden>, X-Auth-Token: '<hidden>'"),
    ("x --token hunter2 --api-key=hunter2", "x --token <hidden> --api-key=<hidden>"),
])  # fmt: skip
def test_what_addresses_and_headers_ask_with(text, expected):
    assert redact(text) == expected


def test_a_secret_that_begins_like_another(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "hunter2hunter2")
    monkeypatch.setenv("B_TOKEN", "hunter2hunter2-and-more")
    assert redact("hunter2hunter2-and-more") == HIDDEN


def test_a_recipe_that_cannot_be_read_shows_no_half_of_a_key(tmp_path, capfd):
    """YAML's own message cuts the line, and what is left of a key looks like none."""
    (tmp_path / "mine.yaml").write_text(f"stages: {SHAPED['hugging face']}: x")
    said = prints(capfd, [f"recipe={tmp_path / 'mine.yaml'}"], 2)
    assert "line 1, column 48: mapping values are not allowed in this context" in said and "0123456789" not in said


@pytest.mark.parametrize("name", VARIABLES)
def test_values_of_secret_variables(environment, name):
    assert redact(f"<{VARIABLES[name]}>") == f"<{HIDDEN}>"
    assert redact_tree({"x": [VARIABLES[name]]}) == {"x": [HIDDEN]}


@pytest.mark.parametrize("text", [
    "resuming from runs/x/step-00000004 (step 4)",
    "meta-llama/Llama-3 user@host.org, see https://host.org/a/b?c=d#e",
    "https://host.org:8080/a, http://localhost:29500, http://[::1]:80/x",
    f"~/.cache/huggingface/hub/models--org--name/snapshots/{COMMIT}/config.json",
    f"target.revision was {COMMIT[:12]}; commit: {COMMIT}, 'revision': '{COMMIT}'",
    "a bearer of bad news; accepted tokens: 1.75/cycle, tokens = base64.b64encode(x)",
    "xxh3 0123456789abcdef0123456789abcdef, md5 0123456789abcdef0123456789abcdef",
    '"visual_tokens": 9.142857142857142, "T_tokens": 1.234567890123456e-05, and no more of it',
    "eos_token: '<|endoftext|>', pad_token=[PAD151643], tokens: 123456, max_new_tokens=40, secrets: none is kept",
    "sk-learn and hf_transfer; Qwen/Qwen2.5-VL-7B-Instruct",
    "64 samples, 500 tokens, 100 supervised",
    "authorization: required; Authorization: bearer $TOKEN; the bearer carries on; basic understanding of geometry",
    "vllm serve x --max-new-tokens 1024 --eos-token </s> --tokenizer y -u 1000:1000 proxy: http://proxy:8080",
    "http://host:8080/a@b and docker://x/y:tag, https://host.org/x:tag@sha256, cookie: chocolate, x-axis: tokens",
    "sha256 " + COMMIT + "0" * 24,
])  # fmt: skip
def test_other_text_is_left_alone(environment, text):
    assert redact(text) == text


def test_names_of_secrets_in_a_tree():
    names = (
        *("secret_access_key", "private_key", "AWS_ACCESS_KEY_ID", "accountKey", "x-api-key", "db_pass", "pass", "pwd"),
        *("Authorization", "proxy-authorization", "Cookie", "set-cookie", "X-Auth-Token", "subscription-key"),
        *(
            "token",
            "hf_token",
            "Bearer",
            "bearer_key",
            "api_key",
            "apikey",
            "API_KEY",
            "password",
            "client_secret",
            "credentials",
            "tokens",
        ),
    )
    for name in names:
        assert redact_tree({"a": [{name: PLAIN}]}) == {"a": [{name: HIDDEN}]}, name
        assert redact_tree({name: [PLAIN, {"value": PLAIN}]}) == {name: [HIDDEN, {"value": HIDDEN}]}, name
    assert redact_tree({"password": 12345678, "api_key": None}) == {"password": HIDDEN, "api_key": None}
    assert redact_tree({SHAPED["github"]: 1}) == {HIDDEN: 1}


def test_what_only_looks_like_a_secret_is_kept():
    tree = {
        "max_new_tokens": 40, "eos_token": "</s>", "target": {"revision": COMMIT}, "git": {"commit": COMMIT},
        "lr": 1e-3, "stages": ["a", "b"], "dry_run": True, "x": None, "keys": {1: "one"},
        "methods": {"DFlash, 5 tokens": {"draw": "sample"}, "M, no first token": {"draw": "sample"}},
    }  # fmt: skip
    assert redact_tree(tree) == tree


@pytest.mark.parametrize(("argument", "expected"), [
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
])  # fmt: skip
def test_command_line_arguments(argument, expected):
    assert redact_argument(argument) == expected


def leaks(text: str | bytes) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    secrets = [*SHAPED.values(), *VARIABLES.values(), PLAIN]
    # As written by YAML, JSON and the shell as well.
    forms = {s: {s, json.dumps(s)[1:-1], s.replace("'", "''"), s.replace("'", "'\"'\"'")} for s in secrets}
    return [s for s in secrets if any(form.encode() in data for form in forms[s])]


# In a list of texts, which takes anything; keys that nobody knows are refused when the recipe loads.
SECRETIVE = [
    "tracking={wandb: {project: p, mode: offline}}",
    f"tracking.wandb.tags={json.dumps([f'https://me:{PLAIN}@host.org/x', *VARIABLES.values(), *SHAPED.values()])}",
]


def small_recipe(path: Path) -> Path:
    """The demo's first two stages, two steps long."""
    tree = yaml.safe_load((ROOT / "recipes" / "demo" / "lvlm-from-nothing.yaml").read_text())
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
    arguments = [f"recipe={recipe}", f"output={output}", f"target.revision={COMMIT}", "stages.target.seed=3",
                 *SECRETIVE]  # fmt: skip
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
    address, *others = recipe["tracking"]["wandb"]["tags"]
    assert address == f"https://{HIDDEN}@host.org/x" and set(others) == {HIDDEN}
    about = yaml.safe_load((output / "run.yaml").read_text())
    assert about["git"]["commit"] == versions()["git"]["commit"]
    assert "stages.target.seed=3" in about["command"] and f"https://{HIDDEN}@host.org/x" in about["command"]


@pytest.mark.parametrize("arguments", [
    [f"recipe={SHAPED['hugging face']}"],
    ["recipe=demo/lvlm", SHAPED["github"]],
    ["recipe=demo/lvlm", f"stages.new={{kind: {SHAPED['github']}}}"],
    ["recipe=demo/lvlm", f"drafter.password=[{PLAIN}"],
    ["recipe=demo/lvlm", f"seed=https://me:{PLAIN}@host.org"],
    ["recipe=demo/lvlm", f"seed={VARIABLES['WANDB_API_KEY']}"],
], ids=["recipe", "bare word", "section", "broken value", "address", "variable"])  # fmt: skip
def test_mistakes_are_told_without_them(environment, tmp_path, monkeypatch, capfd, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capfd.readouterr()
    assert HIDDEN in shown.err and leaks(shown.out + shown.err) == []


def test_nothing_of_the_repository_looks_like_a_secret():
    """Code, recipes, docs and goldens hold hashes, commits and names of models, and no key."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    own = ("tests/goldens/", "tests/tools/")
    names = [name for name in listed.splitlines() if not name.startswith("tests/") or name.startswith(own)]
    assert len(names) > 300
    held = {name: secret_in((ROOT / name).read_bytes().decode("utf-8", "replace"))
            for name in names if (ROOT / name).is_file()}  # fmt: skip
    assert {name: rule for name, rule in held.items() if rule is not None} == {}


@pytest.mark.parametrize("length", [20, 40, 60, 80])
def test_a_secret_is_hidden_before_a_text_is_cut(length):
    text = f"see https://me:hunter2hunter2@host.org and {SHAPED['nvidia']}"
    assert shortened(text, length) == redact(text)[:length]
    assert "hun" not in shortened(text, length) and "Ab" not in shortened(text, length)


def test_what_another_library_has_cut_is_hidden():
    assert redact("key " + SHAPED["github, fine-grained"][:40]) == f"key {HIDDEN}"


@pytest.mark.parametrize("secret", SHAPED.values(), ids=SHAPED.keys())
def test_errors_hold_none(environment, secret):
    """Whoever prints, sends or writes a message."""
    error = UserError(f"no file {secret}", where=f"/data/{secret}", hint=f"try ({VARIABLES['HF_TOKEN']!r})")
    for text in (str(error), repr(error), error.problem, error.where, error.hint, first_line(OSError(f"x {secret}"))):
        assert leaks(text) == []
    assert HIDDEN in error.problem and HIDDEN in error.hint


def test_a_line_of_checksums_and_a_changed_setting_are_cut_behind_what_they_hide(tmp_path):
    (tmp_path / "SHA256SUMS").write_text("x" * 80 + " https://me:hunter2hunter2@host.org\n")
    assert "hun" not in str(fails_with("no line of checksums", read_sums, tmp_path))
    value = "x" * 60 + " https://me:hunter2hunter2@host.org"
    assert next(_shown({"key": value}, {}, "key")).endswith(" https://<hidden>@h")
    assert [*_shown({"key": value}, {"key": f"{value}s"}, "key")] == [
        '... ://<hidden>@host.org"',
        '... ://<hidden>@host.orgs"',
    ]


def test_messages_of_libraries_hold_none(environment, monkeypatch, capsys):
    """What transformers and others log and warn on any rank, once a run has begun."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    factory = logging.getLogRecordFactory()
    logger = logging.getLogger("a library")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    try:
        redact_output()
        for secret in (*SHAPED.values(), *VARIABLES.values()):
            logger.warning("cannot reach %s: %d", f"https://host/{secret}", 3)
            assert leaks(warnings.formatwarning(secret, UserWarning, "x.py", 1)) == []
    finally:
        logger.removeHandler(handler)
        logging.setLogRecordFactory(factory)
    said = capsys.readouterr().err
    assert said.count("cannot reach") == len(SHAPED) + len(VARIABLES) and leaks(said) == []
