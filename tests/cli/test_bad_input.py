"""Bad input to the command in a process of its own. tests/corpus has the messages."""

import socket

from tests.support.studies import make_study


def test_unknown_command_suggests_the_nearest_one(cli):
    assert "no such command, got 'rnu'. Did you mean 'run'?" in cli.refused("rnu")


def test_refused_commands_leave_no_files(cli):
    cli.refused("run", "model=resnet19")
    assert list(cli.cwd.iterdir()) == []


def test_port_in_use_is_refused(cli):
    make_study(cli.cwd / "runs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = cli.refused("ui", "--port", str(port))
    assert f"--port: cannot be listened on, got {port} (Address already in use)" in said
