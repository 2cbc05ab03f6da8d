"""Keys, pages of other sites, and proxies: who may ask, and who only says so."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.errors import UsageError
from glm5.serve.access import ADMIN_PATHS, Access, hosts_answered
from glm5.serve.keys import find_key

URL, PAGE = "/v1/chat/completions", "https://chat.example"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
PROXY, FAR = ("10.0.0.1", 1), ("203.0.113.9", 1)
Make = Callable[..., tuple[TestClient, Any]]


def asked(client: TestClient, path: str = URL, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(path, json=BODY if path == URL else {}, headers=named).status_code


def test_a_page_in_front_of_a_proxy_with_tls_is_ours(scripted: Make) -> None:
    """The browser says https://chat.example; the proxy asks us under a name of its own."""
    plain, _ = scripted("<|user|>", app={"api_key": "k"}, headers={"x-api-key": "k", "host": "10.0.0.7:8000"})
    assert asked(plain, origin=PAGE, sec_fetch_site="same-origin") == 403
    access = Access(origins=(PAGE,))
    named, _ = scripted("<|user|>", app={"api_key": "k", "access": access}, headers={"x-api-key": "k"})
    assert asked(named, origin=PAGE, host="10.0.0.7:8000") == 200
    trusting = {"api_key": "k", "access": Access(proxies=("10.0.0.0/8",))}
    behind, _ = scripted("<|user|>", app=trusting, client=PROXY, headers={"x-api-key": "k", "host": "10.0.0.7:8000"})
    told = {"x_forwarded_host": "chat.example", "x_forwarded_proto": "https", "x_forwarded_for": FAR[0]}
    assert asked(behind, origin=PAGE, **told) == 200
    assert asked(behind, origin=PAGE, **{**told, "x_forwarded_host": "chat.example:443"}) == 200
    assert asked(behind, origin="http://chat.example", **told) == 403  # whoever sits between could have written it
    assert asked(behind, origin="https://evil.example", **told) == 403
    assert asked(behind, origin="null", **told) == 403
    # Of a list, the last word is that of the trusted proxy, the first one the client's.
    assert (
        asked(behind, origin="https://evil.example", **{**told, "x_forwarded_host": "evil.example, chat.example"})
        == 403
    )


def test_forwarded_headers_of_others_are_not_believed(scripted: Make) -> None:
    for access in (Access(), Access(proxies=("10.0.0.1",))):
        spoofing, engine = scripted("<|user|>", app={"access": access, "allowed_hosts": {"localhost"}}, client=FAR)
        told = {"x_forwarded_host": "localhost", "x_forwarded_proto": "https", "x_forwarded_for": "127.0.0.1"}
        assert asked(spoofing, host="evil.example", **told) == 403
        assert asked(spoofing, host="localhost", origin="https://evil.example", **told) == 403
        for path in (*ADMIN_PATHS, "/workers"):
            for value in ("127.0.0.1", "localhost", "::1"):
                status = asked(spoofing, path, host="localhost", x_forwarded_for=value, forwarded=f"for={value}")
                assert status == 403, path
        assert not engine.prompts


def test_who_comes_through_a_proxy_is_not_local(scripted: Make) -> None:
    """Without a key the admin paths are for this machine; a proxy on it carries requests of others."""
    path = "/flush_cache"
    client, _ = scripted("<|user|>", client=("127.0.0.1", 1))
    assert asked(client, path) == 200
    for name in ("x_forwarded_for", "forwarded", "x_real_ip", "via", "x_forwarded_host"):
        assert asked(client, path, **{name: "127.0.0.1"}) == 403, name
    trusting, _ = scripted("<|user|>", app={"access": Access(proxies=("127.0.0.1", "::1"))}, client=("127.0.0.1", 1))
    assert asked(trusting, path, x_forwarded_for=FAR[0]) == 403
    # What the client wrote stands to the left of what the proxy added.
    assert asked(trusting, path, x_forwarded_for=f"127.0.0.1, {FAR[0]}") == 403
    assert asked(trusting, path, x_forwarded_for="localhost") == 403
    assert asked(trusting, path) == 403  # a proxy that does not say for whom it asks


def test_names_that_resolve_to_us_are_not_ours(scripted: Make) -> None:
    hosts = hosts_answered("127.0.0.1", None, Access(origins=(PAGE,)))
    assert hosts is not None and "chat.example" in hosts
    client, engine = scripted("<|user|>", app={"allowed_hosts": hosts, "access": Access(origins=(PAGE,))})
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.", "[::1", "a@localhost@b"):
        assert asked(client, host=host, origin=f"http://{host}", sec_fetch_site="same-origin") == 403, host
    assert not engine.prompts
    assert asked(client, host="chat.example", origin=PAGE) == asked(client, host="localhost:8000") == 200


def test_browsers_are_told_which_sites_may_ask(scripted: Make) -> None:
    client, _ = scripted("<|user|>", app={"api_key": "k", "access": Access(origins=(PAGE,))})
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    answer = client.options(URL, headers={"Origin": PAGE, **ask})  # a browser sends no key along
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    refused = client.post(URL, json=BODY, headers={"Origin": PAGE, "Sec-Fetch-Site": "cross-site"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE
    good = client.post(URL, json=BODY, headers={"Origin": PAGE, "Sec-Fetch-Site": "cross-site", "x-api-key": "k"})
    assert good.status_code == 200 and good.headers["vary"] == "Origin"
    for origin in ("https://evil.example", "null", "https://chat.example.evil.example", "http://chat.example", ""):
        headers = {"Origin": origin, **ask}
        assert "access-control-allow-origin" not in client.options(URL, headers=headers).headers, origin
        stranger = client.post(URL, json=BODY, headers={"Origin": origin, "x-api-key": "k"})
        assert stranger.status_code == 403 and "access-control-allow-origin" not in stranger.headers, origin
    silent, _ = scripted("<|user|>", app={"api_key": "k"})
    assert "access-control-allow-origin" not in silent.options(URL, headers={"Origin": PAGE, **ask}).headers


@pytest.mark.parametrize("api_key", ["k", None])
def test_the_admin_key_opens_what_the_other_does_not(scripted: Make, api_key: str | None) -> None:
    app = {"api_key": api_key, "access": Access(admin_key="boss")}
    client, _ = scripted("<|user|>", app=app, client=("127.0.0.1", 1))
    for path in ADMIN_PATHS:
        for headers in ({}, {"x-api-key": "k"}, {"authorization": "Bearer k"}, {"x_api_key": "bos"}):
            assert asked(client, path, **headers) == 401, path
    assert asked(client, "/flush_cache", authorization="Bearer boss") == 200
    assert asked(client, x_api_key="boss") == 200
    assert asked(client, x_api_key="k") == 200 and asked(client, x_api_key="no") == (401 if api_key else 200)
    assert client.get("/workers", headers={"x-api-key": "k"}).status_code == 401


def test_where_keys_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    file.chmod(0o600)
    assert find_key("api", None, None) is None
    assert find_key("api", "given", None) == "given" and find_key("api", None, file) == "from-file"
    monkeypatch.setenv("GLM5_API_KEY", "from-environment")
    with pytest.raises(UsageError, match="more than once"):
        find_key("api", "given", None)
    monkeypatch.setenv("GLM5_API_KEY", "from-environment")
    assert find_key("api", None, None) == "from-environment" and "GLM5_API_KEY" not in os.environ
    for bad in ("", "two words", "\u00e9", "a\nb"):
        with pytest.raises(UsageError, match="is not a valid key"):
            find_key("admin", bad, None)
        file.write_text(bad, encoding="utf-8")
        with pytest.raises(UsageError, match="is not a valid key") as refused:
            find_key("admin", None, file)
        assert not bad or bad not in str(refused.value)
    for mode in (0o644, 0o640, 0o606):
        file.chmod(mode)
        with pytest.raises(UsageError, match="chmod 600"):
            find_key("api", None, file)
    with pytest.raises(UsageError, match="no such file"):
        find_key("api", None, tmp_path / "nowhere")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("from-pipe\n"))
    writer.start()
    assert find_key("api", None, pipe) == "from-pipe"
    writer.join()


@pytest.mark.parametrize(
    "origin", ["*", "null", "chat.example", "https://a/b", "https://a/", "file://x", "https://A b"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(UsageError, match="not an origin"):
        Access(origins=(origin,))


def test_what_is_no_proxy() -> None:
    for proxy in ("*", "proxy.example", "10.0.0.1/8", ""):
        with pytest.raises(UsageError, match="trusted proxy"):
            Access(proxies=(proxy,))
