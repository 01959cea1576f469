"""The dashboard and the HTTP API. Needs the extra ``web``."""
