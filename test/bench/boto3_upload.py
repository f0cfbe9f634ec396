"""Uploads the segment files of a folder with boto3: `boto3_upload.py URL CA CONCURRENCY TIMES DIR`; prints what it took."""

import json
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

url, ca, concurrency, times, folder = sys.argv[1:]
paths = sorted(Path(folder).glob("*.segment")) * int(times)
client = boto3.client(
    "s3", endpoint_url=url, verify=ca, region_name="us-east-1", aws_access_key_id="id", aws_secret_access_key="secret",
    config=Config(s3={"addressing_style": "path"}, max_pool_connections=int(concurrency), retries={"total_max_attempts": 1}))
# One PUT a file, as a fragment is one.
whole = TransferConfig(multipart_threshold=2**40, use_threads=False)


def upload(path):
    client.upload_file(str(path), "bucket", f"boto3/{path.name}", Config=whole)


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


before, start = cpu(), time.monotonic()
with ThreadPoolExecutor(int(concurrency)) as pool:
    list(pool.map(upload, paths))
print(json.dumps({"bytes": sum(os.path.getsize(path) for path in paths), "wall": time.monotonic() - start, "cpu": cpu() - before}))
