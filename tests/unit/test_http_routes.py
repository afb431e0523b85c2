"""The paths of the dashboard address."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from distributed_core.server.http import HttpServer, Request, Response
from distributed_core.server.http_routes import RouteSettings, make_routes, parse_keys
from tests.unit.fake_source import GIB, FakeSource

API = ("get_workers", "retire_workers", "check_idle", "adaptive_target")


def ask(
    source: FakeSource,
    path: str,
    query: dict[str, list[str]] | None = None,
    method: str = "GET",
    body: bytes = b"",
    peer: str = "127.0.0.1",
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> Response:
    chosen = RouteSettings("1.2.3", **{"api": True, **settings})
    server = HttpServer(make_routes(source, chosen), prefix=chosen.prefix)
    request = Request(method, path, query or {}, headers or {}, body, peer)
    return asyncio.run(server.respond(request))[1]


def json_of(response: Response, status: int = 200) -> Any:
    assert response.status == status, response.body
    assert response.content_type == "application/json"
    return json.loads(response.body)


def working() -> FakeSource:
    source = FakeSource()
    source.add_client()
    source.add_client("fire-and-forget", peer=None)
    source.add_worker(1)
    source.add_worker(2, name=2)
    source.submit(["a-1", "a-2", ("a-3", 0)], inputs={2: [0]})
    source.finish("a-1")
    return source


def test_health() -> None:
    source = FakeSource()
    response = ask(source, "/health")
    assert (response.status, response.body) == (200, b"ok")
    assert response.content_type.startswith("text/plain")
    source.trouble = ["the materializer cannot be started: exit code 1"]
    response = ask(source, "/health")
    assert response.status == 503 and b"exit code 1" in response.body


def test_health_of_a_wedged_loop() -> None:
    source = FakeSource()
    for _ in range(3):
        source.loop_lag.observe(11.0)
    response = ask(source, "/health")
    assert response.status == 503 and b"event loop" in response.body


def test_ready() -> None:
    source = FakeSource()
    assert ask(source, "/ready").status == 200
    source.is_ready = False
    assert ask(source, "/ready").status == 503


def test_metrics() -> None:
    response = ask(working(), "/metrics")
    assert response.content_type.startswith("text/plain; version=0.0.4")
    assert b'dask_scheduler_tasks{state="memory"} 1.0\n' in response.body


def test_counts() -> None:
    assert json_of(ask(working(), "/json/counts.json")) == {
        "bytes": 100,
        "clients": 1,
        "cores": 2,
        "erred": 0,
        "hosts": 1,
        "idle": 0,
        "memory": 1,
        "processing": 2,
        "released": 0,
        "saturated": 0,
        "tasks": 3,
        "unrunnable": 0,
        "waiting": 0,
        "waiting_data": 1,
        "workers": 2,
        "desired_workers": 2,
    }


def test_identity() -> None:
    found = json_of(ask(FakeSource(), "/json/identity.json"))
    assert found == {"type": "Scheduler", "asked": -1, "limit": None, "raw": "b'x'"}
    limited = ask(FakeSource(), "/json/identity.json", {"n_workers": ["3"]})
    assert json_of(limited)["asked"] == 3
    assert ask(FakeSource(), "/json/identity.json", {"n_workers": ["x"]}).status == 400


def test_the_api_is_there_only_if_enabled() -> None:
    assert ask(FakeSource(), "/api/v1").body == b"API V1"
    for name in ("", *(f"/{name}" for name in API)):
        assert ask(FakeSource(), f"/api/v1{name}", api=False).status == 404


def test_get_workers() -> None:
    assert json_of(ask(working(), "/api/v1/get_workers")) == {
        "num_workers": 2,
        "workers": [
            {"name": "w1", "address": "tcp://127.0.0.1:1"},
            {"name": 2, "address": "tcp://127.0.0.1:2"},
        ],
    }


def test_check_idle_and_adaptive_target() -> None:
    source = working()
    assert json_of(ask(source, "/api/v1/check_idle")) == {"idle_since": None}
    source.idle_since = 12.5
    assert json_of(ask(source, "/api/v1/check_idle")) == {"idle_since": 12.5}
    assert json_of(ask(source, "/api/v1/adaptive_target")) == {"workers": 2}


def retire(source: FakeSource, fields: Any, **settings: Any) -> Response:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return ask(source, "/api/v1/retire_workers", method="POST", body=body, **settings)


def test_retire_workers() -> None:
    source = FakeSource()
    source.add_worker(1)
    source.add_worker(2, memory_limit=2 * GIB)
    assert json_of(retire(source, {"workers": ["tcp://127.0.0.1:1"]})) == {
        "tcp://127.0.0.1:1": {"name": "w1"}
    }
    assert json_of(retire(source, {"n": 1})) == {"tcp://127.0.0.1:2": {"name": "w2"}}
    assert json_of(retire(source, {"n": 0})) == {}
    assert source.retired == [["tcp://127.0.0.1:1"], ["tcp://127.0.0.1:2"], []]


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b"{",
        b"[" * 100_000,
        [],
        {},
        {"m": 1},
        {"n": -1},
        {"n": True},
        {"n": "1"},
        {"n": None},
        {"workers": "tcp://127.0.0.1:1"},
        {"workers": [1]},
        {"workers": None},
    ],
)
def test_retire_workers_refuses_nonsense(fields: Any) -> None:
    source = FakeSource()
    source.add_worker(1)
    assert json_of(retire(source, fields), 400)["Error"]
    assert source.retired == []


def test_other_machines_retire_no_workers_unless_allowed() -> None:
    source = FakeSource()
    source.add_worker(1)
    fields = {"workers": ["tcp://127.0.0.1:1"]}
    assert "allow-anonymous-api" in json_of(retire(source, fields, peer="10.0.0.1"), 403)["Error"]
    forwarded = {"x-forwarded-for": "10.0.0.1"}
    assert retire(source, fields, headers=forwarded).status == 403
    evil = {"origin": "http://evil.example", "host": "localhost"}
    assert retire(source, fields, headers=evil, allow_anonymous_api=True).status == 403
    assert source.retired == []
    assert retire(source, fields, peer="10.0.0.1", allow_anonymous_api=True).status == 200


def test_changes_need_post() -> None:
    assert ask(FakeSource(), "/api/v1/retire_workers").status == 405
    assert ask(FakeSource(), "/metrics", method="POST").status == 405


def test_story() -> None:
    source = working()
    text = ask(source, "/story", {"key": ["a-1"]}).body.decode()
    assert "'a-1'" in text and "processing -> memory" in text and "'a-2'" not in text
    found = json_of(ask(source, "/story", {"key": ["('a-3', 0)", "a-1"], "format": ["json"]}))
    assert found["keys"] == ["('a-3', 0)", "a-1"]
    assert {json.dumps(record["key"]) for record in found["records"]} == {'["a-3", 0]', '"a-1"'}
    by_accept = ask(source, "/story", {"key": ["x"]}, headers={"accept": "application/json"})
    assert json_of(by_accept)["records"] == []
    assert b"nothing is recorded of x" in ask(source, "/story", {"key": ["x"]}).body
    assert ask(source, "/story").status == 400
    assert ask(source, "/story", {"key": ["x"], "format": ["xml"]}).status == 400


def test_explain() -> None:
    source = working()
    assert ask(source, "/explain", {"key": ["a-1"]}).body == b"'a-1' is memory\n"
    found = json_of(ask(source, "/explain", {"key": ["('a-3', 0)"], "format": ["json"]}))
    assert found == {"key": ["a-3", 0], "lines": ["('a-3', 0) is processing"]}
    response = ask(source, "/explain", {"key": ["gone"]})
    assert response.status == 404 and b"'gone'" in response.body
    assert json_of(ask(source, "/explain", {"key": ["gone"], "format": ["json"]}), 404)["error"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("x", ["x"]),
        ("('x-1', 0)", ["('x-1', 0)", ("x-1", 0)]),
        ('["x-1", 0]', ['["x-1", 0]', ("x-1", 0)]),
        ("('x', ('y', 1.5))", ["('x', ('y', 1.5))", ("x", ("y", 1.5))]),
        ("12", ["12", 12]),
        ("-1.5", ["-1.5", -1.5]),
        ("()", ["()", ()]),
        ("(", ["("]),
        ("(1, __import__('os'))", ["(1, __import__('os'))"]),
        ("({}, 1)", ["({}, 1)"]),
        ("('x'", ["('x'"]),
        ("[None]", ["[None]"]),
        ("", [""]),
    ],
)
def test_keys_in_a_query(text: str, keys: list[Any]) -> None:
    assert parse_keys(text) == keys


def test_huge_keys_in_a_query_are_texts() -> None:
    for text in ("(" * 5000 + ")" * 5000, "(1," * 3000 + ")" * 3000, "(" + "1," * 9000 + ")"):
        assert parse_keys(text) == [text]


def test_root_leads_to_the_status_page() -> None:
    response = ask(FakeSource(), "/")
    assert (response.status, response.headers) == (302, (("Location", "/status"),))
    response = ask(FakeSource(), "/dask", prefix="dask/")
    assert response.headers == (("Location", "/dask/status"),)


def test_status_page() -> None:
    source = working()
    source.machine.counters["finished-stale"] = 3
    source.counters.transition_errors = 1
    response = ask(source, "/status")
    page = response.body.decode()
    assert response.content_type.startswith("text/html")
    for text in ("1.2.3", "tcp://127.0.0.1:2", "finished-stale", "Errors of the engine"):
        assert text in page
    assert "<script" not in page


def test_status_page_escapes_what_peers_named() -> None:
    source = FakeSource()
    source.add_client()
    evil = "<img src=x onerror=alert(1)>'\""
    source.add_worker(1, name=evil)
    source.submit([f"{evil}-1"], prefix=evil)
    page = ask(source, "/status").body.decode()
    assert "<img" not in page and "&lt;img" in page


def test_status_page_is_bounded() -> None:
    source = FakeSource(worker_saturation=float("inf"))
    source.add_client()
    for n in range(1, 251):
        source.add_worker(n)
    for i in range(60):
        source.submit([f"p{i}-1"], prefix=f"p{i}")
    page = ask(source, "/status").body.decode()
    assert page.count("tcp://127.0.0.1:") == 200
    assert "200 of 250" in page and "50 of 60" in page


def test_status_page_that_is_turned_off_still_answers() -> None:
    response = ask(FakeSource(), "/status", dashboard=False)
    assert response.status == 200 and b"http.dashboard" in response.body


def test_no_path_fails_on_an_empty_or_a_busy_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for source in (FakeSource(), working()):
            for route in make_routes(source, RouteSettings("1.2.3", api=True)):
                if "GET" in route.methods:
                    assert ask(source, route.path, {"key": ["a-1"]}).status < 500
    assert not caplog.records
