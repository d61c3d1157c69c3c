"""Field kits: one file that describes a kit becomes a folder from which its machines are set up, offline."""
