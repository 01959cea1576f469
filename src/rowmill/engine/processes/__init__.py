"""Worker processes under a supervisor: started, restarted when they die, stopped gracefully.

May import the rest of ``engine``; nothing else in ``engine`` imports this folder.
"""
