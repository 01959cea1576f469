"""A worker inside another application's process, such as a web application.

May import the rest of ``engine``; nothing else in ``engine`` imports this folder.
"""
