"""What moves: a worker claims rows, runs handlers in slots, settles outcomes, renews leases and sweeps dead ones.

The way of a row: ``worker`` claims, ``slots`` hands out, ``execute`` runs, ``worker`` settles.
May import ``store`` and ``declare``; never ``client``, ``mill`` or what is above them.
"""
