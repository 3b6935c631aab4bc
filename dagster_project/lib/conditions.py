"""Automation conditions: cheap assets follow their parents, trained ones follow the clock.

Neither acts on anything whose blocking checks did not pass: a blocking check stops its own run only.
"""

from __future__ import annotations

from typing import Any

import dagster as dg

Condition = dg.AutomationCondition[Any]

AUDITED: Condition = dg.AutomationCondition.all_deps_blocking_checks_passed()
CHANGED: Condition = dg.AutomationCondition.data_version_changed()
EVERY_NIGHT: Condition = dg.AutomationCondition.on_cron("0 3 * * *")

FOLLOW: Condition = dg.AutomationCondition.eager() & AUDITED
"""Made as soon as a parent is new, on the latest partition."""

NIGHTLY: Condition = EVERY_NIGHT & dg.AutomationCondition.any_deps_match(CHANGED.since_last_handled()) & AUDITED
"""Trained once a night, and only if the data of a parent changed since."""
