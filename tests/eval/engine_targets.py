"""Tiny targets of the families that vLLM serves, as a recipe has them."""

# Heads of 32 wide, the smallest that the CPU engine has a kernel for.
LANGUAGE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.09,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 48, "patch_size": 16,
}  # fmt: skip
QWEN_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
QWEN_TOWER = {
    "depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": 64,
    "intermediate_size": 128, "out_hidden_size": 128, "window_size": 32, "fullatt_block_indexes": [1],
    "tokens_per_second": 4,
}  # fmt: skip
TARGETS = {
    "llama": {"kind": "causal_lm", "language_model": {"model_type": "llama", **LANGUAGE}},
    "llava": {
        "kind": "llava", "language_model": {"model_type": "llama", **LANGUAGE}, "vision_tower": CLIP,
        "vision_feature_layer": -1,
    },
    "qwen2_5_vl": {
        "kind": "qwen2_5_vl", "vision_tower": QWEN_TOWER,
        "language_model": {"model_type": "qwen2_5_vl_text", **LANGUAGE, "rope_scaling": QWEN_ROPE},
    },
}  # fmt: skip
