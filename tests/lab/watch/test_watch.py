"""Runs are followed as they grow: every row is told once, and anew if a run was cut and goes on."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pergrad.lab import cli
from pergrad.lab.config import Train
from pergrad.lab.errors import LabError
from pergrad.lab.watch import follow, server
from tests.support.made_up import made

CONFIG = Train(steps=9)


class Reader:
    """Asks for news as the page does, and keeps what the page would know."""

    def __init__(self, *paths: Path) -> None:
        self.paths, self.since, self.rows = paths, {}, {}

    def ask(self) -> dict[str, Any]:
        news = follow.news(self.paths, self.since)
        for run in news["runs"]:
            old = [] if run["anew"] else self.rows[run["path"]]
            self.rows[run["path"]] = old + run["rows"]
            self.since[run["path"]] = run["since"]
        return news

    def losses(self) -> list[float | None]:
        (rows,) = self.rows.values()
        return [row["loss"] for row in rows]


def line(step: int, loss: float | None, **more: Any) -> bytes:
    return json.dumps({"step": step, "loss": loss, "examples": 16 * step} | more).encode() + b"\n"


def test_every_row_is_told_once(tmp_path):
    run = made(tmp_path / "run", CONFIG, [3.0, 2.0])
    reader = Reader(run)
    (told,) = reader.ask()["runs"]
    assert [row["loss"] for row in told["rows"]] == [3, 2] and told["state"] == "going on"
    assert told["steps"] == 9 and told["name"] == "adam" and told["path"] == str(run)
    assert not reader.ask()["runs"][0]["rows"]
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(line(3, 1.5)[:-9])
        metrics.flush()
        assert not reader.ask()["runs"][0]["rows"], "half of a line is no row"
        metrics.write(line(3, 1.5)[-9:] + line(4, None))
        metrics.flush()
        assert len(reader.ask()["runs"][0]["rows"]) == 2
    assert reader.losses() == [3, 2, 1.5, None]


@pytest.mark.parametrize("then", [1, 3, 8])
def test_a_run_that_was_cut_is_told_anew(tmp_path, then):
    """It went on from a checkpoint after step 2, and has fewer, as many or more rows than before."""
    run = made(tmp_path / "run", CONFIG, [4.0, 3.0, 2.0, 1.0, 0.5])
    reader = Reader(run)
    reader.ask()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    again = [line(step, step + 0.25) for step in range(3, 3 + then)]
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:2], *again]))
    assert reader.ask()["runs"][0]["anew"]
    assert reader.losses() == [4, 3, *(step + 0.25 for step in range(3, 3 + then))]


def test_long_files_come_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "BUDGET", 1000)
    for name in "ab":
        made(tmp_path / name, replace(CONFIG, seed=ord(name), steps=300), [1 / i for i in range(1, 200)])
    reader = Reader(tmp_path)
    answers = [reader.ask()]
    while answers[-1]["more"]:
        answers.append(reader.ask())
    assert 10 < len(answers) < 40
    assert all(sum(len(run["rows"]) for run in news["runs"]) < 60 for news in answers)
    assert [len(rows) for rows in reader.rows.values()] == [199, 199]
    assert all(rows[-1]["loss"] == 1 / 199 for rows in reader.rows.values())


def test_a_line_longer_than_an_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "BUDGET", 10)
    reader = Reader(made(tmp_path / "run", CONFIG, [3.0, 2.0]))
    while reader.ask()["more"]:
        pass
    assert reader.losses() == [3, 2]


def test_a_run_that_is_not_there_yet(tmp_path):
    reader = Reader(tmp_path / "runs")
    assert reader.ask() == {"runs": [], "waiting": [str(tmp_path / "runs")], "more": False}
    run = made(tmp_path / "runs" / "deep" / "run", CONFIG, [3.0])
    (run / "metrics.jsonl").rename(run / "later")
    (told,) = reader.ask()["runs"]
    assert told["state"] == "not begun" and told["rows"] == []
    (run / "later").rename(run / "metrics.jsonl")
    assert reader.ask()["waiting"] == [] and reader.losses() == [3]


def test_names_and_states(tmp_path):
    made(tmp_path / "a", replace(CONFIG, steps=2), [3.0, 2.0])
    made(tmp_path / "b", replace(CONFIG, steps=2, optimizer="micro_adam", seed=1), [3.0, None])
    made(tmp_path / "c" / "1", replace(CONFIG, steps=2, learning_rate=0.5), [3.0])
    told = {run["name"]: run["state"] for run in follow.news([tmp_path, tmp_path / "a"], {})["runs"]}
    assert told == {
        "adam, learning rate 0.01, seed 0": "done",
        "micro_adam, learning rate 0.01, seed 1": "diverged",
        "adam, learning rate 0.5, seed 0": "going on",
    }
    made(tmp_path / "d", replace(CONFIG, steps=2), [3.0])
    same = [run["name"] for run in follow.news([tmp_path / "a", tmp_path / "d"], {})["runs"]]
    assert same == [f"adam ({tmp_path / 'a'})", f"adam ({tmp_path / 'd'})"]


def test_what_cannot_be_read_is_said_and_the_others_go_on(tmp_path):
    (made(tmp_path / "a", CONFIG, [3.0]) / "config.json").write_text("{")
    (made(tmp_path / "b", CONFIG, [3.0]) / "metrics.jsonl").write_text("{}\nno row\n")
    (made(tmp_path / "c", CONFIG, [3.0]) / "result.json").write_text("[]")
    made(tmp_path / "d", CONFIG, [3.0])
    a, b, c, d = follow.news([tmp_path], {})["runs"]
    assert "config.json cannot be read" in a["problem"]
    assert "metrics.jsonl cannot be read" in b["problem"]
    assert "is not the result of a run" in c["problem"]
    assert len(d["rows"]) == 1 and "problem" not in d


def test_positions_that_mean_nothing(tmp_path):
    run = made(tmp_path / "run", CONFIG, [3.0, 2.0])
    for since in ("", "x", "-1-0", "7-123", "99999-0", None, 3, [1]):
        (told,) = follow.news([run], {str(run): since})["runs"]
        assert told["anew"] and len(told["rows"]) == 2


def test_what_is_told_of_a_row(tmp_path):
    run = made(tmp_path / "run", CONFIG, [])
    noise = {"snr": 0.5, "noise_scale": 4.0, "noise_share": 0.25, "outliers": 0.1, "signal": 3.0}
    noise |= {"snr/a/kernel/value": 0.2, "noise_share/a/kernel/value": 3.0}
    unseen = {"snr": 0.0, "noise_scale": None, "noise_share": None, "outliers": None}
    listed = [{"place": 3, "norm": 9.0, "times_median": 4.0, "text": "abc"}]
    rows = [line(1, 2.0, noise=noise, outliers=listed), line(2, 1.0, noise=unseen, learning_rate=0.1)]
    (run / "metrics.jsonl").write_bytes(b"".join(rows))
    first, second = follow.news([run], {})["runs"][0]["rows"]
    assert first["noise"] == {"scale": 4, "divisor": 0.2, "outliers": 0.1, "layers": {"a.kernel": 0.2}}
    assert first["outliers"] == listed and first["examples"] == 16
    assert second["noise"] == {"scale": None, "divisor": 1, "outliers": None, "layers": {}}
    assert second["learning_rate"] == 0.1


# The server.


@contextlib.contextmanager
def served(*paths: Path) -> Iterator[server.Server]:
    with server.make(paths, 0) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield page
        finally:
            page.shutdown()
            thread.join()


def request(page: server.Server, method: str, path: str, body: Any = None, **headers: str) -> Any:
    with contextlib.closing(http.client.HTTPConnection(*page.server_address[:2], timeout=30)) as asked:
        asked.request(method, path, body, headers)
        answer = asked.getresponse()
        return answer.status, answer.read(), answer.headers


def test_the_page_and_its_news(tmp_path):
    made(tmp_path / "<run>", CONFIG, [3.0, None])
    with served(tmp_path) as page:
        assert page.address == f"http://127.0.0.1:{page.server_address[1]}/"
        for path, words in (
            ("/", b"<title>pergrad watch"),
            ("/watch.js", b"use strict"),
            ("/watch.css", b":root"),
        ):
            status, content, headers = request(page, "GET", path)
            assert status == 200 and words in content
            assert "default-src 'none'" in headers["Content-Security-Policy"]
        status, content, _ = request(page, "GET", "/plotly.min.js")
        assert status == 200 and b"plotly.js v" in content[:200]
        status, content, headers = request(page, "POST", "/news", "{}")
        (run,) = json.loads(content)["runs"]
        assert status == 200 and [row["loss"] for row in run["rows"]] == [3, None]


def test_requests_that_are_refused(tmp_path):
    with served(tmp_path) as page:
        port = page.server_address[1]
        assert request(page, "GET", "/", Host=f"evil.example:{port}")[0] == 403
        assert request(page, "POST", "/news", "{}", Host="evil.example")[0] == 403
        assert request(page, "GET", "/", Host=f"localhost:{port}")[0] == 200
        assert request(page, "GET", "/../server.py")[0] == 404
        assert request(page, "GET", "/config.json")[0] == 404
        assert request(page, "POST", "/", "{}")[0] == 404
        for question in ("", "[]", "{"):
            assert request(page, "POST", "/news", question)[0] == 400
        too_long = {"Content-Length": str(server.LONGEST + 1)}
        assert request(page, "POST", "/news", "{}", **too_long)[0] == 400


def test_only_this_machine_can_ask(tmp_path):
    with served(tmp_path) as page:
        assert page.server_address[0] == "127.0.0.1"


def test_a_port_in_use(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["watch", str(tmp_path), "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: port {port} is in use") and "--port 0" in error


@pytest.mark.parametrize("port", [-1, 65536])
def test_no_port(tmp_path, port):
    with pytest.raises(LabError, match=f"a port is a number from 0 to 65535, not {port}"):
        server.make([tmp_path], port)


def test_a_file_is_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match=r"file is a file\. Name the directory of a run"):
        server.make([tmp_path / "file"], 0)


def test_the_command(tmp_path, capsys, monkeypatch):
    """It names what is not there yet, prints the address, and ends when it is interrupted."""

    def interrupted(self: server.Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server.Server, "serve_forever", interrupted)
    assert cli.main(["watch", str(tmp_path / "later"), "--port", "0"]) == 0
    waiting, address = capsys.readouterr().out.splitlines()
    assert waiting == f"{tmp_path / 'later'} is not there yet: the page waits for it"
    assert address.startswith("http://127.0.0.1:")


def test_the_charts_need_plotly(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LabError, match=r"need the package plotly: pip install 'pergrad\[lab\]'"):
        server.make([tmp_path], 0)
