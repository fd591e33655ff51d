"""What makes a target's answers and hidden states: texts, pictures, states; by our own passes or a serving engine."""
