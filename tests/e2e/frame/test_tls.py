"""HTTPS with the real command: client certificates, renewal without a restart, and files that are wrong."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ferrule.api import tls
from ferrule.config import FrontendConfig
from ferrule.errors import ConfigError
from ferrule_testkit import server as servers

KEY_USES = [
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
]


class Pair(NamedTuple):
    """A certificate and its key, as files."""

    cert: Path
    key: Path
    serial: int


class Authority:
    """An authority that issues certificates for 127.0.0.1, with the extensions of RFC 5280 that clients demand from
    Python 3.13 on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        usage = dict.fromkeys(KEY_USES, False) | {"key_cert_sign": True, "crl_sign": True}
        certificate = (
            self._builder(self.name, self.key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
        )
        self.cert = folder / "ca.pem"
        self.cert.write_bytes(certificate.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )

    def issue(self, name: str, passphrase: bytes | None = None) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
        found = self._builder(subject, key).add_extension(names, critical=False).sign(self.key, hashes.SHA256())
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key", found.serial_number)
        pair.cert.write_bytes(found.public_bytes(serialization.Encoding.PEM))
        lock = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))
        return pair


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def trusting(authority: Authority, client: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.cert))
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    return context


def health(port: int, context: ssl.SSLContext) -> int:
    """Return the status of GET /health over TLS; 0 without an answer."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def serial(port: int, client: Pair | None = None) -> int:
    """Return the serial number of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    with socket.create_connection(("127.0.0.1", port), 240) as plain, context.wrap_socket(plain) as secure:
        shown = secure.getpeercert(binary_form=True)
    return x509.load_der_x509_certificate(shown or b"").serial_number


@contextlib.contextmanager
def running(args: list[str], log: Path, context: ssl.SSLContext) -> Iterator[servers.Server]:
    with servers.started([*servers.WITHOUT_MODEL, *servers.FEW_ROUTES, *args], log, {"OMP_NUM_THREADS": "1"}) as server:
        wait_for(lambda: health(server.port, context) == 200, server)
        yield server
        server.stop()


def wait_for(condition: Callable[[], bool], server: servers.Server) -> None:
    assert servers.until(lambda: server.process.poll() is not None or condition()), server.text()
    assert server.process.poll() is None, server.text()


def replace(target: Path, content: bytes) -> None:
    """Replace a file as tools do: the new one takes the old one's name, so that nobody reads a half of it."""
    new = target.with_suffix(".new")
    new.write_bytes(content)
    new.replace(target)


def test_https_with_renewal(authority: Authority, tmp_path: Path) -> None:
    """Serve chat and streams, and probes without TLS; use a new pair for new connections, and not a broken one, which
    the log reports.
    """
    first, second, other = (authority.issue(name) for name in ("first", "second", "other"))
    cert, key = tmp_path / "live.pem", tmp_path / "live.key"
    cert.write_bytes(first.cert.read_bytes())
    key.write_bytes(first.key.read_bytes())
    context = trusting(authority)
    args = ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--enable-ssl-refresh"]
    with (
        servers.own_port() as probes,
        running([*args, "--probe-port", str(probes)], tmp_path / "log", context) as server,
    ):
        assert server.says(f"ready at https://127.0.0.1:{server.port}/v1")
        for path, status in (("/health", 200), ("/metrics", 200), ("/ping", 200), ("/v1/models", 404)):
            assert httpx.get(f"http://127.0.0.1:{probes}{path}", timeout=240).status_code == status
        with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context, timeout=240) as http:
            body = {"prompt": "Hello", "max_tokens": 8, "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
            too_large = http.post("/v1/completions", content=b" " * (33 << 20))
            assert too_large.status_code == 413
            assert serial(server.port) == first.serial

            replace(cert, second.cert.read_bytes())  # without its key: of no use
            wait_for(lambda: "the old ones stay in use" in server.text(), server)
            assert serial(server.port) == first.serial
            assert http.get("/health").status_code == 200

            replace(key, second.key.read_bytes())
            wait_for(lambda: serial(server.port) == second.serial, server)
            assert server.says("the changed certificate files are in use")
            assert http.get("/health").status_code == 200  # the connection of before is not cut

            replace(cert, b"no certificate")
            wait_for(lambda: server.text().count("the old ones stay in use") == 2, server)
            assert serial(server.port) == second.serial
            replace(cert, other.cert.read_bytes())
            replace(key, other.key.read_bytes())
            wait_for(lambda: serial(server.port) == other.serial, server)
        wait_for(lambda: health(server.port, context) == 200, server)
        plain = socket.create_connection(("127.0.0.1", server.port), 240)
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")
        plain.close()
    assert server.process.returncode == 0


def test_client_certificates(authority: Authority, tmp_path: Path) -> None:
    """Refuse the handshake without a client's certificate, or with a stranger's."""
    pair, client = authority.issue("server"), authority.issue("client")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    stranger = Authority(folder).issue("stranger")
    known = trusting(authority, client)
    args = ["--ssl-certfile", str(pair.cert), "--ssl-keyfile", str(pair.key), "--ssl-ca-certs", str(authority.cert)]
    args += ["--ssl-cert-reqs", "2", "--ssl-ciphers", "ECDHE+AESGCM", "--header-timeout", "1"]
    with running(args, tmp_path / "log", known) as server:
        assert health(server.port, trusting(authority)) == 0
        assert health(server.port, trusting(authority, stranger)) == 0
        wait_for(lambda: health(server.port, known) == 200, server)
        old = trusting(authority, client)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.set_ciphers("ECDHE+CHACHA20")
        assert health(server.port, old) == 0
        with socket.create_connection(("127.0.0.1", server.port), 240) as silent:  # no handshake
            assert silent.recv(1) == b""
        wait_for(lambda: late_headers(server.port, known) == 408, server)
        renewed = authority.issue("server")  # in the same files
        assert serial(server.port, client) == pair.serial
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: serial(server.port, client) == renewed.serial, server)


def late_headers(port: int, context: ssl.SSLContext) -> int:
    """Return the code of the answer to a client that sends nothing; 0 where even its handshake was late."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=240)
    with contextlib.suppress(OSError), contextlib.closing(connection):
        connection.connect()
        late = http.client.HTTPResponse(connection.sock)
        late.begin()
        code = int(json.loads(late.read())["error"]["code"])
        return code if code == late.status else 0
    return 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"keyfile": "pair.key"}, "The --ssl options need --ssl-certfile."),
        ({"cert_reqs": 2}, "The --ssl options need --ssl-certfile."),
        ({"certfile": "pair.pem", "keyfile": "pair.key", "cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-ca-certs"),
        ({"certfile": "missing.pem", "keyfile": "pair.key"}, "No such file or directory: .*missing.pem"),
        ({"certfile": "pair.pem", "keyfile": "other.key"}, "other.key is not .*pair.pem.*KEY_VALUES_MISM"),
        ({"certfile": "pair.pem", "keyfile": "locked.key"}, "locked.key has no private key"),
        ({"certfile": "pair.pem"}, "pair.pem has no private key"),
        ({"certfile": "pair.pem", "keyfile": "pair.pem"}, "pair.pem has no private key"),
        ({"certfile": "pair.key", "keyfile": "pair.key"}, "pair.key has no certificate"),
        ({"certfile": "pair.pem", "keyfile": "pair.key", "ciphers": "NONSENSE"}, "--ssl-ciphers NONSENSE.*o cipher"),
        ({"certfile": "pair.pem", "keyfile": "pair.key", "ca_certs": "pair.key"}, "pair.key has no certificate"),
    ],
)
def test_what_is_wrong_is_named(authority: Authority, tmp_path: Path, options: dict[str, Any], what: str) -> None:
    for name, passphrase in (("pair", None), ("other", None), ("locked", b"secret")):
        authority.issue(name, passphrase)
    values: dict[str, Any] = {
        f"ssl_{name}": value if isinstance(value, int) or name == "ciphers" else str(tmp_path / value)
        for name, value in options.items()
    }
    with pytest.raises(ConfigError, match=what):
        tls.context_of(FrontendConfig(**values))


def test_wrong_files_are_one_block(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("pair"), authority.issue("other")
    args = ["--host", "127.0.0.1", "--port", "0", "--ssl-certfile", str(pair.cert), "--ssl-keyfile", str(other.key)]
    args += [*servers.WITHOUT_MODEL, *servers.FEW_ROUTES]
    command = [sys.executable, "-m", "ferrule", "serve", *args]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 2
    assert "KEY_VALUES_MISMATCH" in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stderr.count("\nferrule: ") == 1
