"""What a run is: the schema, the loader, the command line and the YAML files."""
