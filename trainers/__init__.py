"""From a recipe to its results: stages, the training loop, the DeepSpeed engine, checkpoints."""
