"""Orchestration: assets, checks, jobs and automation. An asset's body calls one function of another package."""

import warnings

# Dagster 1.13, which we pin, marks backfill policies and partition mappings that allow a missing first day as beta,
# and checks by partition as preview.
warnings.filterwarnings("ignore", message=".*is currently in (beta|preview)")
