"""Generated code of the wire contract; regenerate with `make protos`."""
