"""Jobs in Django's admin: a list with filters, a page for each, and the actions *run again* and *cancel*."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import async_to_sync
from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils.module_loading import import_string

from ..errors import RowmillError
from ..mill import Mill
from ..ops import actions
from ..ops.access import Audit, first_database
from ..ops.actions import ActionTarget, ChosenRows
from ..ops.directory import LaneDirectory
from ..plural import counted
from .models import QueuedJob

Action = Callable[[ActionTarget, ChosenRows], Awaitable[dict[str, Any]]]


@admin.register(QueuedJob)
class JobAdmin(admin.ModelAdmin):
    """Reads the table; changes it by the actions of rowmill's operators alone, which the audit log keeps."""

    list_display = ("id", "task", "queue", "state", "attempts", "run_after", "created_at", "finished_at", "error")
    list_filter = ("state", "queue")
    search_fields = ("=id", "task", "=key", "error")
    show_full_result_count = False
    actions = ("run_again", "cancel")

    def get_queryset(self, request: HttpRequest) -> Any:
        """The jobs of the first database that the Mill serves."""
        return super().get_queryset(request).using(next(iter(_mill().environments)))

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Jobs are enqueued by code."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Ended jobs are deleted after their retention time."""
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """All of them: a change by hand would know nothing of the worker that holds the row."""
        return [field.name for field in self.model._meta.fields]

    @admin.action(description="Run selected jobs again", permissions=["change"])
    def run_again(self, request: HttpRequest, queryset: Any) -> None:
        """Make dead, canceled and waiting jobs ready at once, with all their attempts."""
        self._act(request, "retry", queryset, actions.retry)

    @admin.action(description="Cancel selected jobs", permissions=["change"])
    def cancel(self, request: HttpRequest, queryset: Any) -> None:
        """Cancel jobs that have not begun."""
        self._act(request, "cancel", queryset, actions.cancel)

    def _act(self, request: HttpRequest, verb: str, queryset: Any, action: Action) -> None:
        queues: dict[str, list[str]] = {}
        for id, queue in queryset.values_list("id", "queue"):
            queues.setdefault(queue, []).append(str(id))
        who = request.user.get_username()
        try:
            count, passed = async_to_sync(_act)(verb, queues, action, who)
        except RowmillError as error:
            self.message_user(request, error.message, messages.ERROR)
            return
        past = {"retry": "made ready", "cancel": "canceled"}[verb]
        self.message_user(request, f"{counted(count, 'job')} {past}.", messages.SUCCESS if count else messages.WARNING)
        for row in passed:
            self.message_user(request, f"Job {row['id']} was left as it is: {row['reason']}.", messages.WARNING)


def _mill() -> Mill:
    mill: Mill = import_string("rowmill.django.project.mill")
    return mill


async def _act(verb: str, queues: dict[str, list[str]], action: Action, who: str) -> tuple[int, list[dict[str, str]]]:
    """Do it, queue by queue, and write each to the audit log."""
    mill, count, passed = _mill(), 0, list[dict[str, str]]()
    environment = next(iter(mill.environments))
    async with LaneDirectory(mill, [environment]) as directory, first_database(mill) as database:
        audit = Audit(database)
        await audit.ensure()
        for queue, ids in queues.items():
            entry = {"who": who, "action": verb, "environment": environment, "lane": queue, "outcome": "started"}
            noted = await audit.record({**entry, "target": f"ids={ids}"})
            try:
                document = await action(ActionTarget(directory, environment, queue), ChosenRows(ids=ids))
            except RowmillError as error:
                await audit.complete(noted, "refused", error.message)
                raise
            await audit.complete(noted, *actions.audited(document))
            count += document["count"]
            passed += document["passed_over"]
    return count, passed
