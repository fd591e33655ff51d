"""States of a frozen target on disk: what a head reads of it, computed once and read in every epoch."""
