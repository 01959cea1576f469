"""registre: documents from a land registry, searches in two registers, on rowmill. See README.md."""
