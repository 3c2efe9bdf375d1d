"""moto's S3 server, with conditional writes that are atomic as S3's are.

moto looks whether the key is there and then stores it, without a lock between the two: of two writers at once that both
say `If-None-Match: *` both may win. S3 lets one of them succeed and answers 412 (or 409) to the other
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html).

    python atomic_moto.py -H 127.0.0.1 -p PORT
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main


def _one_at_a_time(*names: str) -> None:
    """The body has been read when these begin: a slow client holds up nobody."""
    lock = threading.Lock()

    def locked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return method(*args, **kwargs)

        return call

    for name in names:
        setattr(S3Response, name, locked(getattr(S3Response, name)))


if __name__ == "__main__":
    _one_at_a_time("put_object", "_key_response_post")  # the latter completes multipart uploads
    main()
