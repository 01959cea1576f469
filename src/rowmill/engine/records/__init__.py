"""What runs leave behind for people to read: failures, and what handlers logged. Written after the outcomes.

May import the store and the counters, not the worker or what runs the handlers.
"""
