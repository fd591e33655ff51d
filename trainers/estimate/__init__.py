"""What stages say of themselves in a dry run: counted or declared, without weights and without a network."""
