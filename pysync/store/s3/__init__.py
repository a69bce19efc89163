"""The store in a bucket of S3 or of a compatible server.

    store               the methods of `Store`; listings
    conditional_writes  conditional puts and deletes, and the outcome of a write whose response was lost
    versions            ids of writes, and which write replaced which; a cache of what was read or written
                        last; what the bucket's server supports
    transfers           files: uploads, spooled, whole or in parts; downloads, resumed after a break
    damaged_files       the list of files that were found damaged
    probe               which conditions the bucket's server honours
    http                signed requests over one session, retried where that can help
    credentials         credentials, endpoint, addressing and signatures

Each object lies at its own key below the URL's prefix, a document with 65 bytes of white space after it
(`versions` explains why).
"""

from pysync.store.s3.http import RetryPolicy
from pysync.store.s3.store import S3Store
from pysync.store.s3.versions import BucketCapabilities

__all__ = ["BucketCapabilities", "RetryPolicy", "S3Store"]
