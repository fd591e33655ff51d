"""`draftsmith audit` against two real `vllm serve` on this CPU (scripts/test_engines): a target, and it with a head."""

import json

import pytest
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
    """Addresses of the plain server, of the drafting one, and of one that drafts without our plugin's repairs."""
    folder = tmp_path_factory.mktemp("pair")
    build(folder, steps=80, rows=64)
    (folder / "chat.jinja").write_text(TEMPLATE)
    speculative = {"method": "eagle3", "model": str(folder / "eagle3"), "num_speculative_tokens": GAMMA}
    running = [start(folder, None), start(folder, speculative)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_VLLM_REPAIRS", "0")
        running.append(start(folder, speculative))
    try:
        yield [wait(*one) for one in running]
    finally:
        for process, _ in running:
            process.terminate()
        for process, _ in running:
            process.wait(300)


def test_a_real_server_is_audited(servers, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    plain, drafting, _ = servers
    command = ["audit", drafting, str(conversations(tmp_path / "set", 6)), "--beside", plain, "--top-k", "0"]
    assert main([*command, "--tokens", str(TOKENS), "--draws", "100", "--output", str(tmp_path / "out")]) in (0, 3)
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert found["faults"] == [] and found["greedy"]["tokens"] > TOKENS and found["drawn"]["draws"] == 100
    for cell in found["cells"][2:]:
        shares = cell["accepted"]
        assert len(shares) == GAMMA and shares == sorted(shares, reverse=True) and shares[0] > 0.2
        assert cell["tau"] == pytest.approx(1 + sum(shares)) and cell["request_s"] > 0


def test_vllms_own_fault_is_found(servers, tmp_path, monkeypatch):
    """On a CPU, drawn tokens beside a drafter. If this fails, vLLM is repaired."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for server, code in ((servers[2], 1), (servers[1], 0)):
        command = ["audit", server, "--beside", servers[0], "--limit", "12", "--tokens", str(TOKENS), "--top-k", "0"]
        assert main([*command, "--draws", "800", "--output", str(tmp_path / "out")]) == code
        found = json.loads((tmp_path / "out" / "audit.json").read_text())
        assert all(one.startswith("drawn: drafted tokens") for one in found["faults"])


def test_a_request_that_the_server_refuses_is_one_sentence(servers, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    command = ["audit", servers[1], str(conversations(tmp_path / "set", 6)), "--beside", servers[0]]
    assert main([*command, "--tokens", "4000", "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "answers 400 to /v1/chat/completions" in said and "Traceback" not in said
