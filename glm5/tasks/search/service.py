"""A search service behind a URL, for questions whose pages are not in a web of ours.

`POST URL/search {"query": ..., "num": ...}` answers `{"results": [{"url", "title", "text"}, ...]}`, where the text is a
part of the page. `POST URL/open {"url": ...}` answers `{"url", "title", "text"}`, or 404 for a page that there is not.
GLM5_SEARCH_KEY, if it is set, goes along as a bearer token. What comes back is untrusted and bounded. A service that
does not answer is a GradingError, never the agent's failure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from glm5.errors import ConfigError, GradingError, MissingExtraError
from glm5.tasks.search.browser import Browser, View
from glm5.tasks.search.index import quotes
from glm5.tasks.search.records import Page
from glm5.tasks.tools.python_tool import Programs

MOST_BYTES = 8 << 20
SECONDS = 60.0
"""For an answer as a whole."""


class Service:
    """The pages of a service, found by `search` and read by `page`. Safe for threads. Raises ConfigError for a URL that
    is not http or https, MissingExtraError without httpx."""

    def __init__(self, url: str) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingExtraError("httpx", "serve") from error
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ConfigError(
                f"search: {url!r:.80} is not an http(s) URL without a password; GLM5_SEARCH_KEY has the key."
            )
        self.url = url.rstrip("/")
        local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        key = os.environ.get("GLM5_SEARCH_KEY", "")
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._failures = (httpx.RequestError, httpx.StreamError)
        self._client = httpx.Client(timeout=httpx.Timeout(SECONDS, connect=10.0), trust_env=not local, headers=headers)

    def search(self, query: str, num: int) -> list[Page]:
        """Pages with the part of their text that the service shows."""
        found = self._asked("/search", {"query": query, "num": num})
        rows = found.get("results") if isinstance(found, dict) else None
        if not isinstance(rows, list):
            raise GradingError(f'{self.url}/search answered without a list "results".')
        return [self._page(row) for row in rows[:num]]

    def page(self, url: str) -> Page | None:
        """The page at an address, or None."""
        found = self._asked("/open", {"url": url})
        return None if found is None else self._page(found)

    def _page(self, row: Any) -> Page:
        texts = [row.get(key) for key in ("url", "title", "text")] if isinstance(row, dict) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise GradingError(f'{self.url} answered with a page without the texts "url", "title" and "text".')
        url, title, text = (str(one).encode("utf-8", "replace").decode() for one in texts)
        return Page(" ".join(url.split()), " ".join(title.split()), text, "", ())

    def _asked(self, path: str, body: dict[str, Any]) -> Any:
        end = time.monotonic() + SECONDS
        try:
            with self._client.stream("POST", self.url + path, json=body) as answer:
                if answer.status_code == 404 and path == "/open":
                    return None
                if answer.headers.get("content-encoding", "identity").lower() != "identity":
                    raise GradingError(f"{self.url}{path} answered in a compressed form, which was not asked for.")
                data = b""
                for chunk in answer.iter_raw():
                    data += chunk
                    if len(data) > MOST_BYTES:
                        raise GradingError(f"{self.url}{path} answered with more than {MOST_BYTES >> 20} MiB.")
                    if time.monotonic() > end:
                        raise GradingError(f"{self.url}{path} did not finish its answer in {SECONDS:.0f} seconds.")
            if answer.status_code != 200:
                raise GradingError(f"{self.url}{path} answered with status {answer.status_code}.")
            return json.loads(data)
        except self._failures as error:
            raise GradingError(f"{self.url}{path} does not answer: {str(error) or type(error).__name__}.") from error
        except (ValueError, RecursionError) as error:
            raise GradingError(f"{self.url}{path} answered something that is not JSON.") from error


class ServiceBrowser(Browser):
    """The tools of the search environment over a service."""

    def __init__(
        self, service: Service, forbidden: Sequence[str], view: View, programs: Callable[[], Programs] | None
    ) -> None:
        super().__init__(service, forbidden, view, programs)  # type: ignore[arg-type]
        self._service = service

    def found(self, query: str, num: int) -> list[Page]:
        pages = self._service.search(query, num * 2 if self._grams else num)
        return [page for page in pages if not quotes(page.text, self._grams)][:num]
