"""The server that other tests lean on does what a store must."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
from botocore.exceptions import ClientError

from tests.s3.bucket import Bucket

WRITERS = 8


def test_of_several_conditional_puts_at_once_one_wins(s3: Bucket) -> None:
    ready = threading.Barrier(WRITERS)

    def put(writer: int) -> int:
        ready.wait()
        try:
            s3.client.put_object(Bucket=s3.name, Key="part", Body=b"%d" % writer, IfNoneMatch="*")
        except ClientError as error:
            return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
        return 200

    with ThreadPoolExecutor(WRITERS) as pool:
        codes = list(pool.map(put, range(WRITERS)))
    assert codes.count(200) == 1
    assert s3.get("part") == b"%d" % codes.index(200)


def test_pandas_reads_a_folder_of_the_bucket(s3: Bucket) -> None:
    for name in ("a", "b"):
        s3.put(f"out/{name}.parquet", pd.DataFrame({"x": [name]}).to_parquet())
    assert sorted(pd.read_parquet(f"{s3.url}/out")["x"]) == ["a", "b"]
