"""Images by URL: hosts and addresses that may be asked, redirects, limits, and files below a directory."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from adaptrt import ConfigError, RequestError
from adaptrt.serve.image_urls import ImageUrls
from adaptrt.serve.media_hosts import MediaHosts, is_public
from adaptrt.serve.options import ServerLimits, ServerOptions

LIMITS = ServerLimits(max_image_bytes=100, max_body_bytes=150, image_fetch_seconds=5.0)


class Site(BaseHTTPRequestHandler):
    """Answers according to the path."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        name, _, rest = self.path[1:].partition("/")
        getattr(self, f"send_{name}")(rest)

    def send_file(self, size: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", size)
        self.end_headers()
        self.wfile.write(b"x" * int(size))

    def send_endless(self, _: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * 10_000)

    def send_redirect(self, where: str) -> None:
        self.send_response(302)
        self.send_header("Location", where)
        self.end_headers()

    def send_loop(self, _: str) -> None:
        self.send_redirect("/loop/")

    def send_nothing(self, _: str) -> None:
        self.send_error(404)

    def send_echo(self, _: str) -> None:
        body = f"{self.path} {self.headers['Host']} {self.headers['Accept-Encoding']}".encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def send_drip(self, _: str) -> None:
        self.send_response(200)
        self.flush_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"a")
                time.sleep(0.02)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def urls_of(*entries: str, root: Path | None = None, limits: ServerLimits = LIMITS) -> ImageUrls:
    return ImageUrls(ServerOptions(media_hosts=MediaHosts.of_entries(entries), media_root=root, limits=limits))


def refused(urls: ImageUrls, *asked: str) -> str:
    with pytest.raises(RequestError) as raised:
        urls.read(asked)
    return str(raised.value)


def test_files_come_from_allowed_hosts(port: int) -> None:
    base = f"http://127.0.0.1:{port}"
    urls = urls_of(f"127.0.0.1:{port}")
    found = urls.read([f"{base}/file/100", "data:image/png;base64,AA", f"{base}/file/7", f"{base}/file/7"])
    assert {url: len(file) for url, file in found.items()} == {f"{base}/file/100": 100, f"{base}/file/7": 7}
    (echo,) = urls.read([f"{base}/echo/ä?b=c&d#e"]).values()
    assert echo.decode() == f"/echo/%C3%A4?b=c&d 127.0.0.1:{port} identity"
    assert urls.read([f"HTTP://127.0.0.1:{port}/redirect//file/3"]).popitem()[1] == b"xxx"
    # A name may lead to a private address only if that is listed too.
    assert urls_of(f"localhost:{port}", "127.0.0.1").read([f"http://LOCALHOST:{port}/file/1"])
    assert "has no address that allowed_media_domains allows" in refused(
        urls_of(f"localhost:{port}"), f"http://localhost:{port}/file/1"
    )


def test_other_urls_are_refused(port: int) -> None:
    base = f"http://127.0.0.1:{port}"
    urls = urls_of(f"127.0.0.1:{port}", "example.com")
    for url, said in (
        (f"http://127.0.0.2:{port}/file/1", "lists"),
        ("http://127.0.0.1/file/1", "lists"),
        (f"http://example.com:{port}/", "lists"),
        (f"http://example.com.evil.org:{port}/", "lists"),
        (f"http://user@127.0.0.1:{port}/file/1", "without a user"),
        (f"http://example.com\\@127.0.0.1:{port}/", "without spaces"),
        (f"{base}/file/1\r\nX: y", "without spaces"),
        ("http:///file/1", "http://HOST/PATH"),
        ("http://127.0.0.1:99999/", "Port out of range"),
        ("http://[::1/", "Invalid IPv6 URL"),
        (f"{base}/file/101", "more than 100 bytes"),
        (f"{base}/endless/", "more than 100 bytes"),
        (f"{base}/nothing/", "status 404"),
        (f"{base}/loop/", "redirected more than 5 times"),
        (f"{base}/redirect/http://127.0.0.2:{port}/file/1", "lists"),
        (f"{base}/redirect/file:///etc/passwd", "http://HOST/PATH"),
        (f"https://127.0.0.1:{port}/file/1", "cannot be downloaded"),
        ("http://" + "a" * 9000, "at most 8192 characters"),
    ):
        assert said in refused(urls, url), url
    assert "more than 150 bytes" in refused(urls, f"{base}/file/80", f"{base}/file/71")
    assert len(urls.read([f"{base}/file/80", f"{base}/file/70"])) == 2
    with socket.socket() as bound:  # refuses connections, because it does not listen
        bound.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{bound.getsockname()[1]}"
        assert "Connection refused" in refused(urls_of(closed), f"http://{closed}/")
    assert "without --allowed-media-domains" in refused(urls_of(), f"{base}/file/1")


def test_slow_hosts_do_not_hold_a_thread(port: int) -> None:
    limits = ServerLimits(image_fetch_seconds=0.5)
    said = refused(urls_of(f"127.0.0.1:{port}", limits=limits), f"http://127.0.0.1:{port}/drip/")
    assert "the time for downloads is over" in said or "timed out" in said


def test_private_addresses_are_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "172.16.0.1", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fd00::1", "ff02::1", "::ffff:127.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001::1"),
    ):
        assert not is_public(ipaddress.ip_address(text)), text
    for text in ("1.1.1.1", "93.184.216.34", "2606:4700:4700::1111"):
        assert is_public(ipaddress.ip_address(text)), text
    places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, 80)) for text in ("10.0.0.1", "1.1.1.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    assert MediaHosts.of_entries(["a.example"]).resolve("a.example", 80) == ["1.1.1.1"]
    assert MediaHosts.of_entries(["a.example", "10.0.0.0/8"]).resolve("a.example", 80) == ["10.0.0.1", "1.1.1.1"]


def test_entries_are_names_addresses_and_networks() -> None:
    hosts = MediaHosts.of_entries(
        ["A.example.", "b.example:8080", "10.0.0.0/30", "::1", "[fd00::1]:81", "10.9.0.1:90", "c.example:1"]
    )
    for host, port in (
        *(("a.example", 80), ("a.example", 443), ("a.example.", 80), ("b.example", 8080), ("10.0.0.2", 80)),
        *(("::1", 443), ("0:0:0:0:0:0:0:1", 80), ("fd00::1", 81), ("10.9.0.1", 90), ("c.example", 1)),
    ):
        assert hosts.accepts(host, port), (host, port)
    for host, port in (
        *(("a.example", 8080), ("b.example", 80), ("10.0.0.4", 80), ("10.0.0.2", 81), ("fd00::1", 80)),
        *(("10.9.0.1", 80), ("x.a.example", 80), ("0x0a000002", 80), ("example", 80)),
    ):
        assert not hosts.accepts(host, port), (host, port)
    for entry in (
        "",
        "*",
        "http://a",
        "a b",
        "1.2.3",
        "a:0",
        "a:65536",
        "a:b",
        "10.0.0.1/8",
        "ä.example",
        "-a",
        "a..b",
    ):
        with pytest.raises(ConfigError, match="allowed_media_domains has"):
            MediaHosts.of_entries([entry])


def test_files_lie_below_the_directory(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "below").mkdir(parents=True)
    (root / "below" / "a b.png").write_bytes(b"in")
    (root / "large.png").write_bytes(b"x" * 101)
    (tmp_path / "outside.png").write_bytes(b"out")
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    (root / "inner.png").symlink_to("below/a b.png")
    os.mkfifo(root / "fifo.png")
    (tmp_path / "alias").symlink_to(root)
    urls = urls_of(root=root)
    for url in (f"file://{root}/below/a%20b.png", f"file://localhost{root}/inner.png"):
        assert urls.read([url]) == {url: b"in"}
    through = f"file://{tmp_path}/alias/inner.png"
    assert urls_of(root=tmp_path / "alias").read([through]) == {through: b"in"}
    for url, said in (
        (f"file://{tmp_path}/outside.png", "below"),
        (f"file://{root}/link.png", "below"),
        (f"file://{root}/../outside.png", "below"),
        (f"file://{root}/%2e%2e/outside.png", "below"),
        (f"file://{root}/below/a%00.png", "below"),
        (f"file://host{root}/inner.png", "below"),
        ("file:inner.png", "below"),
        ("file://[", "below"),
        (f"file://{root}/missing.png", "No such file"),
        (f"file://{root}/below", "it is a directory"),
        (f"file://{root}/fifo.png", "it is a FIFO"),
        (f"file://{root}/large.png", "it has 101 bytes; expected at most 100"),
    ):
        assert said in refused(urls, url), url
    assert "without --allowed-local-media-path" in refused(urls_of(), f"file://{root}/inner.png")
