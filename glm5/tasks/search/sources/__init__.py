"""Sources of the search web: one module per kind, each an adapter from installed files to records."""

from __future__ import annotations

from glm5.tasks.search.records import Source
from glm5.tasks.search.sources.debian import DEBIAN
from glm5.tasks.search.sources.elements import ELEMENTS
from glm5.tasks.search.sources.foldoc import FOLDOC
from glm5.tasks.search.sources.iso import ISO_CODES
from glm5.tasks.search.sources.manpages import MANPAGES
from glm5.tasks.search.sources.places import AIRPORTS, GEONAMES
from glm5.tasks.search.sources.python_docs import PYTHON_DOCS

SOURCES: dict[str, Source] = {
    source.name: source for source in (GEONAMES, ISO_CODES, AIRPORTS, ELEMENTS, FOLDOC, DEBIAN, PYTHON_DOCS, MANPAGES)
}
"""In the order of their trust: of two values for one relation, the earlier source's is kept."""
