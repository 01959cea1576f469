"""``python -m rowmill`` is the ``rowmill`` command."""

from .cli import main

main()
