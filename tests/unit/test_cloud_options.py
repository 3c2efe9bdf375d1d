"""Options as s3fs and adlfs take them, errors of the client, and what must not be shown."""

from __future__ import annotations

import logging
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec.config
import pytest

from spot_core.errors import AccessError, ConfigError, KeyExistsError, KeyMissingError, StoreError, TransientStoreError
from spot_core.run import Run
from spot_core.store import CloudStore
from spot_core.store._cloud_errors import translate_cloud
from spot_core.store._cloud_options import Place, client_settings, credentials_chain
from spot_core.store._secrets import scrub

S3 = Place.parse("s3://bucket/a/run")
AZURE = Place.parse("abfss://container@account.dfs.core.windows.net/a/run")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT_URL", "ENDPOINT_URL_S3", "REGION", "DEFAULT_REGION", "PROFILE", "CA_BUNDLE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")


def test_places() -> None:
    assert Place("s3", "bucket", "a/run") == S3
    assert Place.parse("s3a://bucket/run/") == Place("s3", "bucket", "run")
    assert Place.parse("az://container/run") == Place("az", "container", "run")
    assert Place("az", "container", "a/run", "account") == AZURE


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (
            {"key": "k", "secret": "s", "token": "t"},
            {"access_key_id": "k", "secret_access_key": "s", "session_token": "t"},
        ),
        ({"anon": True}, {"skip_signature": True}),
        ({"anon": False}, {"skip_signature": False}),
        ({"endpoint_url": "https://x/"}, {"endpoint": "https://x"}),
        (
            {"client_kwargs": {"endpoint_url": "https://x", "region_name": "eu-west-1"}},
            {"endpoint": "https://x", "region": "eu-west-1"},
        ),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {"virtual_hosted_style_request": True}),
        ({"config_kwargs": {"s3": {"payload_signing_enabled": True}}}, {"unsigned_payload": False}),
        (
            {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "id"}},
            {"server_side_encryption": "aws:kms", "sse_kms_key_id": "id"},
        ),
        ({"requester_pays": True}, {"request_payer": True}),
        ({"requester_pays": False, "default_block_size": 1 << 20, "use_listings_cache": False}, {}),
        ({"checksum_algorithm": "sha256"}, {"checksum_algorithm": "sha256"}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_options_as_s3fs_takes_them(options: dict[str, Any], config: dict[str, Any]) -> None:
    expected = {"unsigned_payload": True, "disable_bulk_delete": True, "region": "us-east-1", **config}
    assert client_settings(S3, options).config == expected


def test_the_environment_is_read_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000/")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    made = client_settings(S3, {"profile": "mine"} | {"profile": None})
    assert (made.config["endpoint"], made.config["region"]) == ("http://127.0.0.1:9000", "eu-north-1")
    assert made.profile is None
    assert made.client["allow_http"] is True
    assert client_settings(S3, {"endpoint_url": "https://y"}).config["endpoint"] == "https://y", "an option wins"


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"account_key": "k"}, {"account_key": "k"}),
        ({"sas_token": "sv=1&sig=x"}, {"sas_token": "sv=1&sig=x"}),
        ({"credential": "sv=1&sig=x"}, {"sas_token": "sv=1&sig=x"}),
        ({"credential": "a key"}, {"account_key": "a key"}),
        (
            {"client_id": "i", "client_secret": "s", "tenant_id": "t"},
            {"client_id": "i", "client_secret": "s", "tenant_id": "t"},
        ),
        (
            {"connection_string": "AccountName=n;AccountKey=k==;BlobEndpoint=https://e/n;"},
            {"account_name": "n", "account_key": "k==", "endpoint": "https://e/n"},
        ),
        ({"account_host": "account.blob.core.example"}, {"endpoint": "https://account.blob.core.example"}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_options_as_adlfs_takes_them(options: dict[str, Any], config: dict[str, Any]) -> None:
    assert client_settings(AZURE, options).config == {"account_name": "account", **config}


def test_certificates_of_a_private_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = tmp_path / "ours.pem", tmp_path / "theirs.pem"
    ours.write_bytes(b"ours")
    theirs.write_bytes(b"theirs")
    asked = {"client_kwargs": {"verify": str(ours)}}
    made = client_settings(S3, asked)
    assert (made.client["root_certificate"], made.authorities) == (b"ours", str(ours))
    assert "allow_invalid_certificates" not in made.client
    assert client_settings(AZURE, {"verify": ours}).client["root_certificate"] == b"ours"
    monkeypatch.setenv("AWS_CA_BUNDLE", str(theirs))
    assert client_settings(S3, {}).client["root_certificate"] == b"theirs"
    assert client_settings(S3, asked).client["root_certificate"] == b"ours", "an option wins"
    assert client_settings(S3, {"client_kwargs": {"verify": False}}).client["allow_invalid_certificates"] is True


def test_time_limits() -> None:
    assert client_settings(S3, {}).client["timeout"] == timedelta(seconds=120)
    options = {"config_kwargs": {"read_timeout": 7, "connect_timeout": 3, "retries": {"max_attempts": 2}}}
    client = client_settings(S3, options).client
    assert (client["timeout"], client["connect_timeout"]) == (timedelta(seconds=7), timedelta(seconds=3))


@pytest.mark.parametrize(
    "options",
    [
        {"no_such_option": 1},
        {"config_kwargs": {"proxies": {}}},
        {"s3_additional_kwargs": {"StorageClass": "GLACIER"}},
        {"client_kwargs": {"verify": "/no/ca.pem"}},
    ],
)
def test_an_option_that_would_be_dropped_is_refused(options: dict[str, Any]) -> None:
    store = CloudStore("s3://bucket/run", storage_options={"key": "k", "secret": "hunter2-hunter2", **options})
    with pytest.raises(ConfigError) as caught:
        store.get("a")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_options_are_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    options = {"key": "AKIA-SECRET", "secret": "hunter2-hunter2", "endpoint_url": "http://127.0.0.1:1"}
    store = CloudStore("s3://bucket/run", storage_options=options, retry_s=0.1)
    with pytest.raises(TransientStoreError) as caught:
        store.get("a")
    told = "".join(traceback.format_exception(caught.value)) + repr(store) + repr(Run.open(store)) + caplog.text
    assert "AKIA-SECRET" not in told
    assert "hunter2" not in told
    assert "http://127.0.0.1:1" in told, "where it went is no secret"
    assert caught.value.__cause__ is None


def test_renewed_credentials_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody renews them in the file while the job runs: the next question finds them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    ask = credentials_chain("mine")
    for number in (1, 2):
        names = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "aws_session_token": "t"}
        file.write_text("\n".join(["[mine]", *(f"{name}={letter}{number}" for name, letter in names.items())]))
        found = ask()
        told = found["access_key_id"], found["secret_access_key"], found["token"]
        assert told == (f"k{number}", f"s{number}", f"t{number}")
        assert found["expires_at"].tzinfo is not None
    file.write_text("[mine]\n")
    with pytest.raises(ValueError, match="no credentials"):
        ask()


def test_what_fsspec_is_configured_with_holds_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "AKIA-SECRET", "anon": True, "no_such_option": 1})
    store = CloudStore("s3://bucket/run", storage_options={"anon": False})
    assert dict(store.storage_options) == {"anon": False}, "what is handed to other processes is what was given"
    with pytest.raises(ConfigError, match="anon, key, no_such_option") as caught:
        store.get("a")
    assert "AKIA" not in str(caught.value)


def test_scrub() -> None:
    text = "PUT https://me:pw@host/c/b?sv=1&sig=abc failed for key-4711 of account"
    options = {"account_name": "account", "nested": [{"key": "key-4711"}], "short": "for"}
    assert scrub(text, options) == "PUT https://***@host/c/b failed for *** of account"


def raised(name: str, text: str) -> Exception:
    return type(name, (Exception,), {"__module__": "obstore.exceptions"})(text)  # type: ignore[no-any-return]


def server(status: int, code: str) -> str:
    return (
        f"Generic S3 error: Error performing PUT http://h/b/k in 5ms - Server returned non-2xx status code: {status}: "
        f"<Error><Code>{code}</Code><Message>Told so.</Message></Error>\n\nDebug source:\nGeneric {{ lots }}"
    )


@pytest.mark.parametrize(
    ("name", "text", "cls"),
    [
        ("AlreadyExistsError", server(412, "PreconditionFailed"), KeyExistsError),
        ("GenericError", server(503, "SlowDown"), TransientStoreError),
        ("GenericError", server(500, "InternalError"), TransientStoreError),
        ("GenericError", server(400, "RequestTimeout"), TransientStoreError),
        ("GenericError", server(409, "ConditionalRequestConflict"), TransientStoreError),
        ("GenericError", server(400, "ExpiredToken"), AccessError),
        ("PermissionDeniedError", server(403, "AccessDenied"), AccessError),
        ("UnauthenticatedError", server(401, "Odd"), AccessError),
        ("FileNotFoundError", server(404, "NoSuchKey"), KeyMissingError),
        ("FileNotFoundError", server(404, "NoSuchBucket"), StoreError),
        ("GenericError", server(301, "PermanentRedirect"), StoreError),
        ("GenericError", "Generic S3 error: HTTP error: error sending request: dns error", TransientStoreError),
        ("GenericError", "Generic S3 error: operation timed out", TransientStoreError),
        ("GenericError", "ValueError: no credentials were found in the environment", AccessError),
        ("GenericError", "odd", StoreError),
    ],
)
def test_errors_of_the_client(name: str, text: str, cls: type[StoreError]) -> None:
    found = translate_cloud(raised(name, text), "write", "k", "s3://b/run", text)
    assert type(found) is cls
    assert "k at s3://b/run" in str(found)
    assert "\n" not in str(found)
    if "<Code>" in text:
        assert "(Told so)" in str(found)
