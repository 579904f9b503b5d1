"""A store in a bucket of Amazon S3 or of a server that speaks its protocol.

Importing this package is cheap: the client (botocore, the core of boto3 without its resources) is loaded by the first
request. `bucket` says where a mirror is, `connect` makes its client, `faults` tells what can go wrong apart, `store` is
the store.
"""

from cachemgr.store.s3.bucket import Bucket
from cachemgr.store.s3.store import S3Store

__all__ = ["Bucket", "S3Store"]
