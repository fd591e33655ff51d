"""`draftsmith bench` against two real `vllm serve` on this CPU (scripts/test_engines): a target, and it with a head."""

import json

import pytest
from draftsmith.eval.measured_rows import PLAIN
from draftsmith.recipes.commands.cli import main
from served_pair import build, conversations
from vllm_server import IN_VLLM, start, wait

pytestmark = IN_VLLM
GAMMA, TOKENS = 4, 40
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ ('USER: ' if message['role'] == 'user' else 'ASSISTANT: ') + message['content'] + ' ' }}"
    "{% endfor %}ASSISTANT:"
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Addresses of the plain server and of the drafting one, and the folder of the pair."""
    folder = tmp_path_factory.mktemp("pair")
    build(folder, steps=80, rows=64)
    (folder / "chat.jinja").write_text(TEMPLATE)
    speculative = {"method": "eagle3", "model": str(folder / "eagle3"), "num_speculative_tokens": GAMMA}
    running = [start(folder, None), start(folder, speculative)]
    try:
        yield [wait(*one) for one in running] + [folder]
    finally:
        for process, _ in running:
            process.terminate()
        for process, _ in running:
            process.wait(300)


def test_tau_and_identical_answers_of_a_real_server(servers, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    plain, drafting, _ = servers
    command = ["bench", drafting, str(conversations(tmp_path / "set", 6)), "--beside", plain, "--at-once", "1,3"]
    assert main([*command, "--tokens", str(TOKENS), "--output", str(tmp_path / "out")]) == 0
    assert "Served by vLLM 0." in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert found["notes"] == [], "all tokens were counted, and none came from a cache"
    cells = {(cell["method"], cell["concurrency"]): cell for cell in found["cells"]}
    for together in (1, 3):
        without, with_drafts = cells[PLAIN, together], cells[drafting, together]
        assert without["tau"] == 1 and without["requests"] == with_drafts["requests"] == 9
        assert with_drafts["identical"] == 9 and with_drafts["tau"] > 1.2
        shares = with_drafts["accepted"]
        assert len(shares) == GAMMA and shares == sorted(shares, reverse=True) and shares[0] > 0.2
        # Passes that did not draft, and the last pass, which the answer's end cuts, keep tau a little below.
        assert 0.9 * (1 + sum(shares)) < with_drafts["tau"] <= 1 + sum(shares)
        assert 0 < with_drafts["ttft_p50_s"] <= with_drafts["ttft_p95_s"] and with_drafts["between_p50_s"] > 0
    assert cells[drafting, 1]["tau"] == pytest.approx(cells[drafting, 3]["tau"], rel=0.02)


def test_a_request_that_the_server_refuses_is_one_sentence(servers, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    command = [
        "bench",
        servers[1],
        str(conversations(tmp_path / "set", 6)),
        "--at-once",
        "2",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main([*command, "--tokens", "4000"]) == 2
    said = capsys.readouterr().err
    assert "answers 400 to /v1/chat/completions" in said and "Traceback" not in said
