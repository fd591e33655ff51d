"""DFlash 2's layouts, both ways: what others compute from an exported folder, and folders as others write them.

`Theirs` follows what vLLM 0.32, speculators 0.9, NeMo Automodel and z-lab's code compute in common, from config.json
and tensors alone. It shares nothing with the drafts of this project.
"""

import json
import math

import pytest
import torch
from dflash_tiny import SMALL, draft, walked
from draftsmith.core.errors import UserError
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.dflash2 import Dflash2Config
from draftsmith.models.drafters.outside import load_start
from draftsmith.models.formats.export import files_of
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.heads import import_head, load_published
from draftsmith.models.formats.source import Target, read_source
from fails import fails_with
from heads_tiny import config_of
from published_tiny import exported, published
from tensors import same_weights
from tiny import llava
from tiny import request as ask
from tiny import target as language

SECOND = {"kind": "dflash2", "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4, "mask_token_id": 61}
SETTINGS = {
    "the whole": {},
    "a window": {"sliding_window": 6},
    "other heads and rotation": {"kv_heads": "mha", "rope_theta": 500.0, "norm_eps": 3e-6, "intermediate_size": 40},
}


@pytest.fixture(scope="module")
def model():
    return llava(0, layers=5)


@pytest.fixture(scope="module")
def big(model):
    return language(model)


class Theirs:
    """A draft of anyone's config.json and tensors.

    Args:
        scores: the target's LM head.
    """

    def __init__(self, values, state, embedding, scores):
        if "speculators_model_type" in values:  # ids count what enters a layer
            assert values["speculators_model_type"] == "dflash2"
            self.layer, block = values["transformer_layer_config"], values
            self.taps = block["aux_hidden_state_layer_ids"]
            assert block["sliding_window_non_causal"] is True and block["sample_from_anchor"] is False
            self.size = block["block_size"]
        else:  # what leaves one
            self.layer, block = values, values["dflash_config"]
            self.taps = [one + 1 for one in block["target_layer_ids"]]
            assert values["is_causal"] is False
            self.size = block["block_size"]
        assert values["architectures"] == ["DFlash2DraftModel"] and self.layer["model_type"] == "qwen3"
        self.block, self.state, self.embedding, self.scores = block, state, embedding, scores
        windows = {"sliding_attention": self.layer.get("sliding_window"), "full_attention": None}
        self.windows = [windows[one] for one in self.layer["layer_types"]]

    def rms(self, x, name):
        return x * (x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt() * self.state[name]

    def linear(self, x, name):
        return x @ self.state[f"{name}.weight"].T

    def turned(self, x, places):
        """[T,H,E] in halves, as Qwen3's."""
        half = x.shape[-1] // 2
        angles = places[:, None].float() / self.layer["rope_parameters"]["rope_theta"] ** (torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)

    def convolved(self, x, deltas, base):
        """Each place of the one block [P,D]: sum over taps o of (base[o] + delta[o] of its group) x(t - o)."""
        out = torch.zeros_like(x)
        for place in range(len(x)):
            for tap in range(min(self.block["conv_kernel_size"], place + 1)):
                spread = deltas[place, tap].repeat_interleave(self.block["conv_group_size"])
                out[place] += (base[tap] + spread) * x[place - tap]
        return out

    def wrapped(self, x, name, sublayer):
        deltas = self.linear(x, f"{name}.kernel_projection").view(len(x), 2, self.block["conv_kernel_size"], -1)
        base = self.state[f"{name}.base_kernel"]
        return self.convolved(sublayer(self.convolved(x, deltas[:, 0], base[0])), deltas[:, 1], base[1])

    def attention(self, x, context, number, places):
        prefix, width = f"layers.{number}.self_attn", self.layer["head_dim"]
        heads, groups, rows = self.layer["num_attention_heads"], self.layer["num_key_value_heads"], len(context)

        def project(y, kind, count):
            return self.linear(y, f"{prefix}.{kind}_proj").view(len(y), count, width)

        both = torch.cat([context, x])
        q = self.turned(self.rms(project(x, "q", heads), f"{prefix}.q_norm.weight"), places[rows:])
        k = self.turned(self.rms(project(both, "k", groups), f"{prefix}.k_norm.weight"), places)
        k, v = (part.repeat_interleave(heads // groups, 1) for part in (k, project(both, "v", groups)))
        weights = torch.einsum("qhe,khe->hqk", q, k) / width**0.5
        if self.windows[number] is not None:
            weights = weights.masked_fill(places[rows:, None] - places >= self.windows[number], -math.inf)
        return self.linear(torch.einsum("hqk,khe->qhe", weights.softmax(-1), v).flatten(1), f"{prefix}.o_proj")

    @torch.no_grad()
    def outputs(self, layers, last):
        """[P,D] of the block after the token `last`; `layers` are states [T,D] by decoder layers passed."""
        joined = torch.cat([layers[tap] for tap in self.taps], -1)
        context = self.rms(self.linear(joined, "fc"), "hidden_norm.weight")
        ids = [last] + [self.block["mask_token_id"]] * (self.size - 1)
        x, places = self.embedding[ids].float(), torch.arange(len(context) + self.size)
        for number in range(self.layer["num_hidden_layers"]):
            name = f"layers.{number}"

            def attend(y, number=number):
                return self.attention(y, context, number, places)

            def feed(y, name=name):
                gate = torch.nn.functional.silu(self.linear(y, f"{name}.mlp.gate_proj"))
                return self.linear(gate * self.linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")

            x = x + self.wrapped(self.rms(x, f"{name}.input_layernorm.weight"), f"{name}.attention_conv", attend)
            x = x + self.wrapped(self.rms(x, f"{name}.post_attention_layernorm.weight"), f"{name}.mlp_conv", feed)
        return self.rms(x, "norm.weight")

    @torch.no_grad()
    def drafted(self, layers, last):
        """The likeliest path [K], and q [V] over all tokens at each of its places, as the walk draws at T = 1."""
        path, q = [], []
        tables = [self.state[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")]
        for output in self.outputs(layers, last)[1:]:
            scores, candidates = self.scores(output).topk(self.block["selector_top_k"])
            gated = tables[0][last] * self.linear(output, "candidate_selector.hidden_projection")
            scores = scores + tables[1][candidates] @ gated
            q.append(torch.zeros(len(self.embedding)).scatter(0, candidates, scores.softmax(0)))
            last = int(candidates[scores.argmax()])
            path.append(last)
        return path, torch.stack(q)


def saved(big, folder, **settings):
    """A folder of ours, as a stage leaves it."""
    config, head = draft(big, **SECOND | settings)
    identity = TargetIdentity({"kind": "llava", "path": str(folder.parent / "target")})
    config.save(head, folder, config.manifest(big, identity))
    return config, head


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_others_draft_the_same_from_an_exported_folder_and_it_comes_back(model, big, tmp_path, engine, name):
    config, head = saved(big, tmp_path / "head", **SETTINGS[name])
    source = read_source(tmp_path / "head", Target(model.config, "org/name"))
    check_expressible(engine, source, "all")
    published(tmp_path / "there", *files_of(engine, source))
    for seed in range(3):
        asked = ask(seed, 1)
        path, q, layers = walked(config, head, big, asked, 9 + seed)
        expected = Theirs(*exported(tmp_path / "there"), big.embedding, big.scores).drafted(layers, 9 + seed)
        assert path == expected[0]
        torch.testing.assert_close(q, expected[1], atol=2e-5, rtol=1e-4)
        assert q.gt(0).sum(-1).tolist() == [4] * 4
    back = import_head("dflash2", str(tmp_path / "there"), model.config.get_text_config(), embedding=None)
    assert back.config.shape(big.shape) == config.shape(big.shape) and same_weights(head, back.head)
    assert back.config == Dflash2Config.model_validate(config.model_dump())
    again = config.load(tmp_path / "there", big)  # `path:` in a recipe
    assert same_weights(head, again)
    other = Dflash2Config.model_validate(config.model_dump() | {"selector_top_k": 5})
    fails_with("selector_top_k is 4, expected 5", other.load, tmp_path / "there", big)


def theirs(big, head, **changed):
    """Config and tensors as Inco's folders and NeMo's have them: the block's size beside its other keys, bfloat16."""
    layer = head.shape.layer
    block = {"block_size": 5, "conv_group_size": 8, "conv_kernel_size": 2, "mask_token_id": 61, "selector_rank": 6,
             "selector_top_k": 4, "target_layer_ids": [0, 1, 3]} | changed.pop("block", {})  # fmt: skip
    values = {
        "architectures": ["DFlash2DraftModel"], "auto_map": {"AutoModel": "dflash2.DFlash2DraftModel"},
        "attention_bias": False, "dflash_config": block, "dtype": "bfloat16", "head_dim": layer.head_dim,
        "hidden_act": "silu", "hidden_size": 32, "intermediate_size": layer.intermediate_size, "is_causal": False,
        "layer_types": ["sliding_attention"] * 2, "max_position_embeddings": 256, "model_type": "qwen3",
        "num_attention_heads": layer.num_heads, "num_hidden_layers": 2, "num_key_value_heads": layer.num_kv_heads,
        "num_target_layers": 5, "rms_norm_eps": 1e-6, "sliding_window": 6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False, "use_sliding_window": True, "vocab_size": big.vocab_size,
    } | changed  # fmt: skip
    return values, {name: value.detach().bfloat16() for name, value in head.state_dict().items()}


def test_a_folder_of_others_is_read_bit_for_bit_and_drafts_as_theirs(model, big, tmp_path):
    _, head = draft(big, **SECOND)
    values, state = theirs(big, head)
    published(tmp_path / "theirs", values, state)
    read = import_head("dflash2", str(tmp_path / "theirs"), model.config.get_text_config(), embedding=None)
    assert all(torch.equal(value, state[name]) for name, value in read.head.state_dict().items())
    assert read.settings == SECOND | SMALL | {"kind": "dflash2", "sliding_window": 6, "taps": [1, 2, 4]}
    path, q, layers = walked(read.config, read.head, big, ask(4, 1), 11)
    whole = {name: value.float() for name, value in state.items()}
    expected = Theirs(values, whole, big.embedding, big.scores).drafted(layers, 11)
    assert path == expected[0]
    torch.testing.assert_close(q, expected[1], atol=2e-5, rtol=1e-4)


def test_training_starts_from_a_folder_of_others(big, tmp_path):
    _, head = draft(big, **SECOND)
    values, state = theirs(big, head)
    published(tmp_path / "theirs", values, state)
    config, identity = config_of(**SMALL | SECOND | {"sliding_window": 6}), TargetIdentity({"kind": "llava"})
    begun = load_start(config, tmp_path / "theirs", big, identity, load_published)
    assert all(torch.equal(value, state[name].float()) for name, value in begun.state_dict().items())
    longer = config_of(**SMALL | SECOND | {"sliding_window": 6, "block_size": 6})
    fails_with("block_size is 5, expected 6", load_start, longer, tmp_path / "theirs", big, identity, load_published)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"block": {"conv_kernel_size": 3}}, "conv_kernel_size is 3"),
        ({"block": {"input_embedding_scale": 5.6}}, "input_embedding_scale is 5.6"),
        ({"block": {"output_multiplier": 0.2}}, "output_multiplier is 0.2"),
        ({"block": {"final_logit_softcapping": 20.0}}, "final_logit_softcapping is 20.0"),
        ({"block": {"sample_from_anchor": True}}, "sample_from_anchor"),
        ({"block": {"swa_window_size": 9}}, "swa_window_size is 9, and sliding_window 6"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "only some layers"),
        ({"head_dim": 8, "num_attention_heads": 4}, "num_attention_heads is 4, the target's 2"),
    ],
)  # fmt: skip
def test_what_runs_otherwise_is_refused_by_name(model, big, tmp_path, changed, words):
    _, head = draft(big, **SECOND)
    published(tmp_path / "theirs", *theirs(big, head, **changed))
    fails_with(words, import_head, "dflash2", str(tmp_path / "theirs"), model.config.get_text_config(), embedding=None)


@pytest.mark.parametrize("changed", [
    {"is_causal": None, "block": {"causal": False}}, {"head_dim": None}, {"block": {"swa_window_size": 6}},
    {"is_causal": True}, {"is_causal": None, "block": {"causal": True}},
])  # fmt: skip
def test_a_key_that_says_what_ours_does_is_read(model, big, tmp_path, changed):
    _, head = draft(big, **SECOND)
    published(tmp_path / "theirs", *theirs(big, head, **changed))
    read = import_head("dflash2", str(tmp_path / "theirs"), model.config.get_text_config(), embedding=None)
    assert read.config.sliding_window == 6
    assert read.config.causal == bool(changed.get("is_causal") or changed.get("block", {}).get("causal"))


@pytest.mark.parametrize(
    ("changed", "words"), [({"logit_scale": 0.5}, "logit_scale is 0.5"), ({"is_causal": True}, "causal")]
)
def test_speculators_layout_is_held_to_the_same(model, big, tmp_path, changed, words):
    """Its conversion dropped these keys before anyone looked at them."""
    saved(big, tmp_path / "head")
    published(
        tmp_path / "there", *files_of("speculators", read_source(tmp_path / "head", Target(model.config, "org/name")))
    )
    path = tmp_path / "there" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    fails_with(words, import_head, "dflash2", str(tmp_path / "there"), model.config.get_text_config(), embedding=None)


@pytest.mark.parametrize("asked", ["dflash", "dspark"])
def test_another_kind_is_told(model, big, tmp_path, asked):
    """A DFlash 2 draft read as DFlash would draft, and badly."""
    _, head = draft(big, **SECOND)
    published(tmp_path / "theirs", *theirs(big, head))
    with pytest.raises(UserError, match=f"a draft of kind dflash2, and {asked} is asked for"):
        import_head(asked, str(tmp_path / "theirs"), model.config.get_text_config(), embedding=None)
    _, plain = draft(big, mask_token_id=61)
    published(tmp_path / "first", *theirs(big, plain))
    with pytest.raises(UserError, match="a draft of kind dflash, and dflash2 is asked for"):
        import_head("dflash2", str(tmp_path / "first"), model.config.get_text_config(), embedding=None)


def test_the_size_of_a_dflash_block_stands_with_its_other_keys(model, big, tmp_path):
    """z-lab's newer DFlash folders have it in dflash_config alone; it was read as 16."""
    _, head = draft(big, mask_token_id=61)
    full = {"layer_types": ["full_attention"] * 2, "use_sliding_window": False}
    values, state = theirs(big, head, architectures=["DFlashDraftModel"], **full)
    values["dflash_config"] = {name: values["dflash_config"][name] for name in ("block_size", "mask_token_id",
                                                                               "target_layer_ids")}  # fmt: skip
    published(tmp_path / "theirs", values, state)
    read = import_head("dflash", str(tmp_path / "theirs"), model.config.get_text_config(), embedding=None)
    assert read.config.block_size == 5


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_an_own_vocabulary_is_refused(model, big, tmp_path, engine):
    """vLLM takes the candidates' numbers for the target's ids; the package knows whole vocabularies alone."""
    saved(big, tmp_path / "head", draft_vocab_size=30)
    with pytest.raises(UserError, match=r"drafter\.draft_vocab_size"):
        check_expressible(engine, read_source(tmp_path / "head", Target(model.config, "org/name")), "all")
