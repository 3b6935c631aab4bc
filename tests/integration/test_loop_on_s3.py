"""The whole tiny loop with lake and artefacts in an object store."""

import json
from pathlib import Path

import boto3
import pytest

from tests.conftest import run_loop
from tests.objects import bucket, s3_server

__all__ = ["bucket", "s3_server"]

pytestmark = pytest.mark.slow


def test_the_loop_runs_with_lake_and_artefacts_in_a_bucket(s3_server: str, bucket: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    places = {"MIRACH_LAKE": f"{bucket}/lake", "MIRACH_ARTIFACTS": f"{bucket}/artifacts"}
    first = run_loop(home, **places)
    assert first.returncode == 0, first.stderr[-3000:]
    assert not (home / "lake").exists()
    client = boto3.client("s3", endpoint_url=s3_server)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket.removeprefix("s3://"))
    keys = {item["Key"] for page in pages for item in page.get("Contents", [])}
    assert sum(key.endswith("manifest.json") and key.startswith("lake/") for key in keys) > 100
    pointer = json.loads((home / "releases" / "current.json").read_text())
    assert any(key.startswith("artifacts/") and pointer["version"] in key for key in keys)
    second = run_loop(home, **places)
    assert second.returncode == 0, second.stderr[-3000:]
    assert json.loads((home / "reports" / "run.json").read_text())["made"] == 0
