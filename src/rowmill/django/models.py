"""No models: rowmill's tables are its own. But Django tells only an application that has this file of a ``migrate``."""
