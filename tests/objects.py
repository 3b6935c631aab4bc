"""A local S3 server for tests, one a process, and empty buckets on it."""

import itertools
import logging
import os
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from feature_repo.files import open_filesystem

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of a server that holds its objects in memory."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    values = {
        "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    open_filesystem.cache_clear()
    yield values["AWS_ENDPOINT_URL"]
    open_filesystem.cache_clear()
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
    server.stop()


@pytest.fixture
def bucket(s3_server: str) -> str:
    """An empty bucket, `s3://...`."""
    name = f"bucket-{next(_NUMBERS)}"
    boto3.client("s3", endpoint_url=s3_server).create_bucket(Bucket=name)
    return f"s3://{name}"
