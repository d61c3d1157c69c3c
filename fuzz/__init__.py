"""Fuzzing: the wire decoder, the frame protocol in process, and a live hub. `make fuzz`, or `python -m fuzz --help`."""
