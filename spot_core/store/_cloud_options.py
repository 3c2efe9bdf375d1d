"""From storage options, as s3fs and adlfs take them, to an obstore client.

Options are fsspec's by name and meaning, so that what opens a bucket elsewhere in a program opens it here. A name that
only obstore has (``checksum_algorithm``, ``virtual_hosted_style_request``, ...) goes to it as it is. One that neither
can carry out is refused: an option that is silently dropped is a bucket in the wrong place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spot_core.clock import SYSTEM_CLOCK
from spot_core.errors import ConfigError

__all__ = [
    "SCHEMES",
    "ClientSettings",
    "Place",
    "client_settings",
    "credentials_chain",
    "open_client",
    "s3_session",
    "with_defaults",
]

SCHEMES: Mapping[str, str] = {
    "s3": "s3",
    "s3a": "s3",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
}
"""URI schemes that are served here, and by which kind of client."""

_REQUEST_S = 120.0
"""A request that takes longer is given up and tried again: a part of 16 MiB at 150 kB/s just passes."""
_CONNECT_S = 10.0
_FRESH = timedelta(minutes=10)
"""How long credentials of the botocore chain are believed before it is asked again."""

# What s3fs and adlfs take for their own buffering, caching and looping: nothing of it happens here.
_IDLE = {
    "asynchronous",
    "blocksize",
    "cache_regions",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "fixed_upload_size",
    "listings_expiry_time",
    "loop",
    "max_concurrency",
    "max_paths",
    "session",
    "skip_instance_cache",
    "use_listings_cache",
    "version_aware",
}
_S3 = {
    "key": "access_key_id",
    "username": "access_key_id",
    "secret": "secret_access_key",
    "password": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "anon": "skip_signature",
    "requester_pays": "request_payer",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_S3_EXTRA = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}
_AZURE = {"anon": "skip_signature"}
_CLIENT = {"use_ssl": None, "verify": None, "connect_timeout": "connect_timeout", "read_timeout": "timeout"}


@dataclass(frozen=True)
class Place:
    """Where a run is: the kind of store, its bucket or container, and the prefix in it."""

    kind: str
    bucket: str
    prefix: str
    account: str | None = None

    @classmethod
    def parse(cls, uri: str) -> Place:
        parts = urlsplit(uri)
        account = None
        bucket = parts.netloc
        if "@" in bucket:  # abfss://container@account.dfs.core.windows.net/run
            bucket, host = bucket.split("@", 1)
            account = host.split(".", 1)[0]
        return cls(SCHEMES[parts.scheme.lower()], bucket, parts.path.strip("/"), account)


@dataclass
class ClientSettings:
    config: dict[str, Any] = field(default_factory=dict)
    """Of the store, by obstore's names."""
    client: dict[str, Any] = field(default_factory=dict)
    """Of its HTTP client."""
    profile: str | None = None
    authorities: str | None = None
    """File of certificates, PEM, that servers' may be signed by besides those this machine trusts."""


def with_defaults(place: Place, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` over what fsspec's own configuration (files, ``FSSPEC_S3_*`` variables) says for these schemes."""
    import fsspec.config

    found: dict[str, Any] = {}
    for scheme, kind in SCHEMES.items():
        if kind == place.kind:
            found.update(fsspec.config.conf.get(scheme, {}))
    return {**found, **options}


def client_settings(place: Place, options: Mapping[str, Any]) -> ClientSettings:
    """What an obstore client is to be made of. Raises ConfigError."""
    made = ClientSettings()
    if place.kind == "s3":
        _s3(options, made)
    else:
        _azure(place, options, made)
    endpoint = str(made.config.get("endpoint", ""))
    if endpoint.startswith("http://"):
        made.client.setdefault("allow_http", True)
    made.client.setdefault("timeout", timedelta(seconds=_REQUEST_S))
    made.client.setdefault("connect_timeout", timedelta(seconds=_CONNECT_S))
    return made


def open_client(place: Place, options: Mapping[str, Any], *, retry_s: float) -> Any:
    """The obstore client. Transient errors are tried again for `retry_s` seconds. Raises ConfigError."""
    import obstore.store

    clients: Any = obstore.store  # its types know the keys of one release
    made = client_settings(place, options)
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
    retry = {"max_retries": 1000, "retry_timeout": timedelta(seconds=retry_s), "backoff": backoff}
    common: dict[str, Any] = {"prefix": place.prefix or None, "client_options": made.client, "retry_config": retry}
    if place.kind == "az":
        return clients.AzureStore(place.bucket, config=made.config, **common)
    provider = None
    if not made.config.get("skip_signature") and not ({"access_key_id", "secret_access_key"} <= made.config.keys()):
        provider = credentials_chain(made.profile)
    return clients.S3Store(place.bucket, config=made.config, credential_provider=provider, **common)


def s3_session(options: Mapping[str, Any], profile: str | None) -> Any:
    """The botocore session that s3fs would make."""
    import botocore.session

    return botocore.session.Session(profile=options.get("profile", profile))


def _s3(options: Mapping[str, Any], made: ClientSettings) -> None:
    # Payloads are not signed: TLS covers them, and every byte's digest is checked when it is read. Objects are deleted
    # one by one, and not every server knows the request for many.
    made.config.update(unsigned_payload=True, disable_bulk_delete=True)
    for name, value in _flat(options, ("client_kwargs",)):
        if name == "profile":
            made.profile = value
        elif name == "config_kwargs":
            _botocore_config(value, made)
        elif name == "s3_additional_kwargs":
            _renamed(value, _S3_EXTRA, "s3_additional_kwargs", made)
        elif name in _CLIENT:
            _client_option(name, value, made)
        else:
            made.config[_S3.get(name, name)] = value
    if made.config.get("request_payer") is False:
        del made.config["request_payer"]
    if "endpoint" not in made.config and (found := os.environ.get("AWS_ENDPOINT_URL_S3", "")):
        made.config["endpoint"] = found
    if found := made.config.get("endpoint", os.environ.get("AWS_ENDPOINT_URL", "")):
        made.config["endpoint"] = str(found).rstrip("/")
    if made.authorities is None and (found := os.environ.get("AWS_CA_BUNDLE", "")):
        _client_option("verify", found, made)
    if "region" not in made.config:
        region = os.environ.get("AWS_REGION") or s3_session(options, made.profile).get_config_variable("region")
        made.config["region"] = region or "us-east-1"


def _botocore_config(value: Mapping[str, Any], made: ClientSettings) -> None:
    for name, setting in value.items():
        if name == "s3" and setting.keys() <= {"addressing_style", "payload_signing_enabled"}:
            if setting.get("addressing_style", "auto") != "auto":
                made.config["virtual_hosted_style_request"] = setting["addressing_style"] == "virtual"
            if "payload_signing_enabled" in setting:
                made.config["unsigned_payload"] = not setting["payload_signing_enabled"]
        elif name in _CLIENT:
            _client_option(name, setting, made)
        elif name not in ("signature_version", "retries", "max_pool_connections", "request_checksum_calculation"):
            raise _refused(f"config_kwargs[{name!r}]")


def _azure(place: Place, options: Mapping[str, Any], made: ClientSettings) -> None:
    if place.account is not None:
        made.config["account_name"] = place.account
    if not options and (text := os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")):
        _connection_string(text, made)
    for name, value in _flat(options, ()):
        if name == "connection_string":
            _connection_string(str(value), made)
        elif name == "credential":
            if not isinstance(value, str):
                raise _refused(name, "give account_key, sas_token, or client_id, client_secret and tenant_id")
            made.config["sas_token" if "sig=" in value else "account_key"] = value
        elif name == "account_host":
            made.config["endpoint"] = value if "://" in str(value) else f"https://{value}"
        elif name in _CLIENT or name in ("timeout", "connection_timeout"):
            _client_option({"connection_timeout": "connect_timeout"}.get(name, name), value, made)
        else:
            made.config[_AZURE.get(name, name)] = value


def _connection_string(text: str, made: ClientSettings) -> None:
    pairs = dict(item.split("=", 1) for item in text.split(";") if "=" in item)
    names = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "BlobEndpoint": "endpoint",
        "SharedAccessSignature": "sas_token",
    }
    made.config.update({names[name]: value for name, value in pairs.items() if name in names})


def _flat(options: Mapping[str, Any], nests: Iterable[str]) -> Iterable[tuple[str, Any]]:
    for name, value in options.items():
        if value is None or name in _IDLE:
            continue
        if name in nests:
            yield from ((inner, item) for inner, item in value.items() if item is not None)
        else:
            yield name, value


def _renamed(value: Mapping[str, Any], names: Mapping[str, str], where: str, made: ClientSettings) -> None:
    for name, setting in value.items():
        if name not in names:
            raise _refused(f"{where}[{name!r}]")
        made.config[names[name]] = setting


def _client_option(name: str, value: Any, made: ClientSettings) -> None:
    if name == "verify" and not isinstance(value, bool):
        made.authorities = str(value)
        try:
            made.client["root_certificate"] = Path(value).read_bytes()
        except OSError as error:
            raise ConfigError(f"The certificates of verify cannot be read from {value}: {error.strerror}.") from None
    elif name == "verify":
        made.client["allow_invalid_certificates"] = not value
    elif name == "use_ssl":
        made.client["allow_http"] = not value
    else:
        made.client[_CLIENT.get(name) or name] = timedelta(seconds=float(value))


def _refused(name: str, instead: str = "") -> ConfigError:
    return ConfigError(f"The storage option {name} has no meaning here.", hint=f"{instead}." if instead else "")


def credentials_chain(profile: str | None) -> Callable[[], dict[str, Any]]:
    """Credentials as boto finds them: environment, files, SSO, container, instance.

    Asked again every few minutes by a session of its own, so that keys that somebody renews in a file are seen.
    """
    import botocore.session

    def ask() -> dict[str, Any]:
        found = botocore.session.Session(profile=profile).get_credentials()
        if found is None:
            raise ValueError("no credentials were found in the environment, the AWS files, or this machine's role")
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.fromtimestamp(SYSTEM_CLOCK.now(), timezone.utc) + _FRESH,
        }

    return ask
