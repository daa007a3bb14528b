"""moto's S3 server on loopback, which keeps a list of the requests that it got."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

ACCESS_KEY = "AKIAFORTESTSONLY0001"
SECRET_KEY = "a-secret-that-no-file-may-hold"
BUCKET = "corpus"


@dataclass
class Endpoint:
    """An S3 endpoint with one bucket."""

    url: str
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(method, path with query) in the order of arrival."""
    fault: Callable[[str, str], str | None] = lambda method, path: None
    """The status with which a request (method, path with query) is answered, and nothing else; None for an answer."""

    @property
    def environment(self):
        """All that a client needs to know."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def changes(self):
        """The requests that change something."""
        return [(method, path) for method, path in self.requests if method not in ("GET", "HEAD")]

    def files(self):
        """Every object of the bucket, read with Amazon's own client."""
        client = self._client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        names = [found["Key"] for page in pages for found in page.get("Contents", [])]
        return {name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}

    def empty(self):
        """Make the bucket, or delete what is in it, forget the requests, and answer all of them."""
        self.fault = Endpoint.fault
        client = self._client()
        client.create_bucket(Bucket=BUCKET)
        for name in self.files():
            client.delete_object(Bucket=BUCKET, Key=name)
        self.requests.clear()

    def _client(self):
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
        return boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **keys)


class _Quiet(WSGIRequestHandler):
    def log_request(self, *args):
        """Requests are counted, not printed."""


@contextmanager
def s3_server():
    """Serve on a free port of loopback until the block ends."""
    endpoint = Endpoint("")
    moto = DomainDispatcherApplication(create_backend_app)

    def counted(environ, start_response):
        query = environ["QUERY_STRING"]
        request = (environ["REQUEST_METHOD"], environ["PATH_INFO"] + (f"?{query}" if query else ""))
        endpoint.requests.append(request)
        if status := endpoint.fault(*request):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(status, [("Content-Length", "0")])
            return []
        return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, counted, threaded=True, request_handler=_Quiet)
    endpoint.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
