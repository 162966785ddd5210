"""Settings of the test suite. The four folders are product code: pytest collects nothing in them."""

from __future__ import annotations

import os

from hypothesis import settings

collect_ignore = ["oracle", "kernels", "fixtures", "properties", "src"]

settings.register_profile("ci", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("dev", database=None, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
