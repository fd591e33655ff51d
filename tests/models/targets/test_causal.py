"""A text target whose rotations change with the length of the text: exact up to the length they are fixed for."""

import pytest
import torch
from draftsmith.core.batch import Request
from draftsmith.core.errors import UserError
from draftsmith.core.states import Taps
from draftsmith.data.collate import Sample, collate
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.targets.causal import CausalTarget
from transformers import LlamaConfig, LlamaForCausalLM

FIXED = {"dynamic": 32, "longrope": 24}  # places up to which they stay
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": FIXED["longrope"], "factor": 4.0,
    },
}  # fmt: skip


def target(kind: str) -> CausalTarget:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, initializer_range=0.3, rope_parameters=ROPES[kind] | {"rope_theta": 10000.0},
    )  # fmt: skip
    return CausalTarget(LlamaForCausalLM(config).eval(), num_token_ids=40)


def asked(length: int) -> Request:
    ids = torch.randint(3, 40, (length,), generator=torch.Generator().manual_seed(1))
    return Request(ids, torch.zeros(length, dtype=torch.int8), None, "a record")


@pytest.mark.parametrize("kind", ROPES)
def test_rotations_that_change_with_the_length(kind):
    own, fixed = target(kind), FIXED[kind]
    decoding = Decoding(Chain(3), Greedy(), Draw("top-k"), Warp(), 8, (2,))
    request = asked(fixed - 16)
    plain = generate(own, None, request, decoding).tokens
    drafted = generate(own, IndependentProposal(target(kind).decoder, "T", newline_id=7), request, decoding).tokens
    assert plain == drafted
    own.prefill(request, Taps(), capacity=16)
    with pytest.raises(UserError, match=rf"\({kind}\) change with the length of the text beyond {fixed}.*\n.*a record"):
        own.prefill(request, Taps(), capacity=17)
    long = asked(fixed + 1)
    batch = collate(
        [Sample(long.ids.tolist(), [True] * (fixed + 1), [0] * (fixed + 1), None, "a record")], pad_id=0, image_size=16
    )
    with pytest.raises(UserError, match="change with the length"):
        own.states(batch, Taps(feature=True))
