"""rowmill measured beside its peers, on one machine, in one run: ``python -m bench``."""
