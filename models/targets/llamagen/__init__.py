"""LlamaGen as our own module: the transformer, the VQ tokenizer, caption features and file formats."""
