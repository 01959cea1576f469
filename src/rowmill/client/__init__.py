"""The application's side of tasks: enqueue jobs, hold handles, await results.

Works with and without an event loop.
May import ``engine`` (wake-ups, tracing), ``store`` and ``declare``; never ``mill``.
"""
