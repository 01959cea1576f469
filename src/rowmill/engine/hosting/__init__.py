"""A worker inside somebody else's process, such as a web application.

May import the rest of ``engine``; nothing else in ``engine`` imports this folder.
"""
