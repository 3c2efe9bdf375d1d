"""Multipart uploads that were never completed: obstore cannot list them, so botocore does.

Only ever below one prefix of one run: other jobs upload to the same bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spot_core.store._base import Unfinished
from spot_core.store._cloud_options import Place, client_settings, s3_session

__all__ = ["S3Uploads"]


class S3Uploads:
    """The unfinished uploads of one bucket. Raises what botocore raises."""

    def __init__(self, place: Place, options: Mapping[str, Any]) -> None:
        self._place = place
        self._client = _client(place, options)

    def list(self, prefix: str) -> Sequence[Unfinished]:
        """Those below `prefix`, a prefix of keys."""
        root = f"{self._place.prefix}/" if self._place.prefix else ""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._place.bucket, Prefix=root + prefix
        )
        found = [upload for page in pages for upload in page.get("Uploads", ())]
        # Not every server heeds the prefix, and what is not below it is not ours.
        return [
            Unfinished(item["Key"][len(root) :], item["UploadId"])
            for item in found
            if item["Key"].startswith(root + prefix)
        ]

    def abort(self, upload: Unfinished) -> None:
        key = f"{self._place.prefix}/{upload.key}" if self._place.prefix else upload.key
        self._client.abort_multipart_upload(Bucket=self._place.bucket, Key=key, UploadId=upload.id)


def _client(place: Place, options: Mapping[str, Any]) -> Any:
    import botocore.config

    made = client_settings(place, options)
    config = made.config
    anonymous = bool(config.get("skip_signature"))
    style = "virtual" if config.get("virtual_hosted_style_request") else "path"
    return s3_session(options, made.profile).create_client(
        "s3",
        endpoint_url=config.get("endpoint"),
        region_name=config.get("region"),
        aws_access_key_id=config.get("access_key_id"),
        aws_secret_access_key=config.get("secret_access_key"),
        aws_session_token=config.get("session_token"),
        verify=False if made.client.get("allow_invalid_certificates") else made.authorities,
        config=botocore.config.Config(
            signature_version=_unsigned() if anonymous else None,
            connect_timeout=10,
            read_timeout=60,
            retries={"mode": "standard", "max_attempts": 5},
            s3={"addressing_style": style if config.get("endpoint") else "auto"},
        ),
    )


def _unsigned() -> Any:
    from botocore import UNSIGNED

    return UNSIGNED
