"""draftsmith: train and measure drafters for speculative decoding of multimodal models."""

__version__ = "0.1.0"
