"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision, which draft LVLMs are made of, too."""
