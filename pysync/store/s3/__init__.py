"""The store in a bucket of S3, or of a server that speaks it.

    store      the verbs
    writes     conditional puts and deletes: who wins, and what became of a write whose answer was lost
    versions   ids of writes, and who replaced whom
    recent     what was read or written last
    uploads    files in: spooled, whole or in parts
    downloads  files out: streamed, and gone on with after a break
    listing    names, and everything below a prefix
    probe      what the bucket's server keeps of S3's promises; bucket is what it found
    requests   signed requests over one session, tried again where that can help
    signing    their signatures
    account    credentials, endpoint and addressing

Each object lies at its own key below the URL's prefix, a document with 65 bytes of white space after it
(`versions` says why).
"""

from pysync.store.s3.http import Patience
from pysync.store.s3.store import S3Store
from pysync.store.s3.versions import Bucket

__all__ = ["Bucket", "Patience", "S3Store"]
