"""The server of a live page: on loopback, for whoever knows its address, and nothing but the
page."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from overland.apps.report.serve import ReportServer, open_server
from overland.apps.report.summary import open_runs
from overland.cli.main import app
from tests.cli.processes import start_overland
from tests.reporting.runs import NOW, line, make_run
from tests.waiting import wait_until


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", done=5)


@pytest.fixture
def server(run: Path) -> Iterator[ReportServer]:
    with open_server(open_runs([run]), 0) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


def ask(
    server: ReportServer, path: str = "", host: str | None = None, method: str = "GET"
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    headers = {} if host is None else {"Host": host}
    connection.request(method, path or f"/{server.secret}/", headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_it_listens_on_loopback_alone(server: ReportServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert urlsplit(server.address).hostname == "127.0.0.1"
    assert ask(server)[0] == 200


def test_new_content_comes_once(server: ReportServer, run: Path) -> None:
    server._next = 0.0
    path = f"/{server.secret}/data.json?since="
    status, body = ask(server, f"{path}0")
    content = json.loads(body)
    assert status == 200
    assert content["data"]["charts"][0]["id"] == "loss"
    assert ask(server, f"{path}{content['version']}") == (204, b"")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(6, NOW + 1))
    server._next = 0.0
    newer = json.loads(ask(server, f"{path}{content['version']}")[1])
    assert newer["version"] > content["version"]
    assert "6</dd>" in newer["sections"]["figures"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example:1",
                                  "", "[::1]:80", "localhost@evil:1",
                                  "localhost:evil"])  # fmt: skip
def test_a_name_that_only_resolves_to_this_machine_is_refused(
    server: ReportServer, host: str
) -> None:
    status, body = ask(server, host=host)
    assert status == 403
    assert b"tiny run" not in body


@pytest.mark.parametrize("host", ["localhost:1234", "localhost", "127.0.0.1", "LocalHost:80"])
def test_a_tunnel_may_have_another_port(server: ReportServer, host: str) -> None:
    """A browser leaves port 80 out."""
    assert ask(server, host=host)[0] == 200


def test_a_run_folder_that_is_removed_is_said_and_nothing_is_made_up(
    server: ReportServer, run: Path
) -> None:
    assert b"A tiny run" in ask(server)[1]
    shutil.rmtree(run)
    server._next = 0.0
    status, body = ask(server)
    page = body.decode().split("<main")[1]
    assert status == 200
    assert "no sign of life: its folder no longer exists" in page
    assert "AdamW" not in page


def test_an_error_of_ours_shows_its_trace_and_a_reader_that_has_left_does_not(
    server: ReportServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (BrokenPipeError("gone"), RuntimeError("ours")):
        monkeypatch.setattr(server, "newest", Mock(side_effect=error))
        with pytest.raises(http.client.RemoteDisconnected):
            ask(server)
    said = capsys.readouterr().err
    assert "RuntimeError: ours" in said
    assert "gone" not in said


@pytest.mark.parametrize("path", ["/", "/data.json", "/../config.toml", "/%2e%2e/config.toml",
    "//etc/passwd", "/x/../../../etc/passwd"])  # fmt: skip
def test_nothing_else_is_served(server: ReportServer, path: str) -> None:
    for asked in (path, f"/{server.secret}{path}" if path != "/" else "/wrong/"):
        if asked == f"/{server.secret}/data.json":
            continue
        status, body = ask(server, asked)
        assert status == 404
        assert b"steps" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_only_answers(server: ReportServer, method: str) -> None:
    assert ask(server, method=method)[0] == 501


def test_a_port_that_is_taken_is_said_with_one_that_is_free(run: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = CliRunner().invoke(app, ["watch", str(run), "--serve", str(port)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"port {port} is in use: use a free port, such as `--serve ")


def test_the_command_says_where_and_ends_with_ctrl_c(run: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    process = start_overland("watch", str(run), "--serve", str(port), cwd=run)
    wait_until(
        lambda: "Ctrl-C" in process.stdout or process.poll() is not None, "it serves",
        lambda: process.stdout,
    )  # fmt: skip
    assert process.poll() is None, process.stdout
    address = process.stdout.split()[0]
    assert address.startswith(f"http://127.0.0.1:{port}/")
    assert f"ssh -L {port}:127.0.0.1:{port} " in process.stdout
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert "Traceback" not in process.stdout


def test_serve_does_without_a_port(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[Path], int]] = []
    monkeypatch.setattr("overland.cli.watch.serve_page", lambda *one: asked.append(one))
    done = CliRunner().invoke(app, ["watch", str(run), "--serve"])
    assert done.exit_code == 0, done.output
    assert asked == [([run], 0)]
    asked.clear()
    CliRunner().invoke(app, ["watch", "--serve", str(run)])
    assert asked == [([run], 0)]
