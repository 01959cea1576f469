"""Rows of workers that died: find dead workers, take their rows back, and keep rows that kill workers apart.

``liveness`` finds dead workers, ``sweep`` takes back rows whose lease ran out, ``running_marks`` tells a supervisor
which rows a killed child ran, ``quarantine`` runs rows apart that were taken back more than once.
May import what ``engine`` may; only the worker, its environments and its processes call it.
"""
