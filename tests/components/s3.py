"""The S3 servers that tests run against."""

from dataclasses import dataclass
from typing import Final

from botocore.session import Session

from pysync.config import StoreConfig

ACCESS_KEY_ID: Final = "testing"
SECRET_ACCESS_KEY: Final = "testingsecret"
REGION: Final = "us-east-1"
BUCKET: Final = "pysync"


@dataclass(frozen=True, slots=True)
class S3Server:
    """An S3 server that answers at `endpoint`, with one bucket. `name` says which server it is."""

    name: str
    endpoint: str
    bucket: str = BUCKET
    access_key_id: str = ACCESS_KEY_ID
    secret_access_key: str = SECRET_ACCESS_KEY
    region: str = REGION

    def store(self, prefix: str = "", endpoint: str | None = None) -> StoreConfig:
        """The configuration of a store below `prefix` of the bucket, asked at `endpoint` (a proxy's), else
        directly."""
        return StoreConfig(
            url=f"s3://{self.bucket}/{prefix}".rstrip("/"),
            endpoint=endpoint or self.endpoint,
            region=self.region,
            force_path_style=True,
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key,
        )

    def make_bucket(self, name: str) -> None:
        """Make one more bucket."""
        client = Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key_id,
            aws_secret_access_key=self.secret_access_key,
        )
        client.create_bucket(Bucket=name)
        client.close()
