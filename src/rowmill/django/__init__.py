"""rowmill in a Django project: a Mill over ``settings.DATABASES``, and ``manage.py rowmill``.

INSTALLED_APPS = [..., "rowmill.django"]
ROWMILL_APP = "shop.jobs:mill"  # where the Mill is: shop/jobs.py, mill = rowmill.django.Mill()
"""

from .mill import Mill

__all__ = ["Mill"]
