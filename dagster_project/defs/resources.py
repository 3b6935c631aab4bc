"""Resources of this code location, from the environment it was loaded in."""

import dagster as dg

from dagster_project.lib.partitions import SETTINGS
from dagster_project.lib.resources import Home


@dg.definitions
def resources() -> dg.Definitions:
    """The home folder."""
    return dg.Definitions(resources={"home": Home.of(SETTINGS)})
