"""What vLLM's DSpark classes draft, their walk written out: its V2 runner, which has that walk, needs a GPU. Runs in
vLLM's environment: nothing of ours.

    python dspark_program.py FOLDER

FOLDER/asked.json: `model`, `draft` (a folder in speculators' layout, or DeepSpec's of Gemma 4), `count` of tokens to
draft, `anchors` (the last token of each case); FOLDER/states.pt: states of the tokens before it [T,H] a case, those of
all taps side by side. FOLDER/answers.jsonl: `tokens` of each case, a line.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def built(model: str, draft: str, count: int):
    """The class with the folder's weights, and the tables of the target that the folder lacks (`load_dspark_model`)."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.registry import ModelRegistry

    VllmConfig._get_v1_model_runner_unsupported_features = lambda self: []  # no runner runs here
    speculative = {"model": draft, "method": "dspark", "num_speculative_tokens": count}
    config = EngineArgs(model=model, speculative_config=speculative, dtype="float32", enforce_eager=True,
                        max_model_len=256).create_engine_config()  # fmt: skip
    of_draft = config.speculative_config.draft_model_config.hf_config
    assert of_draft.architectures[0] in ("Qwen3DSparkModel", "Gemma4DSparkModel")
    of_class, _ = ModelRegistry.resolve_model_cls(of_draft.architectures, config.speculative_config.draft_model_config)
    torch.set_default_dtype(torch.float32)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel(1, 1)
        drafter = of_class(vllm_config=config)
    weights = load_file(Path(draft) / "model.safetensors")
    drafter.load_weights(weights.items())
    tables = {n: v for f in Path(model).glob("*.safetensors") for n, v in load_file(f).items()}
    for name, module in {"embed_tokens": drafter.model.embed_tokens, "lm_head": drafter.lm_head}.items():
        if f"{name}.weight" not in weights:
            (table,) = (value for key, value in tables.items() if key.endswith(f"{name}.weight"))
            module.weight.data[: len(table)] = table
    process_weights_after_loading(drafter, config.speculative_config.draft_model_config, torch.device("cpu"))
    return drafter, of_draft, config


def drafted(drafter, config, states, anchor: int, count: int) -> list[int]:
    """Greedy tokens of one block: keys and values of the context, a pass over the block, the Markov walk."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    model, place = drafter.model, len(states)
    for layer in model.layers:
        attention = layer.self_attn.attn
        kept = []
        attention.impl.do_kv_cache_update = lambda _, k, v, *__, kept=kept: kept.extend((k.clone(), v.clone()))
        attention.kv_cache = None

        def forward(q, k, v, *_, own=attention, kept=kept):
            q, k, v = (x.view(len(x), -1, own.head_size) for x in (q, k, v))
            k, v = (torch.cat(pair).transpose(0, 1) for pair in zip(kept, (k, v), strict=True))
            said = scaled_dot_product_attention(q.transpose(0, 1), k, v, enable_gqa=True, scale=own.impl.scale)
            return said.transpose(0, 1).flatten(1)

        attention.forward = forward
    slots = torch.arange(place)
    model.precompute_and_store_context_kv(drafter.combine_hidden_states(states), slots, slots)
    asked = count + (not getattr(config, "sample_from_anchor", True))
    ids = torch.tensor([anchor] + [config.mask_token_id] * (asked - 1))
    hidden = drafter(ids, torch.arange(place, place + asked))[asked - count :]
    scores, tokens = drafter.compute_draft_logits(hidden), [torch.tensor([anchor])]
    for row in scores:
        biased = row + drafter.markov_bias(drafter.markov_embed(tokens[-1]))
        tokens.append(drafter.map_draft_to_target(biased.argmax(-1)))
    return torch.cat(tokens[1:]).tolist()


def main(folder: Path) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    asked, states = json.loads((folder / "asked.json").read_text()), torch.load(folder / "states.pt")
    drafter, config, whole = built(asked["model"], asked["draft"], asked["count"])
    with (folder / "answers.jsonl").open("w") as file, torch.no_grad(), set_current_vllm_config(whole), \
            set_forward_context(None, whole):  # fmt: skip
        for before, anchor in zip(states, asked["anchors"], strict=True):
            tokens = drafted(drafter, config, before, anchor, asked["count"])
            print(json.dumps({"tokens": tokens}), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
