"""Which permission a verb needs, by kind of store: what a preflight that is refused tells to grant."""

from __future__ import annotations

__all__ = ["grant"]

_VERBS = ("look", "write", "write once", "read", "list", "clock", "speed", "delete")

_S3 = {
    "look": "s3:ListBucket on the bucket and s3:GetObject on its objects",
    "write": "s3:PutObject",
    "write once": "s3:PutObject",
    "read": "s3:GetObject",
    "list": "s3:ListBucket on the bucket",
    "clock": "s3:GetObject",
    "speed": "s3:PutObject and s3:AbortMultipartUpload",
    "delete": "s3:DeleteObject",
}
_GCS = {
    "look": "storage.objects.list and storage.objects.get",
    "write": "storage.objects.create and storage.objects.delete (to replace the pointer)",
    "write once": "storage.objects.create",
    "read": "storage.objects.get",
    "list": "storage.objects.list",
    "clock": "storage.objects.get",
    "speed": "storage.objects.create",
    "delete": "storage.objects.delete",
}
_AZURE = dict.fromkeys(_VERBS, "the role Storage Blob Data Contributor on the container")
_FOLDER = dict.fromkeys(_VERBS, "read, write and search permission (rwx)")

_BY_SCHEME = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS, "abfs": _AZURE, "abfss": _AZURE, "az": _AZURE}


def grant(uri: str, verb: str) -> str:
    """The sentence that names the missing permission. `verb` is the name of a check of `preflight.examine_store`."""
    scheme, mark, place = uri.partition("://")
    if not mark:
        return f"Missing permission to {verb}: grant {_FOLDER[verb]} on {uri} to the user of this process."
    table = _BY_SCHEME.get(scheme.lower())
    if table is None:
        return f"Missing permission to {verb} below {uri}: grant it to the identity of this process."
    if table is _S3:
        bucket, _, prefix = place.partition("/")
        where = f"arn:aws:s3:::{bucket}" if verb == "list" else f"arn:aws:s3:::{bucket}/{prefix}/*"
        return f"Missing permission: grant {table[verb]} ({where}) to the identity of this process."
    return f"Missing permission: grant {table[verb]} (for {uri}) to the identity of this process."
