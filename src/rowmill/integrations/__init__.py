"""Where other systems find rowmill: Django's ``TASKS`` setting, and assistants of operators that speak MCP.

Each module needs an extra of its own, and is imported by those alone that have it.
``mcp`` may import ``web`` and what lies below it, ``django`` everything but ``cli``; of the rest only ``cli`` imports
them.
"""
