"""A Llama as one GGUF file, as llama.cpp's converter writes it."""

import gguf
import numpy as np

WORDS = ["<unk>", "<s>", "</s>", "<turn>", *"abcdefghijklmnop", "ab", "cd", "Ġ"]
MERGES = ["a b", "c d"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<turn>{% endfor %}"


def llamas_order(weight, heads):
    """Rows of a projection of queries or keys in llama.cpp's order: pairs that are turned together lie side by side."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write(path, made, *, kind=None, architecture="llama", ends=(2, 3), template=TEMPLATE, words=WORDS, **more):
    """As llama.cpp's converter writes a Llama; `kind` quantises the matrices."""
    writer, config = gguf.GGUFWriter(path, architecture), made.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(more.get("blocks", config.num_hidden_layers))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(more.get("eps", config.rms_norm_eps))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3] * 4 + [1] * (len(words) - 4))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    for name, end in zip(("eos_token_id", "eot_token_id"), ends, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{name}", end)
    if template:
        writer.add_chat_template(template)

    def add(name, weight):
        values = weight.detach().float().numpy()
        if kind is None or values.ndim == 1:
            writer.add_tensor(name, values.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    state = made.state_dict()
    if "bias" in more:
        writer.add_tensor(more["bias"], np.ones(64, np.float32))
    add("token_embd.weight", state["model.embed_tokens.weight"])
    add("output_norm.weight", state["model.norm.weight"])
    if not config.tie_word_embeddings:
        add("output.weight", state["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            add(f"blk.{layer}.{theirs}.weight", weight if heads is None else llamas_order(weight, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_target(path, made, **more):
    """The same, with words of no language for every row of the model's table."""
    words = [*WORDS, *(f"w{number}" for number in range(len(WORDS), made.config.vocab_size))]
    return write(path, made, ends=(2,), words=words, **more)
