"""What is computed: targets, drafters, and the tensors of a decoding cycle."""
