"""Django's tasks in rowmill: ``TASKS = {"default": {"BACKEND": "rowmill.integrations.django.TaskBackend"}}``.

It works with ``django.tasks`` of Django 6, and with ``django-tasks`` on Django 5. Put ``rowmill.django`` into
INSTALLED_APPS: it makes the tables, and ``manage.py rowmill run`` runs the tasks.
"""

from ..django.task_backend import TaskBackend

__all__ = ["TaskBackend"]
