"""Adopt a live table: survey it, propose states and roles with the evidence for each, write the lane's file.

May import ``store`` and ``declare``; never ``engine``.
"""
