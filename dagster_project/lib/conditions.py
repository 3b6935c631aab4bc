"""Automation conditions: cheap assets follow their parents, trained ones follow the clock.

Neither acts on anything whose blocking checks did not pass: a blocking check stops its own run only.
"""

from __future__ import annotations

import dagster as dg

AUDITED = dg.AutomationCondition.all_deps_blocking_checks_passed()

FOLLOW: dg.AutomationCondition[dg.AssetKey] = dg.AutomationCondition.eager() & AUDITED
"""Made as soon as a parent is new, on the latest partition."""

NIGHTLY: dg.AutomationCondition[dg.AssetKey] = (
    dg.AutomationCondition.on_cron("0 3 * * *")
    & dg.AutomationCondition.any_deps_match(dg.AutomationCondition.data_version_changed().since_last_handled())
    & AUDITED
)
"""Trained once a night, and only if the data of a parent changed since."""
