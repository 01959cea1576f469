"""Five working systems on rowmill, each a folder of its own with a README."""
