"""A conformance kit for gateways: does a running one keep what trainers and agents rely on?

It speaks plain HTTP with a session's URL and key, as agents do, and looks at the samples as a trainer does. The model
behind the gateway may be any; answers are kept short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

NOT_RETRIED = (400, 401, 403, 404, 410, 413, 422)
"""Refusals that the OpenAI and Anthropic SDKs do not repeat."""
TOKENS = 16
SECONDS = 300.0
ASK = {"role": "user", "content": "Say something short."}


class Broken(Exception):
    """A promise that the gateway does not keep."""


@dataclass
class Visit:
    """One check's view of the gateway."""

    client: httpx.Client
    admin: Mapping[str, str]

    def session(self, **options: Any) -> tuple[str, str, Mapping[str, str]]:
        """A new session: its id, its base URL and the headers of its agent."""
        made = self.ok(self.client.post("/sessions", json={"task_id": "check", **options}, headers=self.admin))
        need(str(made["base_url"]).endswith(f"/sessions/{made['id']}/v1"), "base_url must end in /sessions/ID/v1")
        return made["id"], made["base_url"], {"authorization": f"Bearer {made['api_key']}"}

    def chat(self, base: str, key: Mapping[str, str], messages: list[Any], **options: Any) -> dict[str, Any]:
        body = {"model": "any", "messages": messages, "max_tokens": TOKENS, **options}
        return self.ok(self.client.post(f"{base}/chat/completions", json=body, headers=key))

    def samples(self, session: str) -> dict[str, Any]:
        found = self.ok(self.client.get(f"/sessions/{session}/samples", headers=self.admin))
        need(found["tokens_lost"] == 0, f"{found['tokens_lost']} sampled tokens are in no sample")
        for row in found["samples"]:
            lengths = {len(row[name]) for name in ("ids", "loss_mask", "rollout_logprobs", "weight_versions")}
            need(len(lengths) == 1, "ids, loss_mask, rollout_logprobs and weight_versions must have one length")
        return found

    @staticmethod
    def ok(answer: httpx.Response) -> dict[str, Any]:
        need(answer.status_code == 200, f"{answer.request.url.path} answered {answer.status_code}: {answer.text[:200]}")
        found: dict[str, Any] = answer.json()
        return found


def need(kept: bool, broken: str) -> None:
    if not kept:
        raise Broken(broken)


def health(visit: Visit) -> None:
    """/healthz answers without a key"""
    visit.ok(visit.client.get("/healthz"))


def keys(visit: Visit) -> None:
    """A session's key opens its own chat surfaces and nothing else"""
    name, base, key = visit.session()
    other, _, _ = visit.session()
    for headers, paths in (
        ({}, ("/sessions", f"/sessions/{name}/v1/chat/completions")),
        (key, ("/sessions", f"/sessions/{name}/reward", f"/sessions/{name}/close", f"/sessions/{other}/v1/messages")),
    ):
        for path in paths:
            status = visit.client.post(path, json={}, headers=headers).status_code
            need(status in (401, 403), f"{path} answered {status} to a key that must not open it")
    status = visit.client.get(f"/sessions/{name}/samples", headers=key).status_code
    need(status in (401, 403), f"the agent's key reads the samples ({status})")
    visit.chat(base, key, [ASK])


def one_row(visit: Visit) -> None:
    """A conversation that only grows is one sample, with every sampled token in the loss once"""
    name, base, key = visit.session()
    messages, sampled = [ASK], 0
    for turn in range(3):
        answer = visit.chat(base, key, messages)
        said = answer["choices"][0]["message"]
        sampled += answer["usage"]["completion_tokens"]
        messages += [{"role": "assistant", "content": said.get("content") or ""}, {**ASK, "content": f"Go on: {turn}."}]
    found = visit.samples(name)
    trained = sum(sum(row["loss_mask"]) for row in found["samples"])
    need(trained == sampled, f"{sampled} tokens were sampled, {trained} are in the loss")
    if not found["forks"]:  # an end marker that the next message cannot follow makes a fork
        need(len(found["samples"]) == 1, f"{len(found['samples'])} samples for a conversation without forks")


def retries(visit: Visit) -> None:
    """A request that is repeated byte for byte gets the same answer and samples nothing"""
    name, base, key = visit.session()
    first, again = (visit.chat(base, key, [ASK])["choices"][0]["message"] for _ in range(2))
    need(first == again, "the answers differ")
    turns = visit.samples(name)["turns"]
    need(turns == 1, f"{turns} turns for one request")


def edits(visit: Visit) -> None:
    """An edited conversation forks, and no token is lost or trained twice"""
    name, base, key = visit.session()
    sampled = visit.chat(base, key, [ASK])["usage"]["completion_tokens"]
    edited = [ASK, {"role": "assistant", "content": "This was never said."}, ASK]
    sampled += visit.chat(base, key, edited)["usage"]["completion_tokens"]
    found = visit.samples(name)
    need(sum(found["forks"].values()) == 1, f"forks: {found['forks']}")
    trained = sum(sum(row["loss_mask"]) for row in found["samples"])
    need(trained == sampled, f"{sampled} tokens were sampled, {trained} are in the loss")


def dialects(visit: Visit) -> None:
    """Chat Completions, Responses and Messages are answered, also as streams; tokens can be counted"""
    name, base, key = visit.session()
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [ASK], "max_tokens": TOKENS},
        "responses": {"input": "Say something.", "max_output_tokens": TOKENS},
        "messages": {"messages": [ASK], "max_tokens": TOKENS},
    }
    for dialect, body in bodies.items():
        visit.ok(visit.client.post(f"{base}/{dialect}", json={"model": "any", **body}, headers=key))
        answer = visit.client.post(f"{base}/{dialect}", json={"model": "any", **body, "stream": True}, headers=key)
        kind = answer.headers.get("content-type", "")
        need(answer.status_code == 200 and kind.startswith("text/event-stream"), f"{dialect} does not stream")
    count = visit.ok(
        visit.client.post(f"{base}/messages/count_tokens", json={"model": "any", "messages": [ASK]}, headers=key)
    )
    need(count["input_tokens"] > 0, "count_tokens says 0")
    need(visit.samples(name)["turns"] == 6, "each of six requests must be a turn, and counting must be none")


def ends(visit: Visit) -> None:
    """A closed session keeps its reward and refuses requests with a status that clients do not retry"""
    name, base, key = visit.session()
    visit.chat(base, key, [ASK])
    visit.ok(visit.client.post(f"/sessions/{name}/reward", json={"reward": 0.25}, headers=visit.admin))
    visit.ok(visit.client.post(f"/sessions/{name}/close", json={}, headers=visit.admin))
    status = visit.client.post(
        f"{base}/chat/completions", json={"model": "any", "messages": [ASK]}, headers=key
    ).status_code
    need(status in NOT_RETRIED, f"a closed session answers {status}")
    need(visit.samples(name)["reward"] == 0.25, "the reward is not in the samples")


CHECKS: tuple[Callable[[Visit], None], ...] = (health, keys, one_row, retries, edits, dialects, ends)


def run(url: str, admin_key: str) -> Iterator[tuple[str, str | None]]:
    """Yields each promise with how the gateway breaks it, or None. Makes about ten sessions with the `task_id`
    "check"."""
    headers = {"authorization": f"Bearer {admin_key}"}
    with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
        for check in CHECKS:
            try:
                check(Visit(client, headers))
            except (Broken, httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
                yield str(check.__doc__), f"{type(error).__name__}: {error}".removeprefix("Broken: ")
            else:
                yield str(check.__doc__), None
