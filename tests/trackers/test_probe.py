"""The check that a store answers, made without MLflow."""

import sqlite3

import pytest

from autotune.trackers import probe
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.trackers.servers import Listener


def test_refused_connection_is_reported_at_once():
    assert probe.problem_of(f"http://127.0.0.1:{free_port()}", 5.0) == "no answer (connection refused)"


def test_hanging_server_is_reported_in_time_and_never_sees_credentials():
    heard = []

    class Server(Listener):
        def serve(self, connection):
            heard.append(connection.recv(1000).decode())

    server = Server()
    try:
        assert probe.problem_of(server.uri.replace("//", "//me:secret@"), 0.3) == "no answer within 0.3 s"
        wait_until(lambda: heard, "the request")
    finally:
        server.close()
    assert heard[0].startswith("GET /health HTTP/1.1")
    assert "secret" not in heard[0]
    assert "Authorization" not in heard[0]


@pytest.mark.parametrize("status", ["200 OK", "401 Unauthorized", "404 Not Found", "500 Internal Server Error"])
def test_every_http_status_counts_as_an_answer(status):
    class Server(Listener):
        def serve(self, connection):
            connection.recv(1000)
            connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            connection.close()

    server = Server()
    try:
        assert probe.problem_of(server.uri, 5.0) == ""
    finally:
        server.close()


def test_server_that_does_not_speak_http_is_reported():
    class Server(Listener):
        def serve(self, connection):
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            connection.close()

    server = Server()
    try:
        assert probe.problem_of(server.uri, 5.0).startswith("no answer (")
    finally:
        server.close()


def test_unresolvable_host_name_is_reported():
    assert probe.problem_of("http://no-such-host.invalid:5000", 5.0).startswith("no answer (")


def test_database_file_is_checked_for_writability(tmp_path):
    file = tmp_path / "m.db"
    assert probe.problem_of(f"sqlite:///{file}", 0.1) == "", "the first writer makes the file"
    database = sqlite3.connect(file, isolation_level=None)
    database.execute("CREATE TABLE x (y)")
    before = file.read_bytes()
    assert probe.problem_of(f"sqlite:///{file}", 0.1) == ""
    assert file.read_bytes() == before
    database.execute("BEGIN EXCLUSIVE")
    assert probe.problem_of(f"sqlite:///{file}", 0.1) == f"{file} cannot be written (database is locked)"
    database.close()
    file.write_bytes(b"no database at all, but long enough to be taken for one by somebody who only looks at the size" * 20)
    assert "cannot be written (file is not a database)" in probe.problem_of(f"sqlite:///{file}", 0.1)


def test_other_kinds_of_stores_are_not_checked():
    assert probe.problem_of("databricks", 0.1) == ""
