"""Stand-ins for the world outside: what the applications talk to when there is no network."""
