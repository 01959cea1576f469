"""The dashboard and the HTTP API: needs the extra ``web``."""
