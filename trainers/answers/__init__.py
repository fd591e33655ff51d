"""How a target's own answers are made for training: texts and pictures."""
