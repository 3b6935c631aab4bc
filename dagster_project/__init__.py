"""Orchestration: assets, checks, jobs and automation. An asset's body calls one function of another package."""

import warnings

# Backfill policies and partition mappings that allow a missing first day are marked beta in Dagster 1.13; we pin 1.13.
warnings.filterwarnings("ignore", message=".*is currently in beta")
