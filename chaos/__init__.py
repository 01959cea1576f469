"""The chaos suite: real processes under load while faults are injected, and a check of what became of every row."""
