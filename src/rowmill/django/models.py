"""``rowmill_jobs`` as a model, for the admin's pages and for results of tasks.

rowmill makes its tables itself: the model is unmanaged, and no migration is of ours.
"""

from __future__ import annotations

from typing import Any

from django.db import models


class QueuedJob(models.Model):
    """A job of a task. To be read; what changes it are rowmill's own actions."""

    id = models.BigIntegerField(primary_key=True)
    task = models.TextField()
    queue = models.TextField()
    state = models.TextField()
    priority = models.SmallIntegerField(help_text="lower goes first")
    attempts = models.IntegerField()
    max_attempts = models.IntegerField(null=True)
    key = models.TextField(null=True)
    args = models.JSONField()
    result = models.JSONField(null=True)
    progress = models.JSONField(null=True)
    error = models.TextField(null=True)
    worker = models.TextField(null=True)
    run_after = models.DateTimeField()
    created_at = models.DateTimeField()
    claimed_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    history: Any = models.JSONField(null=True)

    class Meta:
        app_label = "rowmill"
        db_table = "rowmill_jobs"
        managed = False
        ordering = ("-id",)
        default_permissions = ("view", "change")
        verbose_name = "job"

    def __str__(self) -> str:
        return f"{self.task} {self.pk}"
