"""Licenses of files and packages, from what they say of themselves. A name is SPDX's, or empty if nothing is said."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

from glm5.files import read_small

PERMISSIVE = (
    "0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python HPND ISC MIT MIT-0 MIT-CMU PSF-2.0 "
    "Python-2.0 Unlicense Zlib".split()
)
"""Licenses that ask for little more than their text; a recipe's `licenses = ["permissive"]` stands for them."""
_MOST = 1 << 20
_MOST_METADATA = 16 << 20  # bytes; the largest packages list tens of thousands of files
_MOST_EXPRESSION = 500
_TAG = re.compile(r"SPDX-License-Identifier:\s*\(?([A-Za-z0-9.+-]+(?:\s+(?:OR|AND|WITH)\s+[A-Za-z0-9.+-]+)*)")
_PHRASES = (
    ("Apache-2.0", r"apache license,?\s+version 2\.0"),
    ("MPL-2.0", r"mozilla public license,?\s+(?:version|v\.) 2\.0"),
    ("AGPL-3.0-or-later", r"gnu affero general public license"),
    ("LGPL-2.1-or-later", r"gnu (?:lesser|library) general public license"),
    ("GPL-3.0-or-later", r"gnu general public license\s+(?:as published .{0,80}?)?(?:either )?version 3"),
    ("GPL-2.0-or-later", r"gnu general public license"),
    ("BSD-3-Clause", r"redistributions? (?:and use )?in source and binary forms.{0,1500}neither the names?"),
    ("BSD-2-Clause", r"redistributions? (?:and use )?in source and binary forms"),
    ("MIT", r"permission is hereby granted, free of charge, to any person obtaining a copy"),
    (
        "ISC",
        r"permission to use, copy, modify, and/?(?:or)? distribute this software for any purpose with or without fee",
    ),
    ("Unlicense", r"this is free and unencumbered software released into the public domain"),
    ("PSF-2.0", r"python software foundation license"),
)
_COMPILED = [(name, re.compile(pattern, re.DOTALL)) for name, pattern in _PHRASES]
_SHORT = {
    "apache": "Apache-2.0", "apache 2.0": "Apache-2.0", "apache license 2.0": "Apache-2.0", "apache-2": "Apache-2.0",
    "apache software license": "Apache-2.0", "apache 2.0 license": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0", "3-clause bsd license": "BSD-3-Clause", "isc license (iscl)": "ISC",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0", "bsd": "BSD-3-Clause", "bsd license": "BSD-3-Clause",
    "bsd-2": "BSD-2-Clause", "bsd-3": "BSD-3-Clause", "expat": "MIT", "mit license": "MIT", "psf": "PSF-2.0",
    "python software foundation license": "PSF-2.0", "isc license": "ISC", "the unlicense (unlicense)": "Unlicense",
    "gpl": "GPL-2.0-or-later", "gpl-1+": "GPL-1.0-or-later", "gpl-2": "GPL-2.0-only", "gpl-2+": "GPL-2.0-or-later",
    "gpl-3": "GPL-3.0-only", "gpl-3+": "GPL-3.0-or-later", "lgpl-2+": "LGPL-2.0-or-later",
    "lgpl-2.1": "LGPL-2.1-only", "lgpl-2.1+": "LGPL-2.1-or-later", "lgpl-3+": "LGPL-3.0-or-later",
    "lgpl": "LGPL-2.1-or-later",
    "public-domain": "LicenseRef-public-domain",
}  # fmt: skip


def tagged(text: str) -> str:
    """What the SPDX tag near the start of a file says."""
    found = _TAG.search(text[:3000])
    return found[1] if found else ""


def recognised(text: str) -> str:
    """The license whose text, or whose usual notice, this is."""
    plain = " ".join(text[:30_000].lower().split())
    return next((name for name, pattern in _COMPILED if pattern.search(plain)), "")


def spdx(name: str) -> str:
    """SPDX's name for a common short one."""
    name = " ".join(name.split())
    return _SHORT.get(name.lower(), name if len(name) <= 80 and re.fullmatch(r"[A-Za-z0-9.+() -]+", name) else "")


def allowed(license: str, wanted: list[str]) -> bool:
    """Whether a license, or an expression of SPDX, is one of those wanted. Of alternatives (OR) one suffices; an
    exception (WITH) only adds permissions."""
    names = {*wanted, *(PERMISSIVE if "permissive" in wanted else ())}
    alternatives = re.split(r"\s+OR\s+", license.strip("()"))
    parts = (re.split(r"\s+AND\s+", one.strip("() ")) for one in alternatives)
    return any(all(part.partition(" WITH ")[0] in names for part in one) for one in parts)


class Licenses:
    """Licenses by the top folders of a source: Python packages by their metadata, Debian's documentation by its
    `copyright`, other folders by their license file. Untrusted text; what cannot be read says nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, str] = {}
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if folder.suffix not in (".dist-info", ".egg-info") or folder.is_symlink():
                continue
            distribution = _Distribution(folder)
            try:
                license = _of_metadata(distribution)
                tops = {file.parts[0] for file in distribution.files or ()}
            except Exception:  # its parsers of hostile files raise almost anything
                continue
            self._known |= dict.fromkeys(tops, license)

    def of(self, name: str) -> str:
        """The license of the file `name`, relative to the root."""
        top = name.partition("/")[0]
        if top not in self._known:
            self._known[top] = self._look(self._root / top)
        return self._known[top]

    def _look(self, folder: Path) -> str:
        if not folder.is_dir() or folder.is_symlink():
            return ""
        for path in sorted(folder.glob("*")):
            plain = path.name.lower()
            if not plain.startswith(("copyright", "licen", "copying")) or path.is_symlink():
                continue
            try:
                text = read_small(path, _MOST).decode("utf-8", "replace")
            except OSError:
                continue
            if license := _of_copyright(text) or recognised(text):
                return license
        return ""


class _Distribution(importlib.metadata.PathDistribution):
    """An installed package whose files are hostile: none is a link, a pipe or a device, or large."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        path = self._folder / filename
        try:
            return None if path.is_symlink() else read_small(path, _MOST_METADATA).decode("utf-8", "replace")
        except OSError:
            return None


def _of_copyright(text: str) -> str:
    """The license of all files in Debian's machine-readable form."""
    _, _, rest = text.partition("\nFiles: *\n")
    _, _, field = rest.partition("\nLicense: ")
    return spdx(re.split(r" and | or |,", field.partition("\n")[0])[0])


def _of_metadata(distribution: importlib.metadata.Distribution) -> str:
    metadata = distribution.metadata
    if "License-Expression" in metadata:
        return str(metadata["License-Expression"])[:_MOST_EXPRESSION]
    for classifier in metadata.get_all("Classifier") or ():
        if classifier.startswith("License ::"):
            return spdx(classifier.rpartition(":: ")[2])
    return spdx(metadata["License"]) if "License" in metadata else ""
