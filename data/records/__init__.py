"""Records of files, tables, tars and logs: read, indexed, mixed, and what is wrong with them."""
